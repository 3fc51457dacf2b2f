"""Speech: audio that becomes a text by a decoder, or labels by CTC, with the loss of transformers."""

from typing import Any

import pytest
import torch

from batchwright.errors import SpecError
from batchwright.hardware.memory_devices.factory import open_device
from batchwright.schemas.workload import WorkloadSpec
from batchwright.training.coupling.check import check_spec_coupling
from batchwright.training.micro_batches.splitting import sliced
from batchwright.training.update_engine import UpdateEngine
from batchwright.workloads.base import WeighsLosses
from batchwright.workloads.build import build_model, build_workload, check_workload
from tests.support.factories import transformers_spec
from tests.workloads.test_published_configs import PUBLISHED

WAV2VEC2, WHISPER = PUBLISHED["wav2vec2"], PUBLISHED["whisper"]
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
LAYERS |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
HEADS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CONV: dict[str, Any] = {"conv_dim": [8, 8], "conv_kernel": [10, 8], "conv_stride": [5, 4], "vocab_size": 32}
CONV |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
RAW: dict[str, Any] = {**HEADS, **CONV}
S2T = {"model_type": "speech_to_text", "d_model": 16, "vocab_size": 64, **LAYERS, "conv_channels": 16}
SPEECHT5 = {"model_type": "speecht5", **CONV, **LAYERS, "hidden_size": 16}
SPEECHT5 |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
SPEECHT5.pop("layerdrop")
MOONSHINE = {"model_type": "moonshine", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
MOONSHINE |= {
    f"{part}_num_{what}": 1 for part in ("encoder", "decoder") for what in ("hidden_layers", "attention_heads")
}
AUDIO = {"sequence_length": 6, "audio_length": 1600}

SEQ2SEQ: dict[str, WorkloadSpec] = {
    "whisper": transformers_spec("speech-seq2seq", WHISPER, batch={"sequence_length": 6}),
    "speech_to_text": transformers_spec("speech-seq2seq", S2T, batch={"sequence_length": 6, "audio_length": 40}),
    "moonshine": transformers_spec("speech-seq2seq", MOONSHINE, batch=AUDIO),
    "speecht5": transformers_spec("speech-seq2seq", SPEECHT5, batch=AUDIO),
}
_CTC_CONFIGS: dict[str, dict[str, Any]] = {
    "wav2vec2": {**RAW, "feat_extract_norm": "layer"},
    "wav2vec2-conformer": {**RAW, "feat_extract_norm": "layer"},
    "hubert": RAW,
    "wavlm": RAW,
    "unispeech": {**RAW, "ctc_loss_reduction": "sum"},
    "unispeech-sat": RAW,
    "data2vec-audio": {**RAW, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 1},
    "sew": {**RAW, "squeeze_factor": 2},
    "sew-d": {**{name: value for name, value in RAW.items() if name != "layerdrop"}, "squeeze_factor": 2},
}
CTC: dict[str, WorkloadSpec] = {
    kind: transformers_spec("ctc", {"model_type": kind, **config}, batch=AUDIO) for kind, config in _CTC_CONFIGS.items()
}
ALL = {**SEQ2SEQ, **{f"ctc {kind}": spec for kind, spec in CTC.items()}}


@pytest.mark.parametrize("name", ALL)
def test_loss_terms_are_sums_with_their_weight(name: str) -> None:
    """The batch has the losses and weights of its parts together, and `loss_weights` says them beforehand."""
    torch.manual_seed(0)
    spec = ALL[name]
    workload = build_workload(spec)
    model = build_model(spec, workload).eval()
    batch = workload.make_batch(4)
    ((whole, weight),) = workload.loss_terms(model, batch).values()
    halves = [{key: value[part] for key, value in batch.items()} for part in (slice(0, 1), slice(1, 4))]
    parts = [next(iter(workload.loss_terms(model, half).values())) for half in halves]
    assert float(whole.detach()) == pytest.approx(sum(float(loss.detach()) for loss, _ in parts), rel=1e-4)
    assert float(weight) == sum(float(part) for _, part in parts)
    assert isinstance(workload, WeighsLosses)
    assert list(workload.loss_weights(batch).values()) == [float(weight)]


@pytest.mark.parametrize("name", ALL)
def test_the_update_is_that_of_transformers_loss(name: str) -> None:
    """The loss over its weight is the loss that the model itself returns for the labels."""
    torch.manual_seed(0)
    spec = ALL[name]
    workload = build_workload(spec)
    model: Any = build_model(spec, workload).eval()
    batch = workload.make_batch(3)
    ((loss, weight),) = workload.loss_terms(model, batch).values()
    theirs = float(model(**batch).loss.detach())
    if name.startswith("ctc") and model.config.ctc_loss_reduction == "sum":
        theirs /= 3
    assert float(loss.detach()) / float(weight) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_an_update_trains_in_mixed_precision(name: str) -> None:
    """Two micro-batches under autocast make an update with a finite gradient."""
    torch.manual_seed(0)
    spec = ALL[name].model_copy(update={"precision": "bf16-mixed"})
    workload = build_workload(spec)
    engine = UpdateEngine(spec, workload, build_model(spec, workload), open_device("cpu"), recovers=False)
    report = engine.update([sliced(workload.make_batch(2), 2) for _ in range(2)])
    assert report.gradient_norm is not None
    assert report.gradient_norm > 0


@pytest.mark.parametrize("name", ["whisper", "speech_to_text", "ctc wav2vec2", "ctc hubert"])
def test_the_samples_are_not_coupled(name: str) -> None:
    """The check before a tuning finds the loss of a batch equal to that of its parts."""
    spec = ALL[name]
    assert check_spec_coupling(spec, build_workload(spec), torch.device("cpu")).verdict == "separate"


def test_a_probe_of_speech_has_a_mask_that_masks() -> None:
    """One frame of padding where the model takes a mask; none where the audio is normalised as a whole."""
    masked, whole = (build_workload(CTC[kind]).make_batch(2) for kind in ("wav2vec2", "hubert"))
    assert (masked["attention_mask"] == 0).sum(1).tolist() == [20, 0]
    assert "attention_mask" not in whole
    assert (build_workload(SEQ2SEQ["speech_to_text"]).make_batch(2)["attention_mask"] == 0).any()


def test_labels_of_ctc_need_no_more_frames_than_they_are() -> None:
    """No label equals its neighbour or the blank, so the loss of as many labels as frames is finite."""
    config = {"model_type": "wav2vec2", **RAW, "pad_token_id": 3, "vocab_size": 5, "apply_spec_augment": False}
    spec = transformers_spec("ctc", config, batch={"sequence_length": 77, "audio_length": 1600})
    workload = build_workload(spec)
    batch = workload.make_batch(50)
    labels = batch["labels"]
    assert (labels[:, 1:] != labels[:, :-1]).all()
    assert set(labels.unique().tolist()) == {0, 1, 2, 4}
    ((loss, _),) = workload.loss_terms(build_model(spec, workload), batch).values()
    assert torch.isfinite(loss)


DROPPED = {
    "by the config": ("ctc", {**WAV2VEC2, "layerdrop": 1.0, "num_hidden_layers": 3}, AUDIO, "Wav2Vec2EncoderLayer"),
    "by the module": (
        "speech-seq2seq",
        {**WHISPER, "encoder_layerdrop": 1.0},
        {"sequence_length": 6},
        "WhisperEncoderLayer",
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_no_layer_is_left_out_where_the_worst_case_is_wanted(case: str) -> None:
    """In probes and traces every layer runs; a job leaves out as many as its config says: here all of them."""
    task, config, batch, layer = DROPPED[case]
    spec = transformers_spec(task, config, batch=batch)
    runs = {}
    for worst_case in (False, True):
        workload = build_workload(spec)
        model = build_model(spec, workload, worst_case=worst_case)
        calls: list[str] = []
        layers = [module for module in model.modules() if type(module).__name__ == layer]
        for module in layers:
            module.register_forward_hook(lambda *_, calls=calls: calls.append("run"))
        workload.loss_terms(model, workload.make_batch(2))
        assert layers
        runs[worst_case] = len(calls) / len(layers)
    assert runs == {False: 0.0, True: 1.0}


def test_layers_that_are_left_out_couple_no_samples() -> None:
    """The check before a tuning compares batches without dropout, of layers as of values."""
    spec = transformers_spec("ctc", {**WAV2VEC2, "layerdrop": 0.5}, batch=AUDIO)
    assert check_spec_coupling(spec, build_workload(spec), torch.device("cpu")).verdict == "separate"


def test_ranks_that_share_each_layer_leave_out_none() -> None:
    """A rank would wait for another one that does not run the layer."""
    fsdp = {"world_size": 2, "strategy": "fsdp"}
    with pytest.raises(SpecError) as caught:
        build_workload(transformers_spec("ctc", WAV2VEC2, batch=AUDIO, parallelism=fsdp))
    (problem,) = caught.value.problems
    assert problem.field == "model.config.layerdrop"
    assert "set it to 0" in problem.message


@pytest.mark.parametrize(
    ("task", "config", "batch", "field", "words"),
    [
        ("speech-seq2seq", WHISPER, {"sequence_length": 6, "audio_length": 100}, "batch.audio_length", "64 frames"),
        ("speech-seq2seq", WHISPER, {"sequence_length": 449}, "model.config.max_target_positions", "448"),
        ("speech-seq2seq", S2T, {"sequence_length": 6}, "batch.audio_length", "is required"),
        ("speech-seq2seq", {"model_type": "voxtral"}, AUDIO, "model.task", "write a `python` workload"),
        ("ctc", WAV2VEC2, {"sequence_length": 6}, "batch.audio_length", "is required"),
        ("ctc", WAV2VEC2, {"sequence_length": 77, "audio_length": 400}, "batch.audio_length", "18 frames, and 78"),
        ("ctc", {"model_type": "parakeet_ctc"}, AUDIO, "model", ""),
        ("ctc", {**WAV2VEC2, "vocab_size": 2}, AUDIO, "model.config.vocab_size", "at least 3"),
        ("ctc", WHISPER, AUDIO, "model.task", "for whisper write a `python` workload"),
    ],
)
def test_speech_that_cannot_be_trained_is_named(
    task: str, config: dict[str, Any], batch: dict[str, int], field: str, words: str
) -> None:
    """Audio of another length than the model takes, too short for its labels, or models of other kinds."""
    with pytest.raises(SpecError) as caught:
        check_workload(transformers_spec(task, config, batch=batch))
    problem = caught.value.problems[0]
    assert problem.field.startswith(field)
    assert words in problem.message
