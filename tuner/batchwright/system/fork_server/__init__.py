"""Fork servers: a child process imports what tasks need once, and runs each task in a fork of itself.

``spawn`` starts the process. ``server`` is the loop of that process. ``client`` runs tasks in it, enforces their
deadlines, and reports how each ended. ``tasks`` is a task, and its files: the request, the result and the output.
"""
