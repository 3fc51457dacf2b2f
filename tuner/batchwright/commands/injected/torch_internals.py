"""Private names of torch that the injected code uses, each with the reason why no public name is enough.

Tested with torch 2.13.0: on the CPU, and with the CUDA build on virtual cards. The package cannot import
``batchwright.torch_internals``, because it runs beside the packages of the command.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any, Callable


def when_cuda_starts(torch: Any, action: Callable[[], None]) -> None:
    """Call a function as soon as CUDA is initialised; no public function waits for it without causing it."""
    torch.cuda._lazy_call(action)  # noqa: SLF001


def observe_card_ooms(torch: Any, observer: Callable[[int, int, int, int], None]) -> None:
    """Have the caching allocator report each request that failed after it had emptied its cache.

    The observer takes the card, the requested bytes, those in use and those free. It has no public name, and is missing
    in builds without CUDA.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # noqa: SLF001
    if attach is not None:
        when_cuda_starts(torch, lambda: attach(observer))


def indices_drawn_by(iterator: Any) -> tuple[Any, Any]:
    """The data set and sampler of a data loader's iterator; None for both where no indices are drawn for batches."""
    if iterator._dataset_kind != 0 or not iterator._auto_collation:  # noqa: SLF001 - 0 is a data set with indices
        return None, None
    return iterator._dataset, iterator._index_sampler  # noqa: SLF001


def trains_batch_norms(torch: Any) -> bool:
    """Return whether a batch norm of this process has normalised by the statistics of a batch, and would again.

    The base of all of them has no public name. All objects are looked at once, because a hook on every module or on
    `torch.nn.functional.batch_norm` would slow the program down, or break its compiled graphs. A synchronised batch
    norm counts too: it has the statistics of all ranks, but of one micro-batch.
    """
    kind = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001
    return any(_uses_batch(found) for found in gc.get_objects() if issubclass(type(found), kind))


def _uses_batch(module: Any) -> bool:
    """Return whether a module normalises by the batch, and has run, as far as it counts its batches."""
    if not module.training and module.running_mean is not None:
        return False
    batches = module.num_batches_tracked
    return batches is None or (not batches.is_meta and int(batches) > 0)


def data_loader_iterator() -> Any:
    """The base of the iterators of data loaders with and without worker processes; ``_next_index`` draws a batch."""
    return import_module("torch.utils.data.dataloader")._BaseDataLoaderIter  # noqa: SLF001


def replace_file_writer(torch: Any, observer: Callable[[Any], None]) -> None:
    """Have `torch.save`, `torch.package` and `torch.export` tell the path of a file before native code opens it.

    No public function is between them and the class of the writer.
    """
    native: Any = torch._C.PyTorchFileWriter  # noqa: SLF001

    class PyTorchFileWriter(native):  # type: ignore[misc]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(file, str):
                observer(file)
            super().__init__(file, *args, **kwargs)

    torch._C.PyTorchFileWriter = PyTorchFileWriter  # noqa: SLF001
