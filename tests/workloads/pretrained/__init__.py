"""Tests of ``tuner.workloads.pretrained``."""
