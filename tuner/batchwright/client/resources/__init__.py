"""Define every call of the API once, as a coroutine, grouped by resource.

``tunings`` and ``jobs`` have the calls that wait and follow; ``api`` has the other resources and puts all of them
together. ``batchwright.client.sync`` makes the same calls blocking.
"""
