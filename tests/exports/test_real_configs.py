"""Frameworks that are too heavy to train with here read exports by their own configuration classes and parsers.

`make test-exports` puts their packages beside ours, without what they depend on, and the modules that read settings are
imported without the rest of the package.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from batchwright.exports.base import Export, ExportContext, ExportOptions
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.recommendation import Recommendation
from tests.support.exports.plans import plan
from tests.support.factories import gpt_spec, transformers_spec

pytestmark = [pytest.mark.exports, pytest.mark.filterwarnings("ignore")]

Load = Callable[..., Any]


_INSTALLED = Path(sys.prefix) / "exports" / "configs"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a module of a package whose `__init__` is left out, as are those of the packages on the way."""
    monkeypatch.syspath_prepend(_INSTALLED)
    before = dict(sys.modules)

    def load(name: str) -> Any:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            _hollow(".".join(parts[:depth]))
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in {"torchtitan", "axolotl", "llamafactory", "nemo_automodel", "megatron"}:
            del sys.modules[name]


def _hollow(package: str) -> None:
    """The package with its folder, and without what its `__init__` imports."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: `make test-exports` installs it"
    module = ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations or [])
    sys.modules[package] = module


def _recommendation() -> Recommendation:
    return plan(64, world_size=2, spec=gpt_spec(precision="bf16", gradient_clipping=0.5))


def _exported(name: str, version: str | None = None) -> Export:
    return export(_recommendation(), name, version=version)


def _settings(name: str, version: str | None = None) -> Any:
    return yaml.safe_load(_exported(name, version).files[0].content)


def _read_by_llama_factory(load: Load, settings: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """The arguments of the model, the data, the training and the fine-tuning, by LLaMA-Factory's own classes."""
    parts = {"model": "Model", "data": "Data", "training": "Training", "finetuning": "Finetuning"}
    kinds = [getattr(load(f"llamafactory.hparams.{module}_args"), f"{name}Arguments") for module, name in parts.items()]
    parser = importlib.import_module("transformers").HfArgumentParser(kinds)
    place = {"model_name_or_path": "unused", "output_dir": str(folder), "use_cpu": True}
    found: tuple[Any, ...] = parser.parse_dict(settings | place)
    return found


def _arguments(name: str) -> tuple[str, ...]:
    """What a launcher passes on."""
    target = TARGETS[name]
    assert target.arguments is not None
    given = export(_recommendation(), name)
    target_plan = SimpleNamespace(
        micro_batch_size=given.plan.micro_batch_size,
        gradient_accumulation_steps=given.plan.gradient_accumulation_steps,
        world_size=given.plan.world_size,
        effective_batch_size=given.plan.effective_batch_size,
    )
    context = ExportContext(_recommendation(), target_plan, target.versions[0], ExportOptions(), name)  # type: ignore[arg-type] # these suffice
    return target.arguments(context)


def test_megatrons_own_calculator_derives_the_steps(load: Load) -> None:
    """The flags give the plan's number of micro-batches."""
    calculator = load("megatron.core.num_microbatches_calculator").ConstantNumMicroBatchesCalculator
    flags = dict(argument.removeprefix("--").split("=") for argument in _arguments("megatron"))

    made = calculator(int(flags["global-batch-size"]), int(flags["micro-batch-size"]), 2, False, 0)

    assert (made.get(), made.get_micro_batch_size(), made.get_current_global_batch_size()) == (4, 8, 64)


def test_torchtitans_own_config_takes_the_settings(load: Load) -> None:
    """Every setting is a field of `TrainingConfig` or `ParallelismConfig`, and nothing else changes."""
    configs = load("torchtitan.config.configs")
    config = SimpleNamespace(training=configs.TrainingConfig(), parallelism=configs.ParallelismConfig())
    module: dict[str, Any] = {}
    exec(_exported("torchtitan", "0.3.0").files[0].content, module)  # noqa: S102 - a module that we wrote

    training = module["with_batch"](config).training

    assert (training.local_batch_size, training.global_batch_size, training.seq_len) == (8, 64, 16)
    assert (training.max_norm, training.dtype, training.steps) == (0.5, "bfloat16", configs.TrainingConfig().steps)
    assert (config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree) == (2, 1)


def test_torchtitans_parser_reads_the_arguments(load: Load) -> None:
    """`tyro`, which reads torchtitan's command line, finds every argument."""
    tyro = importlib.import_module("tyro")
    configs = load("torchtitan.config.configs")
    both = dataclasses.make_dataclass(
        "Config",
        [
            ("training", configs.TrainingConfig, dataclasses.field(default_factory=configs.TrainingConfig)),
            ("parallelism", configs.ParallelismConfig, dataclasses.field(default_factory=configs.ParallelismConfig)),
        ],
    )

    read = tyro.cli(both, args=list(_arguments("torchtitan")))

    assert (read.training.local_batch_size, read.training.global_batch_size) == (8, 64)
    assert read.training.max_norm == 0.5


