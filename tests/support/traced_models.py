"""Workloads that are traced as the ``python`` target ``traced_models:...``."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from batchwright.workloads.base import Loss, LossTerms

_HOME = os.getpid()


class Recurrent(nn.Module):
    """An embedding, two LSTM layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.layers: nn.RNNBase = nn.LSTM(16, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.layers(self.tokens(ids))[0])
        return logits


class Tokens:
    """Predicts tokens from themselves."""

    def build_model(self) -> nn.Module:
        """A small LSTM."""
        return Recurrent()

    def make_batch(self, size: int) -> Tensor:
        """Random tokens."""
        return torch.randint(0, 50, (size, 6))

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over tokens."""
        logits = model(batch)
        return {"loss": (F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel())}


class Gated(Tokens):
    """Predicts tokens with a GRU."""

    def build_model(self) -> nn.Module:
        """Two GRU layers in the place of the LSTM's."""
        model = Recurrent()
        model.layers = nn.GRU(16, 32, 2, batch_first=True)
        return model


class PackedRecurrent(Recurrent):
    """Packs sequences of different lengths, and pads the states again."""

    def forward(self, ids: Tensor) -> Tensor:
        """Logits. Every third sample has all steps, the next ones lack one and two."""
        lengths = [ids.shape[1] - number % 3 for number in range(len(ids))]
        packed = pack_padded_sequence(self.tokens(ids), torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True, total_length=ids.shape[1])
        logits: Tensor = self.head(states)
        return logits


class Packed(Tokens):
    """Predicts tokens with an LSTM over packed sequences."""

    def build_model(self) -> nn.Module:
        """The model that `Packed` predicts with."""
        return PackedRecurrent()


class Plain(Tokens):
    """Next-token loss without a slice of the logits: as the published figures were taken."""

    def build_model(self) -> nn.Module:
        """GPT-2 124M without dropout."""
        from batchwright.schemas.workload import Gpt
        from batchwright.workloads.reference import GptNetwork

        sizes = Gpt(name="gpt", layers=12, heads=12, width=768, vocabulary_size=50257)
        return GptNetwork(sizes, 1024, recompute=False)

    def make_batch(self, size: int) -> Tensor:
        """Random tokens."""
        return torch.randint(0, 50257, (size, 1024))


class Summed(Tokens):
    """Sums logits, so that their gradient is one number expanded to their shape."""

    def build_model(self) -> nn.Module:
        """Sixteen numbers for each token, and a head without a bias; torch_geometric asks for torch's build too."""
        torch.__config__.show()
        return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 5000, bias=False))

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """The sum of the logits."""
        return {"loss": (model(batch).sum(), len(batch))}


class Convolved(Tokens):
    """Two convolutions of images of 16 pixels, the second of which is the larger one."""

    def build_model(self) -> nn.Module:
        """Three channels, four, eight."""
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1))

    def make_batch(self, size: int) -> Tensor:
        """Random images."""
        return torch.randn(size, 3, 16, 16)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum of squares."""
        return {"loss": (model(batch).square().sum(), len(batch))}


class Branches(Tokens):
    """Does what no trace can follow: a tensor as long as some values are positive."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Keeps the positive logits."""
        logits = model(batch)
        return {"loss": (logits[logits > 0].sum(), len(batch))}


class Mismatched(Tokens):
    """Multiplies matrices that do not go together."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Fails in the product."""
        logits = model(batch).flatten(0, 1)
        return {"loss": (torch.mm(logits, logits).sum(), len(batch))}


class Sparse(Tokens):
    """Has a sparse gradient."""

    def build_model(self) -> nn.Module:
        """Sixteen numbers for each token."""
        return nn.Embedding(50, 16, sparse=True)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """The sum of the numbers."""
        return {"loss": (model(batch).sum(), len(batch))}


@torch.library.custom_op("tests::nameless", mutates_args=())
def nameless(values: Tensor) -> Tensor:
    """An operator without a rule for tensors that have no values."""
    return values.clone()


class UnknownOperator(Tokens):
    """Runs an operator of its own."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Sums the operator's result."""
        return {"loss": (nameless(model(batch)).sum(), len(batch))}


