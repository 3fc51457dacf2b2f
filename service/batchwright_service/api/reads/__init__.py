"""Make frequent reads cheap, with the parts of ``batchwright_service.fast_path``.

``coalesced`` defines the coalesced reads, of which concurrent equal ones are made once. ``fast_path`` lets the busiest
routes serve requests of the usual shape without the framework's parsing.
"""
