"""What shows only over many steps, or over two runs: growth of memory (R15), and other numbers (R13).

Set ONELOOP_WRITE_GOLDEN=1 to record the golden trajectories anew, after a change of the training maths that is meant.
"""

import gc
import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from oneloop.data import loaders
from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import ANSWERS, UNEVEN

GOLDEN = Path(__file__).with_name("golden.json")
TIMES = {"train/step_seconds", "train/tokens_per_second", "train/peak_memory_gib", "train/data_wait_share"}
RUNS = {
    "full": {},
    "lora": {"use_peft": True, "lora_dropout": 0.1},
    "qlora": {"use_peft": True, "quantization": "nf4"},
}


def trajectory(folder, **changes) -> list[dict]:
    settings = {"global_batch_size": 4, "per_device_batch_size": 2, "max_steps": 8, "shuffle": True, "warmup_steps": 2}
    output = runs.train(folder, UNEVEN * 3, **settings | {"lr_scheduler_type": "cosine", "weight_decay": 0.1} | changes)
    return [{k: v for k, v in line.items() if k not in TIMES} for line in launcher.read_metrics(output)]


@pytest.mark.parametrize("name", RUNS)
def test_same_config_gives_the_same_file(name, tmp_path):
    """Twice the same config, every bit of every metric but the clock's; and the recorded trajectory (other processors
    sum in another order, hence a tolerance)."""
    first, second = (trajectory(tmp_path / number, **RUNS[name]) for number in ("first", "second"))
    assert first == second and len(first) == 8
    losses = [line["train/loss"] for line in first]
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("ONELOOP_WRITE_GOLDEN") == "1":
        GOLDEN.write_text(json.dumps(golden | {name: losses}, indent=1) + "\n")
        return
    assert losses == pytest.approx(golden[name], rel=1e-5)


def test_another_seed_gives_another_file(tmp_path):
    first, second = (trajectory(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert [line["train/loss"] for line in first] != [line["train/loss"] for line in second]


def test_memory_does_not_grow(tmp_path, monkeypatch):
    """2,000 steps: at most 1 kB a step, measured once everything that is made once has been made."""
    process, samples = psutil.Process(), []
    advance = loaders.TrainLoader.advance

    def sampled(self, progress):
        advance(self, progress)
        if progress.step % 50 == 0 and progress.step >= 500:
            gc.collect()
            samples.append((progress.step, process.memory_info().rss))

    monkeypatch.setattr(loaders.TrainLoader, "advance", sampled)
    runs.train(
        tmp_path,
        ANSWERS,
        max_steps=2000,
        global_batch_size=2,
        per_device_batch_size=2,
        logging_steps=100,
        num_train_epochs=1000,
    )
    steps, resident = np.array(samples, dtype=float).T
    assert len(steps) == 31
    # Theil-Sen: the median of all slopes, which one page fault of the allocator does not turn.
    slopes = [(resident[j] - resident[i]) / (steps[j] - steps[i]) for i in range(31) for j in range(i + 1, 31)]
    assert np.median(slopes) <= 1024, f"{np.median(slopes):.0f} bytes a step"
