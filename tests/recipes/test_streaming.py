"""The recipe on a stream: what it trains on is what it trains on when the same rows are prepared, and it goes on
exactly."""

import json
import shutil

import pytest

from oneloop.state import folders
from tests.equivalence import launcher
from tests.recipes import runs

ROWS = [runs.turns(f"question {i}", f"answer {i} " + "yes " * (i % 7)) for i in range(26)]
TIMES = ("train/tokens_per_second", "train/step_seconds", "train/peak_memory_gib", "train/data_wait_share")
BASE = {"global_batch_size": 4, "max_steps": 9, "learning_rate": 1e-3}  # seven steps an epoch


def numbers(out, names=("train/loss", "train/grad_norm", "train/tokens_seen")) -> list[list[float]]:
    metrics = launcher.read_metrics(out)
    return [launcher.column(metrics, name) for name in names]


@pytest.mark.parametrize(
    "changes", [{}, {"packing": True, "max_length": 120}, {"truncation": "split", "max_length": 16}]
)
def test_is_what_prepared_rows_give(tmp_path, changes):  # C06, C30
    ways = {"prepared": {}, "streamed": {"streaming": True, "shuffle_buffer_size": 5}}
    outs = {
        way: runs.train(tmp_path, ROWS, output_dir=str(tmp_path / way), **BASE | changes | settings)
        for way, settings in ways.items()
    }
    assert len(numbers(outs["streamed"])[0]) == 9
    for streamed, prepared in zip(*(numbers(outs[way]) for way in ("streamed", "prepared")), strict=True):
        assert streamed == pytest.approx(prepared, rel=1e-6)
    assert not list((tmp_path / "streamed").glob("data_cache"))


def test_goes_on_to_the_last_bit(tmp_path):  # C32, C40
    settings = BASE | {"streaming": True, "shuffle": True, "shuffle_buffer_size": 7, "save_every": 1}
    settings |= {"save_total_limit": -1, "warmup_steps": 2}
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    for step in (3, 7, 8):
        out = tmp_path / f"from {step}"
        shutil.copytree(whole, out)
        for path in folders.published(out / "states"):
            if folders.step_of(path) > step:
                shutil.rmtree(path)
        shutil.rmtree(out / "model")
        runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
        lines = [
            [{key: value for key, value in line.items() if key not in TIMES} for line in launcher.read_metrics(path)]
            for path in (whole, out)
        ]
        assert lines[0] == lines[1]


def test_bad_rows_are_skipped_as_they_come(tmp_path, capsys):
    bad = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    bad.write_text("\n".join([*lines[:5], lines[5][:-7], *lines[6:]]) + "\n")
    settings = BASE | {"streaming": True, "shuffle_buffer_size": 5}
    out = runs.train(tmp_path, str(bad), on_bad_row="skip", **settings)
    (rejected,) = (json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines())
    assert (rejected["line"], rejected["kind"], rejected["row"]) == (6, "bad_json", lines[5][:-7])
    assert launcher.column(launcher.read_metrics(out), "data/rows_rejected")[-1] == 2, "it came twice"
    with pytest.raises(ValueError, match=r"rows.jsonl:6: .*cut off"):
        runs.train(tmp_path, str(bad), output_dir=str(tmp_path / "stops"), **settings)


def test_two_ranks_train_as_one(tmp_path):
    settings = runs.settings(tmp_path, ROWS, streaming=True, shuffle_buffer_size=6, **BASE) | {"shuffle": True}
    alone = runs.train(tmp_path, settings["dataset_name"], **settings | {"output_dir": str(tmp_path / "alone")})
    case = {"name": "two", "recipe": "sft", "mixed_precision": "no"}
    launcher.run_cases("cpu", 2, [case | {"config": settings | {"output_dir": str(tmp_path / "two")}}], tmp_path / "l")
    for two, one in zip(numbers(tmp_path / "two"), numbers(alone), strict=True):
        assert two == pytest.approx(one, rel=2e-6)


@pytest.mark.parametrize("changes", [{"max_length": 30}, {"truncation": "drop"}, {"split_special_tokens": False}])
def test_other_rows_are_refused_on_continuing(tmp_path, changes):
    settings = BASE | {"streaming": True, "shuffle_buffer_size": 7, "save_every": 4, "max_length": 60}
    runs.train(tmp_path, ROWS, **settings)
    with pytest.raises(ValueError, match=next(iter(changes))):
        runs.train(tmp_path, ROWS, **settings | {"max_steps": 9} | changes)
