"""Train with exact gradient accumulation: the engine, the loop around it, its checkpoints, and the processes of a run.

The pipeline of a run:

1. ``launching`` writes the run's folder and starts one process per rank (``worker``).
2. ``trainer`` builds the workload, the ``data``, the ``update_engine`` and the ``optimizers``, resumes from the newest
   intact checkpoint (``checkpoints``), and makes update after update as ``batch_schedule`` cuts them.
3. ``update_engine`` applies the spec (``precision``, clipping, moving averages). Probes and traces use it too.
4. ``accumulation`` makes one exact update of the ``micro_batches``. It is the API for a training loop of your own.
5. ``coupling`` finds losses that no accumulation can make exact. ``fsdp`` shards the model, ``progress`` reports.

A micro-batch that runs out of memory is split on the spot, or the run restarts from its checkpoint:

================  ==============================  ============================================="""
