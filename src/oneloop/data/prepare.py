"""The rows of a run: prepared at start where they are not yet, by one process of each machine while the others wait."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oneloop import mixture, watchdog
from oneloop.data import cache, preparing, reports
from oneloop.data.preparing import Encode, Job
from oneloop.data.rowsets import Prepared, RowSet
from oneloop.mixture import Source

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig
    from oneloop.data.streaming import Stream


_MOST_PASSES = 1000  # over a source in one epoch; more is a slip of the pen, and a list of that length


def load(
    config: RecipeConfig, accelerator: Accelerator | None, tokenizer, encode: Encode
) -> tuple[RowSet | Stream, RowSet]:
    """The rows to train on, or the stream of them, and those to evaluate, the same on every rank. Collective.

    encode: see `preparing.Encode`. The first process of each machine prepares what is not in `data_cache_dir`, however
    long that takes; the others wait for it without a collective operation, whose time limit would end them. What is
    said of each source is printed once. accelerator: None for a process alone.

    Raises ValueError, on every rank, for sources and rows that cannot be used.
    """
    settings = preparing.settings_of(config)
    train, evaluate = mixture.for_training(config), mixture.for_evaluation(config)
    if config.streaming:
        train = []
    root = cache_dir(config)
    is_main = accelerator is None or accelerator.is_main_process

    def prepare_all(beat: Callable[[], None]) -> list[tuple[str, list[str]]]:
        found = []
        for source in (*train, *evaluate):
            job = Job(settings, tokenizer, encode, source in evaluate or bool(config.test_split_size))
            try:
                folder, names = preparing.prepare(source, job, root, config.dataset_num_proc, beat, is_main)
            except OSError as error:
                place = error.filename or root
                if Path(place).is_relative_to(root):
                    raise ValueError(
                        f"data_cache_dir: {place}: {error.strerror or error}. Prepared rows are kept in {root}: "
                        "make room "
                        "there, or name another folder"
                    ) from error
                raise ValueError(f"{source.field}: {place} cannot be read: {error.strerror or error}") from error
            found.append((str(folder), names))
        return found

    prepared = [
        Prepared(Path(folder), names, source=source.path)
        for source, (folder, names) in zip((*train, *evaluate), _once_a_machine(accelerator, prepare_all), strict=True)
    ]
    for source, one in zip((*train, *evaluate), prepared, strict=True):
        report = one.report
        reports.check(source, report, one.files, config.on_bad_row)
        if is_main:
            print(f"data: {source.path}: {report.line()}", flush=True)
    kept, apart = prepared[: len(train)], prepared[len(train) :]
    if config.test_split_size:
        kept, apart = _split(kept, config.test_split_size, config.seed)
    weights = [source.weight for source in train]
    for source, part in zip(train, kept, strict=True):
        if not len(part):
            raise ValueError(
                f"test_split_size is {config.test_split_size}, which leaves no row of {source.field} "
                f"({source.path}) to "
                "train on: lower it, evaluate on a file of its own, or leave that source out"
            )
    if config.streaming:
        train_rows = _stream(config, accelerator, tokenizer, encode)
    else:
        all_exhausted = config.mixture_stopping_strategy == "all_exhausted"
        train_rows = RowSet(kept, None if None in weights else weights, all_exhausted)
        _check_length(train, train_rows)
    eval_rows = RowSet(apart)
    if is_main and not config.streaming:
        _describe(train, train_rows, eval_rows, config)
    return train_rows, eval_rows


def _stream(config: RecipeConfig, accelerator: Accelerator | None, tokenizer, encode: Encode) -> Stream:
    from oneloop.data import streaming

    if accelerator is None:
        raise ValueError("streaming is true, so nothing is prepared: leave it out, or just run the recipe")
    return streaming.Stream(config, accelerator, tokenizer, encode, mixture.for_training(config))


def loader(train_rows: RowSet | Stream, accelerator: Accelerator, config: RecipeConfig, pad_token_id: int):
    """What hands out the micro-batches of each step: a `loaders.TrainLoader`, or a `streaming.StreamLoader`."""
    from oneloop.data import loaders, streaming

    kind = loaders.TrainLoader if isinstance(train_rows, RowSet) else streaming.StreamLoader
    return kind(train_rows, accelerator, config, pad_token_id)


def cache_dir(config: RecipeConfig) -> Path:
    """The folder of prepared rows."""
    return Path(config.data_cache_dir).expanduser()


def keep_rejected(accelerator: Accelerator, config: RecipeConfig, row_sets: list[RowSet | Stream]) -> None:
    """Write the prepared rows that were skipped, if any, with their places and the reasons, to
    `output_dir`/rejected.jsonl. A stream writes its own while it goes on."""
    if config.streaming:
        return
    if not accelerator.is_main_process:
        return
    parts = [part for rows in row_sets for part in rows.parts if isinstance(part, Prepared)]
    lines = []
    for part in {part.entry.folder: part for part in parts}.values():
        path = part.entry.folder / cache.REJECTED
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            about = json.loads(line)
            place = {"source": part.source, "file": part.files[about["file"]]}
            lines.append(json.dumps(place | {key: value for key, value in about.items() if key != "file"}) + "\n")
    target = Path(config.output_dir) / reports.REJECTED_FILE
    text = "".join(lines)
    if target.exists() and target.read_text(encoding="utf-8") != text:
        names = (target.with_suffix(f".{number}.jsonl") for number in itertools.count(1))
        target.rename(next(name for name in names if not name.exists()))  # of an earlier run, and kept
    if lines:
        with open(target, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(text)
        print(f"data: the rows that were skipped, and why: {target}", flush=True)


# --- one process of each machine --------------------------------------------------------------------------------------

_num_loads = 0


def _once_a_machine(accelerator: Accelerator | None, work: Callable[[Callable[[], None]], Any]) -> Any:
    """What `work` returns (JSON) in the first process of this machine, once those of all machines are done.

    Each rank tells the others by the store that the process group was built with, and looks there for them: there is no
    limit to how long that may take, as long as the process that works is there. Raises ValueError on every rank where
    it is raised on one.
    """
    if accelerator is None or accelerator.num_processes == 1:
        return work(watchdog.beat)
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    global _num_loads
    _num_loads += 1
    name = f"oneloop/data/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{_num_loads}"
    store = distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=60))
    store = dist.PrefixStore(name, store)
    rank, size = accelerator.process_index, accelerator.num_processes
    first = rank - accelerator.local_process_index

    def wait_for(keys: list[str]) -> None:
        while not store.check(keys):
            if store.check(["failed"]):
                raise ValueError(store.get("failed").decode())
            # As far as the one that works and a step further: if that one hangs, it is the one that is behind.
            if rank != first and store.check([f"beats/{first}"]):
                watchdog.catch_up(int(store.get(f"beats/{first}")) + 1)
            time.sleep(0.1)

    if rank == first:
        with _told_to(store, rank):
            try:
                found = work(watchdog.beat)
            except ValueError as error:
                failure: ValueError | None = error
            else:
                failure = None
        if failure is not None:
            store.set("failed", str(failure))
            raise failure
        store.set(f"found/{rank}", json.dumps(found))
    wait_for([f"found/{first}"])
    found = json.loads(store.get(f"found/{first}"))
    store.set(f"done/{rank}", str(watchdog.beats()))
    everyone = [f"done/{other}" for other in range(size)]
    wait_for(everyone)
    watchdog.catch_up(max(int(store.get(key)) for key in everyone))
    return found


@contextmanager
def _told_to(store, rank: int) -> Iterator[None]:
    """Tell the other ranks each second that this one goes on, whatever it is at: a row may take long."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(1.0):
            watchdog.beat()
            store.set(f"beats/{rank}", str(watchdog.beats()))

    teller = threading.Thread(target=tell, name="prepares", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


# --- evaluation rows --------------------------------------------------------------------------------------------------


def _split(parts: list[Prepared], share: float, seed: int) -> tuple[list[Prepared], list[Prepared]]:
    """Set a share of the rows apart: those whose contents, hashed with the seed, come first. So equal rows are on one
    side, and adding rows to a file moves few of the others."""
    drawn = [_mixed(part.digests(), seed) for part in parts]
    contents, counts = np.unique(np.concatenate(drawn), return_counts=True)
    wanted = max(1, round(share * int(counts.sum())))
    # Contents that are more rows than are wanted stay in the training; of the others, the first that come to so many.
    fitting = counts <= wanted
    chosen = contents[fitting][np.cumsum(counts[fitting]) <= wanted]
    if not len(chosen) or len(chosen) == len(contents):
        raise ValueError(
            f"test_split_size is {share} of {int(counts.sum())} rows with {len(contents)} different contents, "
            "which cannot "
            "be divided: equal rows stay together. Evaluate on a file of its own"
        )
    is_apart = [np.isin(numbers, chosen) for numbers in drawn]
    apart, kept = ([np.flatnonzero(mask == wants) for mask in is_apart] for wants in (True, False))
    train = [part.select(numbers) for part, numbers in zip(parts, kept, strict=True)]
    return train, [part.select(numbers) for part, numbers in zip(parts, apart, strict=True)]


def _check_length(sources: list[Source], rows: RowSet) -> None:
    for source, part, count in zip(sources, rows.parts, rows.order.counts, strict=True):
        if count > _MOST_PASSES * len(part):
            raise ValueError(
                f"{source.field}: the weights make an epoch of {len(rows.order):,} rows, with the {len(part):,} "
                "rows of "
                f"{source.path} {count / len(part):,.0f} times: give it a smaller weight, the others a larger "
                "one, or set "
                "mixture_stopping_strategy: first_exhausted"
            )


def _mixed(digests: np.ndarray, seed: int) -> np.ndarray:
    """A number for each digest (N,) uint64, as good as random: SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        mixed = digests + np.uint64(0x9E3779B97F4A7C15) * np.uint64(seed + 1)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def num_shared(train_rows: RowSet, eval_rows: RowSet) -> int:
    """Evaluation rows that are training rows, too."""
    if not len(eval_rows):
        return 0
    wanted = np.unique(np.concatenate([part.digests() for part in eval_rows.parts]))
    seen = [np.intersect1d(part.digests(), wanted) for part in train_rows.parts]
    both = np.unique(np.concatenate(seen))
    return int(sum(np.isin(part.digests(), both).sum() for part in eval_rows.parts))


def _describe(sources: list[Source], train_rows: RowSet, eval_rows: RowSet, config: RecipeConfig) -> None:
    if len(sources) > 1:
        total = len(train_rows.order)
        for source, part, count in zip(sources, train_rows.parts, train_rows.order.counts, strict=True):
            print(
                f"data: {count / total:6.1%} of an epoch's {total:,} rows: {source.path}  ({count:,} of its "
                f"{len(part):,} "
                f"rows, {part.report.num_tokens:,} tokens in all)",
                flush=True,
            )
    if config.test_split_size:
        print(f"data: {len(eval_rows):,} rows set apart for evaluation, {len(train_rows):,} to train on", flush=True)
    shared = num_shared(train_rows, eval_rows)
    if shared:
        print(
            f"data: {shared:,} of {len(eval_rows):,} evaluation rows are in the training data, too: the "
            "evaluation says "
            "less about new ones",
            flush=True,
        )
