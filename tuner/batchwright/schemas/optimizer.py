"""The optimizer and the learning-rate schedule of a spec. Pure data, no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from typing_extensions import TypedDict

from batchwright.device_traits import traits_of
from batchwright.errors import FieldProblem, SpecError
from batchwright.schemas.base import Document, NonNegativeInt

Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
_MOST_GROUPS = 32
_MOST_PATTERNS = 64
_LONGEST_PATTERN = 200
Pattern = Annotated[str, Field(min_length=1, max_length=_LONGEST_PATTERN)]
_SHOWN_NAMES = 8
"""Names of parameters in an error."""


class OptimizerArguments(TypedDict, total=False):
    """Further arguments of a class of ``torch.optim``, by their names there; torch's defaults where absent."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)  # type: ignore[misc]

    eps: Rate
    """Term of the denominator, for numerical stability: all but `adafactor`, `asgd`, `lion`, `lion8bit`, `rprop` and
    `sgd`."""
    amsgrad: bool
    """Keep the largest second moment, a third value per parameter: `adam` and `adamw`."""
    nesterov: bool
    """Nesterov's momentum: `muon` and `sgd`."""
    centered: bool
    """Subtract the mean gradient, one more value per parameter: `rmsprop`."""
    decoupled_weight_decay: bool
    """Weight decay as in `adamw`: `adam`, `nadam` and `radam`."""
    momentum_decay: Decay
    """Decay of the momentum: `nadam`."""
    alpha: Annotated[float, Field(ge=0.0, le=1.0)]
    """Smoothing constant of `rmsprop`; power of the learning rate's decay of `asgd`."""
    rho: Annotated[float, Field(ge=0.0, le=1.0)]
    """Decay of the mean of squared gradients: `adadelta`."""
    lr_decay: Decay
    """Decay of the learning rate: `adagrad`."""
    initial_accumulator_value: Decay
    """Initial sum of squared gradients: `adagrad`."""
    beta2_decay: Annotated[float, Field(le=0.0, allow_inf_nan=False)]
    """Decay of the coefficient of the second moment: `adafactor`."""
    lambd: Decay
    """Decay term: `asgd`."""
    t0: Decay
    """Update at which averaging begins: `asgd`."""
    etas: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], Annotated[float, Field(gt=1.0, allow_inf_nan=False)]]
    """Factors of a decrease and an increase of the step: `rprop`."""
    step_sizes: tuple[Rate, Rate]
    """Smallest and largest step: `rprop`."""
    ns_steps: Annotated[int, Field(ge=1, le=99)]
    """Steps of the Newton-Schulz iteration: `muon`."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"]
    """Learning rate by the shape of a matrix: `muon`. With `match_rms_adamw` the rates of `adamw` serve."""
    adamw_learning_rate: Rate
    """Peak learning rate of what `muon` leaves to AdamW. Default: `learning_rate`."""
    adamw_parameters: Annotated[tuple[Pattern, ...], Field(max_length=_MOST_PATTERNS)]
    """Patterns of names of matrices that `muon` leaves to AdamW, besides embeddings and output layers."""


@dataclass(frozen=True)
class _Optimizer:
    """An optimizer and its arguments, besides the learning rate."""

    torch_class: str
    """Name of its class."""
    fields: frozenset[str]
    """Fields of ``OptimizerSpec`` that it takes."""
    arguments: frozenset[str] = frozenset()
    module: str = "torch.optim"
    """The module of its class."""
    extra: str = "torch"
    """The extra of Batchwright that installs the package of the module."""
    has_fused: bool = False
    has_foreach: bool = True
    prefers_foreach: bool = True
    """Whether torch chooses ``foreach`` on a GPU by default."""
    takes_shards: bool = True
    """True if the step is right for a shard of a parameter (FSDP)."""
    initial_state: Mapping[str, str | float] = field(default_factory=dict)
    """State that does not begin as zeros: a number, or the name of the group's field that has it."""
    trainer_name: str | None = None
    """For a state in 8 bits: `optim` of the Trainer of transformers (and its likes), which like the probes keeps the
    state of embeddings in fp32."""


