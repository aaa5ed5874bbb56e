"""Prepared rows: found again only where nothing that decides them has changed, whole or not at all."""

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oneloop import mixture
from oneloop.data import cache, prepare, preparing, rowsets, sampling, workers
from tests import tiny
from tests.equivalence.scenario import ROOT, load_recipe
from tests.recipes import runs

SFT = load_recipe(ROOT / "recipes" / "sft.py")
ANSWERS = [runs.turns(f"What is {i}?", f"It is {i}.") for i in range(9)]


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


def config(tmp_path: Path, rows=ANSWERS, **changes):
    values = {"model_name_or_path": "m", "output_dir": str(tmp_path / "out"), "data_cache_dir": str(tmp_path / "cache")}
    if "datasets" not in changes and "dataset_name" not in changes:
        values["dataset_name"] = runs.write_rows(tmp_path / "rows.jsonl", rows)
    return SFT.SFTConfig(**values | changes)


def entries(tmp_path: Path) -> set[str]:
    return {path.parent.name for path in (tmp_path / "cache").glob(f"*/{cache.META}")}


def load(asked, tokenizer, encode=SFT.encode):
    return prepare.load(asked, None, tokenizer, encode)


def ids(rows) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


def test_rows_are_those_of_the_encoder(tmp_path, tokenizer, capsys):
    rows, nothing = load(config(tmp_path), tokenizer)
    settings = preparing.settings_of(config(tmp_path))
    expected = [one for result in SFT.encode(settings, tokenizer, ANSWERS, False) for one in result]
    assert len(rows) == len(expected) == len(ANSWERS) and len(nothing) == 0
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() >= {"input_ids", "labels"}
        assert np.array_equal(row["input_ids"], other["input_ids"]) and np.array_equal(row["labels"], other["labels"])
    assert rows.lengths_of(np.array([3, 0])).tolist() == [len(expected[3]["input_ids"]), len(expected[0]["input_ids"])]
    assert rows.where(4).endswith("rows.jsonl:5")
    assert rows.fingerprint == rowsets.InMemory(expected).fingerprint
    printed = capsys.readouterr().out
    assert "read 9, kept 9; form: messages" in printed
    assert f"{sum(len(row['input_ids']) for row in expected):,} tokens" in printed


def test_only_the_same_is_found_again(tmp_path, tokenizer):  # C27
    def count(asked, tokenizer=tokenizer, encode=SFT.encode) -> int:
        load(asked, tokenizer, encode)
        return len(entries(tmp_path))

    asked = config(tmp_path)
    assert count(asked) == 1
    assert count(config(tmp_path)) == 1
    harmless = {
        "learning_rate": 1.0,
        "seed": 3,
        "eval_generations": 0,
        "packing": True,
        "max_steps": 3,
        "shuffle": False,
    }
    assert count(config(tmp_path, **harmless)) == 1
    for number, changes in enumerate(
        [{"max_length": 30}, {"assistant_only_loss": False}, {"truncation": "drop"}, {"split_special_tokens": False}], 2
    ):
        assert count(config(tmp_path, **changes)) == number, changes
    other = copy.deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace("assistant", "helper")
    assert count(asked, other) == 6
    other = copy.deepcopy(tokenizer)
    other.add_special_tokens({"eos_token": "<|other|>"})
    assert count(asked, other) == 7

    def encode(settings, tokenizer, examples, for_evaluation):
        return SFT.encode(settings, tokenizer, examples, for_evaluation)

    assert count(asked, encode=encode) == 8
    # The same name and size, and the same times as far as a program can set them.
    path = Path(asked.dataset_name)
    before = path.stat()
    changed = [*ANSWERS[:-1], runs.turns("What is 8?", "It is 9.")]
    runs.write_rows(path, changed)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    rows, _ = load(asked, tokenizer)
    assert len(entries(tmp_path)) == 9
    assert "9." in tokenizer.decode(rows[8]["input_ids"])
    moved = path.rename(tmp_path / "moved.jsonl")
    rows, _ = load(config(tmp_path, dataset_name=str(moved)), tokenizer)
    assert len(entries(tmp_path)) == 9 and rows.where(0).endswith("moved.jsonl:1")


