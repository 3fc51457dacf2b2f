"""Parts of a spec's model that have a module of their own.

- ``adapter`` describes the LoRA adapter of a frozen model, and the quantisation of the frozen base.

``batchwright.schemas.workload`` imports the package, and has the models themselves. A further kind of adapter belongs
here. Pure data: neither torch nor peft is imported.
"""
