"""A pretrained model: its config in a spec, its weights in a model, and what is refused."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from batchwright.cli import arguments
from batchwright.cli.options import TuningOptions
from batchwright.errors import DataOutsideRootsError, SpecError
from batchwright.library.tuning import tuning_request
from batchwright.planning.fingerprint import memory_part
from batchwright.schemas.workload import TransformersModel, WorkloadSpec, parse_spec
from batchwright.system.data_roots import ANY_FILE, DataRoots
from batchwright.workloads.build import build_model, build_workload
from batchwright.workloads.hugging_face import config_notes
from batchwright.workloads.pretrained.folder_config import with_pretrained_config
from batchwright.workloads.pretrained.pretrained_output import copy_files_of_model, copy_tokenizer
from batchwright.workloads.pretrained.starting_weights import StartingWeights
from tests.support.factories import transformers_spec

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "num_local_experts": 4,
}


def save(folder: Path, config: dict[str, Any], **options: Any) -> torch.nn.Module:
    """Write a random model as transformers itself does, and return it."""
    model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return model


def pretrained_spec(folder: Path, config: dict[str, Any] | None = None, task: str = "causal-lm") -> WorkloadSpec:
    """A spec that names the folder."""
    model = {"kind": "transformers", "task": task, "pretrained": str(folder), "config": config or {}}
    return parse_spec({"model": model, "batch": {"sequence_length": 16}})


def load(spec: WorkloadSpec, notes: list[str] | None = None, roots: DataRoots = ANY_FILE) -> torch.nn.Module:
    """The model that a run of the spec starts from."""
    assert isinstance(spec.model, TransformersModel)
    note = (notes if notes is not None else []).append
    workload = build_workload(spec, StartingWeights(Path(str(spec.model.pretrained)), note, roots))
    return build_model(spec, workload)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a small pretrained GPT-2."""
    save(tmp_path / "gpt2", GPT2)
    return tmp_path / "gpt2"


# --- the config ------------------------------------------------------------------------------------------------------


def test_a_spec_takes_the_config_of_the_folder(folder: Path) -> None:
    """The complete spec has the memory of the model as one would write it by hand, and needs no folder."""
    complete = with_pretrained_config(pretrained_spec(folder))
    assert isinstance(complete.model, TransformersModel)
    assert complete.model.config.items() >= GPT2.items()
    assert complete.model.pretrained == str(folder)
    assert with_pretrained_config(complete) == complete
    probed = build_model(complete, build_workload(complete))
    by_hand = transformers_spec("causal-lm", GPT2, batch={"sequence_length": 16})
    expected = build_model(by_hand, build_workload(by_hand)).state_dict()
    assert {name: value.shape for name, value in probed.state_dict().items()} == {
        name: value.shape for name, value in expected.items()
    }


def test_fields_of_the_spec_take_precedence(folder: Path) -> None:
    """Also within nested configs, of which the other fields are kept."""
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "task_specific_params": {"a": 1, "b": 2}}))
    changes = {"resid_pdrop": 0.5, "attn_implementation": "eager", "task_specific_params": {"b": 3}}
    model = with_pretrained_config(pretrained_spec(folder, changes)).model
    assert isinstance(model, TransformersModel)
    assert model.config["resid_pdrop"] == changes["resid_pdrop"]
    assert model.config["attn_implementation"] == "eager"
    assert model.config["task_specific_params"] == {"a": 1, "b": 3}


def test_the_place_of_a_model_changes_no_fingerprint(folder: Path, tmp_path: Path) -> None:
    """Memory depends on the config alone: a moved model, or random weights of its shapes, share recommendations."""
    save(tmp_path / "moved", GPT2)
    one, other = (with_pretrained_config(pretrained_spec(at)) for at in (folder, tmp_path / "moved"))
    assert isinstance(one.model, TransformersModel)
    random = transformers_spec("causal-lm", dict(one.model.config), batch={"sequence_length": 16})
    assert memory_part(one) == memory_part(other) == memory_part(random)


