"""Code that runs inside the processes that ``batchwright.probing.supervisor`` starts. These modules import torch.

``fork_server`` imports torch once and forks a child for each task. ``worker`` runs the task: it builds the workload and
runs two updates under the memory limit. ``timing`` times the updates of a probe that compares plans.
``data_reading`` reads the data of a spec.
"""
