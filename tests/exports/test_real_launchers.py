"""Launchers read and run what is exported to them: torchrun, shells, Slurm, Ray, SkyPilot, models of Kubernetes.

`make test-exports` installs what is no part of the tests' own environment: a Python environment of the launchers
(`BATCHWRIGHT_TEST_LAUNCHERS`) and Debian's packages of Slurm, unpacked (`BATCHWRIGHT_TEST_SLURM`).
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.registry import export
from batchwright.schemas.results import DeviceInfo
from tests.support.exports.plans import command_plan, plan
from tests.support.exports.read_by_launchers import holds
from tests.support.exports.slurm_cluster import Slurm
from tests.support.exports.starting import document, write
from tests.support.factories import CPU
from tests.support.paths import SUPPORT

pytestmark = [pytest.mark.exports, pytest.mark.timeout(600)]

H100 = DeviceInfo(id="cuda:0", kind="cuda", name="NVIDIA H100 80GB HBM3", total_bytes=80 * 1024**3)
PROGRAM = Path(__file__).parent / "programs" / "reporting_rank.py"
SCRIPT = "a program's.py"
ARGUMENTS_OF = "hugging-face"
HOSTILE = 'a b\'; touch injected; $(touch injected) `touch injected` "$HOME" $(HOME) \\ # é: - { x }'
"""No `$$`, which torchrun itself makes a `$` of (`torch.distributed.elastic`'s macros)."""


def on_cpu(name: str, world_size: int, **options: Any) -> Export:
    """An export that can run here."""
    recommendation = plan(13 * world_size, world_size, 8, device=CPU, environment={"MALLOC_ARENA_MAX": "1"})
    return export(recommendation, name, options=ExportOptions(script=SCRIPT, **options))


def on_gpus(name: str, world_size: int, **options: Any) -> Export:
    """An export that can be read here."""
    return export(plan(13 * world_size, world_size, 8, device=H100), name, options=ExportOptions(**options))


def command_on_cpu(name: str, **options: Any) -> Export:
    """An export of a command that starts two ranks itself, with a configuration file and an argument full of marks."""
    recommendation = command_plan(
        *("torchrun", "--standalone", "--nproc-per-node=2", SCRIPT, "{file:settings.yaml}", HOSTILE),
        world_size=2,
        device=CPU,
        files={"settings.yaml": "size: {micro_batch_size}\ntext: '" + HOSTILE.replace("'", "''") + "'\n"},
    )
    return export(recommendation, name, options=ExportOptions(**options))


def assert_command(folder: Path) -> None:
    """Both ranks were given the command's own words and read its file, and no shell ran what stands in them."""
    for environment in reported(folder, 2):
        assert environment["BATCHWRIGHT_EFFECTIVE_BATCH_SIZE"] == "32"
    for rank in (0, 1):
        path, hostile = json.loads((folder / "reports" / str(rank)).read_text())["arguments"]
        assert hostile == HOSTILE
        assert yaml.safe_load((folder / path).read_text()) == {"size": 8, "text": HOSTILE}
    assert not (folder / "injected").exists()


def path_with(*folders: Path) -> str:
    """A search path that begins with these folders, and then has the tests' own programs."""
    return os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]])


def free_port() -> str:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def reported(folder: Path, ranks: int) -> list[dict[str, str]]:
    """The environments that the ranks reported, after checking that they found each other."""
    reports = [json.loads((folder / "reports" / str(rank)).read_text()) for rank in range(ranks)]
    assert [report["ranks"] for report in reports] == [ranks] * ranks
    return [report["environment"] for report in reports]


def assert_plan(environments: list[dict[str, str]]) -> None:
    """All know the plan and the allocator's settings."""
    for environment in environments:
        assert environment["BATCHWRIGHT_EFFECTIVE_BATCH_SIZE"] == str(13 * len(environments))
        assert environment["BATCHWRIGHT_WORLD_SIZE"] == environment["WORLD_SIZE"] == str(len(environments))
        assert environment["MALLOC_ARENA_MAX"] == "1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a job is started, with its program."""
    shutil.copy(PROGRAM, tmp_path / SCRIPT)
    return tmp_path


@pytest.fixture(scope="module")
def launchers() -> Path:
    """The folder of the launchers' own programs."""
    return _installed("BATCHWRIGHT_TEST_LAUNCHERS") / "bin"


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    """Slurm's commands; no cluster runs yet."""
    return Slurm(_installed("BATCHWRIGHT_TEST_SLURM"), tmp_path_factory.mktemp("slurm"))


def _installed(variable: str) -> Path:
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set: `make test-exports` does")
    folder = Path(os.environ[variable]).resolve()
    if not folder.is_dir():
        pytest.skip(f"there is no folder {folder}: `make test-exports` could not make it")
    return folder


