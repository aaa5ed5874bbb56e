"""What a rank needs beside the training to save and to continue: its own share and a buffer, never a whole model."""

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs

SCRIPT = Path(__file__).with_name("memory.py")
MIB = 1 << 20
BUFFER = 48 * MIB
"""Blocks on their way to the disk, random states, manifests, and what the allocator keeps."""
PIECE = 64 * MIB
"""What is read at a time."""
ROWS = [runs.turns(f"question {i}", f"answer {i}") for i in range(8)]
SETTINGS = {"global_batch_size": 2, "save_every": 2, "save_total_limit": 1}


def launch(folder: Path, config: str, name: str, **changes) -> list[dict]:
    model = folder / "model"
    if not model.exists():
        tiny.save(model, hidden_size=1024, intermediate_size=2560)
    changes.setdefault("output_dir", str(folder / "run"))
    values = runs.settings(folder, ROWS, model_name_or_path=str(model), **SETTINGS | changes)
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    extra = ("--mixed_precision", "no")
    # What is freed goes back to the system at once, for what is kept to be told from what the allocator holds ready.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    launcher.launch(config, 2, SCRIPT, str(folder / name), *words, extra=extra, **allocator)
    return [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("config", ["zero3", "fsdp2"])
def test_a_share_and_a_buffer(config, tmp_path):
    background = launch(tmp_path, config, "background", max_steps=8)
    at_once = launch(tmp_path, config, "at once", max_steps=6, async_save=False, output_dir=str(tmp_path / "other"))
    continued = launch(tmp_path, config, "continued", max_steps=10, allow_changes="max_steps")
    for rank in range(2):
        share = background[rank]["share"]
        assert share > 120 * MIB, "large enough to be seen"
        first, *later = background[rank]["saves"]
        assert first[0] < share + BUFFER  # less where what the last step has freed is used again
        assert max(extra for extra, _ in later) < BUFFER, "the copy is made into the same memory again"
        assert max(extra for extra, _ in at_once[rank]["saves"]) < BUFFER
        # The moments themselves are made here, two thirds of the share, and one tensor of zeros at a time beside them.
        assert continued[rank]["load"] < share + PIECE + BUFFER
        # The last one of a run waits until it is on the disk. Not a benchmark: a copy against a write with its fsync.
        stalls = [min(seconds for _, seconds in run[rank]["saves"][:-1]) for run in (background, at_once)]
        assert stalls[0] < stalls[1], stalls


def test_twenty_saves_leave_nothing_behind(tmp_path):  # R15
    seen = launch(tmp_path, "fsdp2", "twenty", max_steps=22, save_every=1)
    for rank in range(2):
        after = seen[rank]["after"]
        assert len(after) == 22
        # One copy of the share, left behind once, is 128 MiB. The last save is the run's end, when the loop is over.
        early, late = min(after[5:12]), min(after[14:21])
        assert late - early < 16 * MIB, " ".join(f"{value / MIB:.0f}" for value in after)
        print(f"rank {rank}:", " ".join(f"{value / MIB:.0f}" for value in after))
