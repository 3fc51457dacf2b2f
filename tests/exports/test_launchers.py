"""Launchers carry topology, program and figures to torchrun, and nothing of it gets lost or runs on the way."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from batchwright.errors import ExportError
from batchwright.exports.base import Export, ExportOptions
from batchwright.exports.registry import TARGETS, export
from batchwright.schemas.recommendation import Headroom
from batchwright.schemas.results import DeviceInfo
from tests.support.exports.plans import plan
from tests.support.exports.starting import document, start
from tests.support.factories import CPU

LAUNCHERS = [target.name for target in TARGETS.values() if target.kind == "launcher"]
WITHOUT_RAY = [launcher for launcher in LAUNCHERS if launcher not in {"rayjob", "ray-jobs"}]
"""Those whose several nodes need nothing but a shell."""
WITH_QUEUES = [launcher for launcher in LAUNCHERS if launcher not in {"torchrun", "ray-jobs"}]
IN_KUBERNETES = ["kubernetes", "trainjob", "rayjob"]

H100 = DeviceInfo(id="cuda:0", kind="cuda", name="NVIDIA H100 80GB HBM3", total_bytes=80 * 1024**3)
HOSTILE = 'a b\'; touch injected; $(touch injected) `touch injected` "$HOME" $(HOME) $$ \\ # é: - {x}'


def exported(name: str, world_size: int = 2, *, device: DeviceInfo = H100, **options: Any) -> Export:
    """An export of a plan with a micro-batch of 7 samples and one of 6 per rank."""
    return export(plan(13 * world_size, world_size, 8, device=device), name, options=ExportOptions(**options))


def numbers_of_gpus(value: Any) -> list[str]:
    """The numbers that a manifest requests under names with `gpu`."""
    if isinstance(value, list):
        return [gpu for part in value for gpu in numbers_of_gpus(part)]
    if not isinstance(value, dict):
        return []
    own = [str(part) for name, part in value.items() if "gpu" in name.lower() and not isinstance(part, dict)]
    return own + [gpu for part in value.values() for gpu in numbers_of_gpus(part)]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_process_runs_for_every_rank_of_one_node(name: str, tmp_path: Path) -> None:
    """Each node starts as many processes as the plan has ranks, and leaves restarts to others."""
    called = start(exported(name, 8), tmp_path)

    assert called.option("nproc-per-node") == "8"
    assert called.option("max-restarts") == "0"
    assert called.program == ["train.py"]


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_every_node_of_several_starts_its_share(name: str, tmp_path: Path) -> None:
    """16 ranks are two nodes of eight, and each knows of both."""
    for node in (0, 1):
        called = start(exported(name, 16), tmp_path, node)

        nodes = called.environment.get("PET_NNODES") or called.option("nnodes")
        assert (nodes, called.option("nproc-per-node")) == ("2", "8")
        assert called.program == ["train.py"]


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("torchrun", "node1:29500"),
        ("slurm", "node1:30067"),
        ("kubernetes", "batchwright-0.batchwright:29500"),
        ("skypilot", "10.0.0.1:29500"),
    ],
)
def test_nodes_meet_at_the_first_one(name: str, endpoint: str, tmp_path: Path) -> None:
    """All nodes get the same endpoint, and a node that is known to be the first hosts the rendezvous."""
    called = [start(exported(name, 16), tmp_path, node) for node in (0, 1)]

    assert {item.option("rdzv-endpoint") for item in called} == {endpoint}
    assert len({item.option("rdzv-id") for item in called}) == 1
    if name in {"kubernetes", "skypilot"}:
        assert [item.option("rdzv-conf").rsplit("=", 1)[1] for item in called] == ["true", "false"]


def test_a_requeued_slurm_job_meets_under_another_name(tmp_path: Path) -> None:
    """What is left of the first start cannot join the second."""
    assert start(exported("slurm", 16), tmp_path).option("rdzv-id") == "1234567.1"


def test_slurm_hands_all_cpus_of_a_node_to_its_task(tmp_path: Path) -> None:
    """`srun` does not take them over from `sbatch` by itself."""
    start(exported("slurm", 2), tmp_path)

    assert "--cpus-per-task=8" in (tmp_path / "srun").read_text().split("\0")


def test_slurm_exports_variables_even_if_submitted_with_none(tmp_path: Path) -> None:
    """`sbatch --export=NONE`, the default of some sites, holds for `srun` too, and the allocator's would be lost."""
    start(exported("slurm"), tmp_path)

    assert "--export=ALL\0" in (tmp_path / "srun").read_text()


