"""The Python interface behind ``import batchwright``: tuning as functions, and recommendations with methods.

- ``tuning``: tune, plan and estimate; each function is what the command of its name does.
- ``find_batch_size``: a tuning of functions of one's own, which are pickled by value into the probes' processes.
- ``functions``: those functions as a workload, in the processes of the probes.
- ``process_state``: what these processes have from that of the caller. ``reached_code`` finds what the functions use of
  the user's modules, ``torch_settings`` has the settings of torch, ``pickling`` is cloudpickle with our additions.
- ``notebook_board``: the progress of a tuning in a notebook.
- ``recommendation``: the recommendation that these return, with exports, plots and a view for notebooks.

A new way to describe a workload becomes a spec first, as functions do: everything after it is the same. The public
names are those that ``batchwright.__init__`` lists.
"""
