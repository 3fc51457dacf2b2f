"""Runs an exported script with the user's model, data and loss put in: `own_script.py train.py --updates 2`."""

import importlib.util
import sys

import torch
from counting import Counting, samples


def main() -> None:
    """As the user would after an edit of three functions."""
    spec = importlib.util.spec_from_file_location("train", sys.argv.pop(1))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model = Counting()
    optimize = torch.optim.AdamW

    def optimizer(*arguments: object, **named: object) -> torch.optim.Optimizer:
        made = optimize(*arguments, **named)  # type: ignore[arg-type] # whatever the script passes
        made.register_step_post_hook(model.updated)
        return made

    torch.optim.AdamW = optimizer  # type: ignore[assignment,misc] # to hear of its steps
    vars(script).update(build_model=lambda: model, build_data=samples)
    script.main()
    model.write()


main()