def test_content_is_not_read_again_while_nothing_was_touched(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_text("one")
    monkeypatch.setattr(cache, "_RACY_SECONDS", -1.0)
    first = cache.file_sha256(path, tmp_path / "cache", lambda: None)
    beats = []
    assert cache.file_sha256(path, tmp_path / "cache", lambda: beats.append(1)) == first and not beats
    path.write_text("two")
    assert cache.file_sha256(path, tmp_path / "cache", lambda: beats.append(1)) != first and beats
    # What has just been written may be written again within one tick of the clock: that is not remembered.
    monkeypatch.setattr(cache, "_RACY_SECONDS", 60.0)
    path.write_text("three")
    beats.clear()
    for _ in range(2):
        cache.file_sha256(path, tmp_path / "cache", lambda: beats.append(1))
    assert len(beats) == 2


def test_encode_may_read_only_what_rows_are_known_by(tmp_path, tokenizer):
    def encode(settings, tokenizer, examples, for_evaluation):
        return [] if settings.learning_rate else []

    with pytest.raises(
        AttributeError, match="encode reads config.learning_rate, but rows may depend only on .*max_length"
    ):
        load(config(tmp_path), tokenizer, encode)
    assert entries(tmp_path) == set()


# --- bad rows ---------------------------------------------------------------------------------------------------------


def test_bad_rows_stop_or_are_kept_aside(tmp_path, tokenizer, capsys):
    lines = [json.dumps(row) for row in ANSWERS]
    lines[2], lines[5] = lines[2][:-9], json.dumps({"messages": []})
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"messages": "\xff"}\n')
    message = (
        r"read 10, kept 7; refused: bad_json 1, bad_utf8 1, empty 1.*rows.jsonl:3: .*rows.jsonl:6: .*rows.jsonl:10: "
    )
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ValueError, match=f"(?s){message}"):
            load(config(tmp_path, dataset_name=str(path)), tokenizer)
    asked = config(tmp_path, dataset_name=str(path), on_bad_row="skip")
    rows, nothing = load(asked, tokenizer)
    assert len(entries(tmp_path)) == 1 and len(rows) == 7
    Path(asked.output_dir).mkdir()
    prepare.keep_rejected(SimpleNamespace(is_main_process=True), asked, [rows, nothing])
    target = Path(asked.output_dir) / "rejected.jsonl"
    rejected = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["line"], line["kind"]) for line in rejected] == [(3, "bad_json"), (6, "empty"), (10, "bad_utf8")]
    assert rejected[0]["row"] == lines[2] and rejected[2]["row"] == '{"messages": "\\xff"}'
    assert all(line["file"] == str(path) and line["reason"] for line in rejected)
    assert target.stat().st_mode & 0o777 == 0o600
    assert rows.parts[0].report.num_refused == 3


