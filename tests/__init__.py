"""The tests: one package for each package of ``tuner`` and ``service``, and what they share in ``support``."""
