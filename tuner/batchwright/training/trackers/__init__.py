"""Where a run's figures are written beside its own progress: TensorBoard, Weights & Biases, MLflow.

- ``base``: the interface, and the run that trackers write of.
- ``figures``: the figures of an update, by name.
- ``tensorboard``, ``weights_and_biases``, ``mlflow``: one tracker each.
- ``requested_trackers``: the trackers of a request, and the handling of their failures.

Where a new tracker goes: a module here and its line in ``requested_trackers``, its name in ``schemas.requests``
(`TrackerName`), and an extra of that name in `pyproject.toml`, which installs the package of that name.
"""
