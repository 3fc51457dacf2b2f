"""Find a GPU by the name that a scheduler, NVML, torch or a person has for the card. No torch.

The table is in ``tuner.hardware.gpu_table``.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from tuner.errors import EstimateError
from tuner.hardware.gpu_table import GPUS, unknown_gpu
from tuner.schemas.gpus import Gpu
from tuner.units import parse_bytes

_SHOWN_LENGTH = 60
_SMALLEST_CARD_BYTES = 256 * 1024**2
_LARGEST_CARD_BYTES = 4 * 1024**4


def _key(name: str) -> str:
    """Reduce a name to the part that nobody leaves out: ``NVIDIA GeForce RTX 4090`` is ``4090``."""
    words = re.sub(r"\b((nvidia|tesla|geforce|quadro|amd|instinct)\b|rtx)", " ", name.lower().replace("_", " "))
    return re.sub(r"[^a-z0-9]", "", words)


def _without_form(name: str) -> str:
    """A name without the words for how a card is built: ``A100-SXM4-80GB`` is ``a100-80gb``."""
    return re.sub(r"\b(sxm\d?|pcie|hbm\d?e?|oam)\b", " ", name.lower().replace("_", " "))


_BY_KEY = {_key(name): gpu for gpu in GPUS for name in (gpu.name, f"{gpu.name} {gpu.marketed_memory}", *gpu.aliases)}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, however it is written; for a memory size such as ``48GiB``, a card with that much.

    Raises:
        EstimateError: when no card is called so, or several are.
    """
    key = _key(name)
    if found := _BY_KEY.get(key) or _BY_KEY.get(_key(_without_form(name))):
        return found
    family = [gpu for gpu in GPUS if _key(gpu.family) == key]
    if len(family) == 1:
        return family[0]
    if family:
        raise EstimateError(
            f"{_shown(name)} is the name of several GPUs: choose one of {', '.join(gpu.name for gpu in family)}"
        )
    return _unknown_card(name)


def _unknown_card(name: str) -> Gpu:
    """A card of which only the memory is known.

    Raises:
        EstimateError: when the text is no memory size.
    """
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*[kmgt]i?b?\s*", name.lower()):
        raise _no_such_gpu(name)
    try:
        total = parse_bytes(name)
    except ValueError:  # beyond every number
        total = 0
    if not _SMALLEST_CARD_BYTES <= total <= _LARGEST_CARD_BYTES:
        raise EstimateError(f"{_shown(name)} is no memory of a GPU: it has to be from 256MiB to 4TiB")
    return unknown_gpu(name.strip(), total)


def _no_such_gpu(name: str) -> EstimateError:
    names = {_key(text): gpu.name for gpu in GPUS for text in (gpu.name, gpu.family, *gpu.aliases)}
    near = dict.fromkeys(names[key] for key in get_close_matches(_key(name[:_SHOWN_LENGTH]), names, n=5, cutoff=0.5))
    hint = f"near it are {', '.join(near)}" if near else f"there are {', '.join(gpu.name for gpu in GPUS)}"
    return EstimateError(
        f"no GPU is called {_shown(name)}: {hint}; for another card give its memory instead, for example 48GiB"
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_LENGTH else name[:_SHOWN_LENGTH] + "...")
