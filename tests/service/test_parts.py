"""The small parts, each by itself: identifiers, settings, leases, locks, states and errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from batchwright.client.documents.states import RESUMABLE_STATES, TERMINAL_STATES, TRANSITIONS, State, sources_of
from batchwright.client.documents.work import JobSubmission
from batchwright.errors import TuningFailedError
from batchwright.schemas.workload import TransformersModel, parse_spec
from batchwright_service.application.rules.policy import Policy
from batchwright_service.application.views import decode_cursor, encode_cursor
from batchwright_service.bootstrap import build
from batchwright_service.domain.identifiers import IdentifierSource
from batchwright_service.errors import (
    ConfigurationError,
    DataPathNotAllowedError,
    DeviceTakenError,
    InvalidInputError,
    StaleLeaseError,
    StoreUnavailableError,
)
from batchwright_service.problem_mapping import problem_of
from batchwright_service.settings import Settings
from batchwright_service.store.models import Beat
from batchwright_service.store.store import Store
from batchwright_service.worker.heartbeat import send
from batchwright_service.worker.lease import LeaseHolder, LeaseTerms, StopReason
from batchwright_service.worker.slot import DeviceLock
from batchwright_service.worker_bootstrap import served_devices
from tests.support.factories import gpt_spec, recommendation
from tests.support.service.scripted import SERVED, new_work

TERMS = LeaseTerms(lease_seconds=10.0, shutdown_grace_seconds=7.0)

# --- identifiers and cursors ---


def test_identifiers_sort_by_time_and_hold_it() -> None:
    """Later ones sort after earlier ones, also within one tick; they are UUIDs of version 7."""
    ticks = iter([1_000_000_000] * 50 + [2_000_000_000] * 50)
    source = IdentifierSource(lambda: next(ticks))
    made = [source.new("tun") for _ in range(100)]
    assert made == sorted(made)
    assert len(set(made)) == 100
    assert int(made[0][4:16], 16) == 1000
    assert made[0][16] == "7"


def test_a_clock_that_goes_back_does_not_break_the_order() -> None:
    """Identifiers of one source keep their order when the clock is set back."""
    ticks = iter([2_000_000_000, 1_000_000_000])
    source = IdentifierSource(lambda: next(ticks))
    assert source.new("tun") < source.new("tun")


def test_a_cursor_decodes_to_its_identifier() -> None:
    """Decoding an encoded cursor returns its identifier."""
    identifier = IdentifierSource().new("rec")
    assert decode_cursor(encode_cursor(identifier), "rec") == identifier
    assert decode_cursor(None, "rec") is None


# --- states ---


def test_the_table_of_transitions_is_closed() -> None:
    """Every state has a row; success leads nowhere, another end to the queue alone, for jobs that are resumed."""
    assert set(TRANSITIONS) == set(State)
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == TERMINAL_STATES
    assert {State.FAILED, State.CANCELLED} == RESUMABLE_STATES == sources_of(State.QUEUED) - {State.RUNNING}
    assert not TRANSITIONS[State.SUCCEEDED]
    assert sources_of(State.RUNNING) == {State.QUEUED}
    assert sources_of(State.CANCELLED) == {State.QUEUED, State.CANCELLING}


# --- settings ---


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lists take commas or JSON; the database and the runs are below the data folder."""
    monkeypatch.setenv("BATCHWRIGHT_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("BATCHWRIGHT_PYTHON_TARGETS", "a.b:c, d:e")
    monkeypatch.setenv("BATCHWRIGHT_DATA_ROOTS", '["/data, with a comma"]')
    settings = Settings()
    assert settings.python_targets == ("a.b:c", "d:e")
    assert settings.data_roots == ("/data, with a comma",)
    assert settings.url == f"sqlite:///{tmp_path}/batchwright.db"
    assert settings.runs_dir.parent == tmp_path


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    """A misspelt keyword is an error, never ignored."""
    with pytest.raises(ValidationError, match="prot"):
        Settings.model_validate({"data_dir": tmp_path, "prot": 1})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - only looked at
        ("::", False),
        ("host.example", False),
    ],
)
def test_loopback_is_known(tmp_path: Path, host: str, *, loopback: bool) -> None:
    """Only addresses that no other machine reaches count as loopback."""
    assert Settings(data_dir=tmp_path, host=host).listens_on_loopback is loopback


def test_a_folder_that_cannot_be_created_is_named() -> None:
    """No traceback when the disk is read-only or the path is none."""
    with pytest.raises(ConfigurationError, match="/proc/nope/data cannot be created"):
        build(Settings(data_dir=Path("/proc/nope/data"), worker=False))


def test_a_device_the_host_does_not_have_is_named(tmp_path: Path) -> None:
    """Settings that name an absent device are refused with those there are."""
    settings = Settings(data_dir=tmp_path, devices="cpu,cuda:7")
    with pytest.raises(ConfigurationError, match=r"cuda:7; this host has cpu"):
        served_devices(settings, [SERVED.device])


# --- policy ---


