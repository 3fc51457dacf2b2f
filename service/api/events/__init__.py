"""Let callers wait for changes: long polls and event streams (SSE).

``change_feed`` reads the newest event of all that are waited for, once per tick, however many wait. ``streaming``
answers long polls and streams from it, checks meanwhile that the caller's key is still good, and sends keep-alives.
"""
