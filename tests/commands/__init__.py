"""Tests of ``batchwright.commands``, and of whole programs that are tuned as commands.

`programs/` has programs as users write them, which import torch or a framework, and nothing of this project. They are
listed in `program_list.py`, each as it is started. Those of frameworks are run by `make test-commands`.
"""
