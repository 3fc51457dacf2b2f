"""The command line: ``batchwright``."""
