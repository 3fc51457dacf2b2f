"""Secrets and signatures of Standard Webhooks (standardwebhooks.com, version 1: HMAC with SHA-256)."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

_PREFIX = "whsec_"
_SECRET_BYTES = 32
"""Standard Webhooks ask for 24 to 64 bytes."""


def new_secret() -> str:
    """Return a secret of 256 random bits."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def signed_headers(valid_secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a message: its id, the time in seconds since 1970, and a signature by each secret."""
    content = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{_signature(secret, content)}" for secret in valid_secrets),
    }


def _signature(secret: str, content: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    return base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
