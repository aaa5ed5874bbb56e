"""Run inside the ranks of one launch: trains the real recipe, and at one place of one rank a signal is sent.

    signalled.py PLACE:CALL SIGNALS RANK [flags of the recipe]

PLACE is where: `loss` (call CALL of the loss in training), `evaluation` (the same without gradients), `save` (block
CALL of a file being written). SIGNALS are sent one after the other, `+` apart, each NAME@WHOM with WHOM `self` or
`launcher`; a number is a pause in seconds, and `raise` an error, at which the other ranks are asleep for a minute.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from oneloop import process  # noqa: E402
from oneloop.state import format as state_format  # noqa: E402
from tests.equivalence.scenario import load_recipe  # noqa: E402


def send(signals: str) -> None:
    for item in signals.split("+"):
        if item == "raise":
            print(f"sending an error at {time.time()}", flush=True)
            raise OSError("the disk with the rows is gone")
        name, _, whom = item.partition("@")
        if not whom:
            time.sleep(float(name))
            continue
        print(f"sending {name} to {whom} at {time.time()}", flush=True)
        os.kill(os.getpid() if whom == "self" else os.getppid(), getattr(signal, name))


def main() -> None:
    (place, _, number), signals, rank = sys.argv[1].partition(":"), sys.argv[2], sys.argv[3]
    del sys.argv[1:4]
    recipe = load_recipe(ROOT / "recipes" / "sft.py")
    calls = [0]

    def count() -> None:
        calls[0] += 1
        if calls[0] == int(number) and os.environ.get("RANK", "0") == rank:
            send(signals)
        elif calls[0] == int(number) and signals == "raise":
            until = time.monotonic() + 60
            while time.monotonic() < until:
                time.sleep(0.1)

    healthy, write = recipe.compute_loss_sum, state_format.write_tensors

    def compute_loss_sum(model, batch):
        if place == ("loss" if torch.is_grad_enabled() else "evaluation"):
            count()
        return healthy(model, batch)

    def write_tensors(path, entries, beat=lambda: None):
        return write(path, entries, count if place == "save" else beat)

    recipe.compute_loss_sum, state_format.write_tensors = compute_loss_sum, write_tensors
    process.run(recipe.main, recipe.SFTConfig)


if __name__ == "__main__":
    main()
