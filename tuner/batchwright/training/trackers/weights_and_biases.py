"""Runs of Weights & Biases.

The library's own variables apply (``WANDB_API_KEY``, ``WANDB_BASE_URL``, ``WANDB_PROJECT``, ``WANDB_ENTITY``,
``WANDB_MODE``). Without a key and a mode, the run is offline: its files are in the run's folder, and ``wandb sync``
uploads them.
"""

import os
import uuid
from collections.abc import Mapping
from importlib import import_module

from batchwright.schemas.training import RunOutcome
from batchwright.training.trackers.base import TrackedRun

_PROJECT = "batchwright"


class WeightsAndBiases:
    """Writes a run that a resumed process goes on with.

    The figures' axis is ``update``, not wandb's own step, which cannot go back to the update of a checkpoint.
    """

    def __init__(self, run: TrackedRun) -> None:
        wandb = import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            dir=str(run.paths.directory),
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=run.ids().get("wandb") or run.keep_id("wandb", uuid.uuid4().hex),
            name=run.name,
            resume="allow",
            mode=mode,
            config=dict(run.settings),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
        self._run.define_metric("*", step_metric="update")

    def begin(self, resumed_from: int) -> None:
        """Do nothing: updates that are made again are shown again."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Write figures."""
        self._run.log({"update": update, **figures})

    def close(self, outcome: RunOutcome) -> None:
        """Finish the run; one that was stopped is resumed under the same id."""
        self._run.finish(exit_code=1 if outcome is RunOutcome.FAILED else 0)
