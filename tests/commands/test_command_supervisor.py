"""Tests of ``batchwright.commands.command_supervisor``: probes of small programs on the CPU."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.commands.command_supervisor import CommandSupervisor
from batchwright.errors import ProbeCancelledError
from batchwright.hardware.inventory import cpu
from batchwright.schemas.command import CommandSpec
from batchwright.schemas.requests import ProbeRequest
from batchwright.schemas.results import NEARLY_FULL, Outcome, Phase, ProbeResult

MIB = 1024**2
LIMIT = 400 * MIB
"""More than the imports of torch's optimizers take (100 MiB), and less than a hundred of the programs' samples."""
IMPORTS = "import sys, time, torch\nfrom torch.nn import functional as F\n"
SETUP = """
size, steps = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=size)
class Wide(torch.nn.Module):
    def forward(self, batch, megabytes=4):
        return model(batch).sum() + torch.ones(len(batch), megabytes * 2**18).sum()
wide = Wide()
"""
TRAINS = """
for number, batch in enumerate(loader, 1):
    wide(batch).backward()
    if number % steps == 0:
        optimizer.step(); optimizer.zero_grad()
"""
SIZES = ("{micro_batch_size}", "{gradient_accumulation_steps}")


def request(script: Path, size: int = 4, *, launcher: tuple[str, ...] = (), **fields: Any) -> ProbeRequest:
    """The request of a probe of a program at a size, with two micro-batches in an update."""
    argv = (*(launcher or (sys.executable,)), str(script), *SIZES)
    model = {"kind": "command", "argv": argv, **fields.pop("model", {})}
    spec = CommandSpec.model_validate({"model": model, "parallelism": {"world_size": fields.pop("ranks", 1)}})
    common = {"micro_batch_size": size, "samples_per_window": 2 * size, "device": "cpu", "limit_bytes": LIMIT}
    return ProbeRequest.model_validate({"spec": spec, **common, **fields})


def probe(tmp_path: Path, code: str, **fields: Any) -> ProbeResult:
    """Probe a program by a supervisor of its own."""
    script = tmp_path / "program.py"
    script.write_text(IMPORTS + code)
    with CommandSupervisor(cpu()) as supervisor:
        return supervisor.run(request(script, **fields))


class Programs:
    """Programs that begin with the same imports, so that the processes of all are forked from one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._code = folder / "code.py"
        self._script = folder / "program.py"
        self._script.write_text(
            f"{IMPORTS}exec(compile(open({str(self._code)!r}).read(), {str(self._code)!r}, 'exec'))"
        )
        self._supervisor = CommandSupervisor(cpu())

    def probe(self, code: str, size: int = 4, **fields: Any) -> ProbeResult:
        """Probe what follows the imports."""
        self._code.write_text(code)
        result = self._supervisor.run(request(self._script, size, **fields))
        assert result.forked is not fields.get("runs_plan", False), result
        return result

    def close(self) -> None:
        """End the server."""
        self._supervisor.close()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Programs whose imports are executed once."""
    found = Programs(tmp_path_factory.mktemp("programs"))
    assert found.probe(SETUP + TRAINS).outcome is Outcome.FIT
    yield found
    found.close()
    assert leftovers(str(found.folder)) == []


def leftovers(of: str) -> list[str]:
    """Processes that still run a program."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in lines if of in line]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProbeResult, Path]:
    """The probe of a program that fits, in a process of its own, and the folder with what it left."""
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "scratch").mkdir()
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(tempfile, "tempdir", str(folder / "scratch"))
        changed.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))  # torch's own, which stays
        code = SETUP + TRAINS + f"open({str(folder / 'ended')!r}, 'w')"
        result = probe(folder, code, runs_plan=True)
    return result, folder


def test_a_program_that_fits_ends_after_its_updates_and_leaves_nothing(fresh: tuple[ProbeResult, Path]) -> None:
    """The probe fits with its updates counted, and the program does not reach its own end."""
    result, folder = fresh
    assert (result.outcome, result.phase, result.forked) == (Outcome.FIT, Phase.DONE, False), result
    assert result.counted is not None
    assert result.counted.statement == "2 backward passes of 4 samples per update: 8, as planned"
    assert 0 < (result.process_peak_bytes or 0) < LIMIT
    assert result.timing is not None
    assert {path.name for path in folder.iterdir()} <= {"program.py", "scratch", "compiled"}
    assert list((folder / "scratch").iterdir()) == []
    assert leftovers(str(folder / "program.py")) == []


