"""Where things are: the repository, and the folders of the tests that hold files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
EXPORTS = ROOT / "tests" / "exports"
OPENAPI = ROOT / "openapi" / "openapi.json"
EXAMPLES = ROOT / "examples"
