"""Training on preference pairs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from batchwright.schemas.base import Document
from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.dataset.data_spec import DataSpec

_SHORTEST_PAIR = 2
"""A prompt of one token, and one token of a completion."""
_PAIRED_DATA = {"arrays", "records", "synthetic"}


class PreferenceSpec(Document):
    """Training on preference pairs by direct preference optimization (DPO, Rafailov et al. 2023), for `causal-lm`.

    A sample is a pair: a prompt with a chosen and a rejected completion, two sequences of at most
    `batch.sequence_length` tokens each. The reward of a completion is `beta` times the logarithm of its probability
    over that which the reference policy gives it. The reference is the model that the run starts from: the base of an
    adapter, which takes no memory of its own, or a frozen copy of the weights.
    """

    ABSENT_FIELDS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "loss_type": "did you mean `loss`?",
            "ref_model": "the reference is the model that the run starts from",
            "max_length": "it is `batch.sequence_length`",
            "max_prompt_length": "prompts are not cut: a pair whose prompt leaves no room is left out",
            "precompute_ref_log_probs": "the reference runs beside the model for each micro-batch",
            "reference_free": "there is always a reference: the model that the run starts from",
        }
    )

    kind: Literal["dpo"]
    """Selects this kind of training."""
    beta: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.1
    """How much the policy is kept near its reference: larger is nearer. The paper's tau with the loss `ipo`."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: the negative log-likelihood that the chosen completion is preferred, by the difference of the rewards
    (Bradley-Terry). `ipo`: the squared distance of the mean log-ratios per token from `1 / (2 * beta)` (Azar et al.
    2023)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a pair is the wrong way round (conservative DPO, Mitchell 2023), with the loss `sigmoid`."""

    @field_validator("kind", mode="before")
    @classmethod
    def _is_no_loss(cls, value: object) -> object:
        if value == "ipo":
            raise ValueError("must be 'dpo', with `loss: ipo`")
        return value

    @model_validator(mode="after")
    def _smooths_a_likelihood(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"`label_smoothing` is for the loss `sigmoid`, and this is `{self.loss}`: leave it out")
        return self

    @staticmethod
    def require_use(model: str, batch: BatchSpec, data: Mapping[str, DataSpec]) -> None:
        """Check that the parts of a spec have pairs.

        ``model`` is the task of a transformers model, or the kind of another one; ``data`` is by field.

        Raises:
            ValueError: when the model is no causal language model of transformers, records are packed, a sequence has
                no room for a completion, or data has no pairs.
        """
        if model != "causal-lm":
            raise ValueError(f"`preference` is for `causal-lm` models of transformers, and this is {model}")
        if batch.packing is not None:
            raise ValueError("`batch.packing` cannot be combined with `preference`, whose samples are pairs")
        if batch.sequence_length is not None and batch.sequence_length < _SHORTEST_PAIR:
            raise ValueError("`batch.sequence_length` is 1, and a prompt with a completion needs at least 2")
        for field, used in data.items():
            if used.kind not in _PAIRED_DATA:
                raise ValueError(
                    f"`preference` needs pairs, and `{field}` is of the kind `{used.kind}`: use `records` with the "
                    "fields `prompt`, `chosen` and `rejected`"
                )
