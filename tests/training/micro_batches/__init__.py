"""Tests of ``batchwright.training.micro_batches``."""
