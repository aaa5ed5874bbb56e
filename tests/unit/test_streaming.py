"""Streams: which rows come in which step, on how many ranks, and after which stop (C.. are reported faults)."""

import gzip
import itertools
import json
import multiprocessing
import os
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from oneloop import config, mixture
from oneloop.data import ahead, encode, preparing, reports, streaming, windows
from oneloop.data.files import BadRow
from oneloop.data.pieces import fit
from oneloop.data.readers import Raw
from tests import tiny
from tests.recipes.runs import SHARED_CASES

PAD = 0


def row(number: int, length: int = 3) -> str:
    """A line that `number_tokens` makes `length` tokens of, none of which any other row has."""
    return json.dumps({"text": f"{number} {length}"})


def number_tokens(settings, tokenizer, examples, for_evaluation):
    found = []
    for example in examples:
        if example["text"] == "fault":
            raise RuntimeError("the tokenizer has a fault")
        if example["text"] == "die":
            os.kill(os.getpid(), 9)
        number, length = map(int, example["text"].split())
        ids = np.arange(length, dtype=np.int32) + 1000 * number
        try:
            found.append(fit({"input_ids": ids, "labels": ids.copy()}, settings.max_length, settings.truncation))
        except BadRow as bad:
            found.append(bad)
    return found


def write(folder, name: str, lines: list[str]) -> str:
    content = "".join(line + "\n" for line in lines).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(folder / name)


def split_over(folder, num_files: int, num_rows: int, suffix: str = ".jsonl") -> str:
    """A folder of `num_rows` rows, numbered from 1, in files of unlike size."""
    folder.mkdir(exist_ok=True, parents=True)
    borders = [num_rows * i * i // num_files**2 for i in range(num_files + 1)]
    for i, (start, end) in enumerate(zip(borders, borders[1:], strict=False)):
        write(folder, f"part{i}{suffix}", [row(number + 1) for number in range(start, end)])
    return str(folder)


def settings(path, **changes):
    values = {
        "model_name_or_path": "none",
        "dataset_name": str(path),
        "output_dir": str(path) + ".run",
        "streaming": True,
        "max_steps": 6,
        "global_batch_size": 4,
        "per_device_batch_size": 2,
        "shuffle_buffer_size": 4,
        "max_length": 16,
    }
    return config.RecipeConfig(**values | changes)


class Gather:
    """Stands in for what ranks exchange, between threads."""

    def __init__(self, size: int):
        self.size, self.values = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int):
        def gather(value):
            self.values[rank] = value
            self.barrier.wait()
            everyone = list(self.values)
            self.barrier.wait()
            return everyone

        return gather


def train(
    config,
    monkeypatch,
    world_size=1,
    steps=None,
    state=None,
    encode=number_tokens,
    tokenizer=None,
    each=None,
    limits=None,
):
    """Go through the stream on so many ranks; returns for each rank its steps, as `taken` gives them, or the error that
    ended it, and the loader."""
    shared = Gather(world_size)
    outcome: list = [None] * world_size
    monkeypatch.setattr(streaming, "gatherer", lambda accelerator: shared.of(accelerator.process_index))

    def one(rank: int) -> None:
        accelerator = types.SimpleNamespace(
            process_index=rank, num_processes=world_size, is_main_process=rank == 0, device=torch.device("cpu")
        )
        found, loader = [], None
        try:
            stream = streaming.Stream(config, accelerator, tokenizer, encode, mixture.for_training(config))
            stream.limits = limits
            loader = streaming.StreamLoader(stream, accelerator, config, PAD)
            progress = loader.progress_from_start(config)
            if state is not None:
                progress.step, saved = state
                loader.restore(json.loads(json.dumps(saved)))
            for micro_batches in loader.steps(progress):
                found.append([taken(batch) for batch in micro_batches])
                loader.advance(progress)
                if each:
                    each(rank, loader, progress)
                if steps is not None and progress.step == steps:
                    break
            outcome[rank] = (found, loader, progress)
        except Exception as error:
            outcome[rank] = (error, loader, None)
            if world_size > 1 and not isinstance(error, ValueError | RuntimeError):
                shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive(), "a rank hangs"
    return outcome


def taken(batch) -> list[int]:
    """The tokens of a micro-batch."""
    return batch["input_ids"][batch["input_ids"] != PAD].tolist()


