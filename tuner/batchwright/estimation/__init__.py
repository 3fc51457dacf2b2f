"""Estimate peak memory and the largest micro-batch without a GPU.

The pipeline of an estimate: trace at two or more sizes, extrapolate the trace to any size, replay it in a simulated
allocator, and find the largest size that fits.

1. Request: ``client`` runs a task in a fork server that traces. The task leaves an estimate or a failure
   (``protocol``). ``pool`` keeps such servers for the service.
2. Trace: in that process ``tracing`` runs the updates of a probe on fake tensors, at two micro-batch sizes, or more
   where these do not tell how the blocks grow. ``attention_kernels`` and ``cuda_shim`` supply the
   decisions that CUDA would make. The result is a ``trace``: the blocks that are allocated and freed, in order.
3. Extrapolate: ``size_growth`` finds how the bytes of each block depend on the micro-batch size, so that traces at a
   few sizes yield the trace at every size.
4. Replay: ``allocator`` runs a trace through a simulation of torch's caching allocator.
5. Search: ``memory_curve`` finds the largest size that fits, and ``verdict`` turns it into an estimate for each GPU,
   with its interval and its plan.

The other engine of estimates, ``batchwright.driving.virtual_estimate``, takes from ``verdict`` what a card has for a
process.

Where a new thing goes: an operator with memory that torch does not show, ``tracing.kernel_workspaces``; workspaces
measured on a card, the tables of ``batchwright.hardware.workspace_tables``; a rule of an attention kernel,
``attention_kernels``; an allocator setting, ``allocator.config``; a source of uncertainty, ``verdict``.

The package may import ``training``, ``planning``, ``hardware``, ``workloads``, ``schemas`` and ``system``. Only
``tracing`` imports torch; the modules of this folder and ``allocator`` must not.
"""
