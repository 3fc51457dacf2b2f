"""``import batchwright``: its public names, and what importing them needs."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import batchwright
from tests.support.paths import ROOT

TORCH_FREE = sorted({*batchwright.__all__} - {"GradientAccumulation", "windows"})


def test_every_public_name_is_there() -> None:
    """The list, the lazy imports and ``dir`` agree."""
    assert dir(batchwright) == sorted(batchwright.__all__)
    for name in batchwright.__all__:
        assert getattr(batchwright, name) is not None


def test_an_unknown_name_lists_the_public_ones() -> None:
    """A name that is not listed is private."""
    with pytest.raises(AttributeError, match=r"no public name 'find_batchsize'; it has .*find_batch_size"):
        _ = batchwright.find_batchsize


def test_only_training_needs_torch() -> None:
    """The other names are imported without torch, transformers, NVML and the service's packages."""
    code = f"""
from tests.support.blocked_imports import block
block("torch", "transformers", "numpy", "fastapi", "sqlalchemy", "uvicorn", "pynvml", "plotly", "matplotlib")
import batchwright
for name in {TORCH_FREE!r}:
    getattr(batchwright, name)
assert batchwright.plan(100, 34).micro_batch_sizes == ((34, 33, 33),)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    """The imports for type checkers and the lazy ones are of the same names, from the same modules."""
    tree = ast.parse((ROOT / "tuner" / "batchwright" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        node.module: sorted(name.name for name in node.names)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    assert seen == {module: sorted(names) for module, names in batchwright._MODULES.items()}
    assert {*batchwright.__all__} == {name for names in seen.values() for name in names} | {"__version__", "errors"}