def test_long_rows(tmp_path, tokenizer):  # C13
    long = runs.turns("Say much.", "lamp " * 200)
    alone, _ = load(config(tmp_path, [long], max_length=4096), tokenizer)
    whole = alone[0]["input_ids"].tolist()
    few, _ = load(config(tmp_path, ANSWERS, max_length=64), tokenizer)
    counts = {}
    for truncation in ("truncate", "drop", "split"):
        rows, _ = load(config(tmp_path, [long, *ANSWERS], max_length=64, truncation=truncation), tokenizer)
        report = rows.parts[0].report
        counts[truncation] = len(rows) - len(few)
        assert ids(rows)[counts[truncation] :] == ids(few)
        assert report.num_read == 10 and rows.longest <= 64
        if truncation == "truncate":
            assert (report.num_cut, report.tokens_cut) == (1, len(whole) - 64)
        elif truncation == "drop":
            assert report.reasons == {"too_long": 1} and report.num_refused == 0
        else:
            assert sum(ids(rows)[: counts["split"]], []) == whole
            assert report.num_pieces == counts["split"] - 1
    assert counts == {"truncate": 1, "drop": 0, "split": -(-len(whole) // 64)}
    with pytest.raises(ValueError, match=r"leaves no row to use.*too_long 1.*\n.*max_length"):
        load(config(tmp_path, [long], max_length=64, truncation="drop"), tokenizer)


# --- evaluation rows --------------------------------------------------------------------------------------------------


def test_a_share_is_set_apart(tmp_path, tokenizer, capsys):
    answers = [runs.turns(f"What is {i}?", f"It is {i}.") for i in range(100)]
    train, apart = load(config(tmp_path, answers, test_split_size=0.1), tokenizer)
    assert (len(train), len(apart)) == (90, 10)
    assert sorted(ids(train) + ids(apart)) == sorted(ids(load(config(tmp_path, answers), tokenizer)[0]))
    assert "10 rows set apart for evaluation" in capsys.readouterr().out
    assert {"prompt_ids", "reply"} <= apart[0].keys() and apart[0]["reply"].startswith("It is")
    again = load(config(tmp_path, answers, test_split_size=0.1), tokenizer)[1]
    assert again.fingerprint == apart.fingerprint
    assert load(config(tmp_path, answers, test_split_size=0.1, seed=1), tokenizer)[1].fingerprint != apart.fingerprint
    # Equal rows are on the same side, so nothing evaluated is trained on.
    train, apart = load(config(tmp_path, answers * 3, test_split_size=0.1), tokenizer)
    assert not {tuple(row) for row in ids(train)} & {tuple(row) for row in ids(apart)}
    assert (len(train), len(apart)) == (270, 30)


def test_rows_that_are_evaluated_and_trained_on_are_reported(tmp_path, tokenizer, capsys):
    held_out = runs.write_rows(tmp_path / "eval.jsonl", [*ANSWERS[2:4], runs.turns("New?", "Yes.")])
    train, evaluated = load(config(tmp_path, eval_dataset_name=held_out), tokenizer)
    assert prepare.num_shared(train, evaluated) == 2
    assert "2 of 3 evaluation rows are in the training data, too" in capsys.readouterr().out


# --- several sources --------------------------------------------------------------------------------------------------


def test_mixture_has_its_shares(tmp_path, tokenizer, capsys):
    def rows(name, count):
        return runs.write_rows(tmp_path / name, [runs.turns(f"{name} {i}?", f"{i}.") for i in range(count)])

    sources = [
        {"path": rows("a.jsonl", 40), "weight": 1},
        {"path": rows("b.jsonl", 30), "weight": 3},
    ]
    both, _ = load(config(tmp_path, datasets=sources), tokenizer)
    assert len(both) == 70 and both.order.counts == (40, 120)
    printed = capsys.readouterr().out
    assert "25.0% of an epoch's 160 rows" in printed and "75.0% of an epoch's 160 rows" in printed
    order = both.order.epoch(0, 0, True)
    assert sorted(order[order < 40]) == list(range(40))
    assert sorted(np.bincount(order[order >= 40] - 40)) == [4] * 30
    short, _ = load(config(tmp_path, datasets=sources, mixture_stopping_strategy="first_exhausted"), tokenizer)
    assert short.order.counts == (10, 30)
    seen = np.concatenate([short.order.epoch(0, epoch, True) for epoch in range(4)])
    assert sorted(seen[seen < 40]) == list(range(40)), "each row once in four epochs of a quarter"
    plain, _ = load(config(tmp_path, datasets=[{"path": one["path"]} for one in sources]), tokenizer)
    assert plain.order.counts == (40, 30) and plain.where(40).endswith("b.jsonl:1")


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_of_a_mixture_is_a_function_of_seed_and_epoch(shuffle):
    order = sampling.Order((7, 3), (1.0, 1.0))
    epochs = [order.epoch(5, epoch, shuffle).tolist() for epoch in range(3)]
    assert epochs == [order.epoch(5, epoch, shuffle).tolist() for epoch in range(3)]
    assert [sum(row < 7 for row in rows) for rows in epochs] == [7, 7, 7] and len(order) == 14
    if not shuffle:
        assert epochs[0][:4] == [0, 7, 1, 8]
    # Of the small source no row comes a second time before all others have come.
    small = [row for rows in epochs for row in rows if row >= 7]
    assert all(len(set(small[at : at + 3])) == 3 for at in range(0, 21, 3)) or shuffle


def test_columns_of_a_source(tmp_path, tokenizer):
    path = runs.write_rows(tmp_path / "q.jsonl", [{"question": "What is 1?", "answer": "It is 1."}])
    columns = {"prompt": "question", "completion": "answer"}
    rows, _ = load(config(tmp_path, datasets=[{"path": path, "columns": columns}]), tokenizer)
    assert "It is 1." in tokenizer.decode(rows[0]["input_ids"])
    with pytest.raises(ValueError, match="columns: {prompt: question, completion: answer}"):
        load(config(tmp_path, dataset_name=path), tokenizer)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"datasets": []}, "datasets is []"),
        ({"datasets": [{"path": "a", "weigth": 1}]}, "datasets[0] has an unknown key 'weigth'; did you mean weight?"),
        ({"datasets": [{"weight": 1}]}, "datasets[0] has no path"),
        ({"datasets": [{"path": "a", "weight": 0}]}, "datasets[0].weight is 0"),
        ({"datasets": [{"path": "a", "weight": 1}, {"path": "b"}]}, "datasets[1] has no weight"),
        ({"datasets": [{"path": "a"}], "dataset_name": "b"}, "only one can count"),
        ({"dataset_name": None}, "dataset_name is empty"),
        ({"dataset_name": "a", "mixture_stopping_strategy": "first_exhausted"}, "has no effect without a `datasets`"),
        ({"dataset_name": "a", "test_split_size": 1.0}, "test_split_size is 1.0"),
        ({"dataset_name": "a", "test_split_size": 0.1, "eval_dataset_name": "b"}, "only one can be evaluated"),
        ({"dataset_name": "a", "streaming": True}, "streaming: true needs max_steps"),
        ({"dataset_name": "a", "shuffle_buffer_size": 5}, "has no effect without streaming"),
        ({"dataset_name": "a", "batch_unit": "tokens"}, "less than one row of max_length"),
        ({"dataset_name": "a", "dataset_num_proc": 0}, "dataset_num_proc is 0"),
    ],
)
def test_settings_that_cannot_be_meant(changes, message):
    with pytest.raises(ValueError) as caught:
        SFT.SFTConfig(**{"model_name_or_path": "m", "output_dir": "o"} | changes)
    assert message in str(caught.value)


