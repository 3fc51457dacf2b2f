"""Plugin of pytest for `make check`: importing torch, the database or the browser raises, so no fast test needs them.

Loaded by ``-p tests.support.fast_tests``, before any conftest.
"""

from __future__ import annotations

from tests.support.blocked_imports import block

BLOCKED = ("torch", "transformers", "sqlalchemy", "playwright")

block(*BLOCKED)