def _optimizer(torch_class: str, fields: str, arguments: str, **properties: Any) -> _Optimizer:  # noqa: ANN401 - fields of it
    return _Optimizer(torch_class, frozenset(fields.split()), frozenset(arguments.split()), **properties)


def _in_8_bits(torch_class: str, fields: str, arguments: str, trainer_name: str | None) -> _Optimizer:
    """An optimizer of bitsandbytes, which steps one parameter after the other."""
    return _optimizer(
        torch_class,
        fields,
        arguments,
        module="bitsandbytes.optim",
        extra="bitsandbytes",
        has_foreach=False,
        prefers_foreach=False,
        takes_shards=False,
        trainer_name=trainer_name,
    )


_OF_ADAMW = ("adamw_learning_rate", "adamw_parameters")
"""Arguments of `muon` for the parameters that AdamW trains."""
OptimizerName = Literal[
    "adamw",
    "adam",
    "sgd",
    "adadelta",
    "adafactor",
    "adagrad",
    "adamax",
    "adamw8bit",
    "asgd",
    "lion",
    "lion8bit",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
]

OPTIMIZERS: Mapping[OptimizerName, _Optimizer] = MappingProxyType(
    {
        "adamw": _optimizer("AdamW", "weight_decay betas", "eps amsgrad", has_fused=True),
        "adam": _optimizer("Adam", "weight_decay betas", "eps amsgrad decoupled_weight_decay", has_fused=True),
        "sgd": _optimizer("SGD", "weight_decay momentum", "nesterov", has_fused=True),
        "adadelta": _optimizer("Adadelta", "weight_decay", "eps rho"),
        "adafactor": _optimizer("Adafactor", "weight_decay", "beta2_decay", prefers_foreach=False),
        "adagrad": _optimizer(
            "Adagrad",
            "weight_decay",
            "eps lr_decay initial_accumulator_value",
            initial_state={"sum": "initial_accumulator_value"},
        ),
        "adamax": _optimizer("Adamax", "weight_decay betas", "eps"),
        "adamw8bit": _in_8_bits("AdamW8bit", "weight_decay betas", "eps", "adamw_bnb_8bit"),
        "asgd": _optimizer("ASGD", "weight_decay", "lambd alpha t0", initial_state={"eta": "lr", "mu": 1.0}),
        "lion": _optimizer(
            "Lion", "weight_decay betas", "", module="lion_pytorch", has_foreach=False, prefers_foreach=False
        ),
        "lion8bit": _in_8_bits("Lion8bit", "weight_decay betas", "", "lion_8bit"),
        "muon": _optimizer(
            "Muon",
            "weight_decay betas momentum",
            f"eps nesterov ns_steps adjust_lr_fn {' '.join(_OF_ADAMW)}",
            has_fused=True,
            takes_shards=False,
        ),
        "nadam": _optimizer(
            "NAdam",
            "weight_decay betas",
            "eps momentum_decay decoupled_weight_decay",
            initial_state={"mu_product": 1.0},
        ),
        "radam": _optimizer("RAdam", "weight_decay betas", "eps decoupled_weight_decay"),
        "rmsprop": _optimizer("RMSprop", "weight_decay momentum", "eps alpha centered"),
        "rprop": _optimizer("Rprop", "", "etas step_sizes", initial_state={"step_size": "lr"}),
    }
)
"""The optimizers of `torch.optim` for dense gradients whose step takes no closure, Lion of `lion_pytorch`, and two of
`bitsandbytes` with a state in 8 bits (Dettmers et al. 2021).

Muon trains matrices alone, so that `muon` is Muon and AdamW, whose implementation is chosen.

`dampening` of SGD is left out, as torch's first step ignores it, and so are `eps` and `d` of Adafactor. `foreach` and
`fused` are in `implementation`.
"""
_SWITCHES: Mapping[str, dict[str, bool]] = MappingProxyType(
    {"default": {}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}
)


