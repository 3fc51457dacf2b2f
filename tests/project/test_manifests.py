"""Compose file, Kubernetes manifests and image: in step with each other, hardened, with probes that can pass."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from batchwright.estimation.cuda_shim import Shim
from batchwright.system.own_variables import OTHER_VARIABLES
from batchwright_service.api.authentication import HEALTH_PATHS
from batchwright_service.settings import Settings
from tests.support.paths import ROOT

DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if name != "postgres"}
MANIFESTS: list[dict[str, Any]] = [
    document
    for file in ("batchwright.yaml", "servicemonitor.yaml", "raycluster.yaml")
    for document in yaml.safe_load_all((ROOT / "docker/kubernetes" / file).read_text())
]
TEMPLATES = {it["metadata"]["name"]: it["spec"]["template"] for it in MANIFESTS if "template" in it.get("spec", {})}
(RAY_CLUSTER,) = (document for document in MANIFESTS if document["kind"] == "RayCluster")
RAY_WORKERS = {
    f"{RAY_CLUSTER['metadata']['name']}-{group['groupName']}": group["template"]
    for group in RAY_CLUSTER["spec"]["workerGroupSpecs"]
}
TEMPLATES |= {"batchwright-ray-head": RAY_CLUSTER["spec"]["headGroupSpec"]["template"], **RAY_WORKERS}
WORKLOADS = {name: template["spec"] for name, template in TEMPLATES.items()}
GRACE_SECONDS = Settings.model_fields["shutdown_grace_seconds"].default


def variables() -> Iterator[str]:
    """The settings that the manifests make."""
    for service in OURS.values():
        yield from service["environment"]
    for manifest in MANIFESTS:
        yield from manifest.get("data", {})
    for pod in WORKLOADS.values():
        for container in pod["containers"]:
            yield from (variable["name"] for variable in container.get("env", ()))


def test_every_source_of_the_image_is_sent_to_its_build() -> None:
    """The list of what is sent has every file and folder that the Dockerfile copies."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE)
    named = {word.split("/")[0] for line in copied for word in line.split()}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert named == sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_build_reads_a_field_that_there_is() -> None:
    """The compiled stand-in for a card is checked by a field of its class."""
    (field,) = re.findall(r"load_shim\(\)\.(\w+)", DOCKERFILE)
    assert field in {it.name for it in dataclasses.fields(Shim)}


def test_sources_come_after_torch() -> None:
    """An edit of ours fetches neither torch nor another package again, and no compiler is in the last stage."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    (torch,) = (number for number, stage in enumerate(stages) if re.search(r"PIP_OPTIONS torch$", stage, re.MULTILINE))
    (sources,) = (number for number, stage in enumerate(stages) if "COPY tuner tuner" in stage)
    assert torch < sources
    assert "apt-get" not in stages[-1]


def test_both_images_are_built_with_a_bill_of_materials() -> None:
    """`docker buildx bake` builds `batchwright` and `batchwright:cpu`, the latter by arguments of the Dockerfile."""
    bake = json.loads((ROOT / "docker/bake.json").read_text())
    targets = bake["target"]
    assert {targets[name]["tags"][0] for name in bake["group"]["default"]["targets"]} == {
        "batchwright:latest",
        "batchwright:cpu",
    }
    assert "type=sbom" in targets["cuda"]["attest"]
    given = {name for target in targets.values() for name in target.get("args", {})}
    assert given <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, flags=re.MULTILINE))


def test_every_image_of_a_manifest_is_built() -> None:
    """Compose and Kubernetes run images that bake.json names."""
    targets = json.loads((ROOT / "docker/bake.json").read_text())["target"]
    built = {target["tags"][0] for target in targets.values()}
    pods = [
        container for pod in WORKLOADS.values() for container in (*pod.get("initContainers", ()), *pod["containers"])
    ]
    defaults = re.findall(r":-([\w:-]+)\}", (ROOT / "docker/compose.yaml").read_text())
    named = {container["image"] for container in pods} | {
        image if ":" in image else f"{image}:latest" for image in defaults
    }
    assert named == built


def test_the_ray_cluster_has_fields_that_kuberay_knows() -> None:
    """Of the recorded part of its schema, with Ray's version in the images; only token holders submit jobs."""
    schema = json.loads((Path(__file__).parent / "schemas/raycluster-1.5.json").read_text())
    jsonschema_rs.validate(schema, RAY_CLUSTER)
    installed = re.search(r"^ray==(\S+)", (ROOT / "requirements/image-ray.txt").read_text(), flags=re.MULTILINE)
    assert installed is not None
    assert RAY_CLUSTER["spec"]["rayVersion"] == installed[1]
    assert RAY_CLUSTER["spec"]["authOptions"] == {"mode": "token"}


