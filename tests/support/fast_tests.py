"""Plugin of pytest for `make check`: importing torch, the database or the browser raises, so no fast test needs them.

Loaded by ``-p tests.support.fast_tests``, before any conftest. Python processes that tests start are blocked as well.
"""

import atexit
import os
import tempfile
from pathlib import Path

from tests.support.blocked_imports import block
from tests.support.paths import ROOT

BLOCKED = ("torch", "transformers", "sqlalchemy", "playwright")
_SITE = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.support.blocked_imports import block
block(*{BLOCKED!r})
"""


def _block_in_children() -> None:
    """Have Python import ``sitecustomize``, which it looks for at its start, from a folder that blocks the packages."""
    folder = tempfile.TemporaryDirectory(prefix="batchwright-fast-tests-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "sitecustomize.py").write_text(_SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder.name, os.environ.get("PYTHONPATH"))))


block(*BLOCKED)
_block_in_children()
