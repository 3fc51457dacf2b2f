"""The workloads of virtual_gpu.py, with what explains the differences that were found; some are ``python`` targets.

Sizes are such that a probe takes seconds: it builds the model on the CPU, and no large operator is computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finders_workloads import Classifier
from torch import Tensor, nn

from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.workload import WorkloadSpec, parse_spec

Spec = dict[str, Any]
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Case:
    """One workload at one micro-batch size on one card.

    Attributes:
        name: its name.
        group: the group of the summary.
        spec: the workload.
        size: the largest micro-batch of the update.
        share: samples of an update; ``size`` for an update of one micro-batch, None for two equal micro-batches.
        card: the card.
        allocator: `PYTORCH_ALLOC_CONF`.
        effective_batch_size: the batch for which both engines search the largest size; None where they do not.
    """

    name: str
    group: str
    spec: WorkloadSpec
    size: int
    share: int | None = None
    card: str = "A10G"
    allocator: str = ""
    effective_batch_size: int | None = None

    @property
    def probe(self) -> ProbeRequest:
        """The probe of the size, of the share in one micro-batch, or of the plan that divides the share."""
        share = 2 * self.size if self.share is None else self.share
        return ProbeRequest(
            spec=self.spec,
            micro_batch_size=self.size,
            samples_per_window=share,
            device="cuda:0",
            timeout_seconds=600.0,
            runs_plan=self.share is not None and self.share > self.size,
        )


# --- targets ---


class Recurrent(nn.Module):
    """Token embeddings, stacked recurrent layers, and a linear layer on the last state."""

    def __init__(self, kind: Callable[..., nn.Module], width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(n, 10)`` of token ids ``(n, s)``."""
        states, _ = self.layers(self.embedding(ids))
        logits: Tensor = self.head(states[:, -1])
        return logits


VOCABULARY = 8000


def lstm(width: int, layers: int, length: int) -> Classifier:
    """A stacked LSTM."""
    return Classifier(lambda: Recurrent(nn.LSTM, width, layers), (length,), VOCABULARY)


def gru(width: int, layers: int, length: int) -> Classifier:
    """A stacked GRU."""
    return Classifier(lambda: Recurrent(nn.GRU, width, layers), (length,), VOCABULARY)


def norms(width: int, layers: int, rows: int) -> Classifier:
    """Linear layers with GELU and normalisation over every row of a sample."""

    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(layers)]
        return nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 8), nn.Flatten(), nn.Linear(rows * 8, 10))

    return Classifier(build, (rows, 64), None)


# --- specs ---


def _text(task: str, length: int, model_type: str, **config: object) -> Spec:
    model = {"kind": "transformers", "task": task, "config": {"model_type": model_type, **config}}
    return {"model": model, "batch": {"sequence_length": length}}


def _image(side: int, model_type: str, **config: object) -> Spec:
    named = {"model_type": model_type, "num_labels": 1000, **config}
    model = {"kind": "transformers", "task": "image-classification", "config": named}
    return {"model": model, "batch": {"image_size": side}}


def _own(target: str, **arguments: int) -> Spec:
    return {"model": {"kind": "python", "target": f"virtual_gpu_workloads:{target}", "arguments": arguments}}


def _reference(name: str, batch: Spec, **sizes: int) -> Spec:
    return {"model": {"kind": "reference", "architecture": {"name": name, **sizes}}, "batch": batch}


_WIDE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 4, "vocab_size": 32000}
_GROUPED = {**_WIDE, "intermediate_size": 2048, "num_key_value_heads": 4, "max_position_embeddings": 4096}
_EXPERTS = {**_GROUPED, "num_hidden_layers": 2, "num_experts_per_tok": 2}
_HALF = {"precision": "bf16-mixed"}
_RECOMPUTED = {"activation_checkpointing": True}
GPT2 = _text("causal-lm", 512, "gpt2", n_layer=4)
LLAMA = _text("causal-lm", 1024, "llama", **_GROUPED)
BERT = _text("masked-lm", 256, "bert", **_WIDE, intermediate_size=3072)
VIT = _image(224, "vit", num_hidden_layers=4)
RESNET = _reference("resnet", {"image_size": 224})
MLP = _reference("mlp", {}, input_features=1024, hidden_features=4096, hidden_layers=4)
MLP_ROWS = _own("norms", width=1024, layers=8, rows=64)
LSTM = _own("lstm", width=512, layers=2, length=128)
CLIP_TOWER = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 2048}


