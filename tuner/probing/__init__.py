"""Measure: run a micro-batch size in a fresh process under a memory limit, and report the outcome with its evidence.

The pipeline of a probe:

1. ``supervisor`` receives the request from whatever drives the tuning. It starts a fork server (``fork_server_start``),
   which has torch imported and no CUDA context.
2. The fork server (``child.fork_server``) forks a child for each task: a probe, a check of the spec, the coupling
   check, or an estimate of the CPU's memory curve.
3. In the child ``child.worker`` sets the memory limit, builds the workload, and runs two updates with the engine that
   trains. The first allocates what is allocated late; the second is measured.
4. ``protocol`` is what both sides read and write in the probe's folder. The supervisor bounds the time, and
   ``exit_causes`` explains a child that ended without a result.

Probes leave an OOM to the process: nothing is recovered and nothing is split in a probe.

Where a new thing goes: a figure that a probe measures, ``child.worker`` and ``tuner.schemas.results``; a task of the
fork server, ``protocol``, ``child.fork_server`` and ``supervisor``; a way for a child to end, ``exit_causes``.

The package may import every package of ``tuner`` but ``cli``. The modules of this folder never import torch: the
service imports them. ``child`` does.
"""
