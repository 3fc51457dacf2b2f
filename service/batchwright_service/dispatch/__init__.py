"""Dispatch queued work to a cluster's engine: one Ray job, or one Slurm job, per tuning or job.

The store stays the truth: a dispatched job is a worker for one piece of work, which takes its lease on a node, and the
fencing token excludes every other one. What an engine forgets or runs twice therefore costs time only.

1. ``cluster_engine`` is the interface of an engine; ``ray_engine`` and ``slurm_engine`` implement it.
2. ``reconciliation`` compares the work with the engine's jobs, and returns what to submit, stop and forget. Pure.
3. ``dispatcher`` repeats that, announces the devices of the nodes, and publishes the state for ``/v1/fleet``.

Only the two engines import Ray and submitit, and only the dispatcher's process imports an engine.
"""