@dataclass(frozen=True)
class _Row:
    """A case before its spec is parsed: fields of ``Case``, and changes of the spec."""

    name: str
    group: str
    spec: Spec
    size: int
    changes: Spec = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return Case(self.name, self.group, parse_spec({**self.spec, **self.changes}), self.size, **self.others)


def _optimizer(name: str, **values: object) -> Spec:
    return {"optimizer": {"name": name, **values}}


def cases() -> list[Case]:
    """All workloads."""
    return [row.case for row in (*_decoders(), *_encoders(), *_families(), *_others(), *_variants())]


def _decoders() -> Iterator[_Row]:
    kind = "decoders"
    yield _Row("GPT-2, fp32", kind, GPT2, 4, {}, {"card": "T4", "effective_batch_size": 64})
    yield _Row("GPT-2, bf16-mixed", kind, GPT2, 8, _HALF, {"effective_batch_size": 512})
    yield _Row("GPT-2, fp16-mixed", kind, GPT2, 8, {"precision": "fp16-mixed"}, {"card": "T4"})
    yield _Row("GPT-2, bf16", kind, GPT2, 8, {"precision": "bf16"}, {"card": "H100-80GB"})
    yield _Row("GPT-2, bf16-mixed, recomputed", kind, GPT2, 8, _HALF | _RECOMPUTED, {"card": "T4"})
    yield _Row("Llama, bf16-mixed", kind, LLAMA, 4, _HALF, {"card": "A100-40GB", "effective_batch_size": 256})
    yield _Row("Llama, bf16, recomputed", kind, LLAMA, 8, {"precision": "bf16"} | _RECOMPUTED, {"card": "H100-80GB"})
    qwen = _text("causal-lm", 512, "qwen3", **_GROUPED, head_dim=128)
    yield _Row("Qwen3, bf16-mixed", kind, qwen, 6, _HALF, {"card": "L4"})
    window = _text("causal-lm", 1024, "mistral", **_GROUPED, sliding_window=256)
    yield _Row("Mistral with a window, bf16", kind, window, 4, {"precision": "bf16"}, {})
    neox = _text("causal-lm", 512, "gpt_neox", **_WIDE, intermediate_size=3072)
    yield _Row("GPT-NeoX, fp32", kind, neox, 4, {}, {"card": "RTX 3090"})
    gemma = _text("causal-lm", 512, "gemma2", **_GROUPED, head_dim=64)
    yield _Row("Gemma 2, bf16-mixed", kind, gemma, 4, _HALF, {"card": "RTX 4090"})
    mixtral = _text("causal-lm", 512, "mixtral", **_EXPERTS, num_local_experts=4)
    yield _Row("Mixtral, bf16-mixed", "experts", mixtral, 4, _HALF, {"card": "A100-80GB"})
    experts = {"num_experts": 8, "moe_intermediate_size": 512, "head_dim": 64}
    qwen_moe = _text("causal-lm", 512, "qwen3_moe", **_EXPERTS, **experts)
    yield _Row("Qwen3-MoE, bf16", "experts", qwen_moe, 4, {"precision": "bf16"}, {"card": "H100-80GB"})


def _encoders() -> Iterator[_Row]:
    kind = "encoders"
    yield _Row("BERT, bf16-mixed", kind, BERT, 16, _HALF, {"effective_batch_size": 1024})
    yield _Row("BERT, fp32", kind, BERT, 12, {}, {"card": "RTX 4090"})
    deberta = _text("masked-lm", 256, "deberta-v2", **_WIDE, relative_attention=True, position_buckets=256)
    yield _Row("DeBERTa, fp32", kind, deberta, 8, {}, {"card": "A100-40GB"})
    t5 = _text("seq2seq-lm", 256, "t5", d_model=512, num_layers=3, num_decoder_layers=3, vocab_size=32128)
    yield _Row("T5, bf16-mixed", kind, t5, 12, _HALF, {"card": "L4", "effective_batch_size": 512})
    whisper = _text("speech-seq2seq", 128, "whisper", encoder_layers=2, decoder_layers=2, vocab_size=51865)
    yield _Row("Whisper, bf16-mixed", kind, whisper, 8, _HALF, {})
    yield _Row("ViT, bf16-mixed", kind, VIT, 32, _HALF, {"card": "H100-80GB", "effective_batch_size": 4096})
    yield _Row("ViT, fp32, recomputed", kind, VIT, 32, _RECOMPUTED, {"card": "T4"})
    clip: Spec = {"text_config": CLIP_TOWER, "vision_config": CLIP_TOWER, "projection_dim": 512}
    towers = _text("contrastive", 77, "clip", **clip)
    yield _Row("CLIP, bf16-mixed", kind, towers, 32, _HALF, {"card": "A100-40GB"})


