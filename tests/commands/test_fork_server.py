"""Tests of the fork server of a command: forked probes are as fresh ones, and end as strictly. Real processes."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.commands.launching import may_serve
from batchwright.errors import ProbeCancelledError
from batchwright.hardware.inventory import cpu
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import Outcome, ProbeResult, SharedImports
from batchwright.system import subreaper
from tests.support.paths import ROOT

LIMIT = 400 * 1024**2
IMPORTS = """
'''Train.'''
from __future__ import annotations
import json, os, sys
import torch
"""
TRAINS = """
size, steps = int(sys.argv[1]), int(sys.argv[2])
with open(sys.argv[3], "a") as log:
    log.write(json.dumps({record}) + "\\n")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
class Wide(torch.nn.Module):
    def forward(self, batch):
        return model(batch).sum() + torch.ones(len(batch), 4 * 2**18).sum()
wide = Wide()
for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=size), 1):
    wide(batch).backward()
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
"""
LOG = "record.jsonl"


class Probed:
    """A program in a folder, whose probes are of one supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "program.py"
        self.supervisor = CommandSupervisor(cpu())

    def write(self, imports: str = IMPORTS, record: str = "[size, steps]", trains: str = TRAINS) -> None:
        """Write the program, which appends a record to its log before it trains."""
        self.script.write_text(imports + trains.replace("{record}", record))

    def request(self, size: int = 4, argv: tuple[str, ...] = (), **fields: Any) -> ProbeRequest:
        """The request of a probe."""
        words = (*(argv or (sys.executable, str(self.script))), "{micro_batch_size}", "{gradient_accumulation_steps}")
        model = {"kind": "command", "argv": (*words, str(self.folder / LOG)), **fields.pop("model", {})}
        common = {"device": "cpu", "limit_bytes": LIMIT, "micro_batch_size": size, "samples_per_window": 2 * size}
        spec = CommandSpec.model_validate({"model": model})
        return ProbeRequest.model_validate({"spec": spec, **common, **fields})

    def probe(self, size: int = 4, **fields: Any) -> ProbeResult:
        """Run a probe."""
        return self.supervisor.run(self.request(size, **fields))

    def fresh(self, size: int = 4, **fields: Any) -> ProbeResult:
        """Run a probe as ``batchwright verify`` does, in a process of its own."""
        with CommandSupervisor(cpu()) as supervisor:
            return supervisor.run(self.request(size, runs_plan=True, **fields))

    def log(self) -> list[str]:
        """The records of all probes, in order."""
        return (self.folder / LOG).read_text().splitlines()

    def has_recorded(self) -> bool:
        """Return whether a whole record was written. A log may exist before its first line does."""
        log = self.folder / LOG
        return log.exists() and log.read_text().endswith("\n")


@pytest.fixture
def probed(tmp_path: Path) -> Iterator[Probed]:
    """A program that trains by its arguments."""
    found = Probed(tmp_path)
    found.write()
    yield found
    found.supervisor.close()
    assert processes_naming(str(tmp_path)) == {}


def processes_naming(text: str) -> dict[int, str]:
    """The processes in whose command lines a text occurs."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            lines[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: line for pid, line in lines.items() if text in line and pid != os.getpid()}


@pytest.mark.thorough
def test_the_arguments_of_each_probe_arrive(probed: Probed) -> None:
    """The first probe is forked too, and so is the run of a plan, which starts no server."""
    results = [probed.probe(4), probed.probe(7), probed.probe(5, runs_plan=True), probed.fresh(6)]
    assert [result.outcome for result in results] == [Outcome.FIT] * 4, results
    assert [result.forked for result in results] == [True, True, True, False]
    assert probed.log() == ["[4, 2]", "[7, 2]", "[5, 2]", "[6, 2]"]


@pytest.mark.thorough
def test_a_forked_plan_that_nearly_fills_its_limit_runs_anew(probed: Probed) -> None:
    """The peaks of forked and fresh processes differ a little. A search takes the forked one, and no plan is proven."""
    limit = 15 * 2**18 + (probed.probe(20).process_peak_bytes or 0)
    results = [probed.probe(20, limit_bytes=limit, runs_plan=runs_plan) for runs_plan in (False, True)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.FIT, True), (Outcome.FIT, False)]
    assert [result.counted is not None and result.counted.of_plan for result in results] == [False, True]
    assert probed.log() == ["[20, 2]"] * 3


@pytest.mark.thorough
def test_workers_of_a_data_loader_have_room_for_their_sockets(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the path of the folder for temporary files is long, in forked and in fresh processes."""
    folder = probed.folder / ("long-" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    probed.write(trains=TRAINS.replace("batch_size=size", "batch_size=size, num_workers=1"))
    results = [probed.probe(4), probed.fresh(4)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.FIT, True), (Outcome.FIT, False)]


