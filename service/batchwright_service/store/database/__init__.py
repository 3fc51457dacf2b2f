"""Talk to the database: everything that knows tables, dialects and connections.

``transactions`` opens SQLite and PostgreSQL, makes those that read or write, has the writers of one SQLite file wait in
fair order, and translates their errors. ``schema`` has the tables, ``mapping`` turns rows into documents and back, and
``statements`` has the conditional updates. ``notifications`` sends and receives those of PostgreSQL. ``migrate``
applies the revisions of ``migrations`` and checks the tables.
``claim_statements`` find work for devices, ``claim_admission`` keeps the line for their lock short on PostgreSQL, and
``claim_pipeline`` claims work there in one round trip.

A new column goes to ``schema`` and into a new revision; ``mapping`` writes it and reads it. A document's column is a
``StoredDocument``, which adds the version.
"""
