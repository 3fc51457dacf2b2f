"""Virtual GPUs: torch's own CUDA build on a host without a GPU, on cards of any size that a file describes.

Torch is not changed. Libraries of ours stand in for those below it (libcudart, libcuda, NVML, cuBLAS, cuDNN, NCCL):
memory that can run out, and kernels that do nothing. So torch's caching allocator, its out-of-memory errors,
statistics, snapshots and choices of kernels are the real ones. Nothing that is seen on a virtual GPU is measured on a
GPU: times mean nothing, and the workspaces that only the real libraries know are zero, or assumed (recurrent layers).

1. ``description`` describes a host: its GPUs (catalogued ones by name, with the figures of `figures.toml`), other
   processes on them, and failures to inject.
2. ``build`` compiles `sources/` for the CUDA wheels that torch depends on, into the user's cache folder.
3. ``session`` is one such host: a folder with its description, and with the ledger of what each process holds.
   Processes that are started with its environment see its GPUs.
   ``batchwright.driving.virtual_estimate`` runs the probes of an estimate there.
4. `python -m batchwright.virtual_gpu --gpu T4 -- COMMAND` runs a command in a session of its own.
5. In each Python process of a session ``batchwright.system.startup`` has ``compute`` compute operators on small tensors
   by the CPU, in place: memory of a virtual GPU is memory of the process. ``uncomputed`` lists the operators that were
   left out.

`sources/` has the state of a session (`ledger.h`), that of a process (`virtual_gpu.h`: `description.cpp`, `device.cpp`,
`address_space.cpp`), and above them the libraries (`cudart*.cpp`, `cuda_driver.cpp`, `nvml.cpp`, and so on).

Where a new thing goes: a card, `figures.toml`; a failure, ``description``, ``session`` and `sources/ledger.cpp`; a
function that has to answer something (the session's log names stubs that were called), the file of its library.

The package may import ``hardware``, ``schemas`` and ``system``. Only ``compute`` imports torch.
"""
