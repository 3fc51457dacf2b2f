"""Ray Jobs: the body of a request to a running cluster's HTTP API."""

from pydantic import JsonValue

from batchwright.exports.base import ExportContext, Target, TargetOutput, Warnings
from batchwright.exports.launchers.ray_common import (
    entrypoint,
    entrypoint_resources,
    ray_warnings,
    runtime_environment,
)
from batchwright.exports.launchers.topology import (
    Launch,
    launch_of,
    output_in_container,
    required_files,
    same_device,
    same_versions,
    slices,
    without_queue,
)
from batchwright.exports.rendering import json_file

_POST = ("curl", "--fail-with-body", "--header", "Content-Type: application/json", "--data-binary", "@ray_job.json")


def _write(context: ExportContext) -> TargetOutput:
    without_queue(context, "Ray Jobs")
    launch = launch_of(context, has_folder=False)
    command = (*_POST, "http://127.0.0.1:8265/api/jobs/")
    return TargetOutput((json_file("ray_job.json", _request(context, launch)),), command, _warnings(context, launch))


def _request(context: ExportContext, launch: Launch) -> dict[str, JsonValue]:
    return {
        "entrypoint": entrypoint(launch),
        "submission_id": launch.name,
        "runtime_env": runtime_environment(launch),
        "metadata": {"batchwright_recommendation": context.recommendation.id},
        **entrypoint_resources(launch, cpus="entrypoint_num_cpus", gpus="entrypoint_num_gpus"),
    }


def _warnings(context: ExportContext, launch: Launch) -> Warnings:
    found = {
        "working-directory": f"The cluster has to find {required_files(launch)}: in its image, or in a "
        "`runtime_env.working_dir` that you add (a URI; `ray job submit` uploads a folder). The command posts to a "
        "dashboard on this host.",
        "submission-id": f"Ray refuses a second job with the submission_id {launch.name}, also after the first one "
        "failed: start it again under another `job_name`, or delete the first. A new job resumes from its own "
        "checkpoint.",
    }
    found |= output_in_container(launch) | same_device(launch) | same_versions(context, "The cluster's nodes")
    return found | ray_warnings(launch) | slices(launch)


TARGET = Target(
    name="ray-jobs",
    title="Ray Jobs request",
    kind="launcher",
    versions=("2.60",),
    repeats_one_size=False,
    takes=frozenset({"script", "job_name", "processes_per_node"}),
    write=_write,
    checked="run by a Ray cluster on the CPU, on one node and two",
)
