"""Training rows that are read, checked and tokenised while training goes on, with nothing prepared on disk.

Every rank reads the whole stream, which is cheap, and tokenises only rows of its own: row n of an epoch's order is that
of rank n % world size, whatever files it stands in. Which rows make up a step is decided by all ranks together, from
what they tell each other of their rows (`Seen`): the next `global_batch_size` that can be used, on any number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from oneloop import sources as hub
from oneloop import watchdog
from oneloop.data import (
    ahead,
    files,
    loaders,
    preparing,
    readers,
    reports,
    rows,
    sampling,
    stream_rows,
    stream_steps,
)
from oneloop.data.batches import to_device
from oneloop.data.loaders import MicroBatches
from oneloop.data.reports import REJECTED_FILE
from oneloop.data.stream_rows import Seen
from oneloop.data.stream_steps import Place, Step
from oneloop.data.windows import EpochEnd, Order, Row, Window, walk
from oneloop.mixture import Source

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig
    from oneloop.data.sampling import Progress

_CHUNK_BYTES = 1 << 20
_END_BYTES = 1 << 20


class Chunk(NamedTuple):
    """Some rows of one epoch that are of one rank."""

    epoch: int
    windows: list[Window]
    """Those that begin since the chunk before."""
    rows: list
    """As read, and then `(Seen, [row, ...])` of each."""
    num_rows: int | None
    """Rows of the epoch in all, where this is its last chunk."""


class Stream:
    """The training rows of a run: where they stand, and the processes that tokenise them. Collective.

    Made before the model is loaded: see `ahead`. Raises ValueError, on every rank, for sources that are not there, and
    for local ones that hold no row.
    """

    highest_id = longest = 0
    """Not known before the rows come: see `limits`."""

    def __init__(
        self,
        config: RecipeConfig,
        accelerator: Accelerator,
        tokenizer,
        encode: preparing.Encode,
        sources: list[Source],
    ):
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.gather = gatherer(accelerator)
        """A value of this rank -> everybody's, over host memory: what moves gradients would be waited for."""
        self.order = Order(config.seed, config.shuffle, config.shuffle_buffer_size)
        self.sources = sources
        self.paths: list[Path | None] = []
        self.source_of: list[int] = []
        """Number of each file's source."""
        self.names: list[str] = []
        self.num_read = 0
        """Rows that this rank has read, its own or not."""
        self.limits: tuple[int, int] | None = None
        """Ids and positions that the model has; a row beyond them stops the run. None: not looked at."""
        everyone = self.gather(_failure(self._find))
        for error in filter(None, everyone):
            raise ValueError(error)
        job = preparing.Job(preparing.settings_of(config), tokenizer, encode, False)
        self.fingerprint = _fingerprint(sources, self.paths, self.source_of, job)
        """sha256 of what tells these rows from others without reading all of them."""
        of_files = [sources[number] for number in self.source_of]
        self._encode = functools.partial(_encoded, of_files, job)
        self._num_processes = config.dataset_num_proc or 1
        self._processes = ahead.Processes(self._encode, self._num_processes)

    def __len__(self) -> int:
        """0: how many there are is not known."""
        return 0

    def __bool__(self) -> bool:
        return True

    def processes(self) -> ahead.Processes:
        """The processes that tokenise; others once these were ended."""
        if not self._processes.is_open:
            self._processes = ahead.Processes(self._encode, self._num_processes)
        return self._processes

    def _find(self) -> None:
        for number, source in enumerate(self.sources):
            rows.check(source)
            found = files.find(source)
            first = len(self.paths)
            self.names += [f"{source.path}[{source.split}]"] if found is None else [str(path) for path in found]
            self.source_of += [number] * len(found or [None])
            self.paths += found or [None]
            if found and not any(next(self.read(file, None), None) for file in range(first, len(self.paths))):
                raise ValueError(f"{source.field} {source.path!r} holds no row (split {source.split!r})")

    def read(self, file: int, cursor: readers.Cursor | None) -> Iterator[tuple[readers.Raw, readers.Cursor]]:
        """The rows of a file behind a cursor. Raises ValueError naming source and file."""
        source, path = self.sources[self.source_of[file]], self.paths[file]
        if path is None:
            yield from readers.stream_hub(source, cursor)
            return
        try:
            if cursor and self.is_main and not readers.seeks(path):
                print(f"data: {path} cannot be entered in its middle: read again up to row {cursor[0]}", flush=True)
            yield from readers.read(path, cursor)
        except ValueError as error:
            raise ValueError(f"{source.field}: {error}") from error

    def chunks(self, start: Window, number: int) -> Iterator[Chunk]:
        """This rank's rows some at a time, from row `number` of the epoch on, which is in the window `start` or behind
        it."""
        windows: list[Window] = []
        taken: list[Row] = []
        size, epoch = 0, start.epoch
        for item in walk(self.read, len(self.paths), self.order, start):
            if isinstance(item, Window):
                windows.append(item)
                epoch = item.epoch
            elif isinstance(item, EpochEnd):
                yield Chunk(item.epoch, windows, taken, item.num_rows)
                windows, taken, size, number = [], [], 0, 0
            else:
                self.num_read += 1
                if item.number < number or item.number % self.world_size != self.rank:
                    continue
                taken.append(item)
                size += len(item.raw.data) if isinstance(item.raw.data, bytes) else 1000
                if len(taken) == stream_steps.CHUNK_ROWS or size > _CHUNK_BYTES:
                    yield Chunk(epoch, windows, taken, None)
                    windows, taken, size = [], [], 0


