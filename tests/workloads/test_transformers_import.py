"""``transformers``, imported in less time: what it is afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.workloads.transformers_import import _strip_prefix

_CODE = """
import sys
from pathlib import Path
from batchwright.workloads.transformers_import import import_transformers

import_transformers()
from transformers.utils.import_utils import define_import_structure

folder = Path(sys.modules["transformers"].__file__).parent / "models"
scans = define_import_structure.cache_info().misses
given = sys.modules["transformers.models"]
true = define_import_structure(str(folder / "__init__.py"))
assert define_import_structure.cache_info().misses == scans + 1, "the folder was looked through twice"
plain = type(given)("plain", str(folder / "__init__.py"), true)
assert {name: value for name, value in vars(given).items() if name in ("_class_to_module", "_modules")} == {
    name: value for name, value in vars(plain).items() if name in ("_class_to_module", "_modules")
}
assert given.GPT2Config.__module__ == "transformers.models.gpt2.configuration_gpt2"
"""


def test_a_scan_of_transformers_serves_its_models(tmp_path: Path) -> None:
    """The names below a folder are those of a scan of the folder alone."""
    from transformers.utils.import_utils import define_import_structure

    folder = tmp_path / "models"
    for name in ("gpt", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("")
        (folder / name / f"modeling_{name}.py").write_text(f'__all__ = ["{name.title()}Model"]\n')
    (folder / "__init__.py").write_text("")
    scanned = _strip_prefix("models", define_import_structure(folder, prefix="models"))
    assert scanned == define_import_structure(folder / "__init__.py")
    assert any("gpt.modeling_gpt" in modules for modules in scanned.values())


@pytest.mark.thorough
def test_models_are_found_as_by_a_plain_import() -> None:
    """Names and modules are equal to those of a plain import, and the folder is scanned once."""
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
