"""Trace the updates of a workload on fake tensors. The only part of ``tuner.estimation`` that imports torch.

``worker`` is the process: it imports torch once and answers each request in a fork. From there: ``sized_workload`` (all
sizes, for an estimate) or ``peak_curve`` (the expected peaks of probes) asks ``runs`` for traces, which makes them side
by side; ``session`` runs one traced update; ``dispatch_mode`` sees every operator, and ``recorder`` every block.
``fake_device`` stands for the card, ``kernel_workspaces`` adds memory that operators hide, ``shape_cache`` and
``known_values`` keep a trace fast and concrete.
"""
