"""Keep work, evidence, recommendations, keys and sessions in SQLite or PostgreSQL.

``interface`` has one interface for each kind of caller, with the contract of every implementation; ``models`` has their
values. Callers import both. ``store`` opens the implementation: every interface over one database.

The pipeline of a call: the module of the subject opens a transaction (``database.engine``) and executes statements:

- ``submissions`` queues work, ``scheduling`` orders the queue, ``leases`` claims and ends work;
- ``evidence`` records probes, progress and events, and by how much estimates were off; ``devices`` takes heartbeats
  and lists the served devices;
- ``work_queries``, ``recommendation_queries`` and ``statistics`` read;
- ``outbox`` keeps webhooks and the messages to them, which are written with the ends that they tell of;
- ``api_keys``, ``sessions`` and ``retention`` store keys and browser sessions, and delete ended work.

Every change of state is one conditional update that requires the old state and, of the owner of a lease, its fencing
token. Time is the database's.

Where a new thing goes: a column, ``database.schema``, a new revision in ``database.migrations`` and
``database.mapping``; a query, the module of its subject; a part of the contract, ``interface``, with a test that every
store passes.

The package may import ``batchwright_service.problem_mapping``, ``batchwright_service.folders``,
``batchwright_service.fast_path`` (its cache of rows), ``batchwright_service.errors`` and
``batchwright_service.domain``, and ``batchwright.schemas``.
"""
