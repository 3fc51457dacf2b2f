"""The examples in the OpenAPI document. A service gave the responses, and a test validates them all."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

RESPONSES: dict[str, dict[str, Any]] = json.loads(
    resources.files("batchwright_service.api").joinpath("examples.json").read_text(encoding="utf-8")
)
"""The examples by name: the `document` that an example is of, and its `value`."""

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
        "GPT-2, without the stored recommendation": {
            "value": {"spec": _GPT2, "effective_batch_size": 512, "fresh": True}
        },
        "GPT-2, wherever there is an H100": {
            "value": {"spec": _GPT2, "effective_batch_size": 512, "hardware": {"gpu": "H100-80GB"}}
        },
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


def response_content(name: str) -> dict[str, Any]:
    """Return the OpenAPI ``content`` of a response, with the example of that name."""
    return {"application/json": {"example": RESPONSES[name]["value"]}}
