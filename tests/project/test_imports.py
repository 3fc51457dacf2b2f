"""The import rules of the house, as contracts in ``pyproject.toml``; lazy imports count."""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def test_the_import_rules_hold() -> None:
    """Layers one way, no cycle, no torch where it does not belong, an SDK that stands alone."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    contracts = (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")
    assert contracts
    assert f"Contracts: {contracts} kept, 0 broken." in checked.stdout