class Flexible(Tokens):
    """Attends with a kernel that torch compiles."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Attends between the logits, without gradients, which the CPU does not have."""
        heads = model(batch)[:, None].detach()
        return {"loss": (flex_attention(heads, heads, heads).sum(), len(batch))}


class Slow(Tokens):
    """Never comes back."""

    def build_model(self) -> nn.Module:
        """Sleeps instead."""
        time.sleep(3600)
        return super().build_model()


class Huge(Tokens):
    """Takes real memory."""

    def make_batch(self, size: int) -> Tensor:
        """Sixteen gibibytes."""
        return torch.ones(size, 2**32, dtype=torch.int32)


class Spilling(Tokens):
    """Writes a file that has no end in sight."""

    def build_model(self) -> nn.Module:
        """Two gibibytes, most of them holes."""
        with tempfile.TemporaryFile() as stream:
            stream.seek(2**31)
            stream.write(b"!")
            stream.flush()
        return super().build_model()


class Unique(Tokens):
    """Fails when it is built again, in whatever process: the folder ``BUILT`` of the environment tells."""

    def build_model(self) -> nn.Module:
        """Makes the folder, which works once."""
        try:
            Path(os.environ["BUILT"]).mkdir()
        except FileExistsError:
            raise RuntimeError("built a second time") from None
        return super().build_model()


class Threaded(Tokens):
    """Starts a thread that stays when it is built, as some libraries do."""

    def build_model(self) -> nn.Module:
        """The same."""
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().build_model()


class Casting(Tokens):
    """Casts a layer in each forward pass, as the routers of Switch Transformers do."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """Cast the head, and return the loss of the others."""
        assert isinstance(model, Recurrent)
        model.head = model.head.to(torch.float32)
        return super().loss_terms(model, batch)


class Homesick(Tokens):
    """Kills every process but the one that imported it."""

    def make_batch(self, size: int) -> Tensor:
        """The same where it may be made."""
        if os.getpid() != _HOME:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make_batch(size)


class Conditional(Tokens):
    """Another loss for more than two samples."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """An additional term of its own for every three samples."""
        extra: Any = sum((model(batch).square().mean() for _ in range(len(batch) // 3)), torch.zeros(()))
        return {"loss": (model(batch).sum() + extra, len(batch))}


class Layered(Tokens):
    """Linear layers with another one of torch in between, which is named."""

    def __init__(self, layer: str, arguments: dict[str, Any]) -> None:
        self._layer = layer
        self._arguments = arguments

    def build_model(self) -> nn.Module:
        """Three linear layers of width 64."""
        layers: list[nn.Module] = [nn.Linear(8, 64)]
        for width in (64, 4):
            layers += [getattr(nn, self._layer)(**self._arguments), nn.Linear(64, width)]
        return nn.Sequential(*layers)

    def make_batch(self, size: int) -> Tensor:
        """Random rows."""
        return torch.randn(size, 8)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over samples."""
        return {"loss": (model(batch).square().sum(), len(batch))}


class Averaged(Layered):
    """Returns the mean of its loss alone."""

    def loss_terms(self, model: nn.Module, batch: Tensor) -> Loss:  # type: ignore[override] # any form of a loss
        """A mean over samples."""
        mean: Tensor = model(batch).square().sum(1).mean()
        return mean


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer (DiT): its norms are shifted and scaled by what a step of noise says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, patches: Tensor, step: Tensor) -> Tensor:
        """Patches ``(n, s, width)`` after attention and two layers, given steps ``(n, width)``."""
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(step)[:, None].chunk(6, dim=-1)
        states = self.norms[0](patches) * (1 + scale) + shift
        patches = patches + gate * self.attention(states, states, states, need_weights=False)[0]
        shifted: Tensor = self.norms[1](patches) * (1 + scale_2) + shift_2
        result: Tensor = patches + gate_2 * self.layers(shifted)
        return result


