"""Train small models on the CPU and on a virtual card, from equal weights and data, and print how far they differ.

The output is a JSON object with a ``Comparison`` per workload. Nothing here knows that the card is virtual.
"""

import argparse
import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.workload import Gpt, Mlp, ReferenceModel, ResNet
from batchwright.workloads.base import Workload
from batchwright.workloads.reference import ClassificationWorkload, reference_workload

_SAMPLES, _LENGTH, _WIDTH, _CLASSES = 6, 24, 32, 5


class _Classifier(nn.Module):
    """Layers over sequences of vectors, and a linear head on the last position."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            outputs = layer(states)
            states = outputs[0] if isinstance(outputs, tuple) else outputs
        logits: Tensor = self.head(states[:, -1])
        return logits


class _MaskedMean(nn.Module):
    """Attention with a key padding mask, and the mean of the positions that boolean indexing selects."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, 4, batch_first=True)

    def forward(self, states: Tensor) -> Tensor:
        padded = states[:, :, 0] > 1
        mixed, _ = self.attention(states, states, states, key_padding_mask=padded, need_weights=False)
        selected: Tensor = mixed[~padded]
        return states + selected.mean(0)


class _GroupedQueries(nn.Module):
    """Causal attention whose keys and values have fewer heads than its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        query = self.queries(states).unflatten(-1, (4, -1)).transpose(1, 2)
        key, value = self.keys(states).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return states + mixed.transpose(1, 2).flatten(2)


def _reference(model: Mlp | ResNet | Gpt, **batch: int) -> Workload:
    return reference_workload(ReferenceModel(kind="reference", architecture=model), BatchSpec(**batch), recompute=False)


def _classifier(*layers: Callable[[], nn.Module]) -> Workload:
    return ClassificationWorkload(lambda: _Classifier(*(layer() for layer in layers)), (_LENGTH, _WIDTH), _CLASSES)


def _encoder(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(_WIDTH, 4, 64, dropout, batch_first=True)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "mlp": lambda: _reference(Mlp(name="mlp", input_features=20, hidden_features=32, classes=_CLASSES)),
    "resnet": lambda: _reference(ResNet(name="resnet", width=8, blocks_per_stage=1, classes=_CLASSES), image_size=32),
    "gpt": lambda: _reference(Gpt(name="gpt", layers=2, width=_WIDTH), sequence_length=_LENGTH),
    "transformer": lambda: _classifier(_encoder),
    "masked": lambda: _classifier(_MaskedMean),
    "grouped": lambda: _classifier(_GroupedQueries),
    "rms-norm": lambda: _classifier(lambda: nn.Linear(_WIDTH, _WIDTH), lambda: nn.RMSNorm(_WIDTH, eps=1e-6)),
    "group-norm": lambda: _classifier(lambda: nn.Linear(_WIDTH, _WIDTH), lambda: nn.GroupNorm(4, _LENGTH)),
    "lstm": lambda: _classifier(lambda: nn.LSTM(_WIDTH, _WIDTH, 2, batch_first=True)),
    "gru": lambda: _classifier(lambda: nn.GRU(_WIDTH, _WIDTH // 2, batch_first=True, bidirectional=True)),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, 0.1, momentum=0.9, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, 1e-3, **options),
}


@dataclass(frozen=True)
class Trained:
    """The results of a training: losses of the updates, gradients of the first, parameters at the end."""

    losses: list[float]
    gradients: list[Tensor]
    parameters: list[Tensor]


@dataclass(frozen=True)
class Comparison:
    """Train on the CPU and on the card, and compare.

    Attributes:
        losses: on the CPU and on the card, by update.
        equal_gradients: whether the gradients of the first update are equal bit by bit.
        gradient_difference: the largest difference of a gradient, relative to the largest element of all.
        parameter_difference: likewise, of the parameters in the end.
        peak_allocated_bytes: most memory of the card that tensors took.
    """

    losses: list[tuple[float, float]]
    equal_gradients: bool
    gradient_difference: float
    parameter_difference: float
    peak_allocated_bytes: int


def train(workload: Workload, model: nn.Module, batch: dict[str, Tensor], options: argparse.Namespace) -> Trained:
    """Train on the device of the model."""
    device = next(model.parameters()).device
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    implementation = {options.implementation: True} if options.implementation else {}
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), **implementation)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0, enabled=options.precision == "fp16")
    losses, gradients = [], []
    for update in range(options.updates):
        optimizer.zero_grad()
        with _cast(device, options.precision):
            total, weight = next(iter(workload.loss_terms(model, batch).values()))
            loss = total / weight
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        if update == 0:
            gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        scaler.step(optimizer)
        scaler.update()
    return Trained(losses, gradients, [parameter.detach().cpu() for parameter in model.parameters()])


def _cast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtypes[precision]) if precision in dtypes else nullcontext()


def _difference(ones: list[Tensor], others: list[Tensor]) -> float:
    largest = max(one.abs().max().item() for one in ones)
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True)) / largest


def compare(name: str, options: argparse.Namespace) -> Comparison:
    """Train on both devices."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    workload = WORKLOADS[name]()
    model = workload.build_model()
    batch = dict(workload.make_batch(_SAMPLES))
    there = copy.deepcopy(model).cuda()
    cpu, card = train(workload, model, batch, options), train(workload, there, batch, options)
    pairs = zip(cpu.gradients, card.gradients, strict=True)
    return Comparison(
        list(zip(cpu.losses, card.losses, strict=True)),
        all(torch.equal(one, other) for one, other in pairs),
        _difference(cpu.gradients, card.gradients),
        _difference(cpu.parameters, card.parameters),
        torch.cuda.max_memory_allocated(),
    )


def main() -> None:
    """Compare as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", choices=WORKLOADS, nargs="+")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--implementation", choices=["foreach", "fused"])
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps({name: asdict(compare(name, options)) for name in options.workloads}))  # noqa: T201


if __name__ == "__main__":
    main()
