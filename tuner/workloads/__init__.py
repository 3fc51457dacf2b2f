"""What is trained: from a spec to a model, a worst-case batch and named loss terms.

Importing this package does not import torch; all its modules but ``imports`` and ``transformers_import`` do.
"""
