"""Open a device in the process that uses it: set a memory limit, read peaks, translate errors.

``factory`` opens the device of an identifier such as `cuda:0`. ``base`` is the interface, ``cuda`` limits and measures
through torch's caching allocator, ``cpu`` through `RLIMIT_DATA` and the kernel's accounting. All modules import torch.
"""