@pytest.mark.thorough
def test_a_variable_that_torch_reads_late_is_not_read_early(probed: Probed) -> None:
    """The server has executed imports that torch delays until a program has an optimizer."""
    probed.write(record="[os.environ.setdefault('TORCHDYNAMO_DISABLE', '1'), 'torch._dynamo' in sys.modules]")
    result = probed.probe(4)
    assert (result.outcome, result.forked) == (Outcome.FIT, False)
    assert probed.log() == ['["1", true]', '["1", false]']


@pytest.mark.thorough
def test_an_oom_of_a_forked_process_is_one(probed: Probed) -> None:
    """The limit holds in it, and the next probe is forked again."""
    results = [probed.probe(200), probed.probe(4)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.OOM, True), (Outcome.FIT, True)]


RECORD = (
    "[os.environ['SIZE'], os.environ['BATCHWRIGHT_MICRO_BATCH_SIZE'], os.getcwd(), sys.argv[:2], sys.orig_argv[1:3],"
    " os.getsid(0) == os.getpid(), os.path.isdir(os.environ['TMPDIR']), sys.path[0], __file__, __name__,"
    " sys.stdin.read(), sys.stdout.isatty(), 'BATCHWRIGHT_FORK_SERVER' in os.environ]"
)


@pytest.mark.thorough
def test_a_forked_program_finds_what_a_fresh_one_does(probed: Probed) -> None:
    """Its environment, working directory, session, arguments and standard input are those of its own probe."""
    here = probed.folder / "here"
    here.mkdir()
    probed.write(record=RECORD)
    model = {"environment": {"SIZE": "{micro_batch_size}"}, "working_directory": str(here)}
    results = [probed.probe(size, model=model) for size in (3, 6)]
    fresh = probed.fresh(6, model=model)
    assert [result.forked for result in (*results, fresh)] == [True, True, False]
    first, second, of_fresh = probed.log()
    assert second == of_fresh
    assert '"3"' in first
    assert str(here) in second


@pytest.mark.thorough
def test_the_peak_of_a_forked_process_is_that_of_a_fresh_one(probed: Probed) -> None:
    """The imports after torch's count in both."""
    probed.write(IMPORTS + "import unittest.mock, xml.dom.minidom, torch.utils.benchmark\n")
    forked, fresh = probed.probe(20), probed.fresh(20)
    assert (forked.forked, fresh.forked) == (True, False)
    assert abs((forked.process_peak_bytes or 0) - (fresh.process_peak_bytes or 0)) <= 4 * 1024**2


@pytest.mark.thorough
def test_what_a_program_does_before_an_import_is_not_passed_by(probed: Probed) -> None:
    """A variable that the program sets before it imports torch is there when torch is imported."""
    probed.write("import json, os, sys\nos.environ['TORCH_LOGS'] = '+nonsense_of_a_test'\nimport torch\n")
    failed = probed.probe(4)
    assert "nonsense_of_a_test" in (failed.traceback or "")
    probed.write("import json, os, sys\nkinds = 'torch' in sys.modules\nimport torch\n", record="[kinds]")
    with CommandSupervisor(cpu()) as supervisor:
        result = supervisor.run(probed.request(4))
    assert (result.outcome, result.forked) == (Outcome.FIT, True)
    assert probed.log()[-1] == "[false]"


