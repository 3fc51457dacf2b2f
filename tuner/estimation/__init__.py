"""Estimate peak memory and the largest micro-batch without a GPU.

The pipeline of an estimate: trace at two or more sizes, grow the trace to any size, replay it against an allocator, and
find the largest size that fits.

1. Ask: ``client`` runs a task in a fork server that traces, which ``worker_start`` describes; the task leaves an
   estimate or a failure (``protocol``). ``pool`` keeps such servers for the service.
2. Trace: in that process ``tracing`` runs the updates of a probe on fake tensors, at a few micro-batch sizes (three for
   a whole estimate, two for the curve that seeds a search). ``attention_kernels`` and ``cuda_shim`` supply the
   decisions that CUDA would make. The result is a ``trace``: which blocks are allocated and freed, in which order.
3. Grow: ``size_growth`` finds for each block how its bytes depend on the micro-batch size, so that traces at a few
   sizes are the trace of every size.
4. Replay: ``allocator`` runs a trace through a simulation of torch's caching allocator.
5. Find: ``memory_curve`` searches the largest size with room, and ``verdict`` turns it into an estimate for each GPU,
   with its interval and its plan.

Where a new thing goes: an operator with memory that torch does not show, ``tracing.kernel_workspaces``; a rule of an
attention kernel, ``attention_kernels``; an allocator setting, ``allocator.config``; a source of uncertainty,
``verdict``.

The package may import ``training``, ``planning``, ``hardware``, ``workloads``, ``schemas`` and ``system``. Only
``tracing`` imports torch; the modules of this folder and ``allocator`` must not.
"""
