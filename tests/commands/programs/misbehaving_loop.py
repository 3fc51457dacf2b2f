"""Users' loops that do what a prober may not expect, one way each: `misbehaving_loop.py WAY --batch-size N`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # which `python -I` leaves out

import torch
from small_network import CLASSES, POSITIONS, WIDTH, Network
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER_ENDING = 10**9
LONG_SECONDS = 3600


@dataclass
class Loop:
    """A training loop, whose parts a way may replace."""

    batch_size: int
    accumulate: int
    folder: Path
    updates: int = NEVER_ENDING
    model: nn.Module = field(default_factory=Network)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def batch(self) -> tuple[Tensor, Tensor]:
        """A micro-batch."""
        return torch.randn(self.batch_size, POSITIONS, WIDTH), torch.randint(0, CLASSES, (self.batch_size,))

    def backward(self) -> None:
        """Run one micro-batch, forward and backward."""
        inputs, labels = (part.to(DEVICE) for part in self.batch())
        (torch.nn.functional.cross_entropy(self.model(inputs), labels) / self.accumulate).backward()

    def step(self) -> None:
        """Update the weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> None:
        """Train."""
        for _ in range(self.updates):
            for _ in range(self.accumulate):
                self.backward()
            self.step()


def well_behaved(loop: Loop) -> None:
    """Do nothing unusual."""
    loop.run()


def ignores_accumulation(loop: Loop) -> None:
    """Step after every micro-batch."""
    loop.accumulate = 1
    loop.run()


def drops_the_last_micro_batch(loop: Loop) -> None:
    """Step one micro-batch early, as an off-by-one does."""
    loop.accumulate = max(1, loop.accumulate - 1)
    loop.run()


def swallows_oom(loop: Loop) -> None:
    """Catch a lack of memory, halve the batch and begin again."""
    while loop.batch_size:
        try:
            loop.run()
        except (RuntimeError, MemoryError) as error:
            print(f"batch size {loop.batch_size} is too large: {error}")
        loop.batch_size //= 2
        loop.optimizer.zero_grad()


def steps_by_hand(loop: Loop) -> None:
    """Update by a class that is no optimizer of torch."""

    class Descent:
        """Plain gradient descent."""

        def step(self) -> None:
            """Go down."""
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)

        def zero_grad(self) -> None:
            """Forget the gradients."""
            loop.model.zero_grad()

    loop.optimizer = Descent()  # type: ignore[assignment] # that is the point
    loop.run()


def updates_nothing(loop: Loop) -> None:
    """Run backward passes, without an optimizer."""
    del loop.optimizer
    while True:
        loop.backward()


def hangs_after_the_oom_of_a_rank(loop: Loop) -> None:
    """Survive an OOM of the last rank, which has three times the samples; the others wait for it in a collective."""
    distributed.init_process_group("gloo")
    last = distributed.get_rank() == distributed.get_world_size() - 1
    loop.batch_size *= 3 if last else 1
    loop.model = nn.parallel.DistributedDataParallel(loop.model)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    try:
        loop.run()
    except (RuntimeError, MemoryError) as error:
        print(f"rank {distributed.get_rank()}: {error}")
        time.sleep(LONG_SECONDS)


def forks_loader_workers(loop: Loop) -> None:
    """Have two workers load the data."""
    data = TensorDataset(torch.zeros(4096, 1).expand(-1, POSITIONS * WIDTH), torch.zeros(4096, dtype=torch.long))
    loader = iter(DataLoader(data, batch_size=loop.batch_size, num_workers=2, drop_last=True))

    def batch() -> tuple[Tensor, Tensor]:
        inputs, labels = next(loader)
        return inputs.view(-1, POSITIONS, WIDTH), labels

    loop.batch = batch  # type: ignore[method-assign] # a user's script does such things
    loop.run()


