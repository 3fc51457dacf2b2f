"""Batchwright's service: tunings and training jobs as durable work behind an HTTP API.

``client`` is the SDK and installs without the rest; ``domain`` holds the documents both sides share. Nothing here
imports torch: what needs a device runs in processes that an executor starts.
"""
