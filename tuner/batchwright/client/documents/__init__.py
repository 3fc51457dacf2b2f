"""Define the documents that the SDK and the service share. Pure data: no FastAPI, SQLAlchemy or torch.

- ``work``: tunings, jobs, probes, events and recommendations as the API returns them.
- ``states``: the states of a tuning or job, and the one table of the transitions between them.
- ``workers``: devices, the workers that serve them, the queue, statistics, and health. ``fleet``: those of a cluster.
- ``api_keys``: scopes and keys. ``audit``: who did what. ``bulk``: acts on many tunings or jobs at once.
- ``webhooks``: receivers that are notified when work ends, and their messages.
- ``problems``: problem documents (RFC 9457). ``exports``: requests and lists of export formats. ``commands``: commands
  that an operator has registered. ``staleness``: what changed on a device since a recommendation was made.

Where a new thing goes: a field of a response, the document here, then ``batchwright_service.application.views`` fills
it and `make openapi` exports it; a state, ``states`` (the store enforces the table by conditional updates); a scope,
``api_keys``.

The package may import ``batchwright.schemas``, ``batchwright.hardware.matching`` and ``batchwright.exports.base``.
"""
