"""Workspaces that kernels and libraries allocate beside their results, invisible to a trace of operators.

Each figure names its source in torch 2.13. Those of cuDNN, which does not document its own, are measured ones where
there is a table for the compute capability (``batchwright.hardware.workspace_tables``), else estimates.

A trace asks ``shared_kernels``: the kernels of all profiles that share it, as long as they decide alike. Those of one
profile are ``device_kernels``, whose table has the function of each operator. ``contiguous_copies`` are made by many
kernels, and some keep a larger storage than their result needs (``kept_storages``). ``library_calls`` are those of
cuDNN, whose choice is estimated. ``composed_kernels`` run other operators. The other modules have the functions by kind
of kernel (``attention_workspaces``, ``index_workspaces``, ``reduction_workspaces``, ``recurrent_workspaces``); their
type is that of ``workspace``.

Where a new thing goes: an operator with a workspace, the module of its kind and the table of ``device_kernels``; an
argument that a kernel copies, ``contiguous_copies``; a call whose workspace a card's evidence is to measure,
``library_calls``.
"""