@pytest.mark.parametrize("name", ["torchrun", "kubernetes", "trainjob", "skypilot"])
def test_ranks_of_one_node_find_each_other(name: str, folder: Path) -> None:
    """Two processes are started, and know their figures."""
    command, variables = write(on_cpu(name, 2), folder)

    subprocess.run(command, cwd=folder, env={"PATH": path_with(), **_pet(variables, 0, "1")}, check=True, timeout=120)

    assert_plan(reported(folder, 2))


@pytest.mark.parametrize("name", ["torchrun", "kubernetes", "trainjob", "skypilot"])
def test_ranks_of_two_nodes_find_each_other(name: str, folder: Path) -> None:
    """Both nodes are this host, under the names that the launcher gives to them."""
    port = free_port()
    nodes = []
    for node in (1, 0):
        command, variables = write(on_cpu(name, 2, processes_per_node=1), folder, node)
        words = [item.replace("batchwright-0.batchwright:29500", f"localhost:{port}") for item in command]
        words = [word.replace("$head_node:29500", f"$head_node:{port}") for word in words]
        here = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
        environment = {"PATH": path_with(), **_pet(variables, node, "2", port), **here}
        nodes.append(subprocess.Popen(words, cwd=folder, env=environment))

    assert [node.wait(120) for node in nodes] == [0, 0]
    assert_plan(reported(folder, 2))


def _pet(variables: dict[str, str], node: int, nodes: str, port: str = "29400") -> dict[str, str]:
    """What Kubeflow's operator adds: a number of processes too, which the export's own must rule."""
    operator = {
        "PET_NNODES": nodes,
        "PET_NPROC_PER_NODE": "7",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }
    return {**variables, **(operator if "PET_NNODES" in variables else {})}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(item, size) for item in ("torchrun", "slurm", "skypilot", "ray-jobs") for size in (3, 16)] + [("kubernetes", 16)],
)
def test_shellcheck_finds_nothing(name: str, world_size: int, launchers: Path, tmp_path: Path) -> None:
    """Neither in scripts nor in commands that a shell reads; a Kubernetes Job of one node has none."""
    command, _ = write(on_gpus(name, world_size, arguments_of=ARGUMENTS_OF, allow_inexact=True), tmp_path)
    script = tmp_path / command[1]
    if command[1] == "-c":
        script = tmp_path / "script"
        script.write_text(command[2])
    shell = "bash" if command[0] == "bash" else "sh"

    subprocess.run([launchers / "shellcheck", "--shell", shell, script], check=True)