def test_a_forked_process_has_the_result_of_a_fresh_one(programs: Programs, fresh: tuple[ProbeResult, Path]) -> None:
    """Both count the same updates. Their peaks include the imports and differ by steps of the heap."""
    forked = programs.probe(SETUP + TRAINS)
    assert (forked.outcome, forked.message) == (Outcome.FIT, fresh[0].message)
    assert abs((forked.process_peak_bytes or 0) - (fresh[0].process_peak_bytes or 0)) <= 8 * MIB


def test_the_memory_between_two_micro_batches_is_that_without_activations(programs: Programs) -> None:
    """The peak lies above it by what the samples of a micro-batch take, so that the search knows the slope at once."""
    kept = SETUP + "kept = torch.ones(40, 2**18)\n" + TRAINS
    small, large = (programs.probe(kept, size) for size in (4, 16))
    resident = [result.resident_bytes or 0 for result in (small, large)]
    assert resident[0] > 40 * MIB
    assert abs(resident[1] - resident[0]) < 4 * MIB
    assert (large.process_peak_bytes or 0) - resident[1] > 16 * 4 * MIB


def test_an_oom_has_its_request(programs: Programs) -> None:
    """And with the phase in which it came. The limit holds in one process: the next fits again."""
    result = programs.probe(SETUP + TRAINS, 200)
    assert (result.outcome, result.phase) == (Outcome.OOM, Phase.WARMUP)
    assert result.message == "asked for 800.00 MiB more in the first update"
    assert programs.probe(SETUP + TRAINS).outcome is Outcome.FIT


IN_A_LIBRARY = SETUP + TRAINS.replace(
    "    wide(batch).backward()",
    "    try: exec('wide(batch).backward()')\n    except RuntimeError: model(batch).sum().backward()",
)
IN_OWN_CODE = SETUP + TRAINS.replace(
    "    wide(batch)", "    try: torch.ones(len(batch), 2**20)\n    except RuntimeError: pass\n    model(batch).sum()"
)


@pytest.mark.parametrize("code", [IN_A_LIBRARY, IN_OWN_CODE], ids=["in a module", "outside of any module"])
def test_an_oom_that_the_program_catches_is_an_oom(programs: Programs, code: str) -> None:
    """Otherwise the program would train with another size than the probe's, and be called a fit."""
    assert programs.probe(code, 200).outcome is Outcome.OOM


@pytest.mark.thorough
def test_a_program_that_trains_nothing_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Other ways to end without an answer are those of ``test_misbehaving``."""
    result = probe(tmp_path, "")
    assert (result.outcome, result.error_type) == (Outcome.ERROR, "ended-early")
    assert "it imported torch, and trained nothing" in result.message


def test_a_stopped_probe_leaves_nothing(tmp_path: Path) -> None:
    """Its tree is gone when the error is raised."""
    script = tmp_path / "program.py"
    script.write_text("import time; time.sleep(600)")
    spec = CommandSpec.model_validate(
        {"model": {"kind": "command", "argv": (sys.executable, str(script), "{micro_batch_size}")}}
    )
    stopped = ProbeRequest(spec=spec, micro_batch_size=1, samples_per_window=1, device="cpu")
    with pytest.raises(ProbeCancelledError), CommandSupervisor(cpu()) as supervisor:
        supervisor.run(stopped, lambda: bool(leftovers(str(script))))
    assert leftovers(str(script)) == []


RANKS = SETUP.replace(
    "model = torch.nn.Linear(64, 64)",
    """
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
rank = torch.distributed.get_rank()
""",
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.thorough
def test_the_updates_of_all_ranks_are_counted(tmp_path: Path) -> None:
    """In the processes that a launcher started."""
    result = probe(tmp_path, RANKS + TRAINS, launcher=TORCHRUN, ranks=2)
    assert result.outcome is Outcome.FIT, result
    assert result.counted is not None
    assert result.counted.statement.startswith("2 backward passes of 4 samples per update on each of 2 ranks: 16")


def test_loaders_that_fork_are_outside_of_the_limit(programs: Programs) -> None:
    """Their memory is not the training process's."""
    forks = SETUP.replace("batch_size=size)", "batch_size=size, num_workers=1, collate_fn=collate)").replace(
        "loader =", "def collate(rows):\n    torch.ones(2**26)\n    return torch.stack(rows)\nloader ="
    )
    result = programs.probe(forks + TRAINS, limit_bytes=LIMIT // 2)
    assert result.outcome is Outcome.FIT, result
    assert result.counted is not None
    assert result.counted.as_planned


BIG_CHILD = "import subprocess, os\nbig = [sys.executable, '-S', '-c', f'bytearray({LIMIT})']\n".replace(
    "{LIMIT}", str(LIMIT)
)


@pytest.mark.parametrize(
    "executes",
    ["subprocess.run(big, check=True)", "subprocess.run(big, close_fds=False)", "assert not os.system(line)"],
)
def test_programs_that_the_command_executes_have_no_limit(programs: Programs, executes: str) -> None:
    """A compiler is no part of the training process, which has its limit again afterwards."""
    code = BIG_CHILD + "import shlex; line = shlex.join(big)\n" + executes + SETUP + TRAINS
    assert programs.probe(code).outcome is Outcome.FIT
    assert programs.probe(code, 200).outcome is Outcome.OOM


LOADER = "(Rows(), batch_size=size, num_workers=1, multiprocessing_context='START')"
SPAWNED = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        torch.ones(2**27)
        return torch.ones(64)
if __name__ == "__main__":
""" + (SETUP.replace("(torch.randn(4096, 64), batch_size=size)", LOADER) + TRAINS).replace("\n", "\n    ")


@pytest.mark.thorough
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_loaders_of_either_start_method_are_outside_of_the_limit(tmp_path: Path, start: str) -> None:
    """Python 3.14 starts workers by forkserver; their memory is not the training process's."""
    result = probe(tmp_path, SPAWNED.replace("START", start))
    assert (result.outcome, result.phase) == (Outcome.FIT, Phase.DONE), result


SPAWNED_RANK = """
import torch
def train(_):
    import sys
SETUP_AND_TRAINS
if __name__ == "__main__":
    torch.multiprocessing.spawn(train)
""".replace("SETUP_AND_TRAINS", (SETUP + TRAINS).replace("\n", "\n    ").replace("(Wide, self)", "()"))


@pytest.mark.thorough
def test_a_spawned_process_that_trains_has_the_limit(tmp_path: Path) -> None:
    """From its optimizer on, so that its first forward pass is held to it."""
    assert probe(tmp_path, SPAWNED_RANK).outcome is Outcome.FIT
    result = probe(tmp_path, SPAWNED_RANK, size=200)
    assert (result.outcome, result.message) == (Outcome.OOM, "asked for 800.00 MiB more in the first update")


LIFTS = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))\n"