@pytest.mark.thorough
def test_a_module_of_the_programs_own_is_executed_in_each_probe(probed: Probed) -> None:
    """Its leading imports are executed in the server, and nothing else of it."""
    (probed.folder / "own").mkdir()
    (probed.folder / "own" / "__init__.py").write_text("'''A package.'''\nimport sys\n")
    (probed.folder / "own" / "parts.py").write_text("import torch\nimport os\npid = os.getpid()\n")
    (probed.folder / "tabnanny.py").write_text("import os\npid = os.getpid()\n")  # hides that of Python
    names = "[parts.pid == os.getpid(), tabnanny.pid == os.getpid()]"
    for imports in ("from own import parts\nimport tabnanny\n", "import tabnanny\nfrom own import parts\n"):
        probed.write(imports + "import json, os, sys\nimport torch\n", names)
        with CommandSupervisor(cpu()) as supervisor:
            assert supervisor.run(probed.request(4)).forked
    assert probed.log() == ["[true, true]"] * 2


@pytest.mark.thorough
def test_a_module_runs_as_a_program(probed: Probed) -> None:
    """`python -m` executes the packages of the module first."""
    package = probed.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\n")
    probed.script = package / "train.py"
    probed.write(record="['package.train' in sys.modules, __name__, __package__, sys.argv[0]]")
    argv = (sys.executable, "-m", "package.train")
    model = {"working_directory": str(probed.folder)}
    forked, fresh = probed.probe(4, argv=argv, model=model), probed.fresh(4, argv=argv, model=model)
    assert (forked.outcome, forked.forked, fresh.forked) == (Outcome.FIT, True, False), forked
    first, second = probed.log()
    assert first == second
    assert first.startswith('[false, "__main__", "package"')


@pytest.mark.thorough
def test_a_console_script_is_its_own_server(probed: Probed) -> None:
    """The first line of the script names Python."""
    probed.script.write_text(f"#!{sys.executable} -u\n" + probed.script.read_text())
    probed.script.chmod(0o755)
    results = [probed.probe(size, argv=(str(probed.script),)) for size in (4, 6)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.FIT, True)] * 2
    assert probed.log() == ["[4, 2]", "[6, 2]"]


@pytest.mark.thorough
def test_words_of_the_interpreter_are_not_changed(probed: Probed) -> None:
    """A placeholder before the program, or in a variable that Python reads, takes a fresh start from the second on."""
    in_option = (sys.executable, "-X", "size={micro_batch_size}", str(probed.script))
    probed.write(record="[sys._xoptions['size'], size]")
    assert [probed.probe(size, argv=in_option).forked for size in (4, 5)] == [True, False]
    assert probed.log() == ['["4", 4]', '["5", 5]']
    probed.write(record="[os.environ['PYTHONHASHSEED'], sys.flags.hash_randomization]")
    model = {"environment": {"PYTHONHASHSEED": "{micro_batch_size}"}}
    assert [probed.probe(size, model=model).forked for size in (4, 5)] == [True, False]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "line",
    [
        "import threading; threading.Thread(target=event.wait, daemon=True).start()",
        "fds",
    ],
)
def test_an_import_that_cannot_be_forked_takes_fresh_starts(probed: Probed, line: str) -> None:
    """Threads and connections are not shared."""
    code = "import threading, socket\nevent = threading.Event()\n"
    code += "pair = socket.socketpair()\n" if line == "fds" else line + "\n"
    (probed.folder / "site").mkdir()
    (probed.folder / "site" / "sitecustomize.py").write_text(code)
    model = {"environment": {"PYTHONPATH": str(probed.folder / "site")}}
    results = [probed.probe(size, model=model) for size in (4, 6)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.FIT, False)] * 2


@pytest.mark.thorough
def test_a_program_with_an_error_is_repeated_anew(probed: Probed) -> None:
    """The result is that of the fresh start, with its traceback."""
    probed.write(record="[1 / 0]")
    failed = probed.probe(4)
    assert (failed.outcome, failed.forked) == (Outcome.ERROR, False)
    assert "ZeroDivisionError" in failed.message
    probed.script.write_text("import torch\nthis is no Python\n")
    broken = probed.probe(4)
    assert (broken.outcome, broken.forked) == (Outcome.ERROR, False)
    assert "SyntaxError" in broken.message


