"""Keep work, evidence, recommendations, keys and sessions in SQLite or PostgreSQL.

``interface`` says what callers need and what every implementation promises; ``models`` has its plain values. Callers
import it, and ``service.bootstrap`` opens the implementation, ``sql_store``.

The pipeline of a call: ``sql_store`` opens a transaction (``database.engine``) and calls the module of the subject,
which executes statements:

- ``submissions`` queues work, ``scheduling`` orders the queue, ``leases`` claims, renews and ends work;
- ``work_queries``, ``recommendation_queries`` and ``statistics`` read;
- ``api_keys``, ``sessions`` and ``retention`` do what they are named for; ``hit_counter`` collects counts off the
  request path.

Every change of state is one conditional update that requires the old state and, of the owner of a lease, its fencing
token. Time is the database's.

Where a new thing goes: a column, ``database.schema``, a revision in ``database.migrations`` and ``database.mapping``; a
query, the module of its subject; a promise, ``interface``, with a test in the contract of all stores.

The package may import ``service.problem_mapping``, ``service.folders``, ``service.errors`` and ``service.domain``, and
``tuner.schemas``.
"""