def tokens_of_steps(outcome) -> list[list[int]]:
    """The tokens of each step over all ranks, sorted."""
    for found, *_ in outcome:
        if isinstance(found, Exception):
            raise found
    counts = {tuple(len(step) for step in found) for found, *_ in outcome}
    assert len(counts) == 1, "ranks have another number of micro-batches"
    together = zip(*(found for found, *_ in outcome), strict=True)
    return [sorted(token for rank in step for chunk in rank for token in chunk) for step in together]


def ids_of_steps(outcome) -> list[list[int]]:
    return [[token // 1000 for token in step if token % 1000 == 0] for step in tokens_of_steps(outcome)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_is_cut_into_windows_and_entered_at_any_of_them(shuffle, monkeypatch):
    monkeypatch.setattr(windows, "_UNSHUFFLED_ROWS", 4)
    contents = [list(range(5)), [], [5], list(range(6, 16))]

    def read(file, cursor):
        for place, value in enumerate(contents[file], start=1):
            if cursor is None or place > cursor[1]:
                yield Raw(place, value), [place, place]

    order = windows.Order(3, shuffle, 4)
    items, ends = [], 0
    for item in windows.walk(read, 4, order, windows.BEGINNING):
        items.append(item)
        ends += isinstance(item, windows.EpochEnd)
        if ends == 2:
            break
    rows_of = [item for item in items if isinstance(item, windows.Row)]
    epochs = [[item.raw.data for item in rows_of[:16]], [item.raw.data for item in rows_of[16:]]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(16))
    assert (epochs[0] != epochs[1]) == shuffle and (epochs[0] == list(range(16))) != shuffle
    assert [item.number for item in rows_of] == list(range(16)) * 2
    starts = [place for place, item in enumerate(items) if isinstance(item, windows.Window)]
    assert len(starts) == 10
    for place in starts:
        again = windows.walk(read, 4, order, items[place])
        assert [next(again) for _ in items[place:]] == items[place:]


@pytest.mark.parametrize("num_files", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_c30_every_row_once_an_epoch_whatever_the_files(num_files, world_size, tmp_path, monkeypatch):
    path = split_over(tmp_path / "rows", num_files, 12)
    for num_proc in (1, 2):
        run = settings(path, dataset_num_proc=num_proc)
        outcome = train(run, monkeypatch, world_size)
        ids = ids_of_steps(outcome)
        assert sorted(sum(ids[:3], [])) == sorted(sum(ids[3:], [])) == list(range(1, 13))
        assert ids[:3] != ids[3:]
        assert ids == ids_of_steps(train(run, monkeypatch, world_size))
        assert ids != ids_of_steps(train(settings(path, seed=1), monkeypatch, world_size))
        assert ids == ids_of_steps(train(run, monkeypatch, 3 - world_size))
        each = [sum(len(chunk) // 3 for step in found for chunk in step) for found, *_ in outcome]
        assert max(each) - min(each) <= 2  # a micro-batch
        assert [outcome[0][2].step, outcome[0][2].epoch, outcome[0][2].position] == [6, 2, 0]


@pytest.mark.parametrize(
    ("suffix", "packing", "num_rows", "buffer_size"),
    [
        *((".jsonl", *more) for more in itertools.product([False, True], [12, 200], [4, 1000])),
        (".jsonl.gz", False, 200, 4),
    ],
)
def test_c40_a_stream_goes_on_where_it_was(num_rows, buffer_size, packing, suffix, tmp_path, monkeypatch, capsys):
    path = split_over(tmp_path / "rows", 3, num_rows, suffix)
    run = settings(path, shuffle_buffer_size=buffer_size, packing=packing, max_steps=30)
    whole = tokens_of_steps(train(run, monkeypatch, 2))
    assert len(whole) == 30
    for steps in (3, 20):
        for before, after in ((1, 2), (2, 1)) + ((2, 2),) * (steps == 3):
            first = train(run, monkeypatch, before, steps=steps)
            states = [loader.state() for _, loader, _ in first]
            assert all(state == states[0] for state in states)
            second = train(run, monkeypatch, after, state=(steps, states[0]))
            assert tokens_of_steps(first) + tokens_of_steps(second) == whole
    if suffix == ".jsonl.gz":
        assert "cannot be entered in its middle" in capsys.readouterr().out


def test_c32_stopped_in_any_step_and_with_split_rows(tmp_path, monkeypatch):
    lines = [row(number, 5 * number) for number in range(1, 13)] + ['{"text": "', row(13)]
    path = write(tmp_path, "rows.jsonl", lines)
    for unit, size in (("sequences", 3), ("tokens", 20)):
        run = settings(
            path, truncation="split", on_bad_row="skip", batch_unit=unit, global_batch_size=size, max_steps=40
        )
        outcome = train(run, monkeypatch, 2)
        whole, counts = tokens_of_steps(outcome), outcome[0][1].metrics()
        rejected = (tmp_path / "rows.jsonl.run" / "rejected.jsonl").read_text()
        epoch = sorted(1000 * number + token for number in range(1, 13) for token in range(5 * number))
        epoch = sorted([*epoch, *range(13000, 13003)])
        assert sorted(sum(whole, [])[: len(epoch)]) == epoch
        assert unit != "tokens" or all(len(step) <= 20 for step in whole)
        for steps in range(1, 40, 4):
            first = train(run, monkeypatch, 2, steps=steps)
            second = train(run, monkeypatch, 1, state=(steps, first[1][1].state()))
            assert tokens_of_steps(first) + tokens_of_steps(second) == whole
            assert second[0][1].metrics() == counts
            assert (tmp_path / "rows.jsonl.run" / "rejected.jsonl").read_text() == rejected
        assert json.loads(rejected) == {
            "source": path,
            "file": path,
            "line": 13,
            "kind": "bad_json",
            "reason": json.loads(rejected)["reason"],
            "row": '{"text": "',
        }
        assert (tmp_path / "rows.jsonl.run" / "rejected.jsonl").stat().st_mode & 0o777 == 0o600
        (tmp_path / "rows.jsonl.run" / "rejected.jsonl").unlink()


def test_a_step_is_so_many_tokens(tmp_path, monkeypatch):
    path = write(tmp_path, "rows.jsonl", [row(number, 2 + number % 9) for number in range(1, 101)])
    run = settings(path, batch_unit="tokens", global_batch_size=32, max_steps=40)
    steps = tokens_of_steps(train(run, monkeypatch, 2))
    assert all(len(step) <= 32 for step in steps) and sum(map(len, steps)) / len(steps) > 25
    assert steps == tokens_of_steps(train(settings(path, **{**run_changes(run), "packing": True}), monkeypatch, 2))


def run_changes(run) -> dict:
    return {"batch_unit": run.batch_unit, "global_batch_size": run.global_batch_size, "max_steps": run.max_steps}


def test_refused_rows_cost_no_further_micro_batch(tmp_path, monkeypatch):
    """Rows are handed over where those of a step are spread unevenly."""
    lines = [row(number, 3 if number % 3 else 99) for number in range(1, 200)]
    path = write(tmp_path, "rows.jsonl", lines)
    run = settings(path, truncation="drop", max_steps=30)
    outcome = train(run, monkeypatch, 2)
    assert {len(step) for found, *_ in outcome for step in found} == {1}
    assert tokens_of_steps(outcome) == tokens_of_steps(train(run, monkeypatch, 1))
    assert outcome[0][1].metrics()["data/rows_rejected"] == 0


def test_bad_rows_stop_every_rank_in_the_same_step(tmp_path, monkeypatch):
    lines = [row(number) for number in range(1, 41)]
    lines[20], lines[21], lines[33] = "{", '{"text": 3}', "[]"
    path = write(tmp_path, "rows.jsonl", lines)
    run = settings(path, shuffle=False)
    for world_size in (1, 2):
        done = []
        outcome = train(run, monkeypatch, world_size, each=lambda rank, loader, progress: done.append(progress.step))  # noqa: B023
        errors = {str(error) for error, *_ in outcome}
        assert max(done) == 5 and len(done) == 5 * world_size  # rows 1 to 20
        (error,) = errors
        assert all(isinstance(error, ValueError) for error, *_ in outcome)
        assert f"dataset_name '{path}' has rows that cannot be used" in error
        assert f"{path}:21: not valid JSON" in error and f"{path}:22: text is a int" in error
        assert "set `on_bad_row: skip`" in error and "bad_json 1" in error


def test_faults_reach_every_rank(tmp_path, monkeypatch):
    """A fault of the tokenizer, a killed process, a file that is cut off: nobody waits for the rank that has it."""
    good = [row(number) for number in range(1, 41)]
    fault, killed = [*good[:20], '{"text": "fault"}', *good[20:]], [*good[:20], '{"text": "die"}', *good[20:]]
    outcome = train(settings(write(tmp_path, "fault.jsonl", fault), shuffle=False), monkeypatch, 2)
    assert [type(error) for error, *_ in outcome] == [RuntimeError] * 2
    assert all("the tokenizer has a fault" in str(error) for error, *_ in outcome)
    outcome = train(settings(write(tmp_path, "killed.jsonl", killed), shuffle=False), monkeypatch, 2)
    assert [type(error) for error, *_ in outcome] == [ValueError] * 2
    assert all("was ended from outside" in str(error) for error, *_ in outcome)
    noise = np.random.default_rng(0).bytes(500_000).hex()
    lines = [json.dumps({"text": f"{number} 3", "meta": noise[200 * number :][:200]}) for number in range(1, 5000)]
    whole = write(tmp_path, "cut.jsonl.gz", lines)
    with open(whole, "r+b") as file:
        file.truncate(os.path.getsize(whole) // 2)
    for shuffle in (True, False):
        outcome = train(settings(whole, shuffle=shuffle, max_steps=5000), monkeypatch, 2)
        assert len({str(error) for error, *_ in outcome}) == 1
        assert all(isinstance(error, ValueError) and "cut.jsonl.gz cannot be read beyond" in str(error)
                   for error, *_ in outcome)  # fmt: skip


def test_death_shows_where_another_process_holds_the_connection(monkeypatch):
    """One that was forked by another thread at the same moment has a copy of it, which keeps it from ending."""
    context, copies = multiprocessing.get_context("fork"), []
    pipe = context.Pipe

    def copied():
        ours, theirs = pipe()
        copies.append(os.dup(theirs.fileno()))
        return ours, theirs

    monkeypatch.setattr(context, "Pipe", copied)
    processes = ahead.Processes(lambda piece: os.kill(os.getpid(), 9), 1)
    try:
        with pytest.raises(ValueError, match="was ended from outside"):
            processes.call(1)
    finally:
        processes.close()
        for copy in copies:
            os.close(copy)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    """Neither threads nor processes outlive the steps, however these end."""
    import psutil

    path = split_over(tmp_path / "rows", 2, 40)
    # Of tests before this one: threads may end meanwhile, and torch keeps its compiling processes.
    before, others = set(threading.enumerate()), set(psutil.Process().children())
    train(settings(path, dataset_num_proc=2), monkeypatch, 2, steps=1)
    train(settings(path, max_steps=2), monkeypatch, 1)
    train(settings(path), monkeypatch, 1, each=lambda *_: 1 / 0)
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    assert [process for process in psutil.Process().children() if process not in others] == []


def test_sources_without_a_row_are_refused(tmp_path, monkeypatch):
    empty, dropped = write(tmp_path, "empty.jsonl", []), write(tmp_path, "long.jsonl", [row(1, 99)])
    for path, message in ((empty, "holds no row"), (dropped, "leaves no row to use"), ("no.jsonl", "does not exist")):
        outcome = train(settings(path, truncation="drop"), monkeypatch, 2)
        assert [type(error) for error, *_ in outcome] == [ValueError] * 2
        assert all(message in str(error) for error, *_ in outcome)
    cut = write(tmp_path, "cut.jsonl", ["{", "["])
    outcome = train(settings(cut, on_bad_row="skip"), monkeypatch, 2)
    assert all("leaves no row to use (read 2, kept 0; refused: bad_json 2)" in str(error) for error, *_ in outcome)


def test_another_stream_begins_a_new_epoch(tmp_path, monkeypatch, capsys):
    path = split_over(tmp_path / "rows", 1, 12)
    (_, loader, _), *_ = train(settings(path), monkeypatch, 1, steps=2)
    state = loader.state()
    write(tmp_path / "rows", "more.jsonl", [row(50)])
    outcome = train(settings(path, max_steps=6), monkeypatch, 1, state=(2, state))
    ids = ids_of_steps(outcome)
    assert sorted(sum(ids, [])) == [*range(1, 13), 50] and outcome[0][2].epoch == 2
    assert "begins with a new epoch" in capsys.readouterr().out


def test_rows_beyond_the_model_are_named(tmp_path, monkeypatch):
    path = write(tmp_path, "rows.jsonl", [row(1), row(2, 9)])
    for limits, message in (((2000, 99), "token id 2008"), ((9999, 8), "rows.jsonl:2 has 9 tokens")):
        found = train(settings(path), monkeypatch, 1, limits=limits)
        assert isinstance(found[0][0], ValueError) and message in str(found[0][0]), found


def sft_encode(settings, tokenizer, examples, for_evaluation):
    return encode.encode_batch(tokenizer, examples, max_length=settings.max_length, truncation=settings.truncation)


def rows_of(batch) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of the rows of a padded micro-batch."""
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), batch["lengths"].tolist(), strict=True)
    return [(ids[:length], labels[:length]) for ids, labels, length in rows if length]


CASES = [
    ("C13_long_prompt_mix.jsonl", "truncate"),
    ("C13_long_prompt_mix.jsonl", "split"),
    ("C13_long_prompt_mix.jsonl", "drop"),
    ("C19_mixed_schema.jsonl", "truncate"),
    *((f"C20_{name}.jsonl", "truncate") for name in ("array_line", "bom", "crlf_blank_lines", "cut_line")),
    *((f"C20_{name}.jsonl", "truncate") for name in ("no_final_newline", "two_objects_one_line")),
    *((f"C21_{name}.jsonl", "truncate") for name in ("latin1", "lone_surrogate", "unicode")),
    ("C26_docs.jsonl", "split"),
]


@pytest.mark.skipif(not SHARED_CASES.is_dir(), reason="the collection of cases is not here")
@pytest.mark.parametrize(("name", "truncation"), CASES)
def test_a_stream_has_the_rows_that_preparing_gives(name, truncation, tmp_path, monkeypatch):
    path = SHARED_CASES / name
    run = settings(
        path, output_dir=str(tmp_path / "run"), truncation=truncation, on_bad_row="skip", shuffle=False,
        max_length=64, global_batch_size=100, max_steps=1,
    )  # fmt: skip
    tokenizer = tiny.tokenizer(pad="</s>")
    job = preparing.Job(preparing.settings_of(run), tokenizer, sft_encode, False)
    monkeypatch.setattr("tests.unit.test_streaming.taken", rows_of)
    source = mixture.for_training(run)[0]
    expected, report = [], reports.Report()
    for chunk in preparing.chunks([path], source):
        encoded = preparing.encode_chunk(source, job, chunk)
        report.add(encoded.report)
        # The first token is predicted from nothing.
        expected += [(ids.tolist(), [-100, *labels[1:].tolist()]) for ids, labels in preparing.tokens_of(encoded)]
    for world_size in (1, 2):
        outcome = train(run, monkeypatch, world_size, encode=sft_encode, tokenizer=tokenizer)
        if not expected:
            assert all("leaves no row" in str(error) for error, *_ in outcome)
            continue
        mine = [row for found, *_ in outcome for step in found for chunk in step for row in chunk]
        assert sorted(mine) == sorted(expected)
        assert outcome[0][1].reports == [report]


def test_memory_is_flat(tmp_path, monkeypatch):
    """30 MB of rows, read twice, in less than a third of that."""
    import psutil

    text = "x" * 3000
    lines = [json.dumps({"text": f"{number} 3", "meta": text}) for number in range(1, 10_001)]
    path = write(tmp_path, "rows.jsonl", lines)
    del lines
    run = settings(path, shuffle_buffer_size=200, global_batch_size=200, per_device_batch_size=50, max_steps=100)
    process, most = psutil.Process(), {}

    def each(rank, loader, progress):
        family = [process, *process.children()]
        most[progress.step] = sum(one.memory_info().rss for one in family)

    assert len(ids_of_steps(train(run, monkeypatch, 1, each=each))) == 100
    assert max(most.values()) - most[5] < 10e6, most


def test_several_sources_follow_each_other_and_are_reported_apart(tmp_path, monkeypatch, capsys):
    first = write(tmp_path, "a.jsonl", [row(number) for number in range(1, 8)])
    second = write(tmp_path, "b.jsonl", [json.dumps({"document": f"{number} 3"}) for number in range(8, 13)])
    run = settings(first, shuffle=False, dataset_name=None, output_dir=str(tmp_path / "run"),
                   datasets=[{"path": first}, {"path": second, "columns": {"text": "document"}}])  # fmt: skip
    for world_size in (1, 2):
        outcome = train(run, monkeypatch, world_size)
        assert ids_of_steps(outcome)[:3] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
        assert [report.num_kept for report in outcome[0][1].reports] == [14, 10]
        said = capsys.readouterr().out
        assert said.count("a.jsonl: end of the first epoch: read 7, kept 7") == 1
        assert said.count("b.jsonl: end of the first epoch: read 5, kept 5") == 1


def test_a_hub_stream_is_entered_by_its_cursor(tmp_path, monkeypatch):
    entered = []

    def stream_hub(source, start=None):
        entered.append(start)
        for index in range(start[1] if start else 0, 40):
            yield Raw(index, {"text": f"{index + 1} 3"}), [index, index + 1]

    monkeypatch.setattr("oneloop.data.readers.stream_hub", stream_hub)
    monkeypatch.setattr("oneloop.sources.dataset_commit", lambda *_: "c0ffee")
    run = settings("someone/rows", output_dir=str(tmp_path), max_steps=20)
    whole = ids_of_steps(train(run, monkeypatch, 2))
    assert sorted(sum(whole[:10], [])) == list(range(1, 41))
    first = train(run, monkeypatch, 1, steps=7)
    entered.clear()
    assert ids_of_steps(first) + ids_of_steps(train(run, monkeypatch, 2, state=(7, first[0][1].state()))) == whole
    again = [start for start in entered if start is not None]  # None: a further epoch
    assert again and all(20 <= start[1] <= 28 for start in again)


def test_where_names_the_rows_of_the_newest_step(tmp_path, monkeypatch):
    path = write(tmp_path, "rows.jsonl", [row(number) for number in range(1, 13)])
    found = []

    def each(rank, loader, progress):
        mine = [loader.where(int(row_id)) for chunk in loader.last_micro_batches for row_id in chunk]
        found.append((rank, loader.last_row_ids, mine))

    steps = train(settings(path), monkeypatch, 2, each=each)
    of_rank_0 = [one for one in found if one[0] == 0]
    assert [row_ids for _, row_ids, _ in of_rank_0] == [list(range(4 * step, 4 * step + 4)) for step in range(6)]
    for (_, _, mine), trained in zip(of_rank_0, steps[0][0], strict=True):
        numbers = [token // 1000 for chunk in trained for token in chunk if token % 1000 == 0]
        assert mine == [f"{path}:{number}" for number in numbers]


@given(
    lines=st.lists(st.one_of(st.integers(2, 40), st.sampled_from(["{", "[]"])), min_size=1, max_size=40),
    num_files=st.integers(1, 3),
    buffer_size=st.sampled_from([1, 3, 7, 100]),
    unit=st.sampled_from(["sequences", "tokens"]),
    truncation=st.sampled_from(["truncate", "drop", "split"]),
    packing=st.booleans(),
    world_sizes=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    stop=st.integers(1, 11),
    seed=st.integers(0, 99),
)
@hypothesis_settings(max_examples=30, deadline=None, derandomize=True)
def test_steps_depend_on_neither_ranks_nor_stops(
    lines, num_files, buffer_size, unit, truncation, packing, world_sizes, stop, seed, tmp_path_factory
):
    """Any rows, in any files: the same steps, of which the first make up an epoch with every usable token once."""
    assume(any(isinstance(line, int) and (truncation != "drop" or line <= 16) for line in lines))
    folder = tmp_path_factory.mktemp("case") / "rows"
    folder.mkdir()
    texts = [row(number, line) if isinstance(line, int) else line for number, line in enumerate(lines, start=1)]
    for file in range(num_files):
        write(folder, f"{file}.jsonl", texts[file::num_files])
    changes = {"shuffle_buffer_size": buffer_size, "batch_unit": unit, "truncation": truncation, "packing": packing}
    changes |= {"global_batch_size": 16 if unit == "tokens" else 4, "on_bad_row": "skip", "seed": seed}
    run = settings(folder, output_dir=str(folder.parent / "run"), max_steps=12, **changes)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ahead, "sys", types.SimpleNamespace(platform="elsewhere"))  # without processes: faster
        outcome = train(run, monkeypatch, world_sizes[0])
        whole = tokens_of_steps(outcome)
        first = train(run, monkeypatch, world_sizes[1], steps=stop)
        second = train(run, monkeypatch, world_sizes[2], state=(stop, first[0][1].state()))
        assert tokens_of_steps(first) + tokens_of_steps(second) == whole
        assert second[0][1].state() == outcome[0][1].state()
    expected = []
    for number, line in enumerate(lines, start=1):
        if isinstance(line, int) and not (truncation == "drop" and line > 16):
            kept = line if truncation == "split" else min(line, 16)
            kept -= kept > 16 and kept % 16 == 1  # a piece of one token has no target
            expected += range(1000 * number, 1000 * number + kept)
    flat: list[int] = []
    while len(flat) < len(expected) and whole:
        flat += whole.pop(0)
    assert sorted(flat) == sorted(expected) or (not whole and set(flat) < set(expected))