@pytest.mark.thorough
def test_an_error_of_one_size_leaves_the_others_forked(probed: Probed) -> None:
    """BatchNorm1d refuses one sample, in a forked process as in the fresh one that repeats it."""
    probed.write(trains="torch.nn.BatchNorm1d(4)(torch.randn(int(sys.argv[1]), 4))\n" + TRAINS)
    results = [probed.probe(size) for size in (1, 4)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.ERROR, False), (Outcome.FIT, True)]
    assert "Expected more than 1 value per channel" in results[0].message


@pytest.mark.thorough
def test_nothing_is_forked_once_a_forked_process_ended_otherwise(probed: Probed) -> None:
    """The program fails where imports of torch were executed that it delays. The result says why it was not forked."""
    probed.write(record="[1 / ('torch._dynamo' not in sys.modules)]")
    results = [probed.probe(size) for size in (3, 4)]
    assert [(result.outcome, result.forked) for result in results] == [(Outcome.FIT, False)] * 2
    assert [result.shared_imports and result.shared_imports.reason for result in results] == [
        "a forked process ended otherwise than a fresh one"
    ] * 2


@pytest.mark.thorough
def test_packages_of_a_site_folder_on_the_path_are_imported_once(probed: Probed) -> None:
    """As modules of a cluster set `PYTHONPATH`. The result says how many imports ran ahead, and where they ended."""
    folder = probed.folder / "modules" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "shared.py").write_text("import os\npid = os.getpid()\n")
    probed.write("import json, os, sys\nimport shared\nimport torch\n", "[shared.pid == os.getpid()]")
    result = probed.probe(4, model={"environment": {"PYTHONPATH": str(folder)}})
    assert (result.outcome, result.forked) == (Outcome.FIT, True)
    place, reason = "program.py:5", "`size, steps = int(sys.argv[1]), int(sys.argv[2])`"
    assert result.shared_imports == SharedImports(statements=3, torch=True, place=place, reason=reason)
    assert probed.log() == ["[false]"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("torch.nn.BatchNorm1d(64)", True),
        ("torch.nn.BatchNorm1d(64, track_running_stats=False)", True),
        ("__import__('copy').deepcopy(torch.nn.BatchNorm1d(64))", True),
        ("torch.nn.BatchNorm1d(64).eval()", False),
        ("torch.nn.LayerNorm(64); unused = torch.nn.BatchNorm1d(64)", False),
    ],
)
def test_batch_norms_in_training_are_found(probed: Probed, norm: str, *, expected: bool) -> None:
    """Those that normalise by the batch."""
    probed.write(trains=f"norm = {norm}\n" + TRAINS.replace("model(batch).sum()", "norm(model(batch)).sum()"))
    counted = probed.probe(4).counted
    assert counted is not None
    assert counted.batch_norms is expected


