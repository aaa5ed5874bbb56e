"""Trackers over an interruption: the same run, the same axis, every step once (C52)."""

import json
import shutil

import pytest

from oneloop.state import folders
from oneloop.state import format as state_format
from tests.equivalence import launcher
from tests.recipes import runs
from tests.unit.test_tracking import own_environment, wandb_records  # noqa: F401

ROWS = [runs.turns(f"question {i}", f"answer {i} " + "yes " * (i % 7)) for i in range(9)]
SETTINGS = {"global_batch_size": 2, "max_steps": 10, "save_every": 5, "save_total_limit": -1, "eval_steps": 3}
KILLED_AFTER, RESUMED_FROM = 8, 5


@pytest.fixture
def interrupted(tmp_path):
    """A function: train with a tracker, up to step 8 as if killed there, and again to the end."""

    def make(tracker: str):
        settings = SETTINGS | {"eval_dataset_name": runs.write_rows(tmp_path / "eval.jsonl", ROWS[:3])}
        settings |= {"report_to": tracker, "lr_scheduler_type": "constant"}
        first = settings | {"max_steps": KILLED_AFTER}
        out = runs.train(tmp_path, ROWS, **first)
        shutil.rmtree(out / "states" / folders.name_of(KILLED_AFTER))
        shutil.rmtree(out / "model")
        whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings | {"report_to": "none"})
        yield out
        runs.train(tmp_path, ROWS, **settings, allow_changes=["max_steps"])
        assert launcher.column(launcher.read_metrics(out), "train/loss") == launcher.column(
            launcher.read_metrics(whole), "train/loss"
        )
        yield launcher.read_metrics(whole)

    return make


def test_wandb_goes_on_with_the_same_run(interrupted, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    steps = interrupted("wandb")
    out = next(steps)
    first = ids(out)
    saved = state_format.open_state(out / "states" / folders.name_of(RESUMED_FROM)).manifest["tracker"]
    assert saved == {"name": "wandb", "run_id": first[0]}
    shutil.move(out / "wandb", out / "wandb of the first")
    whole = next(steps)
    assert ids(out) == first, "the same run"
    history = []
    for record in wandb_records(out):
        if record.HasField("history"):
            items = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            history.append((record.history.step.num, {k: v for k, v in items.items() if not k.startswith("_")}))
    assert [step for step, _ in history] == [6, 7, 8, 9, 10], "each step once, under its own number"
    expected = [line for line in whole if line["step"] > RESUMED_FROM]
    for name in ("train/loss", "train/lr", "eval/loss"):
        stored = {step: items[name] for step, items in history if name in items}
        assert stored == {line["step"]: line[name] for line in expected if name in line}, name
    assert [step for step, items in history if "eval/loss" in items] == [6, 9, 10]


def ids(out) -> list[str]:
    return [record.run.run_id for record in wandb_records(out) if record.HasField("run")]


def test_tensorboard_hides_what_is_done_again(interrupted):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = interrupted("tensorboard")
    out = next(steps)
    whole = next(steps)
    [folder] = {path.parent for path in out.rglob("events.out.tfevents.*") if path.parent.name == "oneloop"}
    events = EventAccumulator(str(folder)).Reload()
    for name in ("train/loss", "eval/loss"):
        stored = {event.step: event.value for event in events.Scalars(name)}
        assert len(stored) == len(events.Scalars(name)), "no step twice"
        assert stored == pytest.approx({line["step"]: line[name] for line in whole if name in line})
