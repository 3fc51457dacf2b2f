"""Tests of the ranks that a launcher starts: forked ones are as fresh ones, and what a fork is not is refused."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.injected.environment_reads import EnvironmentReads
from batchwright.commands.injected.standing_in import state_of_process
from batchwright.commands.launched_ranks import expected_rank
from batchwright.errors import ProbeCancelledError
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome
from tests.commands.program_list import BIN
from tests.commands.test_fork_server import IMPORTS, LOG, TRAINS, Probed, processes_naming

TORCHRUN = (str(BIN / "torchrun"), "--standalone")
RECORD = "[size, os.environ['RANK'], os.environ['MASTER_PORT'] != '', __import__('logging')._startTime]"
"""Ends with the time at which `logging` was imported, which processes of one server have in common."""
LAUNCHER = """
import subprocess, sys
ended = subprocess.run([sys.executable, *sys.argv[1:]])
sys.exit(ended.returncode)
"""


class Launched(Probed):
    """A program that torchrun starts."""

    ranks = 1

    def request(self, size: int = 4, argv: tuple[str, ...] = (), **fields: Any) -> ProbeRequest:
        """The request of a probe."""
        words = argv or (*TORCHRUN, f"--nproc-per-node={self.ranks}", str(self.script))
        return super().request(size, words, **fields)

    def imported_at(self) -> list[str]:
        """The time of the imports of each record."""
        return [record.rpartition(", ")[2] for record in self.log()]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """A program that trains in a rank."""
    found = Launched(tmp_path)
    found.write(IMPORTS, RECORD)
    yield found
    found.supervisor.close()
    assert processes_naming(str(tmp_path)) == {}


@pytest.mark.thorough
def test_a_rank_is_forked_in_every_probe(launched: Launched) -> None:
    """With the figures of its own probe, which the launcher gives it."""
    results = [launched.probe(4), launched.probe(7), launched.fresh(6)]
    assert [(it.outcome, it.forked, it.rank_not_forked) for it in results] == [
        *[(Outcome.FIT, True, None)] * 2,
        (Outcome.FIT, False, None),
    ]
    assert [record[:4] for record in launched.log()] == ["[4, ", "[7, ", "[6, "]
    first, second, fresh = launched.imported_at()
    assert first == second != fresh


@pytest.mark.thorough
def test_every_rank_of_a_probe_is_forked(launched: Launched) -> None:
    """Each has its own rank, and all a new rendezvous."""
    launched.ranks = 2
    trains = "torch.distributed.init_process_group('gloo')\n" + TRAINS
    launched.write(IMPORTS, RECORD, trains)
    results = [launched.supervisor.run(_of_two_ranks(launched, size)) for size in (4, 7)]
    assert [(it.outcome, it.rank_not_forked) for it in results] == [(Outcome.FIT, None)] * 2
    assert len(set(launched.imported_at())) == 1
    assert sorted(record[:8] for record in launched.log()) == ['[4, "0",', '[4, "1",', '[7, "0",', '[7, "1",']


def _of_two_ranks(launched: Launched, size: int) -> ProbeRequest:
    request = launched.request(size, samples_per_window=4 * size).model_dump(mode="json")
    request["spec"]["parallelism"]["world_size"] = 2
    return ProbeRequest.model_validate(request)


@pytest.mark.thorough
def test_the_peak_of_a_forked_rank_is_that_of_a_fresh_one(launched: Launched) -> None:
    """Its limit counts from the same place."""
    forked, fresh = launched.probe(20), launched.fresh(20)
    assert (forked.rank_not_forked, fresh.forked) == (None, False)
    assert abs((forked.process_peak_bytes or 0) - (fresh.process_peak_bytes or 0)) <= 4 * 1024**2
    assert [launched.probe(200).outcome, launched.probe(4).outcome] == [Outcome.OOM, Outcome.FIT]
    assert len(set(launched.imported_at())) == 2


@pytest.mark.thorough
def test_a_rank_with_other_variables_is_not_forked(launched: Launched) -> None:
    """A variable of the rank is read before its imports end. The next server has what that rank had."""
    site = launched.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\nseen = os.environ.get('RANK')\n")
    model = {"environment": {"PYTHONPATH": str(site)}}
    launched.write(IMPORTS, "__import__('sitecustomize').seen")
    results = [launched.probe(size, model=model) for size in (4, 5)]
    assert [(it.outcome, it.forked, it.rank_not_forked) for it in results] == [
        (Outcome.FIT, True, "another value of RANK"),
        (Outcome.FIT, True, None),
    ]
    assert launched.log() == ['"0"'] * 2


@pytest.mark.thorough
def test_the_rank_of_an_unknown_launcher_is_forked_from_the_second_probe_on(launched: Launched) -> None:
    """The first shows how it is started."""
    launcher = launched.folder / "launch.py"
    launcher.write_text(LAUNCHER)
    launched.write(IMPORTS, "[size, __import__('logging')._startTime]")
    argv = (sys.executable, str(launcher), str(launched.script))
    results = [launched.probe(size, argv=argv) for size in (4, 5, 6)]
    assert [it.outcome for it in results] == [Outcome.FIT] * 3
    assert [it.rank_not_forked is None for it in results] == [False, True, True]
    first, second, third = launched.imported_at()
    assert first != second == third


@pytest.mark.thorough
def test_a_rank_ignores_the_signals_that_its_launcher_has_it_ignore(launched: Launched) -> None:
    """The fork server of a command under `nohup` ignores SIGHUP, torchrun handles it, and its ranks do neither."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launched.write(record="[__import__('signal').getsignal(1).name]")
        results = [launched.probe(4), launched.fresh(6)]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [(it.outcome, it.forked, it.rank_not_forked) for it in results] == [
        (Outcome.FIT, True, None),
        (Outcome.FIT, False, None),
    ]
    assert launched.log() == ['["SIG_DFL"]'] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "record",
    [
        "[1 / 0]",
        "[os.kill(os.getpid(), 11)]",
        "[sys.exit(3)]",
    ],
)
def test_a_rank_that_ends_is_repeated_anew(launched: Launched, record: str) -> None:
    """The launcher learns how the process ended that stood in for it, and its result is that of a fresh start."""
    launched.write(record=record)
    result = launched.probe(4)
    assert (result.outcome, result.forked) == (Outcome.ERROR, False), result


