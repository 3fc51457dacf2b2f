"""Authenticate callers by an API key, or by a session that was opened with one.

The pipeline of a request that requires authentication:

1. ``batchwright_service.api.authentication`` takes the key or the session token from the request's headers.
2. ``api_keys`` compares the key's digest with the store, or ``sessions`` does so with a session's token. A verified
   caller is trusted for a few seconds, so that most requests cost no read. A revoked key works no longer than that.
3. The route compares the caller's scopes with its own (``batchwright_service.api.authentication``).

While no API key exists, a service that listens on loopback requires none from its own host.

Where a new thing goes: another way to authenticate, a module here and a branch in
``batchwright_service.api.authentication``; a scope, ``batchwright.client.documents.api_keys``; what is stored of a key,
``batchwright_service.store.api_keys``.

The package may import ``batchwright_service.store``, ``batchwright_service.fast_path`` (callers trusted for a few
seconds), ``batchwright_service.errors`` and ``batchwright_service.domain``; not ``observability``, which is on the same
level.
"""
