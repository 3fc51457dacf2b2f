"""Let callers wait for changes: long polls and event streams (SSE).

``change_feed`` reads the ids of the newest events once per tick, for all waiting callers. ``streaming`` serves long
polls and event streams from the feed, checks that the caller's key is still valid, and sends keep-alives.
"""
