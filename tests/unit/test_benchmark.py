"""What scripts/benchmark.py judges by: turns, ratios, verdicts and the page. The measurements are made by hand."""

import sys

import numpy as np
import pytest

from tests.test_guards import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import benchmark  # noqa: E402
from benchmarks import baton, outcome, packing, page  # noqa: E402


def contender(name: str, log: list, num_steps: int):
    def train(step_done):
        for step in range(num_steps):
            log.append((name, step))
            step_done()
        log.append((name, "end"))

    return train


def test_contenders_take_turns():
    log = []
    seconds = baton.alternate({name: contender(name, log, 5) for name in "abc"}, num_steps=3, warm_up=2)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert [{step for _, step in one} for one in rounds] == [{0}, {1}, {2}, {3}, {4}, {"end"}]
    assert [one[0][0] for one in rounds] == list("abcabc")  # nobody always follows the same one


def test_a_contender_is_timed_alone():
    clock = {"now": 0.0}

    def train(cost):
        def steps(step_done):
            for _ in range(4):
                clock["now"] += cost
                step_done()

        return steps

    seconds = baton.alternate({"fast": train(1.0), "slow": train(3.0)}, 3, 1, lambda: clock["now"])
    assert seconds == {"fast": [1.0] * 3, "slow": [3.0] * 3}
    assert baton.ratio(seconds["slow"], seconds["fast"]) == baton.Ratio(3.0, 3.0)


def test_a_failure_ends_the_run():
    def fails(step_done):
        step_done()
        raise KeyError("of this contender")

    with pytest.raises(KeyError, match="of this contender"):
        baton.alternate({"a": contender("a", [], 4), "b": fails}, num_steps=3, warm_up=1)


@pytest.mark.parametrize("num_steps", [3, 5])
def test_wrong_number_of_steps(num_steps):
    with pytest.raises(AssertionError, match=f"a did {num_steps} steps"):
        baton.alternate({"a": contender("a", [], num_steps)}, num_steps=3, warm_up=1)


@pytest.mark.parametrize("paired,of_medians,says", [(1.0, 1.0, True), (0.92, 1.0, False), (1.0, 1.08, False)])
def test_control(paired, of_medians, says):
    assert baton.conclusive(baton.Ratio(of_medians, paired)) is says


@pytest.mark.parametrize(
    "value,conclusive,verdict", [(1.0, True, "holds"), (1.2, True, "MISSED"), (1.0, False, "INCONCLUSIVE")]
)
def test_verdict(value, conclusive, verdict):
    one = outcome.Outcome("loop", [outcome.Target("ours / bare", value, 1.05)], control=1.0, conclusive=conclusive)
    assert one.verdict == verdict
    assert one.text().splitlines()[-1] == f"{value:.4g}"  # one figure last


def test_page(tmp_path):
    series = {
        "loop": {"milliseconds": {"ours": 10.0, "bare": 9.0}},
        "loss-head": {"megabytes": {"ours": 87.0, "full": 1218.0}},
        "startup": {"seconds": {"help": 0.6}},
        "memory": {"bytes per parameter": {f"ddp, 2, {p}, after backward": [16.0, 16.0] for p in ("no", "bf16")}},
    }
    for name in page.ORDER:
        table = [["contender", "figure"], [name, "1"]]
        made = outcome.Outcome(name, [outcome.Target("t", 0.5, 1.0)], tables=[table], series=series[name])
        made.save(tmp_path)
        assert outcome.load(tmp_path / f"{name}.json") == made
    page.write(tmp_path, tmp_path)
    text = (tmp_path / "benchmarks.md").read_text()
    assert text.count("| t | 0.5 | 1 | holds |") == 4
    assert (tmp_path / "benchmarks.png").stat().st_size > 10_000


def test_every_benchmark_has_a_place_on_the_page():
    assert set(benchmark.BENCHMARKS) == set(page.TITLES) == set(page.ABOUT) == {*page.ORDER, *page.IF_MEASURED}
    assert len(page.ORDER) + len(page.IF_MEASURED) == len(benchmark.BENCHMARKS)


@pytest.mark.parametrize(
    "blocks,kept,doubled,num_cut",
    [
        ([[0, 1, 2], [3, 4]], 5, 0, 0),  # rows (0, 1, 2) and (3, 4)
        ([[0, 1, 2], [3]], 4, 0, 0),
        ([[0, 1, 2], [3, 4, 4]], 5, 1, 0),
        ([[0, 1, 2, 3], [4]], 5, 0, 1),
    ],
)
def test_what_packing_did_to_tokens(blocks, kept, doubled, num_cut):
    blocks = [np.array(block) for block in blocks]
    assert packing.compared(blocks, np.array([3, 2])) == (kept, doubled, num_cut)


def test_a_row_longer_than_a_block_may_be_cut():
    lengths = np.array([packing.CAPACITY + 2, 2])
    blocks = [np.arange(packing.CAPACITY), np.arange(packing.CAPACITY, packing.CAPACITY + 4)]
    assert packing.compared(blocks, lengths) == (packing.CAPACITY + 4, 0, 0)
