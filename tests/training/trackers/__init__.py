"""Trackers: their failures, and the real ones."""
