"""Inject the matrices of a LoRA adapter into a transformers model, by ``peft``."""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.field_errors import listed
from batchwright.schemas.model.adapter import LoraAdapter
from batchwright.schemas.workload import TransformersTask
from batchwright.suggestions import suggestion
from batchwright.torch_internals import own_parameters

LoraConfig: TypeAlias = Any
"""A ``peft.LoraConfig``; peft ships no usable types."""

_TASK_TYPES: dict[TransformersTask, str] = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
}
"""The tasks that have a class of ``peft``; the others are saved with the class of their model."""
_CLASSIFIER_HEADS = ("classifier", "score")
"""The modules that peft trains whole for the two kinds of classifiers, where the model has them."""
_MOST_NAMES = 20
_STACK_DIMENSIONS = 3
"""Matrices, rows and columns."""
_INDEX = re.compile(r"\d+")
_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
"""The classes of torch that LoRA of peft 0.21 adapts."""
_FAN_MESSAGE = "fan_in_fan_out is set to"
"""Start of peft's warning that it stores the transposed matrices of GPT-2 as they are."""


def lora_config(adapter: LoraAdapter, task: TransformersTask, model: nn.Module) -> LoraConfig:
    """The ``LoraConfig`` of an adapter.

    Args:
        adapter: the adapter of the spec.
        task: the task of the model.
        model: the model, without an adapter.

    Raises:
        SpecError: when ``peft`` is missing, or a name fits no module of the model.
    """
    peft = _import_peft()
    names = [name for name, _ in model.named_modules() if name]
    _require_names("target_modules", adapter.target_modules, names, model)
    _require_names("modules_to_save", adapter.modules_to_save, names, model)
    heads = [name for name in _CLASSIFIER_HEADS if task.endswith("-classification") and _matching(name, names)]
    targets = adapter.target_modules
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,  # as peft writes it
        lora_dropout=adapter.dropout,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        modules_to_save=list(dict.fromkeys((*adapter.modules_to_save, *heads))) or None,
        bias=adapter.bias,
        use_rslora=adapter.use_rslora,
        init_lora_weights=True if adapter.init_lora_weights == "kaiming" else adapter.init_lora_weights,
        task_type=_TASK_TYPES.get(task),
    )


def inject_lora(model: nn.Module, adapter: LoraAdapter, task: TransformersTask) -> nn.Module:
    """Add the adapter to the model in place, freeze all but what is trained, and return the model.

    Args:
        model: a transformers model.
        adapter: the adapter of the spec.
        task: the task of the model.

    Raises:
        SpecError: when ``peft`` is missing, a name fits no module of the model, or a module cannot be adapted, or only
            some of the layers that a name fits.
    """
    config, adaptable = lora_config(adapter, task, model), _adaptable(model)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_FAN_MESSAGE)
            adapted: nn.Module = _import_peft().inject_adapter_in_model(config, model)
    except ValueError as error:
        reason = f"cannot be adapted: {' '.join(str(error).split()).partition('. Currently')[0].rstrip('.')}"
        if adapter.target_modules is None and "target_modules" in str(error):
            reason = "is required: peft knows no default for this type of model"
        raise _problem("target_modules", f"{reason}. {adaptable}") from None
    frozen = [name for name in stacked_parameters(adapted) if ".base_layer." not in name]
    for name in adapter.target_modules if isinstance(adapter.target_modules, tuple) else ():
        if found := _matching(name, frozen):
            message = (
                f"also names experts of {type(model).__name__}, which are one parameter (`{found[0]}`) that peft does "
                "not adapt: choose other modules"
            )
            raise _problem("target_modules", message, name)
    return adapted


def keep_adapter_in_fp32(model: nn.Module) -> None:
    """Convert the matrices of an adapter to fp32, as peft does for a base in 16 bits."""
    from peft.tuners.tuners_utils import cast_adapter_dtype  # noqa: PLC0415 - see _import_peft

    cast_adapter_dtype(model, "default")


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its frozen base does, in evaluation mode, for a block.

    peft's own ``enable_adapters`` also changes ``requires_grad``, which parameters that FSDP has gathered do not keep.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - see _import_peft
    from peft.utils.other import AuxiliaryTrainingWrapper  # noqa: PLC0415

    modes = [(module, module.training) for module in model.modules()]
    adapted = [module for module, _ in modes if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    try:
        for module in adapted:
            module._disable_adapters = True  # noqa: SLF001
        model.eval()
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False  # noqa: SLF001
        for module, mode in modes:
            module.training = mode


def _import_peft() -> Any:  # noqa: ANN401 - an untyped module
    try:
        import peft  # noqa: PLC0415 - takes seconds to import, and only adapters need it
    except ImportError as error:
        message = f"needs the package `peft`, which cannot be imported ({error}): pip install 'batchwright[peft]'"
        raise SpecError([FieldProblem("adapter", message)]) from None
    return peft


# --- names of modules ------------------------------------------------------------------------------------------------


def _matching(name: str, names: Iterable[str]) -> list[str]:
    """The modules that peft finds by a name: those of the name, and those whose name ends with it."""
    return [found for found in names if found == name or found.endswith(f".{name}")]


def stacked_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are stacks of matrices, outside of torch's own modules.

    Mixtures of experts have them since transformers 5, where each expert had linear layers before.
    """
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, parameter in own_parameters(module).items()
        if parameter is not None and parameter.dim() == _STACK_DIMENSIONS and 1 not in parameter.shape
    ]


def _require_names(field: str, wanted: str | tuple[str, ...] | None, names: list[str], model: nn.Module) -> None:
    for name in wanted if isinstance(wanted, tuple) else ():
        if not _matching(name, names):
            near = suggestion(name, _ends(names)) or "."
            known = _adaptable(model) if field == "target_modules" else f"Its modules: {_quoted(_ends(names))}"
            raise _problem(field, f"fits no module of {type(model).__name__}{near} {known}", name)


def _adaptable(model: nn.Module) -> str:
    """A sentence with the ends of the names of modules that can be adapted."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - with the model

    kinds = (*_ADAPTABLE, Conv1D)
    found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return f"Modules that can be adapted: {_quoted(_ends(found))}"


def _quoted(names: list[str]) -> str:
    return listed([f"`{name}`" for name in names], _MOST_NAMES)


def _ends(names: Iterable[str]) -> list[str]:
    """The last part of each name that is no index."""
    parts = ([part for part in name.split(".") if not _INDEX.fullmatch(part)] for name in names)
    return sorted({found[-1] for found in parts if found} - {""})


def _problem(field: str, message: str, value: str = "") -> SpecError:
    return SpecError([FieldProblem(f"adapter.{field}", message, value)])