RAGGED = """
class Ragged(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, number): return torch.randn(32 + number % 33 * (number < 99), 64)
pad = lambda items: torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("longest_first", [False, True])
def test_probes_draw_the_longest_items(probed: Probed, workers: int, *, longest_first: bool) -> None:
    """In every batch, and as many as the program draws. The evidence says it."""
    loader = f"Ragged(), collate_fn=pad, num_workers={workers}, shuffle=True, batch_size=size"
    probed.write(trains=RAGGED + TRAINS.replace("torch.randn(4096, 64), batch_size=size", loader))
    counted = probed.probe(4, model={"longest_first": longest_first}).counted
    assert counted is not None
    assert counted.as_planned
    ((_, (shortest, longest), _),) = counted.shapes.values()
    assert (shortest == longest > 32) is longest_first
    assert ("128 of 4,096 items" in counted.longest_first) is longest_first
    assert ("longer-items" in counted.unseen) is longest_first


@pytest.mark.thorough
def test_grandchildren_end_with_a_forked_probe(probed: Probed) -> None:
    """A process in a session of its own ends, and the server does not."""
    daemon = "__import__('subprocess').Popen(['/bin/sleep', '3600'], start_new_session=True).pid"
    probed.write(record=f"[{daemon}]")
    assert probed.probe(4).forked
    assert not Path(f"/proc/{int(probed.log()[0].strip('[]'))}/cmdline").exists()
    assert probed.probe(4).forked


def _kill_when(found: Callable[[], set[int]]) -> Callable[[], bool]:
    """A stop that never stops, and kills processes as soon as there are some."""
    killed: set[int] = set()

    def look() -> bool:
        if not killed:
            killed.update(found())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return False

    return look


def servers(text: str) -> set[int]:
    """The processes of a program below a subreaper that was started as a program: fork servers, and fresh starts."""
    found = processes_naming(text)
    subreapers = {pid for pid in processes_naming(subreaper.__file__) if pid not in found}
    return {pid for pid in found if _parent(pid) in subreapers}


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@pytest.mark.thorough
def test_a_killed_server_is_replaced_by_fresh_starts(probed: Probed) -> None:
    """Between two probes, and in the middle of one."""
    assert probed.probe(4).forked
    (server,) = servers(str(probed.script))
    os.kill(server, signal.SIGKILL)
    after = probed.probe(5)
    assert (after.outcome, after.forked) == (Outcome.FIT, False)


AWAITS_ANOTHER = TRAINS.replace(
    "model =", "while sum(1 for _ in open(sys.argv[3])) < 2: __import__('time').sleep(0.05)\nmodel =", 1
)
"""Trains once the log has the records of two starts."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "is_training",
    [
        pytest.param(False, id="during its imports"),
        pytest.param(True, id="during a probe"),
    ],
)
def test_a_server_that_is_killed_at_work_is_replaced(probed: Probed, *, is_training: bool) -> None:
    """The probe is repeated, and nothing of the first attempt is left."""
    if is_training:
        probed.write(trains=AWAITS_ANOTHER)
    log = probed.folder / LOG
    stop = _kill_when(lambda: servers(str(probed.script)) if log.exists() or not is_training else set())
    result = probed.supervisor.run(probed.request(4), stop)
    assert (result.outcome, result.forked) == (Outcome.FIT, False)
    assert len(probed.log()) == 1 + is_training


@pytest.mark.thorough
def test_a_cancelled_probe_ends_its_own_tree(probed: Probed) -> None:
    """During the imports it ends the server, and after them its own tree alone."""
    with pytest.raises(ProbeCancelledError):
        probed.supervisor.run(probed.request(4), lambda: True)
    assert processes_naming(str(probed.script)) == {}
    assert probed.probe(4).forked
    with pytest.raises(ProbeCancelledError):
        probed.supervisor.run(probed.request(5), lambda: len(probed.log()) > 1)
    assert len(processes_naming(str(probed.script))) == 1
    assert probed.probe(6).forked


SUPERVISOR = """
import sys
sys.path.insert(0, {root!r})
from tests.commands.test_fork_server import Probed
from pathlib import Path
probed = Probed(Path(sys.argv[1]))
probed.probe(4)
"""


@pytest.mark.thorough
def test_a_killed_supervisor_leaves_no_process_and_no_folder(probed: Probed, tmp_path: Path) -> None:
    """The subreaper of the server ends all, and removes the folders."""
    probed.write(record="__import__('time').sleep(600)")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    code = textwrap.dedent(SUPERVISOR).format(root=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    try:
        while not (tmp_path / LOG).exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    while processes_naming(str(tmp_path)) or list(scratch.iterdir()):  # pytest's limit ends a wait in vain
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), True),
        (("-u", "-W", "ignore", "train.py"), True),
        (("-X", "importtime", "-m", "package"), True),
        (("-I", "train.py"), False),
        (("-uE", "train.py"), False),
        (("-c", "pass"), False),
        (("-",), False),
    ],
)
def test_options_that_keep_the_injected_code_out_take_a_fresh_start(words: tuple[str, ...], *, expected: bool) -> None:
    """Isolated interpreters, and programs without a file."""
    assert may_serve(sys.executable, (sys.executable, *words)) is expected


def test_a_program_that_is_no_python_takes_a_fresh_start(tmp_path: Path) -> None:
    """Binaries and scripts of a shell."""
    script = tmp_path / "run"
    for line, expected in {"#!/bin/sh": False, "#!/usr/bin/env python3": True, "#!/usr/bin/python3 -I": False}.items():
        script.write_text(line + "\n")
        assert may_serve(str(script), (str(script),)) is expected, line
    assert not may_serve("/bin/true", ("/bin/true",))
    assert not may_serve(str(tmp_path / "absent"), ("absent",))
