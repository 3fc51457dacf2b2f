"""What may not be imported where: proved in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

BLOCK = "from tests.support.blocked_imports import block; block(*{blocked!r})\n"


def run(code: str) -> str:
    """Run code in a fresh interpreter; what it printed."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_sdk_needs_neither_torch_nor_the_services_packages() -> None:
    """`batchwright.client` is imported where torch, FastAPI, SQLAlchemy and the like are not installed."""
    blocked = {"torch", "numpy", "fastapi", "starlette", "sqlalchemy", "alembic", "uvicorn", "pydantic_settings"}
    code = "from batchwright.client import Client; print(Client.__name__)"
    assert run(BLOCK.format(blocked=blocked) + code) == "Client"


def test_the_sdk_imports_nothing_of_the_service() -> None:
    """It is used where only its own dependencies are installed."""
    code = "import sys, batchwright.client; print([n for n in sys.modules if n.startswith('batchwright_service')])"
    assert run(code) == "[]"


@pytest.mark.thorough
def test_the_service_never_imports_torch() -> None:
    """Neither the API nor the workers' own process loads torch."""
    code = "from batchwright_service.entrypoints import serve; import sys; print('torch' in sys.modules)"
    assert run(code) == "False"


def test_a_process_of_workers_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """No HTTP code, so that it starts sooner and takes less memory; no torch, engine or driver of PostgreSQL either."""
    http, engines = {"fastapi", "starlette", "uvicorn", "jinja2"}, {"ray", "submitit"}
    blocked = {"torch", "opentelemetry", "psycopg", "psycopg_binary", "psycopg_c", *http, *engines}
    code = (
        "import sys; from batchwright_service.entrypoints import hosted_worker, node_jobs, work\n"
        "from batchwright_service.store.store import open_store\n"
        f"store = open_store('sqlite:///{tmp_path}/service.db'); store.queue.check(); store.close()\n"
        "ours = {name.removeprefix('batchwright_service.') for name in sys.modules}\n"
        "print({'api', 'dispatch', 'observability.opentelemetry'} & ours)"
    )
    assert run(BLOCK.format(blocked=blocked) + code) == "set()"


@pytest.mark.thorough
def test_only_the_dispatcher_imports_an_engine() -> None:
    """The API, the workers of hosts and those of a cluster's nodes run where Ray and submitit cannot be imported."""
    code = (
        "import sys; from batchwright_service.entrypoints import hosted_worker, node_jobs, serve, work\n"
        "print('batchwright_service.dispatch' in sys.modules)"
    )
    assert run(BLOCK.format(blocked={"ray", "submitit"}) + code) == "False"


@pytest.mark.thorough
def test_the_service_runs_where_torch_cannot_be_imported() -> None:
    """A whole service is built, its document included, with torch blocked."""
    code = "from tests.support.service.api_document import document; print(len(document()) > 1000)"
    assert run(BLOCK.format(blocked={"torch"}) + code) == "True"


@pytest.mark.thorough
def test_a_database_of_sqlite_needs_no_extra(tmp_path: Path) -> None:
    """The driver of PostgreSQL is an extra; a default installation serves without it."""
    code = (
        "from batchwright_service.entrypoints import serve, work\n"
        "from batchwright_service.store.store import open_store\n"
        f"store = open_store('sqlite:///{tmp_path}/service.db'); store.queue.check(); store.close(); print('checked')"
    )
    assert run(BLOCK.format(blocked={"psycopg", "psycopg_binary", "psycopg_c"}) + code) == "checked"