def test_sources_of_a_config():
    base = {"model_name_or_path": "m", "output_dir": "o"}
    one = SFT.SFTConfig(dataset_name="a", dataset_train_split="dev", eval_dataset_name="e", **base)
    assert mixture.for_training(one) == [mixture.Source(path="a", split="dev")]
    assert mixture.for_evaluation(one) == [mixture.Source(path="e", split="test", field="eval_dataset_name")]
    two = SFT.SFTConfig(datasets=[{"path": "a", "split": "x"}, {"path": "b"}], dataset_train_split="dev", **base)
    assert [(source.split, source.field) for source in mixture.for_training(two)] == [
        ("x", "datasets[0]"),
        ("dev", "datasets[1]"),
    ]


# --- processes --------------------------------------------------------------------------------------------------------


def test_processes_give_the_same_entry(tmp_path, tokenizer, monkeypatch):
    rows = [runs.turns(f"What is {i}?", "lamp " * (i % 40) + f"{i}.") for i in range(1500)]
    alone, _ = load(config(tmp_path, rows, dataset_num_proc=1), tokenizer)
    monkeypatch.setattr(preparing, "_WORTH_PROCESSES", 0)
    other = config(tmp_path, rows, dataset_num_proc=2, data_cache_dir=str(tmp_path / "other"))
    together, _ = load(other, tokenizer)
    assert together.fingerprint == alone.fingerprint
    (first,), (second,) = ((tmp_path / name).glob("*/meta.json") for name in ("cache", "other"))
    for path in sorted(first.parent.iterdir()):
        assert (second.parent / path.name).read_bytes() == path.read_bytes(), path.name