def test_requests_hold_the_whole_config(folder: Path) -> None:
    """Of the library and the command line, for tunings and for estimates; a spec that nobody read is refused."""
    spec, path = pretrained_spec(folder), folder.parent / "spec.json"
    path.write_text(spec.model_dump_json())
    complete = with_pretrained_config(spec)
    assert tuning_request(spec, 8, None, {"device": "cpu"}).spec == complete
    assert arguments.tuning_request(path, TuningOptions(effective_batch_size=8, device="cpu")).spec == complete
    request = arguments.estimate_request(spec=path, world_size=None, gpus=["T4"], all_gpus=False)
    assert request.spec == complete
    assert arguments.read_spec(path) == complete
    with pytest.raises(SpecError, match=r"model\.pretrained: was not read"):
        build_workload(spec)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json cannot be read: No such file or directory; give the folder"),
        ("{", "config.json is not JSON"),
        ("[]", "names no `model_type`"),
        ('{"architectures": ["GPT2Model"]}', "names no `model_type`"),
        ('{"model_type": "gpt2", "quantization_config": {"bits": 4}}', "holds quantised weights"),
        ('{"model_type": "bert"}', "is gpt2, but .* holds a model of type bert"),
    ],
)
def test_a_folder_without_a_usable_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    """The error names the file and the remedy."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecError, match=message):
        with_pretrained_config(pretrained_spec(tmp_path, {"model_type": "gpt2"}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"' + "x" * 2**20 + '"', "has more than 1 MiB"),
        ("[" * 3_000 + "]" * 3_000, "is nested more than 64 levels deep"),
        ("[" * 300 + "]" * 300, "is nested more than 64 levels deep"),
        ("NaN", "contains nan, which JSON cannot represent"),
        ("-Infinity", "contains -inf, which JSON cannot represent"),
        ("1e999", "contains inf, which JSON cannot represent"),
        (r'"\ud800"', "contains half of a surrogate pair"),
        ("1" * 5_000, "Exceeds the limit"),
    ],
)
def test_a_config_that_no_request_could_have_is_refused(tmp_path: Path, value: str, message: str) -> None:
    """A file gets around no bound of a body, and no value becomes another one silently."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", "x": {value}}}')
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        with_pretrained_config(pretrained_spec(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_misspelt_fields_are_looked_for_in_bounded_time(tmp_path: Path) -> None:
    """Names of the spec times names of the config."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | {f"f{n}": n for n in range(9_000)}))
    with pytest.raises(SpecError, match="has 9000 fields that the config of the pretrained model, with 9001, lacks"):
        with_pretrained_config(pretrained_spec(tmp_path, {f"g{n}": n for n in range(9_000)}))


def test_code_of_a_folder_is_not_run(folder: Path) -> None:
    """The config may name classes in files of the folder: transformers' own class of that type is built."""
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "auto_map": {"AutoConfig": "code.Config"}}))
    (folder / "code.py").write_text("raise SystemExit('the code was run')\n")
    assert type(load(with_pretrained_config(pretrained_spec(folder)))).__name__ == "GPT2LMHeadModel"


def test_fields_that_no_class_declares_are_accepted(folder: Path) -> None:
    """Published configs have such fields, which transformers ignores; a note lists those that may be typing errors."""
    document = json.loads((folder / "config.json").read_text())
    del document["scale_attn_weights"]
    left = {"use_mrope": True, "transformers.js_config": {"kv_cache_dtype": "float16"}}
    (folder / "config.json").write_text(json.dumps({**document, **left}))
    assert config_notes(with_pretrained_config(pretrained_spec(folder))) == ()
    (note,) = config_notes(with_pretrained_config(pretrained_spec(folder, {"scale_attn_weight": True})))
    assert "`config.scale_attn_weight`" in note
    assert "use_mrope" not in note


def test_a_misspelt_change_of_a_field_is_refused(folder: Path) -> None:
    """The folder's config has the field, and the spec meant to change it."""
    with pytest.raises(SpecError, match=r"model\.config\.resid_pdop.* did you mean resid_pdrop"):
        with_pretrained_config(pretrained_spec(folder, {"resid_pdop": 0.5}))


