"""Train with exact gradient accumulation: the engine, the loop around it, its checkpoints, and the processes of a run.

The pipeline of a run:

1. ``launching`` writes the run's folder and starts one process per rank (``worker``).
2. ``assembly`` builds the parts of the run. ``trainer`` resumes from the newest intact checkpoint (``checkpoints``) and
   makes the updates of the ``batch_schedule``.
3. ``update_engine`` applies the spec (precision, clipping, moving averages). Probes and traces use it too.
4. ``accumulation`` makes one exact update of the ``micro_batches``. It is the API for a training loop of your own.
5. ``coupling`` finds losses that no accumulation can make exact. ``fsdp`` shards the model, ``worker``
   and ``trackers`` report, ``finite_updates`` ends a run that diverges, ``evaluation`` runs held-out samples between
   updates, ``trained_model`` writes the result.

A micro-batch that runs out of memory is split on the spot, or the run restarts from its checkpoint:

================  ==============================  ====================================================
device            `ddp`, or one rank              `fsdp` over several ranks
================  ==============================  ====================================================
CUDA              the micro-batch is split and    all ranks end; the launcher restarts them from the
                  run again (`scratch` sums)      newest checkpoint with half the micro-batch
CPU               the micro-batch is split and    as on CUDA
                  the window is run again
                  (`in-place` sums)
================  ==============================  ====================================================

`gradient_gathering` of the spec chooses the sums of the first column. Under torchrun a run of the second column ends,
and resumes when it is started again. A single sample that does not fit ends every run. The effective batch size never
changes.

Where a new thing goes: an optimizer or a learning-rate schedule, ``optimizers`` and ``batchwright.schemas.workload``; a
kind of data, ``data.sources``; state that a checkpoint must hold, ``trainer`` (the state it saves and restores).

The package may import ``hardware``, ``planning``, ``workloads``, ``schemas`` and ``system``. ``launching`` never
imports torch; importing this package does not either.
"""
