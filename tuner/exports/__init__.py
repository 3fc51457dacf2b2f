"""Recommendations in the words of frameworks and launchers: one module per target, and a registry."""

from tuner.exports.base import Export, ExportedFile, ExportOptions, Target
from tuner.exports.registry import TARGETS, export, find_target

__all__ = ["TARGETS", "Export", "ExportOptions", "ExportedFile", "Target", "export", "find_target"]
