"""The private names of torch stay in the modules that give a reason for each."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

ALLOWED = {
    Path("tuner/batchwright/torch_internals.py"),
    Path("tuner/batchwright/estimation/tracing/torch_internals.py"),
    Path("tuner/batchwright/commands/injected/torch_internals.py"),
}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of torch that a module imports or reaches from ``torch``."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [_dotted(node)]
        yield from (name for name in names if name.startswith(("torch.", "nn.")) and _is_private(name))


def test_private_names_of_torch_are_in_three_modules() -> None:
    """No other module of the tuner imports or reaches one."""
    modules = {path.relative_to(ROOT) for path in (ROOT / "tuner").rglob("*.py")} - ALLOWED
    found = {str(path): list(private_names((ROOT / path).read_text())) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source", ["from torch._ops import _", "from torch.nn import _x", "import torch._d", "torch._C._f()", "nn._X"]
)
def test_a_private_name_is_found(source: str) -> None:
    """Imported from a private module or by a private name, and reached by attributes."""
    assert list(private_names(source))
