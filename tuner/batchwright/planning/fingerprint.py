"""Fingerprints of tunings: equal for two requests exactly when they may share a recommendation. Pure, no torch."""

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import TuningRequest
from batchwright.schemas.results import DeviceInfo
from batchwright.schemas.workload import TransformersModel, WorkloadSpec

_LAYOUT = 1
"""Incremented when probing or searching changes so much that stored recommendations are no longer valid."""


def installed_versions() -> dict[str, str]:
    """Versions of the packages that change how much memory a step takes, without importing them."""
    found = {"python": platform.python_version()}
    for name in ("batchwright", "torch", "transformers", "peft", "bitsandbytes"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def relevant_versions(spec: WorkloadSpec | CommandSpec, device: DeviceInfo, versions: dict[str, str]) -> dict[str, str]:
    """The versions that matter for ``spec``, and the device's driver. Of a command, all of them."""
    names = ["batchwright", "python", "torch", *(["transformers"] if spec.model.kind == "transformers" else [])]
    if isinstance(spec, WorkloadSpec):
        names += ["peft"] if spec.adapter is not None else []
        names += ["bitsandbytes"] if spec.needs_bitsandbytes else []
    chosen = {name: versions[name] for name in names if name in versions}
    if isinstance(spec, CommandSpec):
        chosen = dict(versions)
    if device.driver_version is not None:
        chosen["driver"] = device.driver_version
    return chosen


def fingerprint(  # noqa: PLR0913, PLR0917 - what a recommendation depends on
    request: TuningRequest,
    device: DeviceInfo,
    limit_bytes: int | None,
    environment: dict[str, str],
    versions: dict[str, str],
    ranks: int = 0,
) -> str:
    """SHA-256, in hexadecimal, of everything a recommendation depends on.

    The content is the spec without fields that leave memory as it is (data, schedule, rates), the requested batch,
    objective and bounds, the kind of device (not its index) and its limit, the allocator's settings, versions, and the
    commit of a model on the hub, which the evidence names.
    """
    content = request_content(request, device, environment, ranks)
    content["device"]["total_bytes"] = device.total_bytes
    if commit := commit_of(request.spec):
        content["commit"] = commit
    return _digest(content | {"limit_bytes": limit_bytes, "versions": fingerprinted_versions(versions)})


def request_fingerprint(request: TuningRequest, device: DeviceInfo, environment: dict[str, str], ranks: int = 0) -> str:
    """SHA-256, in hexadecimal, of the request and the kind of device, without versions, commit and exact limit.

    Tunings with equal fingerprints have equal request fingerprints.
    """
    return _digest(request_content(request, device, environment, ranks))


def request_content(
    request: TuningRequest, device: DeviceInfo, environment: dict[str, str], ranks: int = 0
) -> dict[str, Any]:
    """The content of a fingerprint without versions, the limit, and the memory of the device.

    Args:
        request: the request.
        device: the device.
        environment: the environment variables of the probes.
        ranks: ranks that a probe runs; 0 where one rank stands for the others, or is the only one.
    """
    is_shared = request.command is None and request.spec.parallelism.world_size > 1
    return {
        **({"ranks": ranks} if is_shared else {}),
        "layout": _LAYOUT,
        "spec": memory_part(request.spec),
        "request": request_fields(request),
        "device": {"kind": device.kind, "name": device.name},
        "environment": environment,
    }


def differences(before: Mapping[str, Any], today: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The values that differ between two contents of fingerprints, by their dotted paths in alphabetical order."""
    one, other = _leaves(before), _leaves(today)
    missing = "not set"
    return {
        name: (str(one.get(name, missing)), str(other.get(name, missing)))
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    }


def _leaves(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value in a tree of mappings, by its dotted path."""
    found: dict[str, Any] = {}
    for name, child in value.items():
        found |= _leaves(child, f"{prefix}{name}.") if isinstance(child, Mapping) else {f"{prefix}{name}": child}
    return found


def commit_of(spec: WorkloadSpec | CommandSpec) -> str | None:
    """The commit of a model on the hub; None for any other."""
    return spec.model.revision if isinstance(spec.model, TransformersModel) else None


def fingerprinted_versions(versions: dict[str, str]) -> dict[str, str]:
    """The versions that are part of a fingerprint: neither Batchwright's nor Python's."""
    return {name: versions[name] for name in versions if name not in ("batchwright", "python")}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def request_fields(request: TuningRequest) -> dict[str, Any]:
    """The request without the spec and the place."""
    left_out = {"spec", "device", "hardware", "memory_limit_bytes", "probe_timeout_seconds", "baseline", "quick"}
    return request.model_dump(mode="json", exclude=left_out)


def memory_part(spec: WorkloadSpec | CommandSpec) -> dict[str, Any]:
    """The part of a spec that memory depends on: without data, schedule, rates, and the time limit of a command."""
    if isinstance(spec, CommandSpec):
        return spec.model_dump(mode="json", exclude={"model": {"loading_timeout_seconds"}})
    rates = {"learning_rate", "weight_decay"}
    exclude: dict[str, Any] = {
        "data": True,
        "evaluation": True,
        "schedule": True,
        "optimizer": {**dict.fromkeys((*rates, "betas"), True), "groups": {"__all__": rates}},
        "model": {"pretrained", "revision"},  # the config says it all
        "adapter": {"alpha", "use_rslora", "init_lora_weights"},
    }
    part = spec.model_dump(mode="json", exclude=exclude)
    part["gradient_clipping"] = spec.gradient_clipping is not None
    part["ema_decay"] = spec.ema_decay is not None
    part["batch"]["packing"] = spec.batch.packing is not None  # each way of packing has the same mask of attention
    part["preference"] = spec.preference is not None  # all losses take the same memory
    part["label_smoothing"] = spec.label_smoothing > 0  # takes other kernels, whatever the share
    decays = [spec.optimizer.weight_decay, *(group.weight_decay or 0.0 for group in spec.optimizer.groups)]
    part["weight_decay"] = max(decays) > 0  # sgd with foreach makes a copy of the gradients for it
    return part


def canonical_json(value: object) -> str:
    """Serialize equal values to equal JSON: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
