"""Batches on the device: all micro-batches of an optimizer step at once, so that the step's item count is known before
its first backward pass.

Nothing here is handed to `accelerator.prepare`: a prepared loader repeats rows to even out the ranks, and keeps a
position of its own that differs with the world size (accelerate 1.15, `data_loader.py`, `BatchSamplerShard`).
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from oneloop import schedule, watchdog
from oneloop.data import packing, sampling
from oneloop.data.batches import Batch, collate, collate_packed, to_device
from oneloop.data.rowsets import InMemory, RowSet

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig

_NOT_COMPARED = ("data_cache_dir",)  # each node may have its own


def check_same_on_all_ranks(accelerator: Accelerator, fingerprint: str, config: RecipeConfig) -> None:
    """Stop when ranks would train on different rows or settings, each sure of itself: a node with another version of
    a file makes rows be missed or repeated, or ranks wait for one that has finished.

    fingerprint: of the training rows. Raises ValueError on every rank.
    """
    settings = dataclasses.asdict(config)
    for name in _NOT_COMPARED:
        settings.pop(name, None)
    everyone = gather_object([(fingerprint, repr(settings))])
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        raise ValueError(
            f"ranks {different} read other training rows or settings than rank 0. Check that the training data, the "
            "tokenizer and the config file are the same on every node."
        )


def first_progress(config: RecipeConfig, total_steps: int) -> sampling.Progress:
    """The beginning of a run of so many steps. Raises ValueError where all of them would be warm-up."""
    warmup_steps = schedule.warmup_steps(config, total_steps)
    if warmup_steps >= total_steps:
        raise ValueError(
            f"warmup_steps / warmup_ratio make {warmup_steps} steps of warm-up in a run of {total_steps}: the "
            "learning rate would never be reached. Shorten the warm-up or train longer."
        )
    return sampling.Progress(total_steps=total_steps)


class Place(NamedTuple):
    """Where a step begins."""

    step: int
    epoch: int
    position: int


_START = Place(0, 0, 0)


class Step(NamedTuple):
    """What one rank does in an optimizer step."""

    row_ids: np.ndarray
    """Rows of the step over all ranks."""
    micro_batches: list[np.ndarray]
    """Of them, those of each micro-batch of this rank."""
    batches: list[Batch]
    """The same as tensors on the host."""
    seeds: list[int]
    """What torch is seeded with before each."""


class _Making:
    """A step that is made on a thread of its own, which the process does not wait for when it ends."""

    def __init__(self, function: Callable[[Place], Step], place: Place):
        self._future: Future[Step] = Future()
        self._thread = threading.Thread(target=self._run, args=(function, place), name="batches", daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[Place], Step], place: Place) -> None:
        try:
            self._future.set_result(function(place))
        except BaseException as error:  # raised in the loop
            self._future.set_exception(error)

    def result(self) -> Step:
        """The step, or the error that making it ended in."""
        with watchdog.waiting_for(self._thread.ident or 0):
            return self._future.result()


class TrainLoader:
    """Yields the micro-batches of one optimizer step after the other; where to start is the caller's `Progress`.

    The next step's batches are made while this one is computed.
    """

    def __init__(self, rows: RowSet | list[dict], accelerator: Accelerator, config: RecipeConfig, pad_token_id: int):
        rows = rows if isinstance(rows, RowSet) else RowSet([InMemory(rows)])
        check_same_on_all_ranks(accelerator, rows.fingerprint, config)
        self.fingerprint = rows.fingerprint
        """sha256 of the tokenised rows in their order in the files."""
        self.rows = rows
        self.seed, self.shuffle = config.seed, config.shuffle
        self.step_size = config.global_batch_size
        self.counts_tokens = config.batch_unit == "tokens"
        self.block_length = config.max_length if config.packing else None
        self.is_flat = "flash" in (config.attn_implementation or "")
        self.layout = {
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "per_device_batch_size": config.per_device_batch_size,
        }
        self.device = accelerator.device
        self.shows = accelerator.is_main_process
        self.pad_token_id = pad_token_id
        self.wait_seconds = 0.0
        """Time in which the loop has waited for batches, since the meter read it."""
        self.last_row_ids: list[int] = []
        """Row numbers (into `rows`) of the newest step over all ranks; for tests, logs and fault reports."""
        self.last_micro_batches: list[np.ndarray] = []
        """The same of this rank alone, micro-batch by micro-batch."""
        self.last_seeds: list[int] = []
        """What torch is seeded with before each of these; see `MicroBatches`."""
        self._order = (-1, np.empty(0, np.int64))

    # --- the length of a run ------------------------------------------------------------------------------------------

    def progress_from_start(self, config: RecipeConfig) -> sampling.Progress:
        """The beginning of a run over these rows, with its length."""
        return first_progress(config, self.total_steps(config))

    def total_steps(self, config: RecipeConfig, start: tuple[int, int, int] = _START) -> int:
        """Optimizer steps of a run that has come to `start` (step, epoch, position), in steps of whatever size."""
        start = Place(*start)
        if config.max_steps > 0:
            return config.max_steps
        if not self.counts_tokens:
            per_epoch = schedule.steps_per_epoch(len(self.rows.order), self.step_size)
            if start == _START:
                return schedule.total_steps(config.max_steps, config.num_train_epochs, per_epoch)
            epochs = config.num_train_epochs - start.epoch  # of which `position` rows are done
            left = min(epochs, 1.0) * len(self.rows.order) - start.position
            this_epoch = max(0, math.ceil(left / self.step_size))
            return start.step + this_epoch + math.ceil(max(epochs - 1.0, 0.0) * per_epoch)
        epochs, steps = Fraction(str(config.num_train_epochs)), start.step
        for epoch in range(start.epoch, math.ceil(epochs)):
            order = self._epoch_order(epoch)
            done = start.position if epoch == start.epoch else 0
            num_steps = sampling.num_steps(order, self.step_size, self.rows.lengths_of, done)
            steps += math.ceil(min(epochs - epoch, Fraction(1)) * num_steps)
        return max(1, steps)

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, progress: sampling.Progress) -> Iterator[MicroBatches]:
        """From `progress` on until its `total_steps`: this rank's micro-batches of each step.

        The caller moves on with `advance`, so that `progress.step` says how many steps are *done* wherever it is read.
        """
        # None: shown on a terminal only; a log file gets the tracker's lines.
        bar = tqdm(total=progress.total_steps, initial=progress.step, unit="step", disable=None if self.shows else True)
        upcoming: tuple[Place, _Making] | None = None
        while progress.step < progress.total_steps:
            place = Place(progress.step, progress.epoch, progress.position)
            if upcoming is None or upcoming[0] != place:
                upcoming = place, _Making(self._step, place)
            began = time.perf_counter()
            step = upcoming[1].result()
            self.wait_seconds += time.perf_counter() - began
            after = self._after(place, len(step.row_ids))
            upcoming = None
            if after.step < progress.total_steps:
                upcoming = after, _Making(self._step, after)
            self.last_row_ids, self.last_micro_batches = step.row_ids.tolist(), step.micro_batches
            self.last_seeds = step.seeds
            watchdog.beat()
            batches = [to_device(batch, self.device) for batch in step.batches]
            yield MicroBatches(zip(step.seeds, batches, strict=True))
            assert progress.step == place.step + 1, "the loop did not call loader.advance(progress) once"
            bar.update()
        bar.close()

    def advance(self, progress: sampling.Progress) -> None:
        """Count the step whose micro-batches were yielded last as done."""
        progress.advance(len(self.last_row_ids), len(self.rows.order))

    @property
    def rows_per_epoch(self) -> int:
        """Rows that an epoch visits, some perhaps more than once."""
        return len(self.rows.order)

    def metrics(self) -> dict[str, float]:
        """What became of the training data's rows before the first step."""
        counts = [part.report for part in self.rows.parts]
        return {
            "data/rows_rejected": float(sum(count.num_refused for count in counts)),
            "data/rows_cut": float(sum(count.num_cut for count in counts)),
        }

    def state(self) -> dict:
        """What a training state must hold beside the progress: nothing, as the order is a function of that."""
        return {}

    def restore(self, state: dict) -> None:
        """Go on from what `state` returned."""

    def _after(self, place: Place, num_rows: int) -> Place:
        there = sampling.Progress(*place)
        there.advance(num_rows, len(self.rows.order))
        return Place(there.step, there.epoch, there.position)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            self._order = (epoch, self.rows.order.epoch(self.seed, epoch, self.shuffle))
        return self._order[1]

    def _step(self, place: Place) -> Step:
        order = self._epoch_order(place.epoch)
        lengths_of = self.rows.lengths_of if self.counts_tokens else None
        row_ids = sampling.rows_of_step(order, place.position, self.step_size, lengths_of)
        assert len(row_ids), f"no rows at position {place.position} of {len(order)}"
        lengths = self.rows.lengths_of(row_ids)
        if self.block_length is None:
            # Rows of like length go together: less padding, and the ranks have equally much to do. Which rows make up
            # the step is not touched, so neither is the result.
            sequences = [row_ids[i : i + 1] for i in np.argsort(lengths, kind="stable")]
        else:
            each = self.layout["world_size"] * self.layout["per_device_batch_size"]
            sequences = [row_ids[block] for block in packing.balanced(lengths, self.block_length, each)]
        num_sequences = len(sequences) if self.block_length or self.counts_tokens else self.step_size
        layout = self.layout | {"accumulation_steps": sampling.accumulation_of(num_sequences, **self._shape)}
        numbers = sampling.micro_batch_rows(np.arange(len(sequences)), **layout)
        mine = [[sequences[number] for number in chunk] for chunk in numbers]
        batches = [self._batch(micro_batch) for micro_batch in mine]
        flat = [np.concatenate([*micro_batch, np.empty(0, np.int64)]) for micro_batch in mine]
        return Step(row_ids, flat, batches, sampling.micro_batch_seeds(self.seed, place.step, **layout))

    @property
    def _shape(self) -> dict[str, int]:
        return {name: self.layout[name] for name in ("world_size", "per_device_batch_size")}

    def _batch(self, sequences: list[np.ndarray]) -> Batch:
        blocks = [[self.rows[i] for i in sequence] for sequence in sequences]
        if self.block_length is None:
            return collate([row for block in blocks for row in block], self.pad_token_id)
        return collate_packed(blocks, self.pad_token_id, self.is_flat)