def test_torchtitan_of_another_generation_refuses_the_settings(load: Load) -> None:
    """A setting that this torchtitan does not have is an error, not ignored."""
    configs = load("torchtitan.config.configs")
    config = SimpleNamespace(training=configs.TrainingConfig(), parallelism=configs.ParallelismConfig())
    module: dict[str, Any] = {}
    exec(_exported("torchtitan", "main-2026-08-20").files[0].content, module)  # noqa: S102 - a module that we wrote

    with pytest.raises(AttributeError, match="num_tokens_per_microbatch_per_dp_rank"):
        module["with_batch"](config)


def test_axolotls_own_schema_validates_the_hyperparameters(load: Load) -> None:
    """Batch, steps and clipping are read by the schema of hyperparameters."""
    schema = load("axolotl.utils.schemas.training").HyperparametersConfig
    settings = {name: value for name, value in _settings("axolotl").items() if name in schema.model_fields}

    read = schema(learning_rate=1e-3, **settings)

    assert (read.micro_batch_size, read.gradient_accumulation_steps, read.max_grad_norm) == (8, 4, 0.5)
    assert read.batch_size is None


def test_axolotls_command_line_has_the_arguments(load: Load) -> None:
    """Its generated options include those that are given."""
    options = load("axolotl.cli.config_options").AXOLOTL_CONFIG_CLI_OPTIONS
    known = {name for names, *_ in options for name in names}

    assert {argument.partition("=")[0] for argument in _arguments("axolotl")} <= known


def test_llama_factorys_new_trainer_parses_the_file(load: Load) -> None:
    """Every key is an argument of v1."""
    load("llamafactory.v1.config.arg_utils")
    arguments = load("llamafactory.v1.config.training_args").TrainingArguments
    (read,) = (
        importlib.import_module("transformers")
        .HfArgumentParser([arguments])
        .parse_dict(_settings("llama-factory", "v1"))
    )

    assert (read.micro_batch_size, read.global_batch_size, read.cutoff_len, read.max_grad_norm) == (8, 64, 16, 0.5)
    assert read.enable_activation_checkpointing is False


def test_llama_factory_parses_the_file(load: Load, tmp_path: Path) -> None:
    """Every key is an argument of the model, of the data, of training or of fine-tuning."""
    model, data, training, finetuning = _read_by_llama_factory(load, _settings("llama-factory"), tmp_path)

    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 4)
    assert (data.cutoff_len, training.max_grad_norm, finetuning.pure_bf16) == (16, 0.5, True)
    assert model.disable_gradient_checkpointing is True


def test_the_adapter_is_read_by_both(load: Load, tmp_path: Path) -> None:
    """As their own classes have it, after their own splitting of names."""
    adapter = {"kind": "lora", "rank": 4, "alpha": 8, "target_modules": ["c_attn", "c_fc"]}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}, adapter=adapter)
    written = [
        yaml.safe_load(export(plan(64, spec=spec), name).files[0].content) for name in ("axolotl", "llama-factory")
    ]
    schema = load("axolotl.utils.schemas.peft").LoraConfig
    read = schema.model_validate({name: value for name, value in written[0].items() if name in schema.model_fields})
    assert (read.adapter, read.lora_r, read.lora_alpha) == ("lora", 4, 8)
    assert read.lora_target_modules == ["c_attn", "c_fc"]

    finetuning = _read_by_llama_factory(load, written[1], tmp_path)[-1]
    assert (finetuning.finetuning_type, finetuning.lora_rank, finetuning.lora_alpha) == ("lora", 4, 8)
    assert finetuning.lora_target == ["c_attn", "c_fc"]


def test_a_base_in_4_bits_is_read_by_both(load: Load, tmp_path: Path) -> None:
    """Axolotl knows each key, and LLaMA-Factory's model has them as its arguments."""
    quantization = {"kind": "nf4", "double_quantization": True}
    adapter = {"kind": "lora", "rank": 4, "target_modules": ["c_attn"], "quantization": quantization}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}, adapter=adapter)
    of_axolotl, of_llama_factory = (
        yaml.safe_load(export(plan(64, spec=spec), name).files[0].content) for name in ("axolotl", "llama-factory")
    )
    known = load("axolotl.utils.schemas.config").AxolotlInputConfig.model_fields
    assert set(of_axolotl) <= set(known)
    of_lora = load("axolotl.utils.schemas.peft").LoraConfig
    read = of_lora.model_validate({name: value for name, value in of_axolotl.items() if name in of_lora.model_fields})
    assert (read.adapter, read.load_in_4bit) == ("qlora", True)

    model = _read_by_llama_factory(load, of_llama_factory, tmp_path)[0]
    assert (model.quantization_bit, model.quantization_type, model.double_quantization) == (4, "nf4", True)


