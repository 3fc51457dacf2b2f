"""Models of published measurements, rebuilt as ``python`` targets; imported by the process that traces alone.

The vision models follow torchvision's (residual blocks, ReLUs in place). The GPT follows the book "Build a Large
Language Model (From Scratch)", chapter 5. Weights are random: they do not change memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

from batchwright.schemas.dataset.batch_spec import BatchSpec
from batchwright.schemas.workload import TransformersModel
from batchwright.workloads.base import LossTerms, Workload
from batchwright.workloads.hugging_face import transformers_workload

BERT_LARGE = {
    "model_type": "bert",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "attn_implementation": "eager",
}


class Images:
    """Classifies square images."""

    def __init__(self, build: Callable[[], nn.Module], classes: int) -> None:
        self.build_model = build
        self.classes = classes

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Images of 224 pixels, and labels."""
        return {"images": torch.randn(size, 3, 224, 224), "labels": torch.randint(0, self.classes, (size,))}

    def loss_terms(self, model: nn.Module, batch: dict[str, Tensor]) -> LossTerms:
        """Cross entropy."""
        loss = F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum")
        return {"classification": (loss, len(batch["labels"]))}


class NextTokens:
    """Predicts the next of 1,024 tokens."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build_model = build

    def make_batch(self, size: int) -> dict[str, Tensor]:
        """Tokens, and those that follow them."""
        tokens = torch.randint(0, 50257, (size, 1025))
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def loss_terms(self, model: nn.Module, batch: dict[str, Tensor]) -> LossTerms:
        """Cross entropy."""
        logits: Tensor = model(batch["inputs"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return {"tokens": (loss, batch["targets"].numel())}


def bert_large(*, recomputes: bool) -> Workload:
    """BERT-large as a classifier of 512 tokens, with the softmax of torch 1.10."""
    _keep_inputs_of_softmax()
    model = TransformersModel(kind="transformers", task="sequence-classification", config=dict(BERT_LARGE))
    return transformers_workload(model, BatchSpec(sequence_length=512), recompute=recomputes)


def _keep_inputs_of_softmax() -> None:
    """From here on ``softmax`` keeps what torch 1.10's did (https://github.com/pytorch/pytorch/issues/64000)."""

    class Softmax(torch.autograd.Function):
        """In fp32 under autocast."""

        @staticmethod
        def forward(ctx: Any, values: Tensor, dim: int) -> Tensor:  # noqa: ANN401 - torch's own
            found = torch.softmax(values, dim)
            ctx.save_for_backward(values, found)
            ctx.dim = dim
            return found

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - as above
            values, found = ctx.saved_tensors
            return torch.ops.aten._softmax_backward_data(gradient, found, ctx.dim, values.dtype), None  # noqa: SLF001 - no public name

    def softmax(values: Tensor, dim: int, **_: object) -> Tensor:
        found: Tensor = Softmax.apply(values.float(), dim)  # type: ignore[no-untyped-call]
        return found

    torch.nn.functional.softmax = softmax  # type: ignore[assignment]


class _EncoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.before_mlp = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.before_attention(tokens)
        tokens = self.attention(normed, normed, normed, need_weights=False)[0] + tokens
        mixed: Tensor = tokens + self.mlp(self.before_mlp(tokens))
        return mixed


class _VisionTransformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.layers = nn.Sequential(*(_EncoderBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], 1) + self.positions
        logits: Tensor = self.head(self.norm(self.layers(tokens))[:, 0])
        return logits


def vit_large() -> Workload:
    """``vit_l_16`` with ten classes."""
    return Images(lambda: _VisionTransformer(1024, 24, 16, 10), 10)


def vgg16() -> Workload:
    """VGG16 without batch normalisation."""

    def layers() -> Iterator[nn.Module]:
        channels = 3
        for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(convolutions):
                yield nn.Conv2d(channels, width, 3, padding=1)
                yield nn.ReLU(inplace=True)
                channels = width
            yield nn.MaxPool2d(2)
        yield nn.AdaptiveAvgPool2d(7)
        yield nn.Flatten()
        for inputs in (512 * 49, 4096):
            yield nn.Linear(inputs, 4096)
            yield nn.ReLU(inplace=True)
            yield nn.Dropout()
        yield nn.Linear(4096, 1000)

    return Images(lambda: nn.Sequential(*layers()), 1000)


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    )


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            _convolution(width, width, 3, stride=stride),
            nn.ReLU(inplace=True),
            _convolution(width, 4 * width, 1),
        )
        same = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, 4 * width, 1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        found = self.layers(images)
        found += self.shortcut(images)
        return F.relu(found, inplace=True)


