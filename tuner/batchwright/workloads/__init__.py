"""Build what is trained: a spec becomes a model, a worst-case batch and named loss terms.

``build`` chooses by `model.kind` of the spec:

1. `reference`: ``reference`` has small models in plain torch, for tests and demos;
2. `transformers`: ``hugging_face`` builds an architecture from a configuration with random weights; ``pretrained``
   reads and writes folders of configuration and weights; ``adapters`` has LoRA; ``speech`` and ``contrastive`` have the
   tasks with audio and with pairs; ``config_fields`` checks the fields of a configuration and ``config_safety`` the
   built one; ``causal`` has the decoders that predict the next token;
3. `python`: the factory that the user names is called.

``base`` is the contract: the protocol of a workload, whose losses are sums with their weight, never means.
``casting`` converts a model to another floating-point type. ``preload`` lists the modules to import before memory is
measured, ``required_packages`` the optional packages of a spec and of a run's trackers.

Where a new thing goes: a kind of model, ``batchwright.schemas.workload`` (its document), a module here, and a case in
``build``; a task of transformers, ``hugging_face``; a part of the contract, ``base``, as an optional protocol.

The package may import ``schemas`` and ``system``, neither ``hardware`` nor ``planning``. Most modules import torch;
``preload``, ``config_fields`` and ``required_packages`` do not, nor does importing the package.
"""
