"""Implement rules that several use cases share. Most are functions of their arguments.

``policy``: code, files and quotas that the operator allows. ``idempotency``: a retry gets the stored response.
``device_checks``: checks that a device can run a job. ``stored_warm_start``: the recommendation that warm-starts a
tuning. ``wait_time``: expected waits in the queue. The workers use ``device_checks`` and ``stored_warm_start``.
"""
