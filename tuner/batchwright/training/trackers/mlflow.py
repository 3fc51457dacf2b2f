"""Runs of MLflow.

The library's own variables apply (``MLFLOW_TRACKING_URI`` and those of its authentication,
``MLFLOW_EXPERIMENT_NAME``). Without a server's address, the run is in a database of its folder, which ``mlflow ui
--backend-store-uri sqlite:///FOLDER/mlflow.db`` shows.
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from batchwright.schemas.training import RunOutcome
from batchwright.training.trackers.base import TrackedRun

_EXPERIMENT = "batchwright"
_MOST_UNWRITTEN = 1000
"""Queue length before logging blocks training."""
_STATUS = {RunOutcome.SUCCEEDED: "FINISHED", RunOutcome.STOPPED: "KILLED", RunOutcome.FAILED: "FAILED"}


class MLflow:
    """Writes a run that a resumed process goes on with."""

    def __init__(self, run: TrackedRun) -> None:
        tracking = import_module("mlflow.tracking")
        self._entities = import_module("mlflow.entities")
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.paths.mlflow.absolute()}"
        self._client: Any = tracking.MlflowClient(tracking_uri=address)
        self._id = run.ids().get("mlflow") or self._new(run)
        self._client.update_run(self._id, status="RUNNING")
        self._unwritten: deque[Any] = deque()
        """Operations of the newest figures, which MLflow writes in a thread of its own."""

    def _new(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        identifier = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        made = str(self._client.create_run(identifier, run_name=run.name).info.run_id)
        parameters = [self._entities.Param(key, str(value)) for key, value in run.settings.items()]
        self._client.log_batch(made, params=parameters)
        return run.keep_id("mlflow", made)

    def begin(self, resumed_from: int) -> None:
        """Do nothing: updates that are made again are shown again."""

    def log(self, update: int, figures: Mapping[str, float]) -> None:
        """Write figures. A server gets them while training goes on."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, update) for name, value in figures.items()]
        self._unwritten.append(self._client.log_batch(self._id, metrics=metrics, synchronous=False))
        if len(self._unwritten) > _MOST_UNWRITTEN:
            self._unwritten.popleft().wait()

    def close(self, outcome: RunOutcome) -> None:
        """Wait until all figures are written, and set the run's status."""
        while self._unwritten:  # `mlflow.flush_async_logging` opens another store, in the current folder
            self._unwritten.popleft().wait()
        self._client.set_terminated(self._id, _STATUS[outcome])
