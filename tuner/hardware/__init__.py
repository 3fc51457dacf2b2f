"""What holds the tensors: devices, their limits and peaks, and the one place that knows an OOM when it sees one.

``failures``, ``inventory`` and ``environment`` never import torch; ``devices`` does.
"""