@pytest.mark.parametrize("world_size", [2, 16])
@pytest.mark.parametrize("options", [{}, {"queue": "team-a", "job_name": "a.b_c-d"}])
def test_kubernetes_ray_and_skypilot_read_all_that_is_written(
    world_size: int, options: dict[str, Any], launchers: Path
) -> None:
    """Their own classes lose no field of it, and refuse none."""
    without_queue = {name: value for name, value in options.items() if name != "queue"}
    in_kubernetes = {**options, "job_name": "a-b"}
    readings: list[tuple[str, Any]] = [
        ("TrainerV1alpha1TrainJob", document(on_gpus("trainjob", world_size, **in_kubernetes))),
        ("skypilot", document(on_gpus("skypilot", world_size, **options))),
        ("ray-jobs", document(on_gpus("ray-jobs", world_size, **without_queue))),
    ]
    job = yaml.safe_load_all(on_gpus("kubernetes", world_size, **in_kubernetes).files[0].content)
    readings += [("IoK8sApi" + {"Job": "BatchV1Job", "Service": "CoreV1Service"}[item["kind"]], item) for item in job]
    cluster = document(on_gpus("rayjob", world_size, **in_kubernetes))["spec"]["rayClusterSpec"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    readings += [("IoK8sApiCoreV1PodTemplateSpec", group["template"]) for group in groups]

    program = SUPPORT / "exports" / "read_by_launchers.py"
    commands = [command_on_cpu(name) for name in ("trainjob", "skypilot", "ray-jobs")]
    readings += [
        (name, document(it))
        for name, it in zip(("TrainerV1alpha1TrainJob", "skypilot", "ray-jobs"), commands, strict=True)
    ]
    read = subprocess.run(
        [launchers / "python", program], input=json.dumps(readings), capture_output=True, text=True, check=False
    )

    assert read.stdout.split() == ["read"] * len(readings), read.stderr


@pytest.mark.parametrize("world_size", [1, 16])
def test_kubectl_reads_all_of_a_job(world_size: int, tmp_path: Path) -> None:
    """It keeps the fields that its own types know, which are all."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("no kubectl")
    job = document(on_gpus("kubernetes", world_size, queue="team-a"), "Job")
    (tmp_path / "job.json").write_text(json.dumps(job))

    read = json.loads(
        subprocess.check_output([kubectl, "set", "env", "--local", "-f", tmp_path / "job.json", "X=1", "-o", "json"])
    )

    job["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "X", "value": "1"})
    assert holds(read, job)


@pytest.mark.parametrize(("world_size", "device"), [(2, CPU), (16, H100)])
def test_sbatch_knows_every_option(world_size: int, device: DeviceInfo, slurm: Slurm, tmp_path: Path) -> None:
    """It reads the script, and fails only for want of a controller; a wrong option it names."""
    given = export(
        plan(26, world_size, 1, device=device), "slurm", options=ExportOptions(queue="team-a", job_name="a.b")
    )
    write(given, tmp_path)
    (tmp_path / "wrong.sbatch").write_text(given.files[0].content.replace("--open-mode", "--opened-mode"))

    assert (
        "Unable to contact slurm controller" in slurm.run("sbatch", "--test-only", "job.sbatch", folder=tmp_path).stderr
    )
    assert "unrecognized option" in slurm.run("sbatch", "--test-only", "wrong.sbatch", folder=tmp_path).stderr


def test_slurm_runs_two_nodes(slurm: Slurm, folder: Path) -> None:
    """A real controller and two daemons run the batch script, and its four ranks find each other."""
    write(on_cpu("slurm", 4, processes_per_node=2), folder)
    slurm.environment["PATH"] = f"{slurm.root}/usr/bin:{path_with()}"

    with slurm.started():
        ended = slurm.run("sbatch", "--wait", "job.sbatch", folder=folder)

    assert ended.returncode == 0, ended.stderr + "".join(path.read_text() for path in folder.glob("slurm-*.out"))
    environments = reported(folder, 4)
    assert_plan(environments)
    assert sorted(environment["SLURM_NODEID"] for environment in environments) == ["0", "0", "1", "1"]


def test_slurm_runs_a_command(slurm: Slurm, folder: Path) -> None:
    """The batch script starts the command, which starts its ranks; no torchrun of the export is around it."""
    write(command_on_cpu("slurm"), folder)
    slurm.environment["PATH"] = f"{slurm.root}/usr/bin:{path_with()}"

    with slurm.started():
        ended = slurm.run("sbatch", "--wait", "job.sbatch", folder=folder)

    assert ended.returncode == 0, ended.stderr + "".join(path.read_text() for path in folder.glob("slurm-*.out"))
    assert_command(folder)


_CLUSTER = """\
import sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": int(sys.argv[1])}
cluster = Cluster(initialize_head=True, head_node_args=head)
cluster.add_node(num_cpus=2)
cluster.add_node(num_cpus=2)
print("up", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def ray_cluster(launchers: Path, folder: Path) -> Iterator[str]:
    """A cluster of two nodes beside the head, which finds programs in a folder, and the URL of its jobs."""
    port = free_port()
    environment = {**os.environ, "PATH": path_with(launchers), "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [launchers / "python", "-c", _CLUSTER, port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        while process.stdout.readline().strip() not in {"up", ""}:
            pass
        yield f"http://127.0.0.1:{port}/api/jobs/"
        process.stdin.close()


def _asked(url: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = httpx.request("GET" if request is None else "POST", url, json=request, timeout=120)
    return dict(answer.raise_for_status().json())


def test_ray_runs_one_node_and_two(launchers: Path, folder: Path) -> None:
    """A real cluster takes both requests; the second reserves both of its nodes for two torchruns that meet."""
    with ray_cluster(launchers, folder) as jobs:
        for name, processes_per_node in (("one", 2), ("two", 1)):
            _asked(jobs, document(on_cpu("ray-jobs", 2, job_name=name, processes_per_node=processes_per_node)))

            assert _ended(jobs + name) == "SUCCEEDED", _asked(f"{jobs}{name}/logs")["logs"]
            assert_plan(reported(folder, 2))
            shutil.rmtree(folder / "reports")


def test_ray_runs_a_command(launchers: Path, folder: Path) -> None:
    """The entry point is a shell's text, which hands each word of the command on as it is."""
    with ray_cluster(launchers, folder) as jobs:
        _asked(jobs, document(command_on_cpu("ray-jobs", job_name="command")))

        assert _ended(f"{jobs}command") == "SUCCEEDED", _asked(f"{jobs}command/logs")["logs"]
        assert_command(folder)


@pytest.mark.parametrize("name", ["torchrun", "kubernetes", "trainjob", "skypilot"])
def test_a_node_runs_a_command(name: str, folder: Path) -> None:
    """Shells and containers write its file and start its ranks."""
    command, variables = write(command_on_cpu(name), folder)

    subprocess.run(command, cwd=folder, env={"PATH": path_with(), **_pet(variables, 0, "1")}, check=True, timeout=120)

    assert_command(folder)


def _ended(url: str) -> str:
    end = time.monotonic() + 240
    while (state := str(_asked(url)["status"])) in {"PENDING", "RUNNING"} and time.monotonic() < end:
        time.sleep(0.5)
    return state