@pytest.mark.parametrize("read", ["config", "weights", "tokenizer"])
def test_links_to_outside_the_roots_are_refused(tmp_path: Path, read: str) -> None:
    """A folder of an allowed root may not make a run read, or copy, other files of the host."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    save(root / "gpt2", GPT2)
    spec = with_pretrained_config(pretrained_spec(root / "gpt2"))
    (root / "gpt2" / "tokenizer.json").write_text("{}")
    name = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json"}[read]
    outside.mkdir()
    (root / "gpt2" / name).rename(outside / name)
    (root / "gpt2" / name).symlink_to(outside / name)
    roots = DataRoots([str(root)])
    (tmp_path / "copies").mkdir()
    uses: dict[str, Callable[[], object]] = {
        "config": lambda: with_pretrained_config(pretrained_spec(root / "gpt2"), roots),
        "weights": lambda: load(spec, roots=roots),
        "tokenizer": lambda: copy_files_of_model(root / "gpt2", tmp_path / "copies", roots, generates=True),
    }
    with pytest.raises(DataOutsideRootsError):
        uses[read]()
    assert not list((tmp_path / "copies").iterdir())


# --- the weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, MIXTRAL], ids=["tied weights", "names that are converted"])
@pytest.mark.parametrize("shard", ["1GB", "10KB"], ids=["one file", "sharded"])
def test_a_run_starts_from_the_weights(tmp_path: Path, config: dict[str, Any], shard: str) -> None:
    """Every tensor is that of the saved model, and the folder's path is forgotten."""
    saved = save(tmp_path / "model", config, max_shard_size=shard).state_dict()
    notes: list[str] = []
    model = load(with_pretrained_config(pretrained_spec(tmp_path / "model")), notes)
    loaded = model.state_dict()
    assert set(loaded) == set(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert notes == []
    assert str(tmp_path) not in str(model.config)


def test_tensors_that_the_folder_lacks_are_named(folder: Path) -> None:
    """A classifier's head is new: the run starts it from random values, and says so."""
    notes: list[str] = []
    spec = with_pretrained_config(pretrained_spec(folder, {"num_labels": 3}, "sequence-classification"))
    body = load(spec, notes).state_dict()
    assert [note for note in notes if "`score.weight` of the model are not in" in note]
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert torch.equal(body["transformer.wpe.weight"], stored["transformer.wpe.weight"])


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    """Neither tensors of other names nor of other sizes are taken for the model's."""
    spec = with_pretrained_config(pretrained_spec(folder))
    safetensors.torch.save_file({"other": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=r"has no tensor of a GPT2LMHeadModel; it has `other`"):
        load(spec)
    save(tmp_path / "wide", {**GPT2, "n_embd": 32})
    with pytest.raises(SpecError, match=r"wide cannot be loaded"):
        load(spec.model_copy(update={"model": spec.model.model_copy(update={"pretrained": str(tmp_path / "wide")})}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match="has no safetensors"):
        load(spec)


def test_files_outside_the_folder_are_not_read(tmp_path: Path) -> None:
    """Neither a shard that the index places elsewhere, nor the base model that an adapter names."""
    save(tmp_path / "other", GPT2, max_shard_size="10KB")
    save(tmp_path / "model", GPT2, max_shard_size="10KB")
    spec, index = with_pretrained_config(pretrained_spec(tmp_path / "model")), "model.safetensors.index.json"
    document = json.loads((tmp_path / "model" / index).read_text())
    names = document["weight_map"]
    first = min(names)
    names[first] = f"../other/{names[first]}"
    (tmp_path / "model" / index).write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"lacks `\.\./other/model-\d+-of-\d+\.safetensors`, which its index"):
        load(spec)
    (tmp_path / "model" / index).write_text("{}")
    with pytest.raises(SpecError, match="index of weights that cannot be read"):
        load(spec)
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../other"}))
    with pytest.raises(SpecError, match=r"holds an adapter .*: merge it"):
        load(spec)


def test_the_digest_is_that_of_the_files(folder: Path) -> None:
    """A single changed bit shows."""
    weights = StartingWeights(folder, lambda _: None)
    before = weights.digest()
    assert weights.digest() == before
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert weights.digest() != before


def test_the_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    """``AutoTokenizer`` loads the copy, from a folder or from a file of any name."""
    from tokenizers import Tokenizer, models

    (tmp_path / "source").mkdir()
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(tmp_path / "source" / "words.json"))  # noqa: S106 - no password
    (tmp_path / "copy").mkdir()
    copy_tokenizer(tmp_path / "source" / "words.json", tmp_path / "copy", ANY_FILE)
    (tmp_path / "copy" / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / "again").mkdir()
    copy_files_of_model(tmp_path / "copy", tmp_path / "again", ANY_FILE, generates=False)
    (tmp_path / "again" / "config.json").write_text(json.dumps(GPT2))
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert AutoTokenizer.from_pretrained(tmp_path / "again")("a").input_ids == [0]


def test_loading_starts_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job takes what its probe took, which has random weights: threads of the loader and its bar take 8 MiB each."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted_start(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted_start)
    StartingWeights(folder, print)(AutoModelForCausalLM, AutoConfig.from_pretrained(folder))
    assert not started
