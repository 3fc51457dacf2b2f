"""Find a GPU by any name that a scheduler, NVML, torch or a person uses for it. No torch.

The table is in ``batchwright.hardware.gpu_table``.
"""

import re
from difflib import get_close_matches

from batchwright.errors import EstimateError
from batchwright.hardware.gpu_table import GPUS, unknown_gpu
from batchwright.schemas.gpus import ByteInterval, Gpu
from batchwright.units import parse_bytes

_MAX_NAME_LENGTH = 60
_SMALLEST_CARD_BYTES = 256 * 1024**2
_LARGEST_CARD_BYTES = 4 * 1024**4


def _key(name: str) -> str:
    """Reduce a name to its essential part: ``NVIDIA GeForce RTX 4090`` becomes ``4090``."""
    words = re.sub(r"\b((nvidia|tesla|geforce|quadro|amd|instinct)\b|rtx)", " ", name.lower().replace("_", " "))
    return re.sub(r"[^a-z0-9]", "", words)


def _without_form_factor(name: str) -> str:
    """Remove the form factor from a name: ``A100-SXM4-80GB`` becomes ``a100-80gb``."""
    return re.sub(r"\b(sxm\d?|pcie|hbm\d?e?|oam)\b", " ", name.lower().replace("_", " "))


_BY_KEY = {_key(name): gpu for gpu in GPUS for name in (gpu.name, f"{gpu.name} {gpu.marketed_memory}", *gpu.aliases)}


_MEMORY_INSTEAD = "for another card give its memory instead, for example 48GiB"


def find_gpu(name: str, *, other_cards: str = _MEMORY_INSTEAD) -> Gpu:
    """Find the GPU of this name, in any spelling; for a memory size such as ``48GiB``, a generic card of that size.

    Args:
        name: the name, or the memory size.
        other_cards: the remedy for a card that has no name here, for the message of the error.

    Raises:
        EstimateError: when no card, or more than one, has this name.
    """
    key = _key(name)
    if found := _BY_KEY.get(key) or _BY_KEY.get(_key(_without_form_factor(name))):
        return found
    family = [gpu for gpu in GPUS if _key(gpu.family) == key]
    if len(family) == 1:
        return family[0]
    if family:
        raise EstimateError(
            f"{_shortened(name)} is the name of several GPUs: choose one of {', '.join(gpu.name for gpu in family)}"
        )
    return _card_of_memory_size(name, other_cards)


def context_bytes_of(name: str) -> ByteInterval:
    """Return the memory of a process outside of torch's allocator on the card of this name, which may be unlisted."""
    try:
        return find_gpu(name).context_bytes
    except EstimateError:
        return unknown_gpu(name, _SMALLEST_CARD_BYTES).context_bytes


def allocatable_bytes_of(name: str, total_bytes: int) -> int | None:
    """Return torch's total memory of the card of this name, at most NVML's; None where the card is not listed."""
    listed = _BY_KEY.get(_key(name)) or _BY_KEY.get(_key(_without_form_factor(name)))
    return min(listed.total_bytes, total_bytes) if listed else None


def _card_of_memory_size(name: str, other_cards: str) -> Gpu:
    """Return a generic card with the memory size that ``name`` states.

    Raises:
        EstimateError: when the text is not a memory size, or no card has so much or so little memory.
    """
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*[kmgt]i?b?\s*", name.lower()):
        raise _no_such_gpu(name, other_cards)
    try:
        total = parse_bytes(name)
    except ValueError:  # too large to parse
        total = 0
    if not _SMALLEST_CARD_BYTES <= total <= _LARGEST_CARD_BYTES:
        raise EstimateError(f"{_shortened(name)} is not a GPU's memory size: it must be from 256MiB to 4TiB")
    return unknown_gpu(name.strip(), total)


def _no_such_gpu(name: str, other_cards: str) -> EstimateError:
    names: dict[str, list[str]] = {}
    for gpu in GPUS:
        for text in (gpu.name, gpu.family, *gpu.aliases):
            names.setdefault(_key(text), []).append(gpu.name)
    close = dict.fromkeys(
        gpu for key in get_close_matches(_key(name[:_MAX_NAME_LENGTH]), names, n=5, cutoff=0.5) for gpu in names[key]
    )
    hint = f"similar names are {', '.join(close)}" if close else f"known are {', '.join(gpu.name for gpu in GPUS)}"
    return EstimateError(f"no GPU is called {_shortened(name)}: {hint}; {other_cards}")


def _shortened(name: str) -> str:
    return repr(name if len(name) <= _MAX_NAME_LENGTH else name[:_MAX_NAME_LENGTH] + "...")
