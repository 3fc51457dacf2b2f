"""Define the documents that cross a boundary: a file, an HTTP body, a message between processes.

Each is a frozen pydantic model that forbids unknown fields. Units are in the names (`limit_bytes`, `step_seconds`), and
every field has a description, which the OpenAPI document shows.

From the user's file to the result:

- ``workload`` is the spec of what is trained; ``dataset`` is its `data` part; ``yaml_loader`` reads YAML.
- ``requests`` asks for a tuning, a probe, an estimate of peaks or a training run; ``estimates`` asks for an estimate
  for GPUs and answers it; ``gpus`` describes a card.
- ``results`` is what probes return; ``plans`` the micro-batches of an update; ``recommendation`` the plan with its
  evidence; ``training`` the progress and the result of a run.
- ``base`` is the class of all documents, and loads one from a file. ``field_errors`` words every wrong field.

Where a new thing goes: a field, the document that owns it (then `make openapi`, if the API shows the document); a kind
of data, ``dataset``; a rule on one field, the field's type; a new type of pydantic error, ``field_errors``.

The package may import ``errors``, ``units`` and ``suggestions``. It never imports torch, and no other package of
``tuner``: everyone imports the schemas.
"""
