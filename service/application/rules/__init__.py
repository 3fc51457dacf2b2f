"""Decide questions that several use cases share. Most are functions of their arguments.

``policy``: code, files and quotas that the operator allows. ``idempotency``: a repeated request gets its first answer.
``placement``: whether a job suits a device. ``warm_start``: which stored recommendation seeds a tuning. ``wait_time``:
how long queued work may wait. The workers use ``placement`` and ``warm_start`` too.
"""
