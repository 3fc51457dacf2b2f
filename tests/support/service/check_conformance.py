"""Every tool that the API and the manifests must please, pinned: what ``make conformance`` runs.

Exit status 1 when one is not pleased.

python tests/support/service/check_conformance.py TOOLS [--max-examples 20] [--only NAME]

TOOLS is the folder into which the Makefile has put what is no package of ours: ``python`` (openapi-generator-cli, and
Grafana's models of a dashboard),
``node`` (Spectral, Redocly, models of the Prometheus operator), ``prometheus`` (promtool), ``manifests``
(docker-compose, kubernetes-validate, helm, hadolint and tally).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from tests.support.paths import ROOT
from tests.support.service.conformance import (
    DOCUMENT,
    Service,
    complete_a_tuning,
    fuzz,
    generate_by_openapi_python_client,
    metrics,
    real_service,
    scripted_service,
    started,
)
from tests.support.service.generated_clients import PACKAGE

LEAST_CASES = 2_000
_CHART = ROOT / "docker/chart"
_PLAIN = {
    ROOT / "docker/kubernetes/batchwright.yaml": (),
    ROOT / "docker/kubernetes/servicemonitor.yaml": ("--set=serviceMonitor.enabled=true",),
    ROOT / "docker/kubernetes/prometheusrule.yaml": ("--set=prometheusRule.enabled=true",),
    ROOT / "docker/kubernetes/raycluster.yaml": ("--set=ray.enabled=true",),
}
"""The plain manifests, with the options by which the chart renders them."""
_WORKER = {"replicas": 1, "nodeSelector": {}, "tolerations": [], "resources": {}, "sharedMemory": "1Gi"}
_OTHER_WORKERS = json.dumps(
    [
        {**_WORKER, "name": "h100", "image": "batchwright:latest", "gpus": 8, "nodeSelector": {"node": "h100"}},
        {**_WORKER, "name": "cpu", "image": "batchwright:cpu", "gpus": 0},
    ]
)
_RAY_GROUP = {**_WORKER, "name": "cpu", "image": "batchwright:ray-cpu", "gpus": 0, "maxReplicas": 4}
_ON_RAY = (
    "--set=ray.enabled=true",
    "--set=ray.autoscaling=true",
    "--set=serviceMonitor.enabled=true",
    "--set-json=workers=[]",
    f"--set-json=ray.groups={json.dumps([_RAY_GROUP])}",
)
_RAY_CLUSTER = json.loads((ROOT / "tests/project/schemas/raycluster-1.5.json").read_text())
_PROMETHEUS_OPERATOR = "monitoring.coreos.com/v1"
_VALIDATED = f"""
const document = JSON.parse(process.argv[2]);
const resources = await import("@kubernetes-models/prometheus-operator/{_PROMETHEUS_OPERATOR}/" + document.kind);
new resources[document.kind](document).validate();
"""
"""A module that raises when a resource breaks its schema of the Prometheus operator."""
_NO_RULE_OF_BUILDKIT = {"buildkit/InvalidDefinitionDescription"}
"""Rules that `docker build --check` leaves out unless they are asked for."""


_LOST_BY_GRAFANA = """
import json, pathlib, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