def resnet50() -> Workload:
    """ResNet-50."""

    def layers() -> Iterator[nn.Module]:
        yield _convolution(3, 64, 7, stride=2)
        yield nn.ReLU(inplace=True)
        yield nn.MaxPool2d(3, 2, 1)
        channels = 64
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                width = 64 << stage
                yield _Bottleneck(channels, width, 2 if stage and not block else 1)
                channels = 4 * width
        yield nn.AdaptiveAvgPool2d(1)
        yield nn.Flatten()
        yield nn.Linear(2048, 1000)

    return Images(lambda: nn.Sequential(*layers()), 1000)


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        expand = [_convolution(inputs, width, 1), nn.ReLU6(inplace=True)] if expansion > 1 else []
        self.layers = nn.Sequential(
            *expand,
            _convolution(width, width, 3, stride=stride, groups=width),
            nn.ReLU6(inplace=True),
            _convolution(width, outputs, 1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return images + found if self.adds else found


def mobilenet_v2() -> Workload:
    """MobileNetV2."""
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def layers() -> Iterator[nn.Module]:
        yield _convolution(3, 32, 3, stride=2)
        yield nn.ReLU6(inplace=True)
        channels = 32
        for expansion, width, blocks, stride in stages:
            for block in range(blocks):
                yield _InvertedResidual(channels, width, 1 if block else stride, expansion)
                channels = width
        yield _convolution(320, 1280, 1)
        yield nn.ReLU6(inplace=True)
        yield nn.AdaptiveAvgPool2d(1)
        yield nn.Flatten()
        yield nn.Dropout(0.2)
        yield nn.Linear(1280, 1000)

    return Images(lambda: nn.Sequential(*layers()), 1000)


class _PlainNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor) -> Tensor:
        mean = values.mean(dim=-1, keepdim=True)
        variance = values.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((values - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class _PlainGelu(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (values + 0.044715 * torch.pow(values, 3))
        return 0.5 * values * (1 + torch.tanh(inner))


class _PlainAttention(nn.Module):
    """Attention as matrix products, with the matrix of all pairs of tokens."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, tokens: Tensor) -> Tensor:
        size, length, width = tokens.shape
        keys, queries, values = (
            layer(tokens).view(size, length, self.heads, -1).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        scores = queries @ keys.transpose(2, 3)
        scores.masked_fill_(self.get_buffer("mask").bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        mixed: Tensor = self.out((weights @ values).transpose(1, 2).reshape(size, length, width))
        return mixed


class _FlashAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        size, length, width = tokens.shape
        queries, keys, values = self.qkv(tokens).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=0.1, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).contiguous().view(size, length, width))
        return found


class _GptBlock(nn.Module):
    def __init__(self, attention: nn.Module, norm: Callable[[int], nn.Module], gelu: nn.Module) -> None:
        super().__init__()
        self.attention, self.norms = attention, nn.ModuleList([norm(768), norm(768)])
        self.mlp = nn.Sequential(nn.Linear(768, 3072), gelu, nn.Linear(3072, 768))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.dropout(self.attention(self.norms[0](tokens))) + tokens
        mixed: Tensor = self.dropout(self.mlp(self.norms[1](tokens))) + tokens
        return mixed


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int, *, native: bool, flash: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm if native else _PlainNorm
        self.tokens, self.positions = nn.Embedding(vocabulary, 768), nn.Embedding(1024, 768)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(
            *(
                _GptBlock(
                    _FlashAttention(768, 12) if flash else _PlainAttention(768, 12, 1024),
                    norm,
                    nn.GELU(approximate="tanh") if native else _PlainGelu(),
                )
                for _ in range(12)
            )
        )
        self.norm, self.head = norm(768), nn.Linear(768, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(self.tokens(tokens) + positions))))
        return logits


def gpt(*, native: bool = False, flash: bool = False, vocabulary: int = 50257) -> Workload:
    """GPT-2 124M of the book.

    Args:
        native: torch's layer norm and GELU instead of the book's.
        flash: torch's attention instead of the book's.
        vocabulary: rows of the embedding, of which the first 50,257 are tokens.
    """
    return NextTokens(lambda: _Gpt(vocabulary, native=native, flash=flash))