def _families() -> Iterator[_Row]:
    """Two layers each of published families, with fewer tokens than the other workloads have."""
    families = {
        "masked-lm": ("albert", "megatron-bert", "modernbert", "mra", "longformer", "roformer", "mobilebert"),
        "causal-lm": ("bloom", "phi3", "starcoder2", "biogpt", "gpt_bigcode", "falcon", "codegen"),
    }
    for task, model_types in families.items():
        for model_type in model_types:
            yield _Row(model_type, "families", _text(task, 128, model_type, num_hidden_layers=2), 4, _HALF, {})
    for model_type in ("pvt_v2", "cvt", "focalnet"):
        yield _Row(model_type, "families", _image(224, model_type), 4, _HALF, {})


def _others() -> Iterator[_Row]:
    yield _Row("ResNet-18, fp32", "convolutions", RESNET, 32, {}, {"effective_batch_size": 1024})
    yield _Row("ResNet-18, bf16-mixed", "convolutions", RESNET, 64, _HALF, {"card": "A100-40GB"})
    resnet = _image(224, "resnet")
    yield _Row("ResNet-50, bf16-mixed", "convolutions", resnet, 32, _HALF, {"card": "H100-80GB"})
    convnext = _image(224, "convnext", depths=[2, 2, 4, 2])
    yield _Row("ConvNeXt, fp32", "convolutions", convnext, 24, {}, {"card": "T4", "effective_batch_size": 512})
    yield _Row("LSTM, fp32", "recurrent", LSTM, 128, {}, {})
    yield _Row("LSTM, bf16-mixed", "recurrent", LSTM, 128, _HALF, {"card": "H100-80GB"})
    gru_spec = _own("gru", width=512, layers=2, length=128)
    yield _Row("GRU, fp32", "recurrent", gru_spec, 128, {}, {"card": "T4"})
    yield _Row("MLP, fp32", "linear layers", MLP, 4096)
    wide = _reference("mlp", {}, input_features=256, hidden_features=768, hidden_layers=2)
    yield _Row("MLP of 200,000 samples, fp32", "linear layers", wide, 200_000)
    yield _Row("MLP of rows, bf16-mixed", "linear layers", MLP_ROWS, 256, _HALF, {"card": "L4"})


