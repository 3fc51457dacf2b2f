"""Define the documents that cross a boundary: a file, an HTTP body, a message between processes.

Each is a frozen pydantic model that forbids unknown fields. Units are in the names (`limit_bytes`, `step_seconds`), and
every field has a description, which the OpenAPI document shows.

From the user's file to the result:

- ``workload`` is the spec of the training; the package ``dataset`` has its samples, ``optimizer`` its optimizer and
  schedule, and the package ``model`` its adapter.
- ``requests`` has the requests for a tuning, a probe, an estimate of peaks and a training run; ``estimates`` has the
  request for an estimate for GPUs and its result; ``gpus`` describes a card.
- ``results`` has the results of probes; ``plans`` the micro-batches of an update; ``recommendation`` the plan with its
  evidence; ``unfinished`` a tuning that was stopped before; ``training`` the progress and the result of a run.
- ``base`` has the base class of all documents, and loads one from a file. ``field_errors`` has the messages for wrong
  fields.

Where to add: a field, the document that owns it (then `make openapi`, if the API shows the document); a kind of data,
 ``dataset``; a rule on one field, the field's type; a new type of pydantic error, ``field_errors``.

The package may import ``errors``, ``units`` and ``suggestions``. It never imports torch or another package of
``batchwright``, because all of them import the schemas.
"""