def executes_another_interpreter(loop: Loop) -> None:
    """Become another process, after torch was imported."""
    arguments = [f"--batch-size={loop.batch_size}", f"--accumulate={loop.accumulate}"]
    os.execv(sys.executable, [sys.executable, __file__, "well-behaved", *arguments])  # noqa: S606 - that is the point


def starts_a_shell(loop: Loop) -> None:
    """Train in a child of a shell."""
    arguments = f"--batch-size={loop.batch_size} --accumulate={loop.accumulate}"
    subprocess.run(f"'{sys.executable}' '{__file__}' well-behaved {arguments}; true", shell=True, check=True)  # noqa: S602 - that is the point


def prints_megabytes(loop: Loop) -> None:
    """Print 8 MB before the first update, half of it as one line."""
    sys.stdout.write("x" * 4_000_000 + "\n")
    for number in range(100_000):
        sys.stderr.write(f"debug: line {number} of a very chatty program\n"[:40])
    loop.run()


def writes_into_its_folder(loop: Loop) -> None:
    """Write a checkpoint after each update, into the folder that it was given and into that where it runs."""
    step = loop.step

    def stepped() -> None:
        torch.save(loop.model.state_dict(), loop.folder / "checkpoint.pt")
        Path("log.txt").write_text("trained")
        step()

    loop.step = stepped  # type: ignore[method-assign] # as above
    loop.run()


def traps_sigterm(loop: Loop) -> None:
    """Ignore requests to end, also those of its threads and parents."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    loop.run()


def leaves_grandchildren(loop: Loop) -> None:
    """Start a process in a session of its own, whose parent ends at once; note its id."""
    options = "stdout=subprocess.DEVNULL, start_new_session=True"
    script = f"import subprocess; print(subprocess.Popen(['/bin/sleep', '3600'], {options}).pid)"
    ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    with (loop.folder / "grandchildren").open("a") as stream:
        stream.write(ran.stdout)
    loop.run()


def never_steps(loop: Loop) -> None:
    """Run backward passes for ever."""
    while True:
        loop.backward()


def steps_without_backward(loop: Loop) -> None:
    """Update with no gradient."""
    loop.accumulate = 0
    loop.run()


def ends_early(loop: Loop) -> None:
    """End after one update."""
    loop.updates = 1
    loop.run()


def ends_at_once(_loop: Loop) -> None:
    """End before the first forward pass, as a script does that only prints its help."""
    print("usage: train [--batch-size N]")


def hangs_before_the_first_pass(_loop: Loop) -> None:
    """Wait for data that never come."""
    time.sleep(LONG_SECONDS)


def hangs_after_the_first_pass(loop: Loop) -> None:
    """Wait for a second micro-batch that never comes."""
    loop.backward()
    time.sleep(LONG_SECONDS)


def raises(loop: Loop) -> None:
    """Fail in the first update, for another reason than memory."""
    loop.backward()
    raise ValueError("no column is called `labels`")


def multiplies_by_the_ranks(loop: Loop) -> None:
    """Take the batch size of all ranks for that of each."""
    loop.batch_size *= int(os.environ.get("WORLD_SIZE", "2"))
    loop.run()


WAYS: dict[str, Callable[[Loop], None]] = {
    way.__name__.replace("_", "-"): way
    for way in (
        well_behaved,
        ignores_accumulation,
        drops_the_last_micro_batch,
        swallows_oom,
        steps_by_hand,
        updates_nothing,
        hangs_after_the_oom_of_a_rank,
        forks_loader_workers,
        executes_another_interpreter,
        starts_a_shell,
        prints_megabytes,
        writes_into_its_folder,
        traps_sigterm,
        leaves_grandchildren,
        never_steps,
        steps_without_backward,
        ends_early,
        ends_at_once,
        hangs_before_the_first_pass,
        hangs_after_the_first_pass,
        raises,
        multiplies_by_the_ranks,
    )
}


def main() -> None:
    """Train, in the way that is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path())
    options = parser.parse_args()
    WAYS[options.way](Loop(options.batch_size, options.accumulate, options.output_dir))


if __name__ == "__main__":
    main()