def lost(given, read, path):
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from lost(value, read.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (value, found) in enumerate(zip(given, read)):
            yield from lost(value, found, f"{path}[{number}]")
    elif given != read:
        yield path

register_default_plugins()
document = json.loads(pathlib.Path(sys.argv[1]).read_text())
read = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
print(json.dumps(list(lost(document, read, ""))))
"""
"""A program that prints the fields of a dashboard that Grafana's own models do not have."""


class Displeased(Exception):  # noqa: N818 - it is said of a tool
    """The findings of a tool."""


@dataclass(frozen=True)
class Checks:
    """The checks, each of which says what it saw, or raises."""

    tools: Path
    folder: Path
    max_examples: int

    def spectral(self) -> str:
        """The document, by every rule that Spectral recommends."""
        found = json.loads(_said([self._node("spectral"), "lint", "--quiet", "-f", "json", str(DOCUMENT)], {0, 1}))
        errors = [error for error in found if error["severity"] == 0]
        _refuse(
            errors, [f"{'.'.join(map(str, error['path']))}: {error['code']}: {error['message']}" for error in errors]
        )
        return f"no error, {len(found) - len(errors)} warnings"

    def redocly(self) -> str:
        """The document, by every rule that Redocly recommends."""
        said = _said([self._node("redocly"), "lint", "--format=json", str(DOCUMENT)], {0, 1})
        found = json.loads(said[said.index("{") : said.rindex("}") + 1])
        _refuse(
            found["totals"]["errors"], [f"{finding['ruleId']}: {finding['message']}" for finding in found["problems"]]
        )
        return f"no error, {found['totals']['warnings']} warnings"

    def schemathesis(self, *, keys: bool, sends_key: bool) -> str:
        """Made-up requests to a running service, whose probes are scripted; all phases, all checks."""
        folder = self._new_folder()
        with started(scripted_service(folder), folder, keys=keys) as service:
            arguments = ["--seed", "1", "--max-examples", str(self.max_examples)]
            found = fuzz(service, folder, key=service.key if sends_key else None, arguments=arguments)
        _refuse(found.failures, [found.output])
        if found.cases < LEAST_CASES or "fail" in str(found.phases):
            raise Displeased(f"{found.cases} cases, phases {found.phases}:\n{found.output[-3000:]}")
        return f"{found.cases} cases, no failure; phases: {found.phases}"

    def python_client(self) -> str:
        """A client by openapi-python-client completes a tuning of the CPU."""
        folder = self._new_folder()
        generate_by_openapi_python_client(folder)
        return self._tuned(sys.executable, "openapi-python-client", folder)

    def generator_client(self) -> str:
        """A client by openapi-generator-cli does."""
        folder = self._new_folder()
        python = self.tools / "python" / "bin"
        target = ["-g", "python", "--package-name", PACKAGE, "-o", str(folder)]
        _said([str(python / "openapi-generator-cli"), "generate", "-i", str(DOCUMENT), *target], {0})
        return self._tuned(str(python / "python"), "openapi-generator", folder)

    def promtool(self) -> str:
        """The metrics, after a tuning."""
        folder = self._new_folder()
        generate_by_openapi_python_client(folder)
        with started(real_service(), folder, keys=False) as service:
            complete_a_tuning(sys.executable, "openapi-python-client", folder, service)
            text = metrics(service)
        return self._checked(text)

    def alerts(self) -> str:
        """The alert rules, by promtool and their unit tests."""
        tested = ROOT / "tests/service/observability/alerts_test.yml"
        said = _said([self._promtool(), "check", "rules", str(ROOT / "docs/operations/alerts.yml")], {0})
        _said([self._promtool(), "test", "rules", str(tested)], {0})
        return said.splitlines()[1].strip()

    def grafana(self) -> str:
        """The dashboard, by Grafana's own models of it: a field that they do not have is lost on the way through."""
        file = ROOT / "docs/operations/grafana.json"
        python = str(self.tools / "python" / "bin" / "python")
        lost = json.loads(_said([python, "-c", _LOST_BY_GRAFANA, str(file)], {0}))
        _refuse(lost, [f"Grafana knows no {path}" for path in lost])
        return f"{len(json.loads(file.read_text())['panels'])} panels, every field known"

    def compose(self) -> str:
        """docker/compose.yaml, with every profile, by Compose itself; the secrets that it names are made here."""
        folder = Path(shutil.copytree(ROOT / "docker", self._new_folder() / "docker"))
        names = ("postgres-password", "pgpass", "admin-key")
        (folder / "secrets").mkdir(exist_ok=True)
        for name in names:
            (folder / "secrets" / name).touch()
        command = [str(self.tools / "manifests/bin/docker-compose"), "--file", str(folder / "compose.yaml")]
        text = _said([*command, "--profile", "*", "config", "--format", "json"], {0})
        services = json.loads(text)["services"]
        _refuse(set(services) != {"postgres", "api", "worker", "worker-gpu"}, [f"the services are {sorted(services)}"])
        writable = [name for name, service in services.items() if not service.get("read_only")]
        _refuse(writable, [f"the root can be written: {', '.join(writable)}"])
        return f"{len(services)} services"

    def kubernetes(self) -> str:
        """The plain manifests are those of the chart; both are read by the schemas of Kubernetes, strictly."""
        stale = [
            path
            for path, options in _PLAIN.items()
            if path.read_text() != self._chart(f"--show-only=templates/{path.name}", *options)
        ]
        _refuse(stale, ["docker/kubernetes is not what the chart renders: run `make manifests`"])
        texts = [path.read_text() for path in _PLAIN]
        texts += [self._chart(f"--set-json=workers={_OTHER_WORKERS}"), self._chart(*_ON_RAY)]
        documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
        known = [schematic for document in documents for schematic in self._known_to_kubernetes(document)]
        (file := self._new_folder() / "all.yaml").write_text(yaml.safe_dump_all(known))
        command = [str(self.tools / "manifests/bin/kubernetes-validate"), "--strict", str(file)]
        validated = len(_said(command, {0}).splitlines())
        _refuse(validated != len(known), [f"{validated} of {len(known)} were validated"])
        return f"{len(documents)} manifests"

    def _known_to_kubernetes(self, document: dict[str, Any]) -> list[dict[str, Any]]:
        """Check a resource of an operator by the operator's schema, and return what Kubernetes has a schema of."""
        if document["apiVersion"] == _PROMETHEUS_OPERATOR:
            (module := self.tools / "node" / "validated.mjs").write_text(_VALIDATED)
            _said(["node", str(module), json.dumps(document)], {0})
            return []
        if document["kind"] == "RayCluster":
            errors = list(jsonschema_rs.validator_for(_RAY_CLUSTER).iter_errors(document))
            _refuse(errors, [f"{error.instance_path}: {error.message}" for error in errors])
            groups = [document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]]
            return [
                {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}, "template": group["template"]}
                for group in groups
            ]
        return [document]

    def dockerfile(self) -> str:
        """docker/Dockerfile, by BuildKit's parser and the rules of `docker build --check`, and by hadolint."""
        file = str(ROOT / "docker/Dockerfile")
        programs = self.tools / "manifests/bin"
        _said([str(programs / "hadolint"), "--no-color", file], {0})
        command = [str(programs / "tally"), "lint", "--no-config", "--select", "buildkit/*", "--format", "json"]
        found = json.loads(_said([*command, "--ignore", "tally/*,hadolint/*", "--slow-checks", "off", file], {0, 1}))
        violations = [finding for result in found["files"] for finding in result["violations"]]
        wrong = [it for it in violations if it["rule"] not in _NO_RULE_OF_BUILDKIT]
        _refuse(wrong, [f"line {it['location']['start']['line']}: {it['rule']}: {it['message']}" for it in wrong])
        _refuse(found["files_scanned"] != 1, ["tally read no file"])
        return "no finding"

    def helm(self) -> str:
        """The chart, by Helm's own strict rules; a misspelt value is refused."""
        helm = str(self.tools / "manifests/bin/helm")
        _said([helm, "lint", "--strict", str(_CHART)], {0})
        try:
            self._chart("--set=api.replica=3")
        except Displeased as refused:
            _refuse("replica" not in str(refused), [str(refused)])
            return "no finding, and a misspelt value is refused"
        raise Displeased("a misspelt value is not refused")

    def _chart(self, *options: str) -> str:
        helm = str(self.tools / "manifests/bin/helm")
        return _said([helm, "template", "batchwright", str(_CHART), "--namespace", "batchwright", *options], {0})

    def _promtool(self) -> str:
        return shutil.which("promtool") or str(self.tools / "prometheus" / "usr" / "bin" / "promtool")

    def _checked(self, text: str) -> str:
        command = [self._promtool(), "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        _refuse(done.returncode or done.stdout + done.stderr, [done.stdout + done.stderr])
        return f"{sum(not line.startswith('#') for line in text.splitlines())} samples, clean"

    def _tuned(self, python: str, generator: str, folder: Path) -> str:
        def tune(service: Service) -> int:
            found: int = complete_a_tuning(python, generator, folder, service)["largest_micro_batch_size"]
            return found

        sizes = []
        for keys in (False, True):
            data = self._new_folder()
            with started(real_service(), data, keys=keys) as service:
                sizes.append(tune(service))
        return f"micro-batches of {sizes[0]} without keys, of {sizes[1]} with one"

    def _node(self, name: str) -> str:
        return str(self.tools / "node" / "node_modules" / ".bin" / name)

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))


