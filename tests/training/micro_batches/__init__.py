"""Tests of ``tuner.training.micro_batches``."""
