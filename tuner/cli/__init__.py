"""The command line: ``batchwright``."""

from tuner.cli.main import main

__all__ = ["main"]
