"""Workloads from the user's own code: a ``package.module:factory`` target."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable

from pydantic import JsonValue

from batchwright.errors import FieldProblem, SpecError, WorkloadError
from batchwright.schemas.workload import PythonModel
from batchwright.workloads.base import Workload

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
