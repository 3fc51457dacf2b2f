"""Run one tuning or one job at a time on one device.

``base`` is the interface; ``local`` runs processes of this host. The executor of tests, which runs everything in their
own process, passes the same checks of `tests/service/worker/test_executors.py`; so must a new one.
"""
