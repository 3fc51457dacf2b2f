"""Run by the launchers' own Python (`make test-exports`): reads exports with the launchers' own classes.

On standard input a list of `[reader, document]`; a document that loses a field on the way, or is refused, ends it.
"""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any


def kubernetes(name: str, document: Any) -> Any:
    """By a model made from the published OpenAPI schema, which drops fields that it does not know."""
    return getattr(import_module("kubeflow_trainer_api.models"), name).from_dict(document).to_dict()


def skypilot(document: Any) -> Any:
    """By SkyPilot's parser of tasks, which checks its own schema first and refuses fields that it does not know."""
    task = import_module("sky").Task.from_yaml_config(json.loads(json.dumps(document)))
    (resources,) = task.resources
    accelerators = ":".join(map(str, next(iter(resources.accelerators.items())))) if resources.accelerators else None
    read = {"name": task.name, "num_nodes": task.num_nodes, "envs": task.envs, "run": task.run}
    given = document["resources"].get("accelerators")
    if accelerators != given:
        raise SystemExit(f"SkyPilot read {accelerators} for {given}")
    return {**document, **read}


def ray_jobs(document: Any) -> Any:
    """By the class that Ray's API makes of a request, and by Ray's runtime environment."""
    import_module("ray.runtime_env").RuntimeEnv(**document["runtime_env"])
    return asdict(import_module("ray.dashboard.modules.job.common").JobSubmitRequest(**document))


def holds(read: Any, given: Any) -> bool:
    """Return whether everything given was read; defaults may be added."""
    if isinstance(given, dict):
        return isinstance(read, dict) and all(
            name in read and holds(read[name], value) for name, value in given.items()
        )
    if isinstance(given, list):
        return len(read) == len(given) and all(map(holds, read, given))
    return bool(read == given)


READERS = {"skypilot": skypilot, "ray-jobs": ray_jobs}


def main() -> None:
    """Read all."""
    for reader, document in json.load(sys.stdin):
        read = READERS[reader](document) if reader in READERS else kubernetes(reader, document)
        if not holds(read, document):
            raise SystemExit(f"{reader} read {read} for {document}")
        print("read")  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
