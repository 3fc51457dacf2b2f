"""Measure: run a micro-batch size in a fresh process under a memory limit, and report the outcome with its evidence.

The pipeline of a probe:

1. ``supervisor`` receives the request from the caller that drives the tuning. It starts a fork server, which has torch
   imported and no CUDA context.
2. The fork server (``child.fork_server``) forks a child for each task: a probe, a check of the spec, the coupling
   check, an estimate of the CPU's memory curve, or a reading of the data.
3. In the child ``child.worker`` sets the memory limit, builds the workload, and runs two updates with the engine that
   trains. The first update makes the late allocations; the second is measured. A probe that brackets makes the first.
4. ``protocol`` defines the files that both sides read and write. The supervisor enforces the deadline, and
   ``exit_causes`` explains a child that ended without a result.

``data_reader`` has the data of a spec read, and names the sample that ended the child.

An OOM ends the update of a probe: nothing is recovered and no micro-batch is split.

Where a new thing goes: a figure that a probe measures, ``child.worker`` and ``batchwright.schemas.results``; a task of
the fork server, ``protocol``, ``child.worker`` and ``supervisor``; a way for a child to end, ``exit_causes``.

The package may import every package of ``batchwright`` but ``cli``. The modules of this folder never import torch: the
service imports them. ``child`` does.
"""
