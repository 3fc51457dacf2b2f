"""Run queued work: claim it under a lease, drive it to an ending, and record that.

The pipeline, in one process with one worker per device:

1. ``coordinator`` starts, wakes and stops the workers. In `batchwright serve` they run in a child process
   (``hosting``).
2. ``device_worker`` takes its device (``slot``, guarded by ``device_lock``) and starts two threads (``device_thread``):
   ``work_loop`` claims work (``claiming``) and has it run, ``heartbeat`` announces the device.
3. ``lease`` is the lease in use: the heartbeat renews it, and it says whether and how fast the work must stop.
4. ``attempts`` drives a claim to an ending that is recorded, or hands the work back to the queue.
5. ``runner`` runs one tuning or job: it asks ``tuner.planning.session`` for the next probe, or watches a training run.
6. ``executors`` runs a probe or a job: in processes of the host, or in this process for tests.

``host_health`` stops claims while the host is at fault (a full disk, no processes left) until a check passes.

Where a new thing goes: a place where work can run (a cluster, say), an executor in ``executors``; a reason to stop,
``lease``; a failure of the host, ``tuner.system.host_failures``; a step of a tuning, ``tuner.planning.session`` first.

The package may import ``service.application``, ``service.observability``, ``service.store.interface`` and the layers
below; neither ``service.api`` nor torch.
"""
