"""Devices: their memory, the limits set on it, and the classification of their errors.

``failures`` is the one place that recognises an out-of-memory error in an exception or its message. Every new message
of a driver or library goes there, with its source. The end of a process that left no result is judged elsewhere:
``batchwright.system.process_exit`` says how it ended (a kill by the kernel for memory, say),
``batchwright.probing.exit_causes`` what that means for a probe, and ``crashes`` repeats a probe that crashed, to learn
whether the limit was the cause.

From the request to the device:

1. ``inventory`` lists the devices of this host, without torch: GPUs through ``nvml``, the only module that calls NVML,
   and the CPU through the kernel. ``memory_in_use`` says how much of one is in use now.
2. ``gpu_lookup`` finds a GPU by any of its names, and ``gpu_table`` reads the figures of each, with their sources,
   from `gpus.toml`. ``workspace_tables`` reads `workspaces.json`: what cuDNN took on cards that were measured.
3. ``batchwright.device_traits`` has what differs between kinds of devices, and so the environment variables under which
   a probe and its job allocate memory.
4. ``memory_devices`` opens a device in the process that uses it, sets its limit, and reads its peaks.
   ``uncomputed_kernels`` counts what a virtual card did not compute.

Where a new thing goes:

- a GPU: a table in `gpus.toml`, whose first lines say how;
- workspaces of a card: `benchmarks/workspace_table.py` writes them;
- another spelling of a GPU's name: `aliases` of its table;
- a kind of device (Intel's `xpu`, Apple's `mps`): a record in ``batchwright.device_traits``, a module in
  ``memory_devices`` with its line in ``memory_devices.factory``, a module like ``nvml`` that lists the devices, and the
  contract tests of `tests/support/device_contract.py`. AMD's cards are `cuda` to torch: they need the last module
  alone;
- an error message that means "out of memory" or "invalid size": ``failures``.

The package may import ``schemas`` and ``system``, neither ``planning`` nor ``workloads``. Only ``memory_devices``
imports torch.
"""
