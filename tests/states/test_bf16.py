"""States of runs in bf16: DeepSpeed has optimizers of its own for that, whose masters lie elsewhere."""

import pytest

from oneloop.state import format as state_format
from tests.equivalence import launcher
from tests.recipes import runs

ROWS = [runs.turns(f"What is {i}?", f"It is {i}.") for i in range(24)]


@pytest.mark.parametrize("config", ["zero1", "zero2"])
def test_goes_on_to_the_last_bit(config, tmp_path):
    settings = runs.settings(tmp_path, ROWS, global_batch_size=4, max_steps=6, save_every=3, save_total_limit=-1)
    cases = [
        {"name": name, "recipe": "sft", "mixed_precision": "bf16", "config": settings | changes}
        for name, changes in {
            "whole": {"output_dir": str(tmp_path / "whole")},
            "rest": {
                "output_dir": str(tmp_path / "rest"),
                "resume": str(tmp_path / "whole" / "states" / "step-00000003"),
            },
        }.items()
    ]
    launcher.run_cases(config, 2, cases, tmp_path / "launch")
    whole, rest = (launcher.read_metrics(tmp_path / name) for name in ("whole", "rest"))
    for key in ("train/loss", "train/grad_norm"):
        values = launcher.column(whole, key)
        assert len(set(values)) == 6 and launcher.column(rest, key) == values[3:]
    states = [state_format.open_state(tmp_path / name / "states" / "step-00000006") for name in ("whole", "rest")]
    sums = [{name: file["sha256"] for name, file in state.manifest["files"].items()} for state in states]
    assert sums[0] == sums[1] and len(sums[0]) == 2
    assert all("exp_avg" in about["kinds"] for about in states[0].tensors.values())