def gatherer(accelerator: Accelerator) -> Callable[[Any], list]:
    """A function that gives everybody's value on all ranks, over a group of its own. Collective."""
    if accelerator.num_processes == 1:
        return lambda value: [value]
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=watchdog.backend_timeout())

    def gather(value: Any) -> list:
        everyone = [None] * accelerator.num_processes
        dist.all_gather_object(everyone, value, group=group)
        return everyone

    return gather


def _encoded(sources: list[Source], job: preparing.Job, chunk: Chunk) -> Chunk:
    return chunk._replace(rows=stream_rows.encode(sources, job, chunk.rows) if chunk.rows else [])


def _failure(function: Callable[[], None]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def _fingerprint(sources: list[Source], paths: list[Path | None], source_of: list[int], job: preparing.Job) -> str:
    made = [sorted(vars(job.settings).items()), [(source.columns, source.format) for source in sources]]
    digest = hashlib.sha256(f"{made!r} {preparing.tokenizer_sha256(job.tokenizer)}".encode())
    for path, number in zip(paths, source_of, strict=True):
        if path is None:
            source = sources[number]
            commit = hub.dataset_commit(source.path, source.revision)
            about = [number, source.path, source.name, commit, source.split]
        else:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                ends = hashlib.sha256(file.read(_END_BYTES))
                file.seek(max(0, size - _END_BYTES))
                ends.update(file.read(_END_BYTES))
            about = [number, path.name, size, ends.hexdigest()]
        digest.update(json.dumps(about).encode())
    return digest.hexdigest()


# --- steps ------------------------------------------------------------------------------------------------------------


class StreamLoader:
    """Yields the micro-batches of one optimizer step after the other, as `loaders.TrainLoader` does.

    The next step is put together before this one is yielded: the ranks agree on its rows, while further rows are being
    tokenised. What is wrong with its rows is not raised before its turn.
    """

    rows_per_epoch = sys.maxsize
    """Not known."""

    def __init__(self, stream: Stream, accelerator: Accelerator, config: RecipeConfig, pad_token_id: int):
        loaders.check_same_on_all_ranks(accelerator, stream.fingerprint, config)
        self.rows, self.fingerprint = stream, stream.fingerprint
        self._rules = stream_steps.Rules(
            step_size=config.global_batch_size,
            counts_tokens=config.batch_unit == "tokens",
            per_device_batch_size=config.per_device_batch_size,
            block_length=config.max_length if config.packing else None,
            is_flat="flash" in (config.attn_implementation or ""),
            pad_token_id=pad_token_id,
            on_bad_row=config.on_bad_row,
        )
        self.seed = config.seed
        self.rejected = Path(config.output_dir) / REJECTED_FILE
        self.device = accelerator.device
        self.wait_seconds = 0.0
        """Time in which the loop has waited for rows, since the meter read it."""
        self.last_row_ids: list[int] = []
        """Running numbers of the newest step's rows over all ranks, from the start of the run; see `where`."""
        self.last_micro_batches: list[np.ndarray] = []
        """The same of this rank alone, micro-batch by micro-batch."""
        self.last_seeds: list[int] = []
        """What torch is seeded with before each of these; see `MicroBatches`."""
        self.reports = [reports.Report() for _ in stream.sources]
        """What became of the rows of each source in the steps that are done, in all epochs."""
        self._place: Place | None = None
        self._newest: Step | None = None
        self._rejected_bytes = 0

    # --- the length of a run ------------------------------------------------------------------------------------------

    def progress_from_start(self, config: RecipeConfig) -> Progress:
        """The beginning of a run, with its length."""
        return loaders.first_progress(config, self.total_steps(config))

    def total_steps(self, config: RecipeConfig, start: loaders.Place | None = None) -> int:
        """Optimizer steps of a run: max_steps, as nothing else is known."""
        return config.max_steps

    # --- what a training state holds ----------------------------------------------------------------------------------

    def state(self) -> dict:
        """What a training state must hold beside the progress: where the stream is, the same on all ranks."""
        if self._place is None:
            return {}
        return {
            "stream": {
                "of": self._identity(),
                "place": list(self._place),
                "reports": [dataclasses.asdict(report) for report in self.reports],
                "rejected_bytes": self._rejected_bytes,
            }
        }

    def restore(self, state: dict) -> None:
        """Go on from what `state` returned, perhaps on another number of ranks.

        In other data, or in another order of them, that place does not exist: then the next epoch begins.
        """
        saved = state.get("stream")
        if saved is None:
            return
        self._place = Place(*saved["place"])
        if saved["of"] != self._identity():
            if self.rows.is_main:
                print("resume: the stream is another one than then: it begins with a new epoch", flush=True)
            self._place = stream_steps.beginning(self._place.epoch + 1, self._place.rows_used)
        self.reports = [reports.Report(**report) for report in saved["reports"]]
        self.reports += [reports.Report() for _ in self.rows.sources[len(self.reports) :]]
        self._rejected_bytes = saved["rejected_bytes"]

    def _identity(self) -> list:
        return [self.fingerprint, *self.rows.order]

    def metrics(self) -> dict[str, float]:
        """Counts of rows over all ranks and epochs up to the newest step that is done."""
        return {
            "data/rows_read": float(sum(report.num_read for report in self.reports)),
            "data/rows_rejected": float(sum(report.num_refused for report in self.reports)),
            "data/rows_cut": float(sum(report.num_cut for report in self.reports)),
            "data/tokens_cut": float(sum(report.tokens_cut for report in self.reports)),
        }

    def where(self, row_id: int) -> str:
        """Where a row of the newest step stands, as `file:line`."""
        return self._newest.where[self._newest.row_ids.index(row_id)]

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, progress: Progress) -> Iterator[MicroBatches]:
        """From the place last restored on until `total_steps`: this rank's micro-batches of each step.

        The caller moves on with `advance`, so that `progress.step` says how many steps are *done* wherever it is read.
        Raises on every rank, in the step that would have had them: ValueError for bad rows under `on_bad_row` "stop"
        and for a file that cannot be read on.
        """
        if self._place is None:
            self._place = stream_steps.beginning(progress.epoch, 0)
        progress.epoch, progress.position = self._place.epoch, self._place.position
        self._cut_rejected()
        # None: shown on a terminal only; a log file gets the tracker's lines.
        bar = tqdm(
            total=progress.total_steps, initial=progress.step, unit="step", disable=None if self.rows.is_main else True
        )
        planner = stream_steps.Planner(self.rows, self._rules, self._place, self.reports)
        try:
            upcoming: Step | Exception | None = None
            while progress.step < progress.total_steps:
                step, done = upcoming or planner.attempt(), progress.step
                if isinstance(step, Exception):
                    raise step
                if done + 1 < progress.total_steps:
                    upcoming = planner.attempt()
                began = time.perf_counter()
                batches = step.batches.result()
                self.wait_seconds += time.perf_counter() - began + planner.take_wait_seconds()
                self._newest, self.last_row_ids, self.last_micro_batches = step, step.row_ids, step.micro_batches
                self.last_seeds = sampling.micro_batch_seeds(
                    self.seed,
                    done,
                    rank=self.rows.rank,
                    world_size=self.rows.world_size,
                    per_device_batch_size=self._rules.per_device_batch_size,
                    accumulation_steps=len(batches),
                )
                watchdog.beat()
                batches = [to_device(batch, self.device) for batch in batches]
                yield MicroBatches(zip(self.last_seeds, batches, strict=True))
                assert progress.step == done + 1, "the loop did not call loader.advance(progress) once"
                bar.update()
        finally:
            planner.close()
            bar.close()

    def advance(self, progress: Progress) -> None:
        """Count the step whose micro-batches were yielded last as done."""
        step = self._newest
        refused = []
        for seen in step.read:
            stream_rows.count(self.reports[self.rows.source_of[seen.file]], seen)
            if seen.data is not None:
                refused.append(seen)
        self._reject(refused)
        if step.epoch == 0 and step.after.epoch == 1 and self.rows.is_main:
            for source, report in zip(self.rows.sources, self.reports, strict=True):
                print(f"data: {source.path}: end of the first epoch: {report.line()}", flush=True)
        self._place = step.after
        progress.step += 1
        progress.epoch, progress.position = step.after.epoch, step.after.position

    def _cut_rejected(self) -> None:
        """Take out of the file what a run that was stopped has written after the state that is gone on from."""
        if self.rows.is_main and self.rejected.is_file():
            os.truncate(self.rejected, min(self._rejected_bytes, self.rejected.stat().st_size))

    def _reject(self, refused: list[Seen]) -> None:
        lines = []
        for seen in refused:
            source = self.rows.sources[self.rows.source_of[seen.file]]
            about = {"source": source.path, "file": self.rows.names[seen.file], "line": seen.line, "kind": seen.kind}
            lines.append(json.dumps(about | {"reason": seen.reason, "row": seen.data}, default=str) + "\n")
        text = "".join(lines).encode()
        if text and self.rows.is_main:
            self.rejected.parent.mkdir(parents=True, exist_ok=True)
            with open(self.rejected, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(text)
        self._rejected_bytes += len(text)
