"""Samples of a workload: what they are, their worst case, and those that are held out. No torch.

- ``data_spec`` has the kinds of data that a run reads, one class each.
- ``batch_spec`` describes the largest sample, ``preference_spec`` pairs of samples.
- ``evaluation_spec`` has the samples that are held out, and what is computed of them.
"""