@pytest.mark.parametrize(
    "path", ["{outside}/a.txt", "{root}/../a.txt", "{root}-more/a.txt", "relative.txt", "/*/x", "{link}/x", "{root}\0"]
)
def test_paths_outside_the_data_roots_are_refused(tmp_path: Path, path: str) -> None:
    """By whatever spelling: beside, above, through a link, through a pattern."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
    (root / "link").symlink_to(outside)
    given = path.format(root=root, outside=outside, link=root / "link")
    spec = gpt_spec(data={"kind": "text", "paths": [f"{root}/ok/*.txt", given]})
    with pytest.raises(DataPathNotAllowedError, match=r"spec\.data\.paths"):
        Policy([], [str(root)]).check_data(spec)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"kind": "text", "paths": ["{root}/a.txt"], "tokenizer": "{outside}.json"}, "tokenizer"),
        ({"kind": "records", "paths": ["{root}/a.csv", "{outside}.csv"]}, "paths"),
        ({"kind": "records", "paths": ["{root}/a.csv"], "tokenizer": "{outside}.json"}, "tokenizer"),
        ({"kind": "images", "path": "{outside}"}, "path"),
        ({"kind": "arrays", "path": "{outside}.npz"}, "path"),
    ],
)
def test_every_path_of_every_kind_of_data_is_checked(tmp_path: Path, data: dict[str, Any], field: str) -> None:
    """Tokenizers, image folders and array files as well as text; where all are below the roots nothing is refused."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    policy = Policy([], [str(root)])
    with pytest.raises(DataPathNotAllowedError, match=rf"spec\.data\.{field}: '{outside}"):
        policy.check_data(gpt_spec(data=placed(data, root, outside)))
    policy.check_data(gpt_spec(data=placed(data, root, root / "inside")))
    with pytest.raises(DataPathNotAllowedError, match=rf"spec\.evaluation\.data\.{field}: '{outside}"):
        policy.check_data(gpt_spec(evaluation={"data": placed(data, root, outside)}))
    policy.check_data(gpt_spec(evaluation={"data": placed(data, root, root / "inside")}))


def placed(data: dict[str, Any], root: Path, outside: Path) -> dict[str, Any]:
    """``data`` with its folders filled in."""
    return {
        name: [text.format(root=root, outside=outside) for text in value]
        if isinstance(value, list)
        else value.format(root=root, outside=outside)
        for name, value in data.items()
    }


@pytest.mark.parametrize("path", ["{root}/a.txt", "{root}/**/*.txt", "{root}/*", "{root}/[ab]/c?.txt", "{root}"])
def test_paths_below_the_data_roots_are_taken(tmp_path: Path, path: str) -> None:
    """Files, folders and patterns below a root."""
    spec = gpt_spec(data={"kind": "text", "paths": [path.format(root=tmp_path)]})
    Policy([], ["/elsewhere", str(tmp_path)]).check_data(spec)
    with pytest.raises(DataPathNotAllowedError, match="BATCHWRIGHT_DATA_ROOTS"):
        Policy([], []).check_data(spec)


@pytest.mark.parametrize("folder", ["{outside}", "{root}/../outside", "./relative", "{root}/link", "{root}\0"])
def test_a_pretrained_model_outside_the_data_roots_is_refused(tmp_path: Path, folder: str) -> None:
    """Before anything of it is read."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for made in (root, outside):
        made.mkdir()
    (outside / "config.json").write_text('{"model_type": "gpt2"}')
    (root / "link").symlink_to(outside)
    model = {"kind": "transformers", "task": "causal-lm", "pretrained": folder.format(root=root, outside=outside)}
    spec = parse_spec({"model": model, "batch": {"sequence_length": 8}})
    for check in (Policy([], [str(root)]).check_model, Policy([], [str(root)]).complete):
        with pytest.raises(DataPathNotAllowedError, match=r"spec\.model\.pretrained"):
            check(spec)


def test_a_pretrained_model_below_a_data_root_is_completed(tmp_path: Path) -> None:
    """The spec then holds its config; a linked config is judged where it lies."""
    root, outside = tmp_path / "root", tmp_path / "outside.json"
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    model = {"kind": "transformers", "task": "causal-lm", "pretrained": str(root / "model")}
    spec = parse_spec({"model": model, "batch": {"sequence_length": 8}})
    complete = Policy([], [str(root)]).complete(spec).model
    assert isinstance(complete, TransformersModel)
    assert complete.config == {"model_type": "gpt2", "n_layer": 3}
    (root / "model" / "config.json").rename(outside)
    (root / "model" / "config.json").symlink_to(outside)
    with pytest.raises(DataPathNotAllowedError, match=r"spec\.model\.pretrained"):
        Policy([], [str(root)]).complete(spec)


# --- locks ---


def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    """A second one is refused with the holder's name, until the first lets go."""
    first, second = DeviceLock(tmp_path, "cuda:0"), DeviceLock(tmp_path, "cuda:0")
    first.acquire("owner one")
    with pytest.raises(DeviceTakenError, match="cuda:0 is served by owner one"):
        second.acquire("owner two")
    DeviceLock(tmp_path, "cuda:1").acquire("owner two")
    first.release()
    first.release()
    second.acquire("owner two")
    second.release()


