"""Wrap the operating system: files that appear whole, processes that never outlive their parent, failures of the host.

Nothing here knows of models, batches or GPUs, and nothing imports torch.

- Files: ``files`` writes atomically and locks folders; ``disk_space`` checks free space before a large file is written;
  ``data_roots`` restricts the files that a run may read to allowed folders.
- Processes: ``subreaper`` keeps a process, ends its tree, and has the ``Channel`` of all child processes;
  ``kept_process`` is its supervisor's side; ``processes`` forks and sets limits; ``process_exit`` classifies how a
  process ended; ``fork_server`` runs tasks in forks of a child process; ``fork_map`` runs functions in parallel forks;
  ``reading_progress`` is the file of a process that reads data; ``startup`` is the folder of what Python runs first in
  the processes of a command.
- Failures: ``host_failures`` recognises a full disk, a lack of descriptors or processes and the like, so that a failure
  of the host is never reported as one of the work.

Where a new thing goes: a system error that is the host's fault, ``host_failures``; another way to write or lock a file,
``files``; a child process that runs tasks, ``fork_server``; what is true of every kept process, ``subreaper``.

The package may import ``errors``, ``units`` and ``suggestions``, the standard library, pydantic and filelock. Linux
only.
"""