class MicroBatches:
    """The micro-batches of one optimizer step; torch is seeded before each is handed out.

    So dropout is a function of seed, step and place in the step alone, like the sample order: the same on any number
    of ranks that make the step up of the same micro-batches, and after a run was stopped and continued elsewhere.
    """

    def __init__(self, seeded: Iterable[tuple[int, Batch]]):
        self._seeded = list(seeded)

    def __len__(self) -> int:
        return len(self._seeded)

    def __iter__(self) -> Iterator[Batch]:
        for seed, batch in self._seeded:
            # Of the CPU and of the device of the batch alone: torch.manual_seed goes through all kinds of devices.
            torch.default_generator.manual_seed(seed)
            device = next(iter(batch.values())).device
            if device.type != "cpu":
                torch.get_device_module(device).manual_seed(seed)
            yield batch


class EvalLoader:
    """One pass over all rows in order; every rank gets equally many batches, the last of them perhaps without rows."""

    def __init__(self, rows: RowSet, accelerator: Accelerator, config: RecipeConfig, pad_token_id: int):
        self.rows = rows
        self.layout = {
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "per_device_batch_size": config.per_device_batch_size,
        }
        self.device = accelerator.device
        self.pad_token_id = pad_token_id

    def __iter__(self) -> Iterator[Batch]:
        for row_numbers in sampling.even_batches(len(self.rows), **self.layout):
            watchdog.beat()
            yield to_device(collate([self.rows[i] for i in row_numbers], self.pad_token_id), self.device)