def _said(command: list[str], statuses: set[int]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in statuses:
        raise Displeased(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _refuse(wrong: object, said: list[str]) -> None:
    if wrong:
        raise Displeased("\n".join(said))


def all_checks(checks: Checks) -> dict[str, Callable[[], str]]:
    """By name."""
    return {
        "spectral": checks.spectral,
        "redocly": checks.redocly,
        "openapi-python-client": checks.python_client,
        "openapi-generator-cli": checks.generator_client,
        "promtool": checks.promtool,
        "alerts": checks.alerts,
        "grafana": checks.grafana,
        "compose": checks.compose,
        "dockerfile": checks.dockerfile,
        "helm": checks.helm,
        "kubernetes": checks.kubernetes,
        "schemathesis-with-a-key": partial(checks.schemathesis, keys=True, sends_key=True),
        "schemathesis-no-keys": partial(checks.schemathesis, keys=False, sends_key=False),
        "schemathesis-stranger": partial(checks.schemathesis, keys=True, sends_key=False),
    }


def main() -> None:
    """Run them all, whatever one of them says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", type=Path)
    parser.add_argument("--max-examples", type=int, default=20, help="of schemathesis, for each operation")
    parser.add_argument("--only", help="one check, by its name")
    options = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        checks = all_checks(Checks(options.tools.resolve(), Path(folder), options.max_examples))
        if options.only and options.only not in checks:
            parser.error(f"no check is named {options.only}: {', '.join(checks)}")
        for name in [options.only] if options.only else checks:
            began = time.monotonic()
            try:
                said = checks[name]()
            except (Displeased, RuntimeError, OSError) as error:
                failed.append(name)
                said = f"FAILED\n{error}"
            sys.stdout.write(f"{name} ({time.monotonic() - began:.0f} s): {said}\n")
            sys.stdout.flush()
    sys.exit(f"not pleased: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
