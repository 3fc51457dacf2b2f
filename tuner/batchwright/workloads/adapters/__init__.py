"""Adapters of frozen transformers models, by the package peft: what is trained is small, and saved alone.

- ``lora`` injects the matrices of a spec's adapter into a model, and checks the names of its modules.
- ``quantized_base`` keeps the linear layers of the frozen base in 4 or 8 bits, before the adapter is injected.
- ``adapter_output`` tells what is trained from the frozen base, and writes the trained adapter as peft does.

Importing the package imports neither torch nor peft.
"""