def _variants() -> Iterator[_Row]:
    kind = "optimizers"
    yield _Row("MLP, SGD with momentum", kind, MLP, 2048, _optimizer("sgd", momentum=0.9), {})
    yield _Row("MLP, plain SGD", kind, MLP, 2048, _optimizer("sgd", weight_decay=0.01), {})
    fused = _optimizer("adamw", implementation="fused")
    yield _Row("GPT-2, fused AdamW", kind, GPT2, 4, _HALF | fused, {})
    loop = _optimizer("adam", implementation="for-loop", weight_decay=0.01)
    yield _Row("BERT, Adam in a loop, clipped", kind, BERT, 4, loop | {"gradient_clipping": 1.0}, {})
    averaged = {"ema_decay": 0.999, "gradient_clipping": 1.0}
    yield _Row("ViT, average of weights", kind, VIT, 16, _HALF | averaged, {"card": "L4"})
    yield _Row("GPT-2, Adafactor", kind, GPT2, 8, _HALF | _optimizer("adafactor"), {"card": "H100-80GB"})
    yield _Row("GPT-2, Muon", kind, GPT2, 8, _HALF | _optimizer("muon", momentum=0.95), {"card": "H100-80GB"})
    yield _Row("GPT-2, Lion", kind, GPT2, 8, _HALF | _optimizer("lion"), {})
    eight, searched = _optimizer("adamw8bit"), {"card": "H100-80GB", "effective_batch_size": 512}
    yield _Row("GPT-2, AdamW of 8-bit state", kind, GPT2, 4, _HALF | eight, searched)
    yield _Row("Llama, Lion of 8-bit state", kind, LLAMA, 4, _HALF | _optimizer("lion8bit"), {"card": "A100-40GB"})
    kind, lora = "fine-tuning", {"adapter": {"kind": "lora", "rank": 16, "target_modules": "all-linear"}}
    yield _Row("Llama with LoRA, bf16", kind, LLAMA, 4, {"precision": "bf16"} | lora, {"card": "A100-40GB"})
    above_8_bits = {"adapter": {**lora["adapter"], "quantization": {"kind": "int8"}}}
    yield _Row(
        "Llama with LoRA above 8 bits", kind, LLAMA, 4, {"precision": "bf16"} | above_8_bits, {"card": "A100-40GB"}
    )
    for quantized in ({"kind": "nf4"}, {"kind": "nf4", "double_quantization": True}):
        qlora = {"adapter": {**lora["adapter"], "quantization": quantized}}
        twice = ", scales too" if len(quantized) > 1 else ""
        yield _Row(f"Llama with QLoRA{twice}", kind, LLAMA, 4, {"precision": "bf16"} | qlora, {"card": "A100-40GB"})
    yield _Row("GPT-2 with LoRA, recomputed", kind, GPT2, 8, _HALF | lora | _RECOMPUTED, {})
    pairs: Spec = {"preference": {"kind": "dpo"}}
    yield _Row("GPT-2, preference pairs", kind, GPT2, 4, _HALF | pairs, searched)
    yield _Row("Llama with LoRA, preference pairs", kind, LLAMA, 2, _HALF | lora | pairs, {"card": "A100-40GB"})
    packed = {"batch": {"sequence_length": 512, "packing": "bfd"}}
    yield _Row("GPT-2, packed", kind, GPT2, 8, _HALF | packed, {"card": "A100-40GB"})
    kind = "windows"
    yield _Row("GPT-2 in one micro-batch", kind, GPT2, 8, _HALF, {"share": 8})
    yield _Row("GPT-2 in 6 + 5 + 5", kind, GPT2, 6, _HALF, {"share": 16})
    yield _Row("BERT in 12 + 11", kind, BERT, 12, _HALF, {"share": 23})
    yield _Row("GPT-2, gradients in place", kind, GPT2, 6, _HALF | {"gradient_gathering": "in-place"}, {})
    yield _Row("GPT-2 on two ranks", kind, GPT2, 6, _HALF | {"parallelism": {"world_size": 2}}, {})
    kind = "allocator"
    settings = {"allocator": EXPANDABLE, "effective_batch_size": 512}
    yield _Row("GPT-2, expandable segments", kind, GPT2, 8, _HALF, settings)
    yield _Row("ResNet-18, expandable segments", kind, RESNET, 32, {}, {"allocator": EXPANDABLE})
    yield _Row("BERT, max_split_size_mb:64", kind, BERT, 16, _HALF, {"allocator": "max_split_size_mb:64"})
    rounding = "roundup_power2_divisions:4"
    yield _Row("ViT, roundup_power2_divisions:4", kind, VIT, 32, _HALF, {"allocator": rounding})
    large = "large_segment_size_mb:64,max_split_size_mb:128"
    yield _Row("Llama, large_segment_size_mb:64", kind, LLAMA, 4, _HALF, {"allocator": large, "card": "T4"})


_WORKSPACES = "workspaces of cuDNN, which the trace assumes and the virtual card does not have"
EXPLANATIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "ResNet-18, fp32",
            "ResNet-18, bf16-mixed",
            "ResNet-18, expandable segments",
            "ResNet-50, bf16-mixed",
        ),
        _WORKSPACES,
    ),
}
"""The cause of each difference above one percent, by the name of the workload: the requests of both were compared."""

SEARCH_EXPLANATIONS = {
    "T5, bf16-mixed": (
        "fitting is not monotone where the allocator has to free its cache: on virtual cards, 122 and 133 fit in the "
        "limit and 128 runs out of memory with more; the trace stops at a size that fits and was interpolated"
    ),
    "ResNet-18, fp32": _WORKSPACES,
}
"""The cause of each difference above one percent between the largest sizes, by the name of the workload."""
