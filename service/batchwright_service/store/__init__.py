"""Keep work, evidence, recommendations, keys and sessions in SQLite or PostgreSQL.

``store`` opens a ``Store``: one class for each kind of caller, all over one database of either kind. The methods state
their contracts. ``models`` has the values that several modules share.

The pipeline of a call: the module of the subject opens a transaction (``database.transactions``) and executes
statements:

- ``submissions`` queues work, ``scheduling`` orders the queue, ``leases`` claims and ends work;
- ``evidence`` records probes, progress and events, and by how much estimates were off; ``devices`` takes heartbeats
  and lists the served devices;
- ``work_queries``, ``recommendation_queries`` and ``statistics`` read;
- ``outbox`` keeps webhooks and the messages to them, which are written with the ends that they tell of;
- ``api_keys``, ``sessions`` and ``retention`` store keys and browser sessions, and delete ended work.

Every method raises ``StoreUnavailableError`` when the database cannot be used. Every change of state is one conditional
update that requires the old state and, for the owner of a lease, the lease's fencing token: a report that comes after
its lease has ended changes nothing. Time is the database's.

Where a new thing goes: a column, ``database.schema``, a new revision in ``database.migrations`` and
``database.mapping``; a query, the module of its subject, with a test that runs on both databases.

The package may import ``batchwright_service.problem_mapping``, ``batchwright_service.folders``,
``batchwright_service.fast_path`` (its cache of rows), ``batchwright_service.errors`` and
``batchwright_service.domain``, and ``batchwright.schemas``.
"""