def test_results_come_in_order_and_errors_through():
    def slow_first(number):
        time.sleep(0.05 if number == 0 else 0)
        if number == 7:
            raise ValueError("seven")
        if number == 9:
            os.kill(os.getpid(), 9)
        return number, os.getpid()

    found = list(workers.in_order(slow_first, range(6), 3, lambda: None))
    assert [number for number, _ in found] == list(range(6)) and os.getpid() not in {pid for _, pid in found}
    with pytest.raises(ValueError, match="seven"):
        list(workers.in_order(slow_first, range(8), 2, lambda: None))
    with pytest.raises(ValueError, match="dataset_num_proc: a process that tokenises was ended from outside"):
        list(workers.in_order(slow_first, [9], 2, lambda: None))


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from oneloop.data import prepare
from tests import tiny
from tests.equivalence.scenario import ROOT, load_recipe
sft = load_recipe(ROOT / "recipes" / "sft.py")
import time
encode = sft.encode
def slowly(settings, tokenizer, examples, for_evaluation):
    print("working", flush=True)
    time.sleep(float(sys.argv[1]))
    return sft.encode(settings, tokenizer, examples, for_evaluation)
config = sft.SFTConfig(model_name_or_path="m", output_dir="o", dataset_name=sys.argv[2], data_cache_dir=sys.argv[3])
print(prepare.load(config, None, tiny.tokenizer(), slowly)[0].fingerprint, flush=True)
"""


def test_two_at_once_and_one_that_is_killed(tmp_path):  # C27
    path = runs.write_rows(tmp_path / "rows.jsonl", ANSWERS * 200)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}

    def start(seconds: float) -> subprocess.Popen:
        words = [sys.executable, str(program), str(seconds), path, str(tmp_path / "cache")]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)

    killed = start(60)
    assert killed.stdout.readline() == "working\n"
    assert list((tmp_path / "cache").glob("*.partial-*")) and not entries(tmp_path)
    waits = start(0.2)
    time.sleep(1)
    killed.kill()
    killed.wait()
    also = start(0.2)
    printed = [process.communicate(timeout=120)[0].splitlines() for process in (waits, also)]
    assert [process.returncode for process in (waits, also)] == [0, 0]
    assert printed[0][-1] == printed[1][-1]
    assert sum("working" in lines for lines in printed) == 1, "both have prepared the same"
    assert len(entries(tmp_path)) == 1 and not list((tmp_path / "cache").glob("*.partial-*"))


def test_damaged_entry_is_named(tmp_path, tokenizer):
    load(config(tmp_path), tokenizer)
    (values,) = (tmp_path / "cache").glob("*/input_ids.values")
    values.write_bytes(values.read_bytes()[:-4])
    with pytest.raises(ValueError, match="data_cache_dir: .* is damaged .*remove that folder"):
        load(config(tmp_path), tokenizer)


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from oneloop.data import batches, cache, rowsets, sampling
rows = rowsets.RowSet([rowsets.Prepared(Path(sys.argv[1]), ["f"])])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
limit = 192 << 20
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
tokens = 0
for number in rows.order.epoch(0, 0, True):
    tokens += len(rows[number]["input_ids"])
print(tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(rows))
"""