@pytest.mark.thorough
def test_a_cancelled_probe_leaves_no_rank(launched: Launched) -> None:
    """Nor what the rank has started, in a session of its own."""
    daemon = "__import__('subprocess').Popen(['/bin/sleep', '3600'], start_new_session=True).pid"
    launched.write(record=f"[{daemon}]", trains=TRAINS + "__import__('time').sleep(600)\n")
    request = launched.request(4, model={"probe_updates": 4096})
    with pytest.raises(ProbeCancelledError):
        launched.supervisor.run(request, launched.has_recorded)
    assert not Path(f"/proc/{int(launched.log()[0].strip('[]'))}").exists()
    launched.write()
    assert launched.probe(4).rank_not_forked is None


@pytest.mark.thorough
def test_a_signal_to_the_process_that_stands_in_reaches_the_rank(launched: Launched) -> None:
    """Launchers end their ranks by signals to the processes that they have started."""
    ends = "__import__('signal').signal(15, lambda *_: (open(sys.argv[3], 'a').write('ended'), os._exit(0)))"
    launched.write(record=f"[str({ends})]", trains=TRAINS + "__import__('time').sleep(600)\n")
    log = launched.folder / LOG
    sent: set[int] = set()

    def terminate() -> bool:
        if launched.has_recorded() and not sent:
            sent.update(_standing_in(str(launched.script)))
            for process in sent:
                os.kill(process, signal.SIGTERM)
        return bool(sent) and log.read_text().endswith("ended")

    with pytest.raises(ProbeCancelledError):
        launched.supervisor.run(launched.request(4, model={"probe_updates": 4096}), terminate)
    assert len(sent) == 1


def _standing_in(text: str) -> set[int]:
    """The processes of a program whose parent is its launcher."""
    found = {pid for pid, line in processes_naming(text).items() if "torchrun" not in line and "subreaper" not in line}
    lines = processes_naming(text)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return {pid for pid, parent in parents.items() if "torchrun" in lines.get(parent, "")}


def test_reads_of_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, whether they are set or not, and not by a loop over all."""
    monkeypatch.setenv("A_SET", "1")
    reads = EnvironmentReads()
    reads.install()
    os.environ.get("A_SET"), os.getenv("AN_UNSET"), "A_THIRD" in os.environ, list(os.environ.items())
    reads.remove()
    os.environ.get("AFTERWARDS")
    assert reads.names == {"A_SET", "AN_UNSET", "A_THIRD"}
    assert (
        reads.difference({"A_SET": "1", "OTHER": "2"}, {"A_SET": "1", "OTHER": "3", "TORCHELASTIC_RUN_ID": "4"}) is None
    )
    assert reads.difference({}, {"AN_UNSET": ""}) == "AN_UNSET"
    assert reads.difference({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}) == "OMP_NUM_THREADS"


def test_the_state_of_a_process_has_what_it_inherits() -> None:
    """A rank of another one is not forked."""
    before = state_of_process(["train.py"])
    os.umask(old := os.umask(0o027))
    assert before == state_of_process(["train.py"]) != state_of_process(["other.py"])
    os.umask(0o077)
    try:
        assert state_of_process(["train.py"]) != before
    finally:
        os.umask(old)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("torchrun", "--nproc-per-node", "2", "train.py", "--size", "4"), ["-u", "train.py", "--size", "4"]),
        (("accelerate", "launch", "--cpu", "train.py", "other.py"), ["train.py", "other.py"]),
        (("torchrun", "-m", "package.train"), None),
        (("torchrun", "absent.py"), None),
        (("composer", "train.py"), None),
    ],
)
def test_the_rank_of_a_known_launcher_is_expected(
    words: tuple[str, ...], expected: list[str] | None, tmp_path: Path
) -> None:
    """From its script on, by the Python of the launcher."""
    for name in ("train.py", "other.py"):
        (tmp_path / name).touch()
    program = tmp_path / words[0]
    program.write_text(f"#!{sys.executable}\n")
    launch = {"argv": [str(program), *words[1:]], "working_directory": str(tmp_path), "environment": {"HOME": "/"}}
    found = expected_rank(launch, str(program))
    assert (found and found["argv"][1:]) == expected
    if found:
        assert found["argv"][0] == sys.executable
        assert ("KMP_BLOCKTIME" in found["environment"]) is ("--cpu" in words)
