"""Implement the use cases: one method for each operation of a caller, with its rules.

The API, the workers and the command line share them. The pipeline of a submission, in ``tunings`` or ``jobs``:

1. ``work`` holds what both share, and checks priority and ownership; ``application_context`` has the shared
   dependencies, and finds the live worker that serves a device.
2. ``rules`` decides: may this code run (``rules.policy``), has this request a stored response (``rules.idempotency``),
   may a stored recommendation warm-start it (``rules.stored_warm_start``), does the job suit the device
   (``rules.device_checks``).
3. The store queues the work, or the stored recommendation with the same fingerprint serves the submission.
4. ``views`` turns stored rows into documents; ``batchwright_service.fast_path.queue_positions`` adds the position in
   the queue.

``queue`` lists devices and waiting work, ``exports`` writes a recommendation for a framework, ``estimates`` bounds and
caches estimates, ``api_keys`` manages keys, ``statistics`` summarises a period, ``job_files`` reads the files of jobs,
``retention`` deletes old work, ``hit_counter`` counts the submissions that a stored recommendation serves, and
``readiness`` checks the database, the workers and the queue.

Where a new thing goes:

- a use case: a method of the module of its resource, or of ``work`` for both kinds of work;
- a rule that two use cases share: ``rules``;
- a health check: ``readiness``; a limit that the operator sets: ``batchwright_service.settings`` and ``rules.policy``;
- a filter of a list: ``batchwright_service.store.models``, its query in ``batchwright_service.store``, and
  ``batchwright_service.api.dependencies``.

The package may import ``batchwright_service.auth``, ``batchwright_service.observability``,
``batchwright_service.store`` (only ``application_context`` takes the whole ``Store``) and the layers below, and the
torch-free parts of ``batchwright``; no FastAPI and no SQL.
"""
