"""Commands that the operator of a service has registered, as callers see them. Pure data."""

from typing import Annotated

from pydantic import Field, JsonValue

from batchwright.schemas.base import Document, PositiveInt


class RegisteredCommand(Document):
    """A training command that callers may tune and run, with the arguments that they may give."""

    name: Annotated[str, Field(examples=["sft"])]
    """Name in specs: `model: {kind: command, name: ..., arguments: {...}}`."""
    title: str
    """Name in forms."""
    description: str
    """Purpose, in the words of the operator."""
    argv: tuple[str, ...]
    """The program and its arguments, with placeholders; `{argument:NAME}` stands for a value of a caller."""
    world_size: PositiveInt
    """Data-parallel ranks that the command starts."""
    probe_updates: PositiveInt
    """Optimizer updates after which a probe ends."""
    probe_timeout_seconds: float | None = None
    """Longest time limit of a probe that callers may ask for, and the default; none for that of all requests."""
    arguments: dict[str, JsonValue]
    """JSON Schema of `arguments`: an object with a property per argument."""


class CommandList(Document):
    """The registered commands."""

    items: tuple[RegisteredCommand, ...]
    """Commands by name; none where the operator has registered none."""
