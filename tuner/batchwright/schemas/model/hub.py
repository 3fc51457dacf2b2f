"""Names of models on the Hugging Face hub."""

import re
from dataclasses import dataclass

from batchwright.schemas.field_errors import described_pattern

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
"""An organisation and a name, or a name alone, as `huggingface_hub` takes them."""
REVISION = described_pattern(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$", "must be a branch, a tag or a commit")


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        id: such as `openai-community/gpt2`.
        revision: branch, tag or commit; None for the branch `main`.
    """

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.id} at {self.revision}" if self.revision else self.id
