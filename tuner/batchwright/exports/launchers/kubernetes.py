"""Kubernetes without an operator: a Job, or for several nodes an Indexed Job with a headless Service."""

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput
from batchwright.exports.launchers.pod_spec import (
    RESTARTS,
    Fields,
    container,
    literal,
    manifest,
    pod,
    pod_warnings,
)
from batchwright.exports.launchers.topology import (
    PORT,
    Launch,
    c10d,
    command_lines,
    launch_of,
    restart_resumes,
    slices,
    torchrun,
    torchrun_on_one_node,
)
from batchwright.exports.rendering import yaml_file

_FIRST_NODE = 'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then first=true; else first=false; fi\n'


def _write(context: ExportContext) -> TargetOutput:
    launch = launch_of(context, kubernetes=True)
    job = _job(context, launch)
    documents = (job,) if launch.nodes == 1 else (_service(launch), job)
    warnings = pod_warnings(context, launch) | restart_resumes("A failed pod's successor") | slices(launch)
    files = (yaml_file("job.yaml", context, *documents),)
    return TargetOutput(files, ("kubectl", "create", "-f", "job.yaml"), warnings)


def _job(context: ExportContext, launch: Launch) -> Fields:
    job = manifest(context, launch, ("batch/v1", "Job"), {"backoffLimit": RESTARTS * launch.nodes})
    if launch.nodes > 1:
        job["spec"] |= {"completionMode": "Indexed", "completions": launch.nodes, "parallelism": launch.nodes}
    job["spec"]["template"] = {"spec": _pod(context, launch)}
    return job


def _pod(context: ExportContext, launch: Launch) -> Fields:
    if launch.nodes == 1:
        command: list[JsonValue] = [literal(word) for word in torchrun_on_one_node(launch)]
        return pod(launch, container(context, launch, "trainer", command=command), restartPolicy="Never")
    rendezvous = c10d(f"{launch.name}-0.{launch.name}:{PORT}", job=launch.name, is_host="$first")
    # A shell has to detect the first node. The program is its positional arguments, so that nothing of it is expanded.
    script = _FIRST_NODE + command_lines((*torchrun(launch, rendezvous), '"$@"'), before="exec ")
    command = [literal(word) for word in ("/bin/sh", "-c", script, "torchrun", *launch.program)]
    ports: list[JsonValue] = [{"name": "rendezvous", "containerPort": PORT}]
    trainer = container(context, launch, "trainer", command=command, ports=ports)
    return pod(launch, trainer, restartPolicy="Never", subdomain=launch.name)


def _service(launch: Launch) -> dict[str, JsonValue]:
    """The Service that gives each pod a name, also before the pod is ready, because pods connect before that."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": launch.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": launch.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


TARGET = Target(
    name="kubernetes",
    title="Kubernetes Job",
    kind="launcher",
    versions=("1.37",),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node", "queue", "image"}),
    write=_write,
    checked="read by kubectl and by models of Kubernetes' published schema; its command run by torchrun on the CPU",
)
