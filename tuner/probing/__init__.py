"""Measured trials in processes of their own.

``supervisor`` starts and bounds them and never imports torch; ``fork_server`` and ``worker`` run inside the processes
it starts.
"""
