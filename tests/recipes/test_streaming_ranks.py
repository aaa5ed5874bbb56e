"""Streams on two real ranks, in one launch: what threads cannot show of process groups, forked processes and ends."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.equivalence import launcher

STEPS = 9
CASES = {  # name: (lines, settings)
    "plain": (range(1, 31), {}),
    "packed": (range(1, 31), {"packing": True}),
    "tokens": (range(1, 31), {"batch_unit": "tokens", "global_batch_size": 32, "truncation": "split"}),
    # Far more rows than are tokenised ahead when the signal comes.
    "skip": (
        [*range(1, 12), "{", *range(12, 700)],
        {"on_bad_row": "skip", "dataset_num_proc": 2, "global_batch_size": 300, "per_device_batch_size": 50},
    ),
    "stop": ([*range(1, 20), "{", *range(20, 31)], {"shuffle": False}),
    "fault": ([*range(1, 20), '{"text": "fault"}'], {"shuffle": False}),
    "killed": ([*range(1, 20), '{"text": "die"}'], {"shuffle": False}),
}


def write_case(folder: Path, name: str) -> tuple[str, dict]:
    """Write the rows of a case into two files; returns their folder and the settings."""
    from tests.unit import test_streaming as streams

    lines, changes = CASES[name]
    lines = [streams.row(line, 3 + line % 20) if isinstance(line, int) else line for line in lines]
    (folder / name).mkdir(parents=True, exist_ok=True)
    streams.write(folder / name, "a.jsonl", lines[:7])
    streams.write(folder / name, "b.jsonl", lines[7:])
    return str(folder / name), {"max_steps": STEPS, "truncation": "truncate"} | changes


def run_case(accelerator, folder: Path, name: str, stop_at: int | None = None, state=None) -> dict:
    """One run of a case on this rank, as JSON."""
    from oneloop import mixture
    from oneloop.data import streaming
    from tests.unit import test_streaming as streams

    path, changes = write_case(folder / str(accelerator.process_index), name)
    config = streams.settings(path, output_dir=str(folder / "run"), **changes)
    config.output_dir = str(folder / f"run-{name}")  # of both ranks
    found, loader = [], None
    try:
        stream = streaming.Stream(config, accelerator, None, streams.number_tokens, mixture.for_training(config))
        config.dataset_name = name  # the ranks compare it
        loader = streaming.StreamLoader(stream, accelerator, config, streams.PAD)
        progress = loader.progress_from_start(config)
        if state is not None:
            progress.step = stop_at
            loader.restore(state)
        for micro_batches in loader.steps(progress):
            found.append([streams.taken(batch) for batch in micro_batches])
            if len(found) == 2 and name == "skip":
                os.killpg(0, signal.SIGUSR1)  # to all processes, as schedulers do it
            loader.advance(progress)
            if state is None and progress.step == stop_at:
                break
    except (ValueError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}".replace(str(folder / str(accelerator.process_index)), "")}
    return {"steps": found, "state": loader.state(), "metrics": loader.metrics()}


def main(folder: Path) -> None:
    from accelerate import Accelerator

    signal.signal(signal.SIGUSR1, lambda *_: None)
    accelerator = Accelerator(cpu=True)
    outcome = {}
    for name in CASES:
        outcome[name] = run_case(accelerator, folder, name)
        if "steps" in outcome[name]:
            first = run_case(accelerator, folder, name, 4)
            outcome[f"{name}, stopped"] = first
            outcome[f"{name}, continued"] = run_case(accelerator, folder, name, 4, first["state"])
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(outcome))
    accelerator.end_training()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks have found: for each, name -> outcome."""
    folder = tmp_path_factory.mktemp("streams")
    launcher.launch("cpu", 2, Path(__file__), str(folder), PYTHONPATH=os.pathsep.join([str(launcher.ROOT), str(launcher.ROOT / "src")]))  # fmt: skip # noqa: E501
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def tokens(outcomes: list[dict]) -> list[list[int]]:
    """The tokens of each step over all ranks, sorted."""
    both = zip(*(outcome["steps"] for outcome in outcomes), strict=True)
    steps = [[token for rank in step for chunk in rank for token in chunk] for step in both]
    assert all(len(a) == len(b) for a, b in zip(*(outcome["steps"] for outcome in outcomes), strict=True))
    return [sorted(step) for step in steps]


@pytest.mark.parametrize("name", ["plain", "packed", "tokens", "skip"])
def test_two_ranks_train_on_what_one_does_and_go_on_where_they_were(name, ranks, tmp_path, monkeypatch):
    from tests.unit import test_streaming as streams

    both = [outcome[name] for outcome in ranks]
    whole = tokens(both)
    assert both[0]["state"] == both[1]["state"] and both[0]["metrics"] == both[1]["metrics"]
    first, second = ([outcome[f"{name}, {part}"] for outcome in ranks] for part in ("stopped", "continued"))
    assert tokens(first) + tokens(second) == whole and len(whole) == STEPS
    assert second[0]["state"] == both[0]["state"] and second[0]["metrics"] == both[0]["metrics"]
    path, changes = write_case(tmp_path, name)
    assert streams.tokens_of_steps(streams.train(streams.settings(path, **changes), monkeypatch, 1)) == whole


def test_packed_rows_are_those_of_padded_ones(ranks):
    assert tokens([outcome["plain"] for outcome in ranks]) == tokens([outcome["packed"] for outcome in ranks])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stop", "/b.jsonl:13: not valid JSON"),
        ("fault", "the tokenizer has a fault"),
        ("killed", "was ended from outside"),
    ],
)
def test_faults_end_both_ranks(name, message, ranks):
    errors = [outcome[name]["error"] for outcome in ranks]
    assert all(message in error for error in errors)
    assert errors[0].partition(":")[0] == errors[1].partition(":")[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