@pytest.mark.parametrize(("name", "file"), [("torchrun", "launch.sh"), ("slurm", "job.sbatch")])
def test_a_script_hands_its_own_arguments_to_the_program(name: str, file: str, tmp_path: Path) -> None:
    """Behind those of the framework, so that a configuration file can be named."""
    given = exported(name, arguments_of="nemo-automodel")
    (command,) = (item for item in [given.command] if item[-1] == file)
    extended = given.model_copy(update={"command": (*command, "--config", "a b")})

    called = start(extended, tmp_path)

    assert called.program[-2:] == ["--config", "a b"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_figures_and_allocator_reach_the_program(name: str, tmp_path: Path) -> None:
    """They are in its environment, in full."""
    recommendation = plan(26, 2, 8, device=H100, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})

    environment = start(export(recommendation, name), tmp_path).environment

    assert {name: value for name, value in environment.items() if name.startswith(("BATCHWRIGHT", "PYTORCH"))} == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "BATCHWRIGHT_EFFECTIVE_BATCH_SIZE": "26",
        "BATCHWRIGHT_WORLD_SIZE": "2",
        "BATCHWRIGHT_MICRO_BATCH_SIZE": "7",
        "BATCHWRIGHT_GRADIENT_ACCUMULATION_STEPS": "2",
    }


@pytest.mark.parametrize("name", LAUNCHERS)
def test_arguments_of_a_framework_stand_behind_the_script(name: str, tmp_path: Path) -> None:
    """The framework's plan is taken, and the environment then holds no figures beside it."""
    called = start(exported(name, arguments_of="megatron", allow_inexact=True), tmp_path)

    assert called.program[0] == "train.py"
    assert called.program[1:3] == ["--micro-batch-size", "1"] or "--micro-batch-size=1" in called.program
    assert not [item for item in called.environment if item.startswith("BATCHWRIGHT_")]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_hostile_script_name_is_nothing_but_a_name(name: str, tmp_path: Path) -> None:
    """Quotes, dollars, backquotes and Kubernetes' own references arrive as they were given, and nothing runs."""
    for world_size in (2, 16) if name in WITHOUT_RAY else (2,):
        called = start(exported(name, world_size, script=HOSTILE), tmp_path)

        assert called.program == [HOSTILE]
        assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize("name", WITHOUT_RAY)
def test_a_hostile_variable_is_nothing_but_a_value(name: str, tmp_path: Path) -> None:
    """What the recommendation's environment holds reaches the program unread."""
    given = export(plan(26, 2, 8, device=H100, environment={"PYTORCH_ALLOC_CONF": HOSTILE}), name)

    assert start(given, tmp_path).environment["PYTORCH_ALLOC_CONF"] == HOSTILE
    assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize("name", ["rayjob", "ray-jobs"])
