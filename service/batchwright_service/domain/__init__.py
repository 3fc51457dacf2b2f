"""Define the documents and rules that the service, its workers and the SDK share. Pure data.

- ``work``: tunings, jobs, probes, events and recommendations as the API returns them.
- ``states``: the states of a tuning or job, and the one table of the transitions between them.
- ``workers``: devices, the workers that serve them, the queue, statistics, and health.
- ``api_keys``: scopes, callers, and the parts of a key. ``identifiers``: ids that sort by their time.
- ``webhooks``: receivers that are notified when work ends, and their messages.
- ``problems``: problem documents (RFC 9457). ``exports``: requests and lists of export formats.

Where a new thing goes: a field of a response, the document here, then ``batchwright_service.application.views`` fills
it and `make openapi` exports it; a state, ``states`` (the store enforces the table by conditional updates); a scope,
``api_keys``.

The package may import ``batchwright.schemas`` and ``batchwright.exports.base``. It knows no HTTP framework and no
database, so that the SDK can import it.
"""