def test_a_base_in_8_bits_is_read_by_both(load: Load, tmp_path: Path) -> None:
    """As that of 4 bits is, and without its keys."""
    adapter = {"kind": "lora", "rank": 4, "target_modules": ["c_attn"], "quantization": {"kind": "int8"}}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch={"sequence_length": 8}, adapter=adapter)
    of_axolotl, of_llama_factory = (
        yaml.safe_load(export(plan(64, spec=spec), name).files[0].content) for name in ("axolotl", "llama-factory")
    )
    of_lora = load("axolotl.utils.schemas.peft").LoraConfig
    read = of_lora.model_validate({name: value for name, value in of_axolotl.items() if name in of_lora.model_fields})
    assert (read.adapter, read.load_in_8bit, read.load_in_4bit) == ("lora", True, False)
    assert _read_by_llama_factory(load, of_llama_factory, tmp_path)[0].quantization_bit == 8


def test_packing_and_the_optimizer_of_8_bits_are_read_by_both(load: Load, tmp_path: Path) -> None:
    """Each key is one of the schema's, with the value that it was written with."""
    batch, optimizer = {"sequence_length": 8, "packing": "bfd"}, {"name": "adamw8bit"}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, batch=batch, optimizer=optimizer)
    of_axolotl, of_llama_factory = (
        yaml.safe_load(export(plan(64, spec=spec), name).files[0].content) for name in ("axolotl", "llama-factory")
    )
    schema = load("axolotl.utils.schemas.config").AxolotlInputConfig
    assert set(of_axolotl) <= set(schema.model_fields)
    of_training = load("axolotl.utils.schemas.training").HyperparametersConfig
    settings = {name: value for name, value in of_axolotl.items() if name in of_training.model_fields}
    read = of_training(learning_rate=1e-3, **settings)
    assert (of_axolotl["sample_packing"], str(read.optimizer)) == (True, "adamw_bnb_8bit")

    _, data, training, finetuning = _read_by_llama_factory(load, of_llama_factory, tmp_path)
    assert (data.packing, data.neat_packing, finetuning.stage) == (True, True, "sft")
    assert str(training.optim) in {"adamw_bnb_8bit", "OptimizerNames.ADAMW_BNB"}


def test_axolotl_has_the_keys_of_preference_pairs(load: Load) -> None:
    """Each key is one of the schema's, and the kind of training one that it knows."""
    changes = {"batch": {"sequence_length": 8}, "preference": {"kind": "dpo"}}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, **changes)
    written = yaml.safe_load(export(plan(64, spec=spec), "axolotl").files[0].content)
    assert set(written) <= set(load("axolotl.utils.schemas.config").AxolotlInputConfig.model_fields)
    assert load("axolotl.utils.schemas.enums").RLType(written["rl"]).name == "DPO"


def test_llama_factory_reads_preference_pairs(load: Load, tmp_path: Path) -> None:
    """For its trainer of them, with a reference model."""
    changes = {"batch": {"sequence_length": 8}, "preference": {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.1}}
    spec = transformers_spec("causal-lm", {"model_type": "gpt2"}, **changes)
    written = yaml.safe_load(export(plan(64, spec=spec), "llama-factory").files[0].content)
    *_, finetuning = _read_by_llama_factory(load, written, tmp_path)
    assert (finetuning.stage, finetuning.use_ref_model) == ("dpo", True)
    assert (finetuning.pref_beta, finetuning.pref_loss, finetuning.dpo_label_smoothing) == (0.2, "sigmoid", 0.1)


def test_automodels_own_step_scheduler_derives_the_steps(load: Load) -> None:
    """Built from the file's settings it accumulates the plan's number of micro-batches."""
    config = load("nemo_automodel.components.training.step_scheduler").StepSchedulerConfig
    settings = _settings("nemo-automodel")["step_scheduler"]
    local = settings.pop("local_batch_size")

    made = config(**settings, preemption_signal=None).build([0] * 8, 2, local)

    assert made.grad_acc_steps == 4


def test_automodels_own_parser_reads_the_arguments(load: Load) -> None:
    """The overrides are taken for dotted settings."""
    parse = load("nemo_automodel.components.config._arg_parser").parse_cli_argv

    _, overrides = parse(argv=["--config", "recipe.yaml", *_arguments("nemo-automodel")])

    assert overrides == ["step_scheduler.global_batch_size=64", "step_scheduler.local_batch_size=8"]
