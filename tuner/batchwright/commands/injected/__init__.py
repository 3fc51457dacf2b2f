"""Code that runs inside the processes of a command, in its interpreter and beside its packages.

``batchwright.system.startup`` is the folder on `PYTHONPATH` whose `sitecustomize` loads this package under an alias as
soon as torch is imported. ``arming`` then sets the memory limit (``memory``) and installs the hooks (``torch_hooks``),
which feed the counter of updates (``counting``). ``longest_first`` has data loaders draw the longest items,
``oom_watch`` observes every OOM, ``written_files`` what a process does to files of the user, and ``reporting`` writes
the events to files. A process of a job is not armed but watched (``watching``), to its own end.

``command_server`` makes the first process of a command the server that is forked for each probe, after
``leading_imports``, each below a ``batchwright.system.subreaper``.

The modules import nothing but the standard library, torch and that module, by relative imports, and take Python 3.9:
the interpreter of the command need not have Batchwright.
"""
