"""The tests: a package for each package of ``batchwright`` and ``batchwright_service``, and helpers in ``support``."""