class Diffusion(Tokens):
    """Predicts noise; a patch of a sample stands for the step too."""

    def build_model(self) -> nn.Module:
        """Two blocks."""
        return nn.ModuleList(DiffusionBlock(32) for _ in range(2))

    def make_batch(self, size: int) -> Tensor:
        """Random patches."""
        return torch.randn(size, 16, 32)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum of squares."""
        patches = batch
        for block in cast("nn.ModuleList", model):
            patches = block(patches, batch[:, 0])
        return {"loss": ((patches - batch).square().sum(), len(batch))}


class Existing(Tokens):
    """Returns one model, which was made before."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))

    def build_model(self) -> nn.Module:
        """With buffers."""
        return self._model

    def make_batch(self, size: int) -> Tensor:
        """Random rows."""
        return torch.randn(size, 8)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """A sum over samples."""
        return {"loss": (model(batch).square().sum(), len(batch))}


class Compiled(Existing):
    """Compiles its model."""

    def build_model(self) -> nn.Module:
        """The model above, compiled."""
        return cast("nn.Module", torch.compile(super().build_model()))


class Taught(nn.Module):
    """A student and its teacher, and a table that is no buffer, which moves to the device in the first pass."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 32), nn.Linear(8, 32).requires_grad_(requires_grad=False)
        self.table = torch.zeros(5000)
        self._rate = rate

    def forward(self, rows: Tensor) -> Tensor:
        """The distances of the two from each other and from zero."""
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self._rate:
                    own.data.lerp_(other, self._rate)
        self.table = self.table.to(rows.device)
        student, teacher = self.student(rows), self.teacher(rows)
        distances = torch.cdist(student, teacher, compute_mode="use_mm_for_euclid_dist")
        return F.mse_loss(student, teacher, reduction="sum") + distances.sum() + self.table[0]


class Teaching(Existing):
    """Learns what a teacher does, which follows at some rate."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def build_model(self) -> nn.Module:
        """A model of its own."""
        return Taught(self._rate)

    def loss_terms(self, model: nn.Module, batch: Tensor) -> LossTerms:
        """The model's own."""
        return {"loss": (model(batch), len(batch))}


_EXISTING = Existing()


def existing() -> Tokens:
    """Every trace of a process gets the same model."""
    return _EXISTING


def fresh() -> Tokens:
    """As ``existing``, with a model for each trace."""
    return Existing()


def tokens() -> Tokens:
    """An LSTM."""
    return Tokens()


def gated() -> Tokens:
    """A GRU."""
    return Gated()


def packed() -> Tokens:
    """An LSTM over packed sequences."""
    return Packed()


def plain() -> Tokens:
    """The model of published figures."""
    return Plain()


def summed() -> Tokens:
    """Has expanded gradients."""
    return Summed()


def convolved() -> Tokens:
    """Has convolutions."""
    return Convolved()


def branches() -> Tokens:
    """Cannot be traced."""
    return Branches()


def mismatched() -> Tokens:
    """Fails in an operator."""
    return Mismatched()


def sparse() -> Tokens:
    """Cannot be traced either."""
    return Sparse()


def unknown_operator() -> Tokens:
    """Cannot be traced either."""
    return UnknownOperator()


def flexible() -> Tokens:
    """Cannot be traced either."""
    return Flexible()


def compiled() -> Tokens:
    """As ``fresh``, compiled."""
    return Compiled()


def slow() -> Tokens:
    """Takes for ever."""
    return Slow()


def huge() -> Tokens:
    """Takes too much."""
    return Huge()


def spilling() -> Tokens:
    """Fills the disk."""
    return Spilling()


def unique() -> Tokens:
    """Is built once."""
    return Unique()


def threaded() -> Threaded:
    """Starts threads."""
    return Threaded()


def casting() -> Casting:
    """Casts a layer."""
    return Casting()


def homesick() -> Homesick:
    """Kills forked processes."""
    return Homesick()


def layered(layer: str, **arguments: Any) -> Tokens:
    """Has a layer of torch."""
    return Layered(layer, arguments)


def averaged(layer: str, **arguments: Any) -> Tokens:
    """As ``layered``, with a loss that is a mean."""
    return Averaged(layer, arguments)


def diffusion() -> Tokens:
    """A diffusion transformer."""
    return Diffusion()


def conditional() -> Tokens:
    """Differs between sizes."""
    return Conditional()


def taught() -> Tokens:
    """A teacher that changes in each pass."""
    return Teaching(0.1)


def untaught() -> Tokens:
    """Has a teacher that no pass changes."""
    return Teaching(0.0)
