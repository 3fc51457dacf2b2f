"""Run queued work: claim it under a lease, run it, and record its ending.

The pipeline, in one process with one worker per device:

1. ``coordinator`` starts, wakes and stops the workers, also by notifications of the database. In `batchwright serve`
   they run in a child process (``hosting``). One ``heartbeat`` renews the leases and announces the devices of all.
2. ``device_worker`` takes its device (``slot``) and starts its thread, which claims work and has it run, with pauses
   while none waits (``idle_pause``).
3. ``lease`` holds the lease in use: the heartbeat renews it, and stop requests reach the running work through it.
4. ``attempts`` runs a claim and records its ending, or hands the work back to the queue.
5. ``runner`` runs one tuning or job. ``batchwright.driving.loop`` drives a tuning, whose probes its hooks here record.
6. ``executors`` runs a tuning or a job in processes of the host.

``host_health`` suspends claims while the host has a fault (a full disk, no processes left) until a check passes.

Where a new thing goes: a target where work can run (a cluster, say), an executor in ``executors``; a reason to stop,
``lease``; a failure of the host, ``batchwright.system.host_failures``; a step of a tuning,
``batchwright.planning.session`` first; the length of a wait, ``domain.lease_waits``.

The package may import ``batchwright_service.application``, ``batchwright_service.observability``,
``batchwright_service.store`` and the layers below; neither ``batchwright_service.api`` nor torch.
"""
