"""Run inside the ranks of one launch: trains the real recipe, and one of the ranks has an accident on the way.

    faulty.py PLACE:ACCIDENT RANK FOLDER [flags of the recipe]

The accidents are put where they happen in life, into the making of batches and into the loss; the recipe is not
touched otherwise.
"""

import ctypes
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python looks into by itself

from oneloop import process  # noqa: E402
from oneloop.data import loaders  # noqa: E402
from tests.equivalence.scenario import load_recipe  # noqa: E402

AT_CALL = 4
"""Which batch, or loss, of the rank meets the accident: in the middle of the run."""


def sleep_for_ever() -> None:
    time.sleep(100_000)


def raise_error() -> None:
    raise OSError("the disk with the rows is gone")


def do_nothing() -> None:
    pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(100_000)  # called like Python's own functions, with the interpreter's lock held


def at_call(accident, folder: Path, function):
    """`function`, with an accident before its call number AT_CALL, and a note of when and what listens for others."""
    calls = itertools.count(1)

    def instead(*arguments):
        if next(calls) == AT_CALL:
            listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
            note = {"time": time.time(), "listening": listening, "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
            (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(note))
            accident()
        return function(*arguments)

    return instead


def main() -> None:
    fault, rank, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    del sys.argv[1:4]
    recipe = load_recipe(ROOT / "recipes" / "sft.py")
    place, _, what = fault.partition(":")
    accident = globals()[what] if os.environ["RANK"] == rank else lambda: None
    if place == "batch":
        loaders.collate = at_call(accident, folder, loaders.collate)
    else:
        recipe.compute_loss_sum = at_call(accident, folder, recipe.compute_loss_sum)
    process.run(recipe.main, recipe.SFTConfig)


if __name__ == "__main__":
    main()