def test_training_reads_more_than_its_memory(tmp_path):
    """A prepared set of 320 MB, read in random order by a process that may not take 192 MB more than it has."""
    writer = cache.Writer(Path(tmp_path))
    folder = tmp_path / "partial"
    folder.mkdir()
    writer = cache.Writer(folder)
    block = np.arange(1000 * 400, dtype="<i4") % 400
    lengths, ones = np.full(1000, 400), np.ones(1000, np.int64)
    columns = {name: ("<i4", block.tobytes(), lengths) for name in ("input_ids", "labels")}
    columns |= {"digest": ("<u8", np.arange(1000, dtype="<u8").tobytes(), ones)}
    for _ in range(100):
        writer.add(columns, 1000)
    writer.publish(tmp_path / "entry", {"report": {}, "fingerprint": "f"})
    assert sum(path.stat().st_size for path in (tmp_path / "entry").iterdir()) > 320e6
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "entry")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    tokens, grown_kb, count = map(int, result.stdout.split())
    assert (tokens, count) == (40_000_000, 100_000)
    assert grown_kb < 32 * 1024


def test_shares_belong_to_what_a_run_is_known_by(tmp_path, tokenizer):
    path = runs.write_rows(tmp_path / "a.jsonl", ANSWERS)
    found = {
        load(config(tmp_path, datasets=[{"path": path} | one for one in entries_]), tokenizer)[0].fingerprint
        for entries_ in ([{}, {}], [{"weight": 1}, {"weight": 1}], [{"weight": 3}, {"weight": 1}])
    }
    assert len(found) == 3


def test_source_that_is_wholly_set_apart_is_named(tmp_path, tokenizer):
    one = runs.write_rows(tmp_path / "one.jsonl", ANSWERS[:1])
    sources = [{"path": runs.write_rows(tmp_path / "a.jsonl", ANSWERS), "weight": 1}, {"path": one, "weight": 1}]
    messages = []
    for seed in range(12):
        try:
            load(config(tmp_path, datasets=sources, test_split_size=0.5, seed=seed), tokenizer)
        except ValueError as error:
            messages.append(str(error))
    assert messages and all("leaves no row of datasets[1]" in message for message in messages)


# --- what people do -----------------------------------------------------------------------------------------------


def test_many_equal_rows_do_not_swell_the_share(tmp_path, tokenizer):
    answers = [runs.turns("Same?", "Yes.")] * 60 + [runs.turns(f"What is {i}?", f"It is {i}.") for i in range(40)]
    for seed in range(12):
        train, apart = load(config(tmp_path, answers, test_split_size=0.1, seed=seed), tokenizer)
        assert len(apart) == 10 and len(train) == 90
    with pytest.raises(ValueError, match="1 different contents, which cannot be divided"):
        load(config(tmp_path, answers[:10], test_split_size=0.1), tokenizer)


def test_rejected_rows_are_those_of_this_run(tmp_path, tokenizer):
    alone = SimpleNamespace(is_main_process=True)
    first, copy_ = tmp_path / "first.jsonl", tmp_path / "copy.jsonl"
    first.write_text(json.dumps(ANSWERS[0]) + "\n{}\n")
    copy_.write_text(first.read_text())
    out = tmp_path / "out"
    out.mkdir()
    for path in (first, copy_):  # the second one's content is found in the cache
        asked = config(tmp_path, dataset_name=str(path), on_bad_row="skip")
        prepare.keep_rejected(alone, asked, list(load(asked, tokenizer)))
        (line,) = map(json.loads, (out / "rejected.jsonl").read_text().splitlines())
        assert line["file"] == line["source"] == str(path) and line["line"] == 2
    assert str(first) in (out / "rejected.1.jsonl").read_text(), "that of the run before is kept"
    asked = config(tmp_path)
    prepare.keep_rejected(alone, asked, list(load(asked, tokenizer)))
    assert not (out / "rejected.jsonl").exists() and str(copy_) in (out / "rejected.2.jsonl").read_text()
    assert len(entries(tmp_path)) == 2


def test_weights_that_repeat_without_end_are_refused(tmp_path, tokenizer):
    small = runs.write_rows(tmp_path / "small.jsonl", ANSWERS[:3])
    sources = [{"path": runs.write_rows(tmp_path / "a.jsonl", ANSWERS), "weight": 1e-9}, {"path": small, "weight": 1}]
    with pytest.raises(ValueError, match=r"datasets\[1\]: the weights make an epoch of 9,000,000,00\d rows"):
        load(config(tmp_path, datasets=sources), tokenizer)


