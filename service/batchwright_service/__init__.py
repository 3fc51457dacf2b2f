"""Serve tunings and training jobs over HTTP, as durable work in a database.

From top to bottom, each layer imports only layers below it:

- ``cli``: the commands `serve`, `work`, `keys` and `prune`, which `batchwright` finds as entry points.
- ``entrypoints``: the processes: the API, the workers of a host, and the export of the OpenAPI document.
- ``bootstrap`` and ``worker_bootstrap``: the only places that choose implementations and build objects; the latter
  builds workers alone, without FastAPI.
- ``dashboard``: the pages for people, over the public API.
- ``api``: the HTTP side. ``worker``: claims queued work and runs it. Neither imports the other.
- ``application``: the use cases and their rules.
- ``webhooks``: tells receivers over HTTP when work ends.
- ``auth``: API keys and sessions. ``observability``: logs, metrics and spans.
- ``store``: the database behind an interface.
- ``problem_mapping``: turns any error into a problem document. ``folders``: creates private folders. ``fast_path``:
  caches and coalescing that make frequent reads cheap.
- ``registry``: commands that the operator has registered, which callers may tune.
- ``errors``: the tree of errors, each with a status and a code.
- ``settings``: the environment variables. ``domain``: values and rules that all others share.

The documents of the API are in ``batchwright.client.documents``, since the SDK has them too.

A tuning goes through them like this: a route of ``api`` calls a use case of ``application``, which stores the work as
queued. A ``worker`` claims it under a lease, runs its probes in child processes, records each result in the ``store``,
and stores the recommendation at the end. Killed at any point, the work goes on from what is recorded.

Nothing here imports torch: work that needs a device runs in processes that an executor starts.
"""