# --- leases ---


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that a test moves."""
    return Clock()


@pytest.fixture
def holder(store: Store, clock: Clock, new_id: Callable[[str], str]) -> LeaseHolder:
    """A holder of the lease of a running tuning."""
    store.submissions.add(new_work(new_id("tun")))
    claim = store.leases.claim(SERVED, TERMS.lease_seconds)
    assert claim is not None
    return LeaseHolder(claim.lease, TERMS, clock.now, clock)


def renew(store: Store, holder: LeaseHolder) -> None:
    """Renew a lease as a heartbeat does."""
    send(store.devices, Beat(TERMS.lease_seconds), [holder])


def test_a_held_lease_lets_work_go_on_while_it_is_renewed(store: Store, holder: LeaseHolder, clock: Clock) -> None:
    """Renewals in time keep it; the first one missed ends it before the lease does."""
    for _ in range(5):
        clock.now += 5.0
        renew(store, holder)
        assert holder.grace_seconds() is None
    clock.now += 8.5
    assert (holder.reason(), holder.grace_seconds()) == (StopReason.LOST, 0.0)


def test_a_cancellation_is_seen_at_the_next_renewal(holder: LeaseHolder, store: Store) -> None:
    """The work gets little time to end."""
    store.submissions.cancel(holder.lease.work_id)
    assert holder.reason() is None
    renew(store, holder)
    assert holder.reason() is StopReason.CANCELLED
    assert (holder.grace_seconds() or 99.0) < 2.0


def test_the_most_pressing_reason_counts(holder: LeaseHolder) -> None:
    """A cancellation outweighs a shutdown, a lost lease both, in whatever order they come."""
    holder.request(StopReason.CANCELLED)
    holder.request(StopReason.SHUTDOWN)
    assert holder.reason() is StopReason.CANCELLED
    holder.request(StopReason.LOST)
    assert holder.reason() is StopReason.LOST


def test_a_lease_taken_over_is_lost(holder: LeaseHolder, store: Store) -> None:
    """A renewal that is refused stops the work at once."""
    store.leases.release_slot(SERVED.slot, SERVED.owner)
    renew(store, holder)
    assert holder.grace_seconds() == 0.0


def test_a_write_is_tried_again_while_the_lease_is_good(holder: LeaseHolder) -> None:
    """A database that comes back in time costs nothing."""
    failures = [StoreUnavailableError("away"), StoreUnavailableError("away")]

    def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    assert holder.retry(write) == "written"


def test_a_write_is_given_up_with_the_lease(holder: LeaseHolder, clock: Clock) -> None:
    """A database that stays away costs the lease, and the write says so."""

    def write() -> None:
        clock.now += 3.0
        raise StoreUnavailableError("away")

    with pytest.raises(StaleLeaseError, match="away"):
        holder.retry(write)


def test_a_lease_that_ended_in_an_outage_is_told_from_one_taken_over(
    holder: LeaseHolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the store is back, and refuses the renewal, before the worker has noticed anything."""
    with monkeypatch.context() as away:
        away.setattr(store.devices, "beat", Mock(side_effect=StoreUnavailableError("away")))
        with pytest.raises(StoreUnavailableError):
            renew(store, holder)
    seen = [holder.is_store_unreachable]
    renew(store, holder)
    seen.append(holder.is_store_unreachable)
    assert seen == [True, False]
    store.leases.release_slot(SERVED.slot, SERVED.owner)
    with monkeypatch.context() as away:
        away.setattr(store.devices, "beat", Mock(side_effect=StoreUnavailableError("away")))
        with pytest.raises(StoreUnavailableError):
            renew(store, holder)
    renew(store, holder)
    assert (holder.reason(), holder.is_store_unreachable) == (StopReason.LOST, True)


# --- errors ---


def test_a_failed_tuning_keeps_its_reason() -> None:
    """The stable word of a failed tuning is the problem's code."""
    assert problem_of(TuningFailedError("timed-out", "it hung")).code == "timed-out"


def test_a_job_names_one_recommendation() -> None:
    """Neither none nor two."""
    for wrong in ({}, {"recommendation_id": "rec_1", "recommendation": recommendation()}):
        with pytest.raises(ValidationError, match="exactly one"):
            JobSubmission.model_validate(wrong)


@pytest.mark.parametrize("name", ["x" * 300, "é" * 200, "a/" * 3000 + "a", "x" * 300 + "/*.txt"])
def test_paths_that_no_system_opens_are_refused(tmp_path: Path, name: str) -> None:
    """Names and paths that are too long."""
    spec = gpt_spec(data={"kind": "text", "paths": [str(tmp_path / name)], "tokenizer": "bytes"})
    with pytest.raises(InvalidInputError, match=r"spec\.data\.paths: cannot be read: File name too long"):
        Policy([], [str(tmp_path)]).check_data(spec)
