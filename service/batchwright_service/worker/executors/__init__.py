"""Run one tuning or one job at a time on one device.

``base`` is the interface; ``local`` runs processes of this host, ``inline`` runs everything in this process, for tests
and for debugging. Both pass the checks of `tests/service/worker/test_executors.py`; so must a new one.
"""
