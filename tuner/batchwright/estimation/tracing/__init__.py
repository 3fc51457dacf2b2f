"""Trace the updates of a workload on fake tensors. The only part of ``batchwright.estimation`` that imports torch.

``worker`` is the process: it imports torch once and handles each request in a fork. There ``sized_workload`` (all
sizes, for an estimate) or ``peak_curve`` (the expected peaks of probes) requests traces from ``runs``, which makes them
in parallel. ``session`` runs one traced update, or one of ``other_loops``. ``dispatch_mode`` intercepts every operator,
and ``recorder`` records every block. ``fake_device`` stands in for the GPU, and ``recurrent_layers`` for its recurrent
layers. ``kernel_workspaces`` adds memory that operators hide, ``shape_cache`` makes traces fast, and ``known_values``
computes the values that a trace needs.
"""
