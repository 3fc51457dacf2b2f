"""``batchwright tune --warm-start-from``: a stored recommendation warm-starts a tuning of the same request."""

import json
import subprocess
from pathlib import Path

import pytest

from batchwright.schemas.recommendation import Recommendation
from tests.support.command import called
from tests.support.factories import mlp_spec, plan_of

pytestmark = pytest.mark.usefixtures("forked")


def tune(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command's answer."""
    return called("tune", *arguments, "--device", "cpu", "--json")


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small spec on the disk."""
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text(mlp_spec().model_dump_json())
    return path


@pytest.fixture(scope="module")
def earlier(spec_file: Path, forked: None) -> Path:
    """An answer whose largest size is the bound that was asked for."""
    del forked
    path = spec_file.parent / "earlier.json"
    done = tune(spec_file, "--effective-batch-size", "100", "--max-micro-batch-size", "8", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def test_one_probe_is_enough_where_a_fit_is_a_proof(spec_file: Path, earlier: Path) -> None:
    """Under another limit a run of the plan proves the bound at once; the evidence names the file's answer."""
    known = Recommendation.model_validate_json(earlier.read_text())
    limits = ("--memory-limit", "300MiB", "--max-micro-batch-size", "8")
    done = tune(spec_file, "--effective-batch-size", "100", *limits, "--warm-start-from", earlier)
    assert done.returncode == 0, done.stderr
    found = Recommendation.model_validate_json(done.stdout)
    assert [probe.micro_batch_sizes for probe in found.evidence.probes] == [(8, 8, 7, 7)]
    assert found.evidence.warm_start is not None
    assert found.evidence.warm_start.recommendation_id == known.id
    assert plan_of(found).micro_batch_sizes == plan_of(known).micro_batch_sizes


def test_a_recommendation_for_another_request_is_refused_before_any_probe(spec_file: Path, earlier: Path) -> None:
    """Exit code 2, and the error names what differs and what it was."""
    done = tune(spec_file, "--effective-batch-size", "90", "--max-micro-batch-size", "8", "--warm-start-from", earlier)
    assert done.returncode == 2
    assert "probe " not in done.stderr
    message = json.loads(done.stdout)["message"]
    assert (
        "request.effective_batch_size: is 100 in the warm start, which was made for another request (got 90)" in message
    )


@pytest.mark.parametrize("content", [None, "{}", "no document"])
def test_a_file_that_is_no_recommendation_is_refused(spec_file: Path, tmp_path: Path, content: str | None) -> None:
    """A missing file, or one with something else in it, is a wrong input."""
    path = tmp_path / "earlier.json"
    if content is not None:
        path.write_text(content)
    done = tune(spec_file, "--effective-batch-size", "100", "--warm-start-from", path)
    assert done.returncode == 2
    assert "warm start" in json.loads(done.stdout)["message"]
