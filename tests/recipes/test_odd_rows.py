"""A thousand malformed and odd rows through the whole recipe: each is used or refused by name, on any ranks."""

import json

import pytest

from oneloop.data import rows as row_rules
from tests import odd_rows
from tests.equivalence import launcher
from tests.recipes import runs

COUNT = 1000


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """(file, line -> kind under which it is refused, number of lines that are rows)"""
    path = tmp_path_factory.mktemp("odd") / "rows.jsonl"
    refused, num_rows = {}, 0
    with path.open("wb") as file:
        for line, (_, raw, expectation) in enumerate(odd_rows.generate(7, COUNT), start=1):
            file.write(raw + b"\n")
            num_rows += expectation is not None
            if isinstance(expectation, str):
                refused[line] = expectation
    return path, refused, num_rows


def settings(folder, path, **changes) -> dict:
    values = {"on_bad_row": "skip", "max_length": 4096, "global_batch_size": 32, "max_steps": 2, "packing": True}
    return runs.settings(folder, str(path), **values | changes)


def rejected(out) -> dict[int, str]:
    lines = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert len({line["line"] for line in lines}) == len(lines), "each bad row once"
    assert all(line["reason"] and line["file"].endswith("rows.jsonl") for line in lines)
    return {line["line"]: line["kind"] for line in lines}


def check(kinds: dict[int, str], refused: dict[int, str]) -> None:
    """Refused is what must be, and beside it only what holds nothing to learn within max_length."""
    assert not set(refused.values()) & row_rules.DROP_KINDS and len(refused) > 200
    assert {line: kinds.get(line) for line in refused} == refused
    assert {kinds[line] for line in kinds.keys() - refused.keys()} <= {"no_target_left"}


def test_each_is_used_or_refused_by_name(odd, tmp_path, capsys):  # R10
    path, refused, num_rows = odd
    out = runs.train(tmp_path, str(path), **settings(tmp_path, path))
    kinds = rejected(out)
    check(kinds, refused)
    assert f"read {num_rows}, kept {num_rows - len(kinds)}" in capsys.readouterr().out
    assert launcher.column(launcher.read_metrics(out), "data/rows_rejected") == [float(len(kinds))] * 2
    with pytest.raises(ValueError, match=rf"rows that cannot be used \(read {num_rows}, ") as caught:
        runs.train(
            tmp_path, str(path), **settings(tmp_path, path, on_bad_row="stop", output_dir=str(tmp_path / "stops"))
        )
    assert str(caught.value).count(f"{path}:") == 10


def test_two_ranks_and_a_stream_decide_alike(odd, tmp_path):
    path, refused, num_rows = odd
    ways = {"prepared": {}, "streamed": {"streaming": True, "max_steps": -(-(num_rows - len(refused)) // 32)}}
    cases = [
        {
            "name": way,
            "recipe": "sft",
            "mixed_precision": "no",
            "config": settings(tmp_path, path, output_dir=str(tmp_path / way), **changes),
        }
        for way, changes in ways.items()
    ]
    launcher.run_cases("cpu", 2, cases, tmp_path / "launch")
    kinds = rejected(tmp_path / "prepared")
    check(kinds, refused)
    assert rejected(tmp_path / "streamed") == kinds
    losses = [launcher.column(launcher.read_metrics(tmp_path / way), "train/loss")[:2] for way in ways]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