def test_what_is_no_file_is_named(tmp_path, tokenizer):
    folder = tmp_path / "data"
    folder.mkdir()
    runs.write_rows(folder / "a.jsonl", ANSWERS)
    os.mkfifo(folder / "pipe.jsonl")
    with pytest.raises(ValueError, match="pipe.jsonl is neither a file nor a folder"):
        load(config(tmp_path, dataset_name=str(folder / "*.jsonl")), tokenizer)
    (folder / "pipe.jsonl").unlink()
    (folder / "dead.jsonl").symlink_to(folder / "nowhere.jsonl")
    with pytest.raises(ValueError, match="dataset_name.*dead.jsonl is a link that leads nowhere"):
        load(config(tmp_path, dataset_name=str(folder / "*.jsonl")), tokenizer)
    with pytest.raises(ValueError, match="has no split 'tset'; did you mean test"):
        load(config(tmp_path, dataset_name=str(folder / "a.jsonl"), dataset_train_split="tset"), tokenizer)


def test_junk_in_the_cache_is_replaced_and_damage_named(tmp_path, tokenizer):
    load(config(tmp_path), tokenizer)
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    whole = json.loads(meta.read_text())
    for damage in ({"unknown": 1}, None):
        report = whole["report"] | damage if damage else None
        meta.write_text(
            json.dumps(whole | {"report": report} if report else {k: v for k, v in whole.items() if k != "report"})
        )
        with pytest.raises(ValueError, match="is damaged .*remove that folder"):
            load(config(tmp_path), tokenizer)
    meta.unlink()
    rows, _ = load(config(tmp_path), tokenizer)  # no description, no entry: prepared anew
    assert len(rows) == len(ANSWERS)


@pytest.mark.parametrize(
    "data, changes, name",
    [
        ("{0}/data", {"output_dir": "{0}/data/run"}, "output_dir"),
        ("{0}/data/**", {"output_dir": "{0}/data/g/run"}, "output_dir"),
        ("{0}/data/*", {"output_dir": "{0}/data/run"}, "output_dir"),
        ("{0}/data", {"data_cache_dir": "{0}/data/cache"}, "data_cache_dir"),
        ("{0}/data/*.jsonl", {"output_dir": "{0}/data/run"}, None),
        ("{0}/data", {"output_dir": "{0}/run", "data_cache_dir": "{0}/data/.cache"}, None),
        ("{0}/data", {"output_dir": "{0}/data-run"}, None),
    ],
)
def test_what_a_run_writes_is_not_what_it_reads(tmp_path, data, changes, name):
    (tmp_path / "data").mkdir()
    values = {
        key: value.format(tmp_path) for key, value in {"output_dir": "o", "dataset_name": data, **changes}.items()
    }
    if name is None:
        SFT.SFTConfig(model_name_or_path="m", **values)
        return
    with pytest.raises(ValueError, match=f"{name} is .* inside the data of dataset_name"):
        SFT.SFTConfig(model_name_or_path="m", **values)


def test_column_names_do_not_act_on_a_terminal(tmp_path, tokenizer, capsys):
    path = runs.write_rows(tmp_path / "rows.jsonl", [ANSWERS[0] | {"\x1b[31mevil": 1, "a\nerror: b": 2}])
    load(config(tmp_path, dataset_name=path), tokenizer)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\nerror" not in printed and "\\x1b[31mevil" in printed
    path = runs.write_rows(tmp_path / "bad.jsonl", [{"\x1b[31mevil": 1}])
    with pytest.raises(ValueError) as caught:
        load(config(tmp_path, dataset_name=path), tokenizer)
    assert "\x1b" not in str(caught.value)


def test_anchor_that_contains_itself(tmp_path, capsys):
    from oneloop import config as config_module

    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\noutput_dir: o\ndatasets: &x [*x]\n")
    with pytest.raises(SystemExit):
        config_module.parse(SFT.SFTConfig, ["--config", str(path)])
    assert "run.yaml:3: datasets holds an anchor that contains itself" in capsys.readouterr().err
