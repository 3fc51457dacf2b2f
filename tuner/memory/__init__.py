"""What holds the tensors: devices, their limits and peaks, and the one place that knows an OOM when it sees one.

``failures`` and ``inventory`` never import torch; ``devices`` does.
"""
