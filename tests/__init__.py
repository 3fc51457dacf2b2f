"""The tests: one package for each package of ``batchwright`` and ``service``, and what they share in ``support``."""
