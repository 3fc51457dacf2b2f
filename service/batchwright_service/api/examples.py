"""The examples in the OpenAPI document: requests, and the responses that `make openapi` has recorded."""

import json
from pathlib import Path
from typing import Any

_TUNING: dict[str, Any] = {
    "spec": {
        "model": {"kind": "reference", "architecture": {"name": "gpt", "layers": 4, "heads": 4, "width": 256}},
        "batch": {"sequence_length": 256},
        "precision": "fp32",
        "data": {"kind": "synthetic"},
    },
    "effective_batch_size": 256,
    "device": "cpu",
    "memory_limit_bytes": "1GiB",
}
_GPT2: dict[str, Any] = {
    "model": {"kind": "transformers", "task": "causal-lm", "config": {"model_type": "gpt2"}},
    "batch": {"sequence_length": 1024},
    "precision": "bf16-mixed",
}
_RECOMMENDATION = "rec_0192f3a1b2c3700089abcdef01234567"

REQUESTS: dict[str, dict[str, Any]] = {
    "TuningSubmission": {
        "a small GPT": {"value": _TUNING},
        "GPT-2, measured again": {"value": {"spec": _GPT2, "effective_batch_size": 512, "fresh": True}},
        "GPT-2 on any H100": {"value": {"spec": _GPT2, "effective_batch_size": 512, "hardware": {"gpu": "H100-80GB"}}},
    },
    "JobSubmission": {
        "a run": {
            "value": {
                "recommendation_id": _RECOMMENDATION,
                "training": {"updates": 200, "checkpoint_every": 50},
            }
        },
        "a dry run": {"value": {"recommendation_id": _RECOMMENDATION, "training": {"updates": 200}, "dry_run": True}},
    },
    "PriorityChange": {"before others": {"value": {"priority": 10}}},
    "BulkSubmission": {
        "delete two": {
            "value": {
                "action": "delete",
                "ids": ["tun_0192f3a1b2c3700089abcdef01234567", "tun_0192f3a1b2c3700089abcdef01234568"],
            }
        }
    },
    "KeySubmission": {
        "a scheduler": {
            "value": {"name": "scheduler", "scopes": ["tunings:read", "tunings:write"], "expires_in_days": 90}
        }
    },
    "WebhookSubmission": {
        "what failed in a project": {
            "value": {
                "url": "https://hooks.example.org/batchwright",
                "name": "on call",
                "events": ["tuning.failed", "job.failed"],
                "project": "language-models",
            }
        }
    },
    "EstimateRequest": {
        "GPT-2": {"value": {"spec": _GPT2, "gpus": ["H100-80GB", "A10G", "48GiB"], "effective_batch_size": 512}}
    },
}
"""The examples by document, then by name."""


def add_examples(paths: dict[str, Any]) -> None:
    """Add the examples to the ``paths`` of the document."""
    recorded = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
    for path, operations in paths.items():
        for method, operation in operations.items():
            for status, example in recorded.get(f"{method.upper()} {path}", {}).items():
                operation["responses"][status]["content"]["application/json"]["example"] = example
            for body in operation.get("requestBody", {}).get("content", {}).values():
                if named := REQUESTS.get(body["schema"].get("$ref", "").rpartition("/")[2]):
                    body["examples"] = named
