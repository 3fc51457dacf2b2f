"""Build the workload and the model of a spec, and summarize a model."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import assert_never

import torch
from pydantic import JsonValue
from torch import nn
from torch.nn.parameter import is_lazy

from batchwright.errors import BatchwrightError, FieldProblem, SpecError, WorkloadError
from batchwright.schemas.optimizer import OptimizerSpec, ScheduleSpec
from batchwright.schemas.results import ModelSummary
from batchwright.schemas.workload import PythonModel, ReferenceModel, TransformersModel, WorkloadSpec
from batchwright.torch_internals import BatchNorm, Dropout
from batchwright.workloads.adapters.lora import keep_adapter_in_fp32
from batchwright.workloads.adapters.quantized_base import unpacked_difference
from batchwright.workloads.base import BuildsLRScheduler, KeepsModes, Workload
from batchwright.workloads.casting import cast_floating
from batchwright.workloads.causal.reference_policy import reference_of
from batchwright.workloads.hugging_face import LAYER_DROPS, transformers_workload
from batchwright.workloads.pretrained.starting_weights import StartingWeights
from batchwright.workloads.reference import reference_workload
from batchwright.workloads.required_packages import require_model_packages, require_optimizer_package


def build_workload(spec: WorkloadSpec, load: StartingWeights | None = None) -> Workload:
    """Build the workload of a spec, without a model.

    Args:
        spec: the spec of the workload.
        load: builds a transformers model with pretrained weights; None for random weights.

    Raises:
        SpecError: when a field names an unknown object, fields contradict each other, or a package is missing.
        WorkloadError: when a ``python`` target breaks the contract.
    """
    require_model_packages(spec)
    model, recompute, smoothing = spec.model, spec.activation_checkpointing, spec.label_smoothing
    match model:
        case ReferenceModel():
            return reference_workload(model, spec.batch, recompute=recompute, label_smoothing=smoothing)
        case TransformersModel():
            is_sharded = spec.parallelism.strategy == "fsdp"
            return transformers_workload(
                model,
                spec.batch,
                recompute=recompute,
                is_sharded=is_sharded,
                load=load,
                label_smoothing=smoothing,
                adapter=spec.adapter,
                preference=spec.preference,
            )
        case PythonModel():
            return _without_two_schedules(spec, python_workload(model))
        case _:
            assert_never(model)


def _without_two_schedules(spec: WorkloadSpec, workload: Workload) -> Workload:
    """Return ``workload``, unless it has a schedule of its own beside one of the spec."""
    if isinstance(workload, BuildsLRScheduler) and spec.schedule != ScheduleSpec():
        message = (
            f"is given, but {type(workload).__name__} also has a `build_lr_scheduler`: leave out `schedule`, "
            "or remove the method"
        )
        raise SpecError([FieldProblem("schedule", message, spec.schedule.name)])
    return workload


def build_model(spec: WorkloadSpec, workload: Workload, *, worst_case: bool = False) -> nn.Module:
    """Build the workload's model, with the spec's parameter type, on torch's default device.

    Modules that the workload has put in eval mode stay so. A model in eval mode as a whole, as ``from_pretrained`` of
    transformers makes it, is put in training mode, unless it is the caller's own (``KeepsModes``).

    Args:
        spec: the spec of the workload.
        workload: the workload.
        worst_case: whether every pass must take the most memory: layers that training leaves out at random are kept.

    Raises:
        WorkloadError: when ``build_model`` returns no module, or one without trainable parameters, or its lazy modules
            get no shapes from a sample.
        SpecError: when activation checkpointing is requested for a ``python`` model that does not support it.
    """
    model = workload.build_model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"build_model() must return a torch.nn.Module, not {type(model).__name__}")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        _give_shapes(model, workload)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"{type(model).__name__} has no trainable parameter")
    if spec.activation_checkpointing and isinstance(spec.model, PythonModel):
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if not callable(enable):
            message = f"{type(model).__name__} has no gradient_checkpointing_enable(): checkpoint inside build_model()"
            raise SpecError([FieldProblem("activation_checkpointing", message, "True")])
        enable()
    if spec.precision == "bf16":
        cast_floating(model, torch.bfloat16)
        if spec.adapter is not None:
            keep_adapter_in_fp32(model)
    if worst_case:
        _keep_all_layers(model)
    return model if model.training or isinstance(workload, KeepsModes) else model.train()


def _give_shapes(model: nn.Module, workload: Workload) -> None:
    """Have lazy modules see a sample, in the loss, as the first forward pass of training would.

    Raises:
        WorkloadError: when that pass fails.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # a BatchNorm refuses one sample and would count it
    try:
        with torch.no_grad():
            workload.loss_terms(model, workload.make_batch(1))
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise WorkloadError(
            f"{type(model).__name__} has lazy modules, and a pass of make_batch(1), which gives them their shapes, "
            f"failed: run a pass in build_model(). {message}"
        ) from error
    for module, training in modes:
        module.training = training