def test_a_variable_that_ray_would_change_is_refused(name: str) -> None:
    """Ray replaces `$NAME` in values, and has no way to write a dollar."""
    recommendation = plan(26, 2, 8, device=H100, environment={"PYTORCH_ALLOC_CONF": "a$HOME"})

    with pytest.raises(ExportError, match=r"PYTORCH_ALLOC_CONF is 'a\$HOME'"):
        export(recommendation, name)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_script_that_looks_like_an_option_is_still_the_script(name: str, tmp_path: Path) -> None:
    """Otherwise torchrun would take `--help.py` for an option of its own."""
    assert start(exported(name, script="--help.py"), tmp_path).program == ["./--help.py"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_name_that_a_scheduler_refuses_is_refused_here(name: str) -> None:
    """No name is changed silently, since the user would look for the one that was given."""
    recommendation = plan(26, 2, 8)

    for job_name in ["a b", "$(touch x)", "-x", "x-", "a" * 64, "../x", 'a"b', "é"]:
        with pytest.raises(ExportError, match="job_name"):
            export(recommendation, name, options=ExportOptions(job_name=job_name))


@pytest.mark.parametrize("name", IN_KUBERNETES)
def test_a_name_in_kubernetes_is_a_label(name: str) -> None:
    """It becomes a part of names of pods and of a Service, which allow less; a legal one is proposed."""
    for job_name in ["Run", "run_1", "run.1", "1run", "a" * 41]:
        with pytest.raises(ExportError, match=r"cannot name a job in Kubernetes.*is valid"):
            exported(name, job_name=job_name)


def test_nodes_share_the_processes_evenly_or_not_at_all() -> None:
    """16 processes are not spread over nodes of five, and the error names what is possible."""
    for name in LAUNCHERS:
        with pytest.raises(ExportError, match="must divide 16: use one of 1, 2, 4, 8, 16"):
            exported(name, 16, processes_per_node=5)


@pytest.mark.parametrize(("world_size", "per_node", "nodes"), [(12, 6, 2), (7, 7, 1), (11, 1, 11), (24, 8, 3)])
def test_nodes_have_at_most_eight_processes_by_default(world_size: int, per_node: int, nodes: int) -> None:
    """The largest divisor up to eight is taken."""
    trainer = document(exported("trainjob", world_size))["spec"]["trainer"]

    assert (trainer["numProcPerNode"], trainer["numNodes"]) == (per_node, nodes)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_training_on_the_cpu_asks_for_no_gpu(name: str) -> None:
    """Neither a device nor a node that has one."""
    for world_size in (2, 16):
        assert "gpu" not in exported(name, world_size, device=CPU).files[0].content.lower()


@pytest.mark.parametrize("name", ["kubernetes", "trainjob", "rayjob", "ray-jobs"])
def test_training_on_gpus_asks_for_one_per_process_of_a_node(name: str) -> None:
    """Requests, limits and what Ray may give away agree."""
    counts = numbers_of_gpus(document(exported(name, 8)))

    assert set(counts) - {"NVIDIA-H100-80GB-HBM3"} == {"8"}


def test_slurm_asks_for_a_gpu_per_process_of_a_node() -> None:
    """By the node, as the processes are."""
    lines = exported("slurm", 16).files[0].content.splitlines()

    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} < set(lines)