def test_a_program_that_lifts_its_limit_is_judged_by_what_it_held(programs: Programs) -> None:
    """It runs through, and its peak is above the limit."""
    result = programs.probe(LIFTS + SETUP + TRAINS, 100)
    assert (result.outcome, result.error_type) == (Outcome.OOM, "peak-above-limit"), result
    assert result.message.startswith("held ")
    assert programs.probe(LIFTS + SETUP + TRAINS).outcome is Outcome.FIT


WORKSPACE = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
class Working(torch.nn.Module):
    def forward(self, batch):
        libc.free(libc.malloc(SIZE * 2**20))
        return Wide.forward(self, batch)
wide = Working()
"""


def test_what_a_library_does_without_near_the_limit_counts(programs: Programs) -> None:
    """As the packing buffers of MKL, which the job takes, because it has no limit. 16 MiB of the loss come after."""
    peak = programs.probe(SETUP + TRAINS).process_peak_bytes or 0
    near = {"limit_bytes": peak + 8 * MIB}
    result = programs.probe(SETUP + WORKSPACE.replace("SIZE", "40") + TRAINS, **near)
    assert (result.outcome, result.error_type) == (Outcome.OOM, "peak-above-limit"), result
    assert (result.process_peak_bytes or 0) > peak + 8 * MIB
    assert "a library takes less where an allocation fails" in result.message
    for code in (SETUP + TRAINS, SETUP + WORKSPACE.replace("SIZE", "2") + TRAINS):
        assert programs.probe(code, **near).outcome is Outcome.FIT


@pytest.mark.parametrize("after", ["", "; time.sleep(60)"])
def test_a_program_that_goes_no_further_is_judged_by_what_it_did(programs: Programs, after: str) -> None:
    """It ends, or pauses, while one more micro-batch is waited for."""
    peak = programs.probe(SETUP + TRAINS).process_peak_bytes or 0
    ends = TRAINS + f"        if number == 2 * steps: break{after}\n"
    assert programs.probe(SETUP + ends, limit_bytes=peak + 8 * MIB).outcome is Outcome.FIT


def test_a_program_that_ends_while_an_optimizer_is_awaited_has_made_its_updates(programs: Programs) -> None:
    """The optimizer that made no step is named."""
    idle = "second = torch.optim.Adam(torch.nn.Linear(64, 64).parameters())"
    result = programs.probe(SETUP + idle + TRAINS + "        if number == 2 * steps: break\n")
    assert result.outcome is Outcome.FIT, result
    assert result.counted is not None
    assert "Adam (4,160 parameters)" in result.counted.unseen["optimizer-did-not-step"]


THREADS = """
import threading
def start(count):
    for _ in range(count): threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_the_stack_of_a_thread_takes_little_of_the_limit(programs: Programs) -> None:
    """A stack counts whole: 8 MiB each, which four loader workers and the threads of OpenMP have many of."""
    peaks = [programs.probe(f"{THREADS}start({count}){SETUP}{TRAINS}").process_peak_bytes or 0 for count in (1, 17)]
    assert peaks[1] - peaks[0] <= 16 * 2.5 * MIB