def _keep_all_layers(model: nn.Module) -> None:
    """Set the probabilities with which models of transformers leave out a layer to zero.

    Layers have them as attributes, or read them from their config in the forward pass.
    """
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name in LAYER_DROPS:
                if isinstance(getattr(holder, name, None), float):
                    setattr(holder, name, 0.0)


def check_workload(spec: WorkloadSpec) -> None:
    """Check a spec by building its workload and model without memory for tensors (on the ``meta`` device).

    Raises:
        SpecError: when a field is wrong in a way that only shows when the model is built.
        WorkloadError: when a ``python`` target breaks the contract.
    """
    workload = build_workload(spec)
    require_optimizer(spec.optimizer)
    if isinstance(spec.model, PythonModel):
        return  # user code may read files or use its tensors while it builds, which only the first probe can do
    try:
        with torch.device("meta"):
            model = build_model(spec, workload)
        spec.optimizer.group_numbers([name for name, it in model.named_parameters() if it.requires_grad])
    except BatchwrightError:
        raise
    except Exception as error:  # noqa: BLE001 - no memory is requested, so the error comes from the spec's sizes
        field = "model.config" if isinstance(spec.model, TransformersModel) else "model.architecture"
        message = f"describes a model that cannot be built: {type(error).__name__}: {' '.join(str(error).split())}"
        raise SpecError([FieldProblem(field, message)]) from None


def require_optimizer(spec: OptimizerSpec) -> None:
    """Check that this version of torch, or the package of the optimizer, has it.

    Raises:
        SpecError: when it does not, or the package is missing.
    """
    require_optimizer_package(spec)
    if spec.package == "torch" and not hasattr(torch.optim, spec.torch_class):
        message = f"torch {torch.__version__} has no `torch.optim.{spec.torch_class}`: install torch 2.9 or newer"
        raise SpecError([FieldProblem("optimizer.name", message)])


def count_parameters(model: nn.Module) -> int:
    """Number of a model's parameters: quantised ones as they are unpacked, and without a copy as the reference."""
    reference = reference_of(model)
    copied = 0 if reference is None else sum(map(torch.numel, reference.parameters()))
    return sum(map(torch.numel, model.parameters())) - copied + unpacked_difference(model)


def summarize(model: nn.Module, config_notes: tuple[str, ...] = ()) -> ModelSummary:
    """Summarize the sizes and the modes of a model, and its modules that couple the samples of a micro-batch."""
    parameters = list(model.parameters())
    tensors = {id(tensor): tensor for tensor in (*parameters, *model.buffers())}
    coupled = tuple(
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and (module.training or module.running_mean is None)
    )
    differs_in_training = any(isinstance(module, (BatchNorm, Dropout)) for module in model.modules())
    return ModelSummary(
        parameters=count_parameters(model),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        batch_coupled_modules=coupled,
        config_notes=config_notes,
        in_eval_mode=not model.training and differs_in_training,
    )


_REQUIRED = ("build_model", "make_batch", "loss_terms")


def python_workload(model: PythonModel) -> Workload:
    """Import the target's module, call its factory with the spec's arguments, and check the workload.

    The working directory is searched last, so that a user's file never hides an installed package.

    Raises:
        SpecError: when the module or the factory does not exist, or the factory does not accept the arguments.
        WorkloadError: when the workload lacks a method of ``Workload``.
    """
    module_name, _, name = model.target.partition(":")
    factory = getattr(_import(module_name, model.target), name, None)
    if not callable(factory):
        raise _target_problem(f"module `{module_name}` has no callable `{name}`", model.target)
    _check_arguments(factory, model.arguments)
    workload: Workload = factory(**model.arguments)
    missing = [method for method in _REQUIRED if not callable(getattr(workload, method, None))]
    if missing:
        raise WorkloadError(f"`{model.target}` returned a {type(workload).__name__} without {', '.join(missing)}()")
    return workload


def _check_arguments(factory: Callable[..., object], arguments: dict[str, JsonValue]) -> None:
    """Check the arguments before the call, so that a TypeError from inside the factory keeps its traceback."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # a callable of C without a signature
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise SpecError([FieldProblem("model.arguments", f"do not fit the factory: {error}")]) from None


def _import(module_name: str, target: str) -> object:
    directory = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # a dependency of the user's module is missing: the traceback says where
        raise _target_problem(f"no module `{error.name}` in {directory} or among the installed ones", target) from None


def _target_problem(message: str, target: str) -> SpecError:
    return SpecError([FieldProblem("model.target", message, target)])