@pytest.mark.parametrize(
    ("device_name", "accelerators"),
    [
        ("NVIDIA H100 80GB HBM3", "H100:8"),
        ("NVIDIA A100-SXM4-40GB", "A100:8"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB:8"),
        ("Tesla T4", "T4:8"),
        ("a card that nobody knows", "80GB+:8"),
    ],
)
def test_skypilot_gets_its_own_name_of_the_card(device_name: str, accelerators: str) -> None:
    """For a card without such a name, memory is requested."""
    given = exported("skypilot", 8, device=H100.model_copy(update={"name": device_name}))

    assert document(given)["resources"]["accelerators"] == accelerators


def test_pods_wait_for_the_device_that_was_measured() -> None:
    """By the label that NVIDIA's feature discovery derives from the device's name; a warning says so."""
    given = exported("kubernetes")

    selector = document(given)["spec"]["template"]["spec"]["nodeSelector"]
    assert selector == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert "nodeSelector" in next(warning.message for warning in given.warnings if warning.code == "same-device")


@pytest.mark.parametrize(
    ("device_name", "resource"),
    [("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia.com/mig-1g.10gb"), ("AMD Instinct MI300X", "amd.com/gpu")],
)
def test_other_devices_have_other_names_in_kubernetes(device_name: str, resource: str) -> None:
    """A slice is requested as a slice, and AMD's cards by AMD's name; NVIDIA's label is not on their nodes."""
    spec = document(exported("kubernetes", device=H100.model_copy(update={"name": device_name})))["spec"]["template"]

    assert spec["spec"]["containers"][0]["resources"]["limits"] == {resource: "2"}
    assert "nodeSelector" not in spec["spec"]


@pytest.mark.parametrize("name", ["trainjob", "kubernetes", "rayjob"])
def test_readers_of_data_have_shared_memory(name: str) -> None:
    """A container's own 64 MiB are not enough for them."""
    content = exported(name).files[0].content

    assert "mountPath: /dev/shm" in content
    assert "medium: Memory" in content


def test_memory_on_the_cpu_is_that_of_all_processes_of_a_node() -> None:
    """What was measured and a tenth, and a gibibyte for each process itself."""
    headroom = Headroom(limit_bytes=4 * 1024**3, peak_bytes=1000 * 1024**2, free_bytes=0, free_fraction=0.0)

    given = export(plan(26, 2, 8, device=CPU, headroom=headroom), "slurm")

    assert f"#SBATCH --mem={2 * (1100 + 1024)}M\n" in given.files[0].content


@pytest.mark.parametrize("name", WITH_QUEUES)
def test_a_queue_is_named_where_its_scheduler_reads_it(name: str) -> None:
    """Kueue starts what was made suspended and has its label; Slurm reads a partition."""
    given = exported(name, queue="team-a")

    if name == "slurm":
        assert "#SBATCH --partition=team-a\n" in given.files[0].content
    elif name == "skypilot":
        assert document(given)["config"]["kubernetes"]["kueue"] == {"local_queue_name": "team-a"}
    else:
        kind = {"kubernetes": "Job", "trainjob": "TrainJob", "rayjob": "RayJob"}[name]
        job = document(given, kind)
        assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
        assert job["spec"]["suspend"] is True


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_queue_that_cannot_be_is_refused(name: str) -> None:
    """A hostile one, and any where there are no queues."""
    with pytest.raises(ExportError, match="queue"):
        exported(name, queue="a; rm -rf x" if name in WITH_QUEUES else "team-a")


@pytest.mark.parametrize("name", [*IN_KUBERNETES, "skypilot"])
def test_an_image_with_white_space_is_refused(name: str) -> None:
    """No registry has one."""
    with pytest.raises(ExportError, match="image 'a b' cannot name an image"):
        exported(name, image="a b")


def test_a_device_name_cannot_leave_its_comment_in_a_batch_script() -> None:
    """A line of its own would be a directive."""
    given = exported("slurm", device=H100.model_copy(update={"name": "x\n#SBATCH --wrap=y\u2028"}))

    (line,) = [line for line in given.files[0].content.splitlines() if "--wrap" in line]
    assert line.startswith(r"# Measured on x\n#SBATCH --wrap=y\u2028: add its type")


@pytest.mark.parametrize("world_size", [2, 16])
def test_a_rayjob_holds_no_field_that_kuberay_does_not_know(world_size: int) -> None:
    """Against the schema recorded from its sources; pods are read by Kubernetes' own models elsewhere."""
    schema = json.loads((Path(__file__).parent / "schemas" / "rayjob-1.4.json").read_text("utf-8"))

    jsonschema_rs.validate(schema, document(exported("rayjob", world_size, queue="team-a")))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_ray_entrypoint_reserves_its_devices_once(nodes: int) -> None:
    """On several nodes its tasks reserve them, so that the entrypoint must not."""
    request = document(exported("ray-jobs", 8 * nodes))

    assert request.get("entrypoint_num_gpus") == (8 if nodes == 1 else None)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_device_and_the_versions_are_warned_about(name: str) -> None:
    """The device and the versions of the probes, in every export."""
    messages = " ".join(warning.message for warning in exported(name).warnings)

    assert "measured on NVIDIA H100 80GB HBM3" in messages
    assert "memory differs between versions" in messages
