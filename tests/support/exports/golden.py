"""Golden files: the reviewed output of every target for a few plans.

`python tests/support/exports/golden.py [FORMAT ...]` renews them; read what changed before you keep it.
A folder holds what an export gave: its files (Python ones with `.txt` behind their name, so that no linter takes them
for ours) and the rest of it in `export.yaml`; or `error.txt`, where it was refused.
"""

import shutil
import sys
from collections.abc import Callable
from typing import Any

import yaml

from batchwright.errors import ExportError
from batchwright.exports.base import ExportOptions, Target
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.recommendation import Recommendation
from tests.support.exports.plans import infeasible, plan
from tests.support.factories import CPU, gpt_spec
from tests.support.paths import EXPORTS

FOLDER = EXPORTS / "golden"

_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _exact() -> Recommendation:
    spec = gpt_spec(precision="bf16-mixed", gradient_clipping=1.0)
    return plan(64, world_size=2, spec=spec, id="rec_exact", environment=_ENVIRONMENT)


def _uneven() -> Recommendation:
    return plan(100, world_size=3, largest_micro_batch_size=9, id="rec_uneven", environment=_ENVIRONMENT)


def _world_1() -> Recommendation:
    return plan(30, largest_micro_batch_size=7, id="rec_world_1", device=CPU)


def _world_8() -> Recommendation:
    spec = gpt_spec(precision="bf16", activation_checkpointing=True, parallelism={"strategy": "fsdp"})
    return plan(128, world_size=8, largest_micro_batch_size=4, spec=spec, id="rec_world_8", environment=_ENVIRONMENT)


SHAPES: dict[str, Callable[[], Recommendation]] = {
    "exact": _exact,
    "uneven": _uneven,
    "uneven-allowed": _uneven,
    "infeasible": infeasible,
    "world-1": _world_1,
    "world-8": _world_8,
}
"""`uneven-allowed` says `allow_inexact`. Launchers of `world-8` pass the arguments of a framework, on two nodes."""


def cases() -> list[tuple[str, str, str]]:
    """Every target, version and shape. To allow another batch changes nothing where micro-batches may differ."""
    return [
        (target.name, version, shape)
        for target in TARGETS.values()
        for version in target.versions
        for shape in SHAPES
        if shape != "uneven-allowed" or target.repeats_one_size
    ]


def options(target: Target, shape: str) -> ExportOptions:
    """Options of the export of a shape."""
    if shape == "world-8" and target.kind == "launcher":
        return ExportOptions(
            script="src/train.py",
            arguments_of="hugging-face",
            job_name="gpt-small",
            processes_per_node=4,
            queue=None if target.name in {"torchrun", "ray-jobs"} else "gpu",
        )
    return ExportOptions(allow_inexact=shape == "uneven-allowed")


def written(name: str, version: str, shape: str) -> dict[str, str]:
    """The texts of a case by their file's name."""
    target = TARGETS[name]
    try:
        given = export(SHAPES[shape](), name, version=version, options=options(target, shape))
    except ExportError as error:
        return {"error.txt": f"{error.reason}: {error}\n"}
    texts = {_stored_name(file.name): file.content for file in given.files}
    rest = given.model_dump(mode="json", exclude={"files", "warnings"})
    rest["files"] = {file.name: file.media_type for file in given.files}
    warnings = {"warnings": {warning.code: warning.message for warning in given.warnings}}
    assert len(warnings["warnings"]) == len(given.warnings)
    return texts | {"export.yaml": _as_yaml(rest, default_flow_style=None) + _as_yaml(warnings)}


def _as_yaml(document: dict[str, Any], **style: Any) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=sys.maxsize, **style))


def stored(name: str, version: str, shape: str) -> dict[str, str]:
    """The stored golden files."""
    folder = FOLDER / name / version / shape
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in folder.rglob("*") if path.is_file()}


def _stored_name(name: str) -> str:
    return f"{name}.txt" if name.endswith(".py") else name


def _renew(names: list[str]) -> None:
    for name in names:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    for case in cases():
        for name, text in written(*case).items() if case[0] in names else ():
            path = FOLDER.joinpath(*case) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    _renew(sys.argv[1:] or list(TARGETS))
