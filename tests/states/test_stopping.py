"""A signal to any rank, and a budget of hours: one state after the same step on all ranks, an exit code, and the rest
of the run as if nothing had happened (C38, R6)."""

import re
import time
from pathlib import Path

import pytest

from oneloop.state import folders
from oneloop.state import format as state_format
from tests.equivalence import launcher
from tests.recipes import runs

SCRIPT = Path(__file__).with_name("signalled.py")
ROWS = [runs.turns(f"question {i}", f"answer {i} " + "yes " * (i % 7)) for i in range(24)]
TRAINING = {
    "global_batch_size": 4,
    "per_device_batch_size": 1,
    "max_steps": 12,
    "shuffle": True,
    "save_every": 4,
    "save_total_limit": -1,
}
GRACE_SECONDS = 20
PASSED_ON = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"}
PRECISION = ("--mixed_precision", "no")  # as in this process, which continues
CASES = {  # name: (config, ranks, place, signals, rank, changes, step after which the run stops)
    "launcher": ("cpu", 2, "loss:11", "SIGTERM@launcher", 0, {}, 6),
    "one rank": ("zero2", 2, "loss:10", "SIGTERM@self", 1, {}, 5),
    "user signal": ("zero3", 2, "loss:13", "SIGUSR1@self", 1, {}, 7),
    "in an evaluation": ("cpu", 2, "evaluation:6", "SIGTERM@self", 1, {"eval_steps": 3}, 3),
    "in a save": ("fsdp2", 2, "save:1", "SIGTERM@self", 0, {}, None),
    "sent to all": ("cpu", 1, "loss:9", "SIGTERM@self+0.5+SIGTERM@self", 0, {}, 3),
    "launcher of one process": ("single", 1, "loss:21", "SIGTERM@launcher+1", 0, {}, 6),
    "user signal to the launcher": ("cpu", 2, "loss:11", "SIGUSR1@launcher", 0, {}, 6),
    "hours": ("cpu", 2, "loss:999", "0", 0, {"max_hours": 1e-4}, 1),
}


def launch(folder: Path, case: str, check: bool):
    config, ranks, place, signals, rank, changes, _ = CASES[case]
    if "eval_steps" in changes:
        changes = changes | {"eval_dataset_name": runs.write_rows(folder / "eval.jsonl", ROWS[:8])}
    values = runs.settings(folder, ROWS, **TRAINING | changes)
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    began = time.time()
    result = launcher.launch(
        config, ranks, SCRIPT, place, signals, str(rank), *words, check=check, extra=PRECISION, **PASSED_ON
    )
    return result, began


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The loss of each step of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    out = runs.train(folder, ROWS, **TRAINING)
    return {line["step"]: line["train/loss"] for line in launcher.read_metrics(out)}


@pytest.mark.parametrize("case", CASES)
def test_stops_and_continues(case, tmp_path, undisturbed):
    stops_after = CASES[case][-1]
    result, _ = launch(tmp_path, case, check=False)
    output = result.stdout
    out = tmp_path / "run"
    assert result.returncode != 0, output
    newest = folders.published(out / "states")[0]
    state = state_format.open_state(newest)
    assert state_format.differences(state) == []
    if "launcher" in case:  # which takes a moment to pass it on, or to be missed
        assert stops_after <= state.step < 12, output
    elif stops_after is not None:
        assert state.step == stops_after, output
    lines = [line for line in launcher.read_metrics(out) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, state.step + 1)), "no step after the one that was saved"
    assert not list((out / "states").glob("*.partial"))
    assert not (out / "model").exists()
    assert f"stopped after step {state.step} of 12" in output and "Exit code 75" in output
    assert "Traceback" not in output.partition("stopped after")[0].partition("sending")[2], output
    sent = re.search(r"sending .* at ([\d.]+)", output)
    assert (sent is None) == (case == "hours")
    assert sent is None or newest.stat().st_mtime - float(sent.group(1)) < GRACE_SECONDS
    if CASES[case][1] > 1 and "launcher" not in case:
        # torchrun's report of its ranks; told to stop itself, it makes none.
        assert re.search(r"exitcode\s*: 75", output), output
    changes = {name: value for name, value in CASES[case][5].items() if name != "max_hours"}
    if "eval_steps" in changes:
        changes |= {"eval_dataset_name": str(tmp_path / "eval.jsonl")}
    runs.train(tmp_path, str(tmp_path / "rows.jsonl"), **TRAINING, **changes)
    lines = [line for line in launcher.read_metrics(out) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13)), "every step once"
    for line in lines:
        assert line["train/loss"] == pytest.approx(undisturbed[line["step"]], rel=1e-6)


def test_second_signal_stops_at_once(tmp_path):
    CASES["twice"] = ("cpu", 1, "loss:21", "SIGTERM@self+3.5+SIGTERM@self", 0, {}, 4)
    try:
        result, _ = launch(tmp_path, "twice", check=False)
    finally:
        del CASES["twice"]
    assert result.returncode != 0 and "second signal (SIGTERM): stopping at once" in result.stdout
    newest = folders.published(tmp_path / "run" / "states")[0]
    assert folders.step_of(newest) == 4, "nothing was saved after the first signal"
    assert state_format.differences(state_format.open_state(newest)) == []


def test_no_rank_saves_when_another_has_failed(tmp_path):
    """The launcher ends the others with the very signal that otherwise means to save and stop."""
    CASES["failed"] = ("cpu", 2, "loss:10", "raise", 1, {}, None)
    try:
        result, _ = launch(tmp_path, "failed", check=False)
    finally:
        del CASES["failed"]
    failed = float(re.search(r"sending an error at ([\d.]+)", result.stdout).group(1))
    assert result.returncode != 0 and "rank 1 failed" in result.stdout
    assert time.time() - failed < 27, "the others were waited for, till the launcher killed them after 30 s"
    assert [folders.step_of(path) for path in folders.published(tmp_path / "run" / "states")] == [4]


def test_without_states_a_signal_ends_a_run_as_ever(tmp_path):
    CASES["never"] = ("cpu", 1, "loss:9", "SIGTERM@self", 0, {"save_every": 0}, None)
    try:
        result, _ = launch(tmp_path, "never", check=False)
    finally:
        del CASES["never"]
    assert result.returncode != 0 and "stopped after" not in result.stdout
    assert not (tmp_path / "run" / "states").exists()