def test_jobs_of_a_ray_node_share_no_port() -> None:
    """Several run in one pod: a port of metrics would be taken by the first."""
    (config,) = (manifest["data"] for manifest in MANIFESTS if manifest["kind"] == "ConfigMap")
    names = {
        variable["name"]
        for template in RAY_WORKERS.values()
        for variable in template["spec"]["containers"][0].get("env", ())
    }
    assert not any("METRICS" in name for name in (*config, *names))


def test_every_variable_is_a_setting() -> None:
    """A variable that nothing reads would refuse the start."""
    ours = {name for name in variables() if name.startswith("BATCHWRIGHT_")}
    assert len(ours) > 6
    assert ours - OTHER_VARIABLES <= {f"BATCHWRIGHT_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_has_read_only_roots_and_time_to_stop(name: str) -> None:
    """No root can be written, and a job has time for its checkpoint."""
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert int(service["stop_grace_period"].removesuffix("s")) > GRACE_SECONDS
    if name in OURS:
        assert service["cap_drop"] == ["ALL"]
        assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])  # noqa: S108 - in a container


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_are_restricted_and_have_time_to_stop(name: str) -> None:
    """As the Pod Security Standard `restricted` asks, with a read-only root and every mount declared."""
    pod = WORKLOADS[name]
    assert pod["terminationGracePeriodSeconds"] > GRACE_SECONDS
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["enableServiceLinks"] is False
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        context = container["securityContext"]
        assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert "memory" in container["resources"]["limits"]


def test_probes_ask_routes_that_any_host_name_may_ask() -> None:
    """An API is asked over HTTP, ready by its database alone; a worker by the command that knows its process."""
    (api,), (worker,) = (WORKLOADS[f"batchwright-{it}"]["containers"] for it in ("api", "worker"))
    paths = {probe: api[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert set(paths.values()) <= HEALTH_PATHS
    assert paths["readinessProbe"] == "/readyz/database"
    assert worker["livenessProbe"]["exec"]["command"] == ["batchwright", "health"]
    assert 'CMD ["batchwright", "health"]' in DOCKERFILE


def test_logs_and_checkpoints_are_where_the_api_reads_them() -> None:
    """API and workers mount one folder of runs."""
    assert all(any(volume.endswith(":/runs") for volume in service["volumes"]) for service in OURS.values())
    for pod in (pod for name, pod in WORKLOADS.items() if name != "batchwright-ray-head"):  # which runs no work
        (runs,) = (volume for volume in pod["volumes"] if volume["name"] == "runs")
        assert runs["persistentVolumeClaim"]["claimName"] == "batchwright-runs"


def test_the_first_key_comes_from_a_secret() -> None:
    """It is a file, in no variable and no argument."""
    assert "admin-key" in COMPOSE["secrets"]
    (api,) = WORKLOADS["batchwright-api"]["containers"]
    (mounted,) = (mount["mountPath"] for mount in api["volumeMounts"] if mount["name"] == "admin")
    named = {variable["name"]: variable["value"] for variable in api["env"]}
    assert Path(named["BATCHWRIGHT_ADMIN_KEY_FILE"]).parent == Path(mounted)


def test_the_chart_has_the_version_of_the_project() -> None:
    """A release of one is a release of the other."""
    chart = yaml.safe_load((ROOT / "docker/chart/Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_selectors_find_the_pods() -> None:
    """Services, budgets, policies and monitors select labels that pods or Services have."""
    labels = [template["metadata"]["labels"] for template in TEMPLATES.values()]
    labels.append({"ray.io/cluster": RAY_CLUSTER["metadata"]["name"]})  # by KubeRay
    for manifest in MANIFESTS:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector)
        if wanted:
            assert any(wanted.items() <= it.items() for it in labels), manifest["metadata"]["name"]


def test_the_alerts_of_the_cluster_are_those_of_the_documents() -> None:
    """The chart takes the file that docs/alerts.md explains, and evaluates nothing in its templates of alerts."""
    rule = yaml.safe_load((ROOT / "docker/kubernetes/prometheusrule.yaml").read_text())
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load((ROOT / "docs/operations/alerts.yml").read_text())
    assert (ROOT / "docker/chart/alerts.yml").samefile(ROOT / "docs/operations/alerts.yml")
