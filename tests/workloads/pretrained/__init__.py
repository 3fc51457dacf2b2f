"""Tests of ``batchwright.workloads.pretrained``."""
