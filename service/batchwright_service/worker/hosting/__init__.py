"""Run the workers of a host in a child process of the one that serves the API.

``interface`` is the workers as the service sees them. ``child_process`` starts
``batchwright_service.entrypoints.hosted_worker``, restarts it when it dies, and passes on stops and metrics.
"""
