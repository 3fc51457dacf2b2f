"""Recommendations in the words of frameworks and launchers: one module per target, and a registry.

Nothing is imported here: the SDK takes the documents of ``base`` alone.
"""
