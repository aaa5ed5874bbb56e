"""The shipped GSM8K recipe config, on the real data where they are."""

import json

import numpy as np
import pytest

from oneloop import config, rewards
from oneloop.data import batches, packing, prepare, sampling
from tests import tiny
from tests.equivalence import launcher
from tests.equivalence.scenario import ROOT, load_recipe
from tests.recipes import runs

DATA = ROOT.parent / "shared" / "data"
SFT = load_recipe(ROOT / "recipes" / "sft.py")
needs_data = pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").is_file(), reason="the GSM8K files are not here")


def shipped(tmp_path, **changes):
    """The shipped config with the local files for the hub's, and a tiny model."""
    path = ROOT / "recipes" / "configs" / "sft" / "smollm2-gsm8k.yaml"
    asked = config.to_dict(config.parse(SFT.SFTConfig, ["--config", str(path)]))
    entry = asked["datasets"][0] | {"path": str(DATA / "gsm8k_train.jsonl")}
    entry.pop("name")
    values = asked | {"datasets": [entry], "eval_dataset_name": str(DATA / "gsm8k_test.jsonl")}
    values |= {"output_dir": str(tmp_path / "run"), "data_cache_dir": str(tmp_path / "cache"), "report_to": "none"}
    return SFT.SFTConfig(**values | changes)


@needs_data
def test_packed_blocks_are_full(tmp_path):
    """At least 97 % of what is computed are tokens of the data, over an epoch of the shipped batch size."""
    asked = shipped(tmp_path)
    rows, evaluated = prepare.load(asked, None, tiny.tokenizer(), SFT.encode)
    assert (len(rows), len(evaluated)) == (7473, 1319)
    order = rows.order.epoch(0, 0, True)
    for world_size, together in ((1, 1), (2, 1), (2, 2), (8, 1)):
        position, tokens, slots = 0, 0, 0
        while position < len(order):
            step = sampling.rows_of_step(order, position, asked.global_batch_size, None)
            lengths = rows.lengths_of(step)
            blocks = packing.balanced(lengths, asked.max_length, world_size * together)
            fills = [int(lengths[block].sum()) for block in blocks]
            batches_of = [fills[at : at + together] for at in range(0, len(fills), together)]
            tokens, slots = tokens + sum(fills), slots + sum(max(batch) * together for batch in batches_of)
            if position == 0:
                first = [[rows[int(row)] for row in step[block]] for block in blocks[:together]]
                assert batches.collate_packed(first, 0, False)["input_ids"].numel() == max(batches_of[0]) * together
            position += len(step)
        assert tokens == int(rows.lengths_of(np.arange(len(rows))).sum())
        assert tokens / slots >= 0.97, (world_size, together)


@needs_data
def test_trains_and_is_scored_by_the_final_number(tmp_path):
    tiny.save(tmp_path / "tiny")
    test_file = tmp_path / "test.jsonl"
    lines = (DATA / "gsm8k_test.jsonl").read_text().splitlines()[:6]
    test_file.write_text("\n".join(lines))
    asked = shipped(
        tmp_path,
        model_name_or_path=str(tmp_path / "tiny"),
        eval_dataset_name=str(test_file),
        eval_generations=2,
        global_batch_size=8,
        max_steps=2,
        logging_steps=1,
        warmup_ratio=0.0,
    )
    SFT.main(asked)
    metrics = launcher.read_metrics(tmp_path / "run")
    assert launcher.column(metrics, "train/non_padding_share") == [1.0, 1.0]
    assert launcher.column(metrics, "eval/exact_match") == [0.0, 0.0]
    losses = launcher.column(metrics, "eval/loss")
    assert losses[1] < losses[0]
    assert all(rewards.final_number(json.loads(line)["answer"]) is not None for line in lines)


def test_answers_are_right_by_their_number(tmp_path, monkeypatch):
    from oneloop import evaluate

    rows = [runs.turns("2 + 2?", "2 + 2 = 4\n#### 4"), runs.turns("A thousand?", "#### 1,000")]
    answers = ["It is 4.0, I think", "#### 1000 and 7"]
    monkeypatch.setattr(evaluate, "generate_answers", lambda *given: answers[: len(given[3])])
    data = runs.write_rows(tmp_path / "eval.jsonl", rows)
    for match, share in {"number": 1.0, "text": 0.0}.items():
        changes = {"eval_dataset_name": data, "eval_generations": 2, "eval_match": match, "max_steps": 1}
        out = runs.train(tmp_path, rows, global_batch_size=2, resume="none", **changes)
        assert launcher.column(launcher.read_metrics(out), "eval/exact_match")[-1] == share
    with pytest.raises(ValueError, match="eval_match: number, but the reply of evaluation row 0 holds no number"):
        data = runs.write_rows(tmp_path / "none.jsonl", [runs.turns("Who?", "Nobody.")])
        changes |= {"eval_dataset_name": data, "eval_match": "number", "eval_generations": 1}
        runs.train(tmp_path, rows, global_batch_size=2, resume="none", **changes)


@pytest.mark.parametrize(
    "text, number",
    [
        ("so 3 and 4\n#### 72", 72),
        ("#### 1,234.50 dollars, not 7", "1234.50"),
        ("It is $18.", 18),
        ("from 5 to -3", -3),
        ("#### none", None),
        ("version v2", None),
        ("half is .5", "0.5"),
        ("", None),
    ],
)
def test_final_number(text, number):
    from decimal import Decimal

    assert rewards.final_number(text) == (None if number is None else Decimal(number))