def test_a_thread_that_finds_no_room_is_an_oom(programs: Programs) -> None:
    """Python's message does not name memory, of which nearly all was in use."""
    result = programs.probe(f"{THREADS}held = torch.ones({LIMIT // 5})\nstart(100)\n{SETUP}{TRAINS}")
    assert (result.outcome, result.details) == (Outcome.OOM, "can't start new thread"), result


@pytest.mark.parametrize("place", ["in", "after"])
def test_an_evaluation_without_memory_is_told_apart_from_training(programs: Programs, place: str) -> None:
    """The message does not claim that no forward pass was seen."""
    evaluates = {
        "in": "with torch.no_grad(): wide(torch.randn(200, 64))\n",
        "after": "with torch.no_grad(): wide(torch.randn(4, 64)); torch.ones(200 * 2**20)\n",
    }
    result = programs.probe(SETUP + evaluates[place] + TRAINS)
    assert result.message == f"asked for 800.00 MiB more {place} a forward pass without gradients, before training"


@pytest.mark.thorough
def test_an_unknown_error_is_shown_with_the_peak_before_it(tmp_path: Path) -> None:
    """The peak shows whether memory may be the cause."""
    result = probe(tmp_path, SETUP + f"held = torch.ones({LIMIT // 5})\nraise KeyError('labels')", runs_plan=True)
    assert result.outcome is Outcome.ERROR
    assert (result.share_of_limit or 0.0) > NEARLY_FULL


SAVES = """
torch.save(model.state_dict(), "PLACE/torch.pt")
from safetensors.torch import save_model
save_model(model, "PLACE/model.safetensors")
"""


def test_the_native_writers_of_torch_and_safetensors_are_seen(programs: Programs) -> None:
    """The second probe overwrites what the first has made, which is no file of the user."""
    code = SETUP + SAVES.replace("PLACE", str(programs.folder)) + TRAINS
    names = (str(programs.folder / "torch.pt"), str(programs.folder / "model.safetensors"))
    first, second = programs.probe(code).files, programs.probe(code).files
    assert first is not None
    assert second is not None
    assert (first.made, second.remade) == (names, names)
    assert not first.replaced
    assert not second.replaced


CHAINS = """
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
value = 7
others = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
spec = PathFinder.find_spec("sitecustomize", others)
if spec is not None:
    spec.loader.exec_module(module_from_spec(spec))
"""
"""A ``sitecustomize`` that runs the one it hides, as other tools have: which is ours again."""


@pytest.mark.thorough
def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    """The user's module runs under its name, and its error is raised as without a probe."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("value = 7\n")
    path = {"environment": {"PYTHONPATH": str(own)}}
    check = "\nimport sitecustomize\nassert sitecustomize.value == 7\n"
    assert probe(tmp_path, SETUP + check + TRAINS, model=path).outcome is Outcome.FIT
    (own / "sitecustomize.py").write_text(CHAINS)
    assert probe(tmp_path, SETUP + check + TRAINS, model=path).outcome is Outcome.FIT
    (own / "sitecustomize.py").write_text("raise ValueError('of the sitecustomize')\n")
    failed = probe(tmp_path, "print('ends')", model=path)
    assert "Error in sitecustomize" in (failed.traceback or "")
    assert "of the sitecustomize" in (failed.traceback or "")


def test_a_library_that_waits_for_memory_while_it_loads_is_an_oom(tmp_path: Path) -> None:
    """OpenBLAS asks for its buffers for ever, and scipy loads one of its own."""
    pytest.importorskip("scipy")
    code = "torch.manual_seed(0)\nimport scipy.special\n" + SETUP + TRAINS
    model = {"loading_timeout_seconds": 40}
    result = probe(tmp_path, code, limit_bytes=24 * MIB, model=model, runs_plan=True)
    assert (result.outcome, result.phase, result.error_type) == (Outcome.OOM, Phase.BUILD, "builtins.MemoryError")