class ParameterGroup(Document):
    """Parameters, by their names, with a learning rate or a weight decay of their own."""

    parameters: Annotated[
        tuple[Pattern, ...],
        Field(min_length=1, max_length=_MOST_PATTERNS),
    ]
    """Patterns of names, as of a shell: `*.bias`, `*ln_*`, `*norm*`. A parameter is in the first group that matches."""
    learning_rate: Rate | None = None
    """Peak learning rate. Default: the optimizer's."""
    weight_decay: Decay | None = None
    """Weight decay. Default: the optimizer's."""

    def has(self, name: str) -> bool:
        """Return whether a pattern matches the name of a parameter."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)

    @property
    def changes(self) -> dict[str, Any]:
        """The arguments of torch that differ from the optimizer's."""
        changed = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        return {name: value for name, value in changed.items() if value is not None}


class OptimizerSpec(Document):
    """The optimizer and its implementation, which both affect the memory of an update."""

    name: OptimizerName = "adamw"
    """A class of `torch.optim`, `lion`, or one of `bitsandbytes`. `adamw` and `adam` keep two values per parameter,
    `sgd` one with momentum and none without, `adafactor` one per row and column of a matrix. `muon` keeps one per
    weight of a hidden layer's matrix, and trains all other parameters by AdamW; it needs torch 2.9. `lion` keeps one,
    by the package `lion-pytorch`. `adamw8bit` and `lion8bit` keep as many values as `adamw` and `lion`, in one byte
    each with a scale for 256 of them; parameters below 4,096 values keep them in fp32. They need the package
    `bitsandbytes`."""
    learning_rate: Rate = 1e-3
    """Peak learning rate."""
    weight_decay: Decay = 0.0
    """Decoupled for `adamw`, `adamw8bit`, `adafactor`, `lion`, `lion8bit` and `muon`, an L2 term for the others.
    `rprop` has none."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of the two moments of `adam`, `adamax`, `adamw`, `adamw8bit`, the AdamW of `muon`, `nadam` and
    `radam`. Of `lion` and `lion8bit`, whose authors use 0.9 and 0.99, those of the step and of the momentum. Unused by
    the others."""
    momentum: Share = 0.0
    """Momentum of `muon`, `rmsprop` and `sgd`. Unused by the others."""
    arguments: OptimizerArguments = Field(default_factory=OptimizerArguments)
    """Further arguments of torch's class."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(max_length=_MOST_GROUPS)] = ()
    """Groups of parameters with rates of their own, such as norms and biases without weight decay."""
    implementation: Literal["default", "foreach", "fused", "for-loop"] = "default"
    """torch's implementation: `foreach` is fast and takes temporaries of the parameters' size, `fused` takes none and
    is there for `adam`, `adamw`, `sgd` and the AdamW of `muon`. `lion`, `adamw8bit` and `lion8bit` have the plain loop
    alone."""

    @field_validator("name", mode="before")
    @classmethod
    def _is_not_paged(cls, value: object) -> object:
        if isinstance(value, str) and value.lower().startswith("paged"):
            raise ValueError(
                "paged optimizer states are not supported: CUDA moves them between the card and the host, "
                "outside of torch's memory, so no probe can tell what fits. Use `adamw8bit` or `lion8bit`, "
                "whose state takes one byte per value on the card"
            )
        return value

    @model_validator(mode="after")
    def _takes_its_arguments(self) -> Self:
        kind = OPTIMIZERS[self.name]
        unknown = sorted(self.arguments.keys() - kind.arguments)
        if unknown:
            known = ", ".join(f"`{name}`" for name in sorted(kind.arguments)) or "none of its own"
            raise ValueError(f"`arguments.{unknown[0]}` is not an argument of `{self.name}`, which has {known}")
        if self.implementation == "fused" and not kind.has_fused:
            having = ", ".join(f"`{name}`" for name, other in sorted(OPTIMIZERS.items()) if other.has_fused)
            raise ValueError(f"`implementation` is `fused`, which `{self.name}` does not have: {having} do")
        if self.implementation == "foreach" and not kind.has_foreach:
            raise ValueError(f"`implementation` is `foreach`, which `{self.name}` does not have: leave it out")
        decays = [self.weight_decay, *(group.weight_decay for group in self.groups)]
        if "weight_decay" not in kind.fields and any(decays):
            raise ValueError(f"`weight_decay` is not an argument of `{self.name}`")
        if self.arguments.get("nesterov") and not self.momentum:
            raise ValueError("`arguments.nesterov` needs a `momentum` above 0")
        if self.name == "muon" and not self.momentum:
            raise ValueError("`muon` needs a `momentum` above 0; its authors use 0.95")
        return self

    def group_numbers(self, names: Sequence[str]) -> list[int]:
        """Return the number of the group of each trainable parameter, from 1, or 0 where no group names it.

        Raises:
            SpecError: when a group has no parameter.
        """
        numbers = [
            next((number for number, group in enumerate(self.groups, 1) if group.has(name)), 0) for name in names
        ]
        for number in range(1, len(self.groups) + 1):
            if number not in numbers:
                listed = ", ".join(
                    [*(f"`{name}`" for name in names[:_SHOWN_NAMES]), *["..."] * (len(names) > _SHOWN_NAMES)]
                )
                message = f"match no trainable parameter that is left by earlier groups; names are {listed}"
                raise SpecError([FieldProblem(f"optimizer.groups.{number - 1}.parameters", message)])
        return numbers

    @property
    def torch_class(self) -> str:
        """Name of the class in ``module``."""
        return OPTIMIZERS[self.name].torch_class

    @property
    def module(self) -> str:
        """The module of the class: ``torch.optim``, or that of a package."""
        return OPTIMIZERS[self.name].module

    @property
    def package(self) -> str:
        """The package of the class: ``torch``, or another."""
        return self.module.partition(".")[0]

    @property
    def extra(self) -> str:
        """The extra of Batchwright that installs the package."""
        return OPTIMIZERS[self.name].extra

    @property
    def trainer_name(self) -> str | None:
        """Its name in the Trainer of transformers (and its likes), for a state in 8 bits; None for all others."""
        return OPTIMIZERS[self.name].trainer_name

    @property
    def is_of_torch(self) -> bool:
        """True if the optimizer is one class of ``torch.optim``, which other programs can make by its name."""
        return self.name != "muon" and self.module == "torch.optim"

    def torch_arguments(self) -> dict[str, Any]:
        """Return the arguments of that class, without the parameters."""
        if self.name == "muon":
            own = {name: value for name, value in self.arguments.items() if name not in _OF_ADAMW}
            return {"lr": self.learning_rate, "weight_decay": self.weight_decay, "momentum": self.momentum, **own}
        fields = OPTIMIZERS[self.name].fields
        return {
            "lr": self.learning_rate,
            **{name: getattr(self, name) for name in ("weight_decay", "betas", "momentum") if name in fields},
            **self.arguments,
            **(_SWITCHES[self.implementation] if OPTIMIZERS[self.name].has_foreach else {}),
        }

    def adamw_arguments(self) -> dict[str, Any]:
        """Return the arguments of the AdamW of `muon`, without the parameters."""
        rate = self.arguments.get("adamw_learning_rate", self.learning_rate)
        return {"lr": rate, "weight_decay": self.weight_decay, "betas": self.betas, **_SWITCHES[self.implementation]}

    def names_for_adamw(self, name: str) -> bool:
        """Return whether `arguments.adamw_parameters` has the name of a parameter."""
        return any(fnmatchcase(name, pattern) for pattern in self.arguments.get("adamw_parameters", ()))

    def require_strategy(self, strategy: str) -> None:
        """Check that the optimizer trains a model that is distributed by ``strategy``.

        Raises:
            ValueError: when it needs whole parameters, and ranks have shards of them.
        """
        if strategy == "fsdp" and not OPTIMIZERS[self.name].takes_shards:
            whole = "matrices" if self.name == "muon" else "parameters"
            raise ValueError(
                f"`optimizer.name` is `{self.name}`, which needs whole {whole}: `parallelism.strategy` must be `ddp`"
            )

    def implementation_on(self, device_kind: str) -> str:
        """Return the implementation on a kind of device, where `default` is torch's choice."""
        if self.implementation != "default":
            return self.implementation
        has_foreach = traits_of(device_kind).has_foreach and OPTIMIZERS[self.name].prefers_foreach
        return "foreach" if has_foreach else "for-loop"

    @property
    def has_fused(self) -> bool:
        """Whether torch has the implementation `fused` of it."""
        return OPTIMIZERS[self.name].has_fused


class ScheduleSpec(Document):
    """The learning rate over the updates, with one scheduler step per optimizer update."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or decaying to zero at the last update."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the rate rises linearly from zero."""
