"""A tuning, from submission to recommendation, by clients that were generated from the OpenAPI document.

python tests/support/service/generated_clients.py GENERATOR URL

GENERATOR is ``openapi-python-client`` or ``openapi-generator``; the package it made, ``batchwright_client``, is on
PYTHONPATH. The key in BATCHWRIGHT_API_KEY, if there is one, is sent along. Prints what was found as JSON.
"""

import json
import os
import sys
from importlib import import_module
from typing import Any

PACKAGE = "batchwright_client"
EFFECTIVE_BATCH_SIZE = 100
MEMORY_LIMIT, MEMORY_LIMIT_BYTES = "2GiB", 2 * 1024**3
"""A field of two types: the clients send the text, and documents have the number."""
_WAIT_SECONDS = 10.0
_MOST_WAITS = 30
_ENDED = {"SUCCEEDED", "FAILED", "CANCELLED"}


def by_openapi_python_client(url: str, key: str | None) -> dict[str, Any]:
    """With functions, one per operation, and classes of attrs."""
    package, models = import_module(PACKAGE), import_module(f"{PACKAGE}.models")

    def call(operation: str, *arguments: object, **named: object) -> Any:
        module = import_module(f"{PACKAGE}.api.{operation}")
        answer = module.sync(*arguments, client=client, **named)
        if isinstance(answer, models.Problem):
            raise SystemExit(f"{operation}: {answer}")
        return answer

    client = package.AuthenticatedClient(base_url=url, token=key) if key else package.Client(base_url=url)
    mlp = models.Mlp(name="mlp", input_features=32)
    spec = models.WorkloadSpec(model=models.ReferenceModel(kind="reference", architecture=mlp))
    submission = models.TuningSubmission(
        spec=spec, effective_batch_size=EFFECTIVE_BATCH_SIZE, device="cpu", memory_limit_bytes=MEMORY_LIMIT
    )
    tuning = call("tunings.submit_tuning", body=submission)
    for _ in range(_MOST_WAITS):
        if tuning.state.value in _ENDED:
            break
        tuning = call("tunings.get_tuning", tuning.id, wait=_WAIT_SECONDS)
    found = call("recommendations.get_recommendation", tuning.recommendation_id)
    probes = call("tunings.list_probes", tuning.id)
    return _told(tuning.state.value, found, probes, found.request.memory_limit_bytes)


def by_openapi_generator(url: str, key: str | None) -> dict[str, Any]:
    """With a class per tag, and classes of pydantic."""
    package = import_module(PACKAGE)
    mlp = package.Architecture(package.Mlp(name="mlp", input_features=32))
    model = package.Model(package.ReferenceModel(kind="reference", architecture=mlp))
    submission = package.TuningSubmission(
        spec=package.Spec(package.WorkloadSpec(model=model)),
        effective_batch_size=EFFECTIVE_BATCH_SIZE,
        device="cpu",
        memory_limit_bytes=package.MemoryLimitBytes(MEMORY_LIMIT),
    )
    with package.ApiClient(package.Configuration(host=url, access_token=key)) as client:
        tunings = package.TuningsApi(client)
        tuning = tunings.submit_tuning(submission)
        for _ in range(_MOST_WAITS):
            if tuning.state.value in _ENDED:
                break
            tuning = tunings.get_tuning(tuning.id, wait=_WAIT_SECONDS)
        found = package.RecommendationsApi(client).get_recommendation(tuning.recommendation_id)
        limit = found.request.memory_limit_bytes.actual_instance
        return _told(tuning.state.value, found, tunings.list_probes(tuning.id), limit)


def _told(state: str, found: Any, probes: Any, memory_limit_bytes: object) -> dict[str, Any]:
    return {
        "state": state,
        "largest_micro_batch_size": found.largest_micro_batch_size,
        "micro_batch_sizes": found.plan.micro_batch_sizes,
        "effective_batch_size": found.plan.effective_batch_size,
        "probes": len(probes.items),
        "memory_limit_bytes": memory_limit_bytes,
    }


GENERATORS = {"openapi-python-client": by_openapi_python_client, "openapi-generator": by_openapi_generator}

if __name__ == "__main__":
    answer = GENERATORS[sys.argv[1]](sys.argv[2], os.environ.get("BATCHWRIGHT_API_KEY"))
    sys.stdout.write(json.dumps(answer) + "\n")
