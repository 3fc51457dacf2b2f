"""Find the largest micro-batch that fits a device, and derive the gradient accumulation of an exact effective batch.

This package is the library and the command line. It works without the service, and never imports ``service``.

From top to bottom, each package imports only packages below it:

- ``library``: what ``import batchwright`` offers to a script or a notebook.
- ``cli``: the command `batchwright`. It parses arguments, calls one function, and prints the result.
- ``foreground``: a tuning from its request to its recommendation, on a device of this host.
- ``probing``: measured trials, each in a process of its own, under a memory limit.
- ``estimation``: the memory curve of a workload without a GPU, from traces and a simulated allocator.
- ``training``: exact gradient accumulation, the training loop, checkpoints, and the processes of a run. ``exports``: a
  recommendation as configuration of a framework or a launcher. ``plots``: pictures of a run.
- ``hardware``: memory devices, the table of GPUs, and the classification of out-of-memory errors. ``planning``: the
  search, the plan and the recommendation, as pure functions of recorded results. ``workloads``: a spec as a model, a
  worst-case batch and named loss terms.
- ``schemas``: the pydantic documents that cross a boundary. ``system``: files, processes and host failures.
- ``errors``, ``units``, ``suggestions`` and ``yaml_loader``: the tree of errors, byte sizes as text, hints for misspelt
  names, and YAML whose `1e-5` is a number.
  ``torch_internals``: the private names of torch in use, each with its reason.

A tuning goes through them in this order: a request (``schemas``) becomes a session (``planning.session``), which names
the next probe. A supervisor (``probing.supervisor``) has it run two updates of the workload with the engine that trains
(``training.update_engine``). The results end in a recommendation, which ``training`` and ``exports`` take.

A new concept gets a package here only if none of these owns it. The order is a contract in `pyproject.toml`.
"""
