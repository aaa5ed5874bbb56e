"""Batches on the device: all micro-batches of an optimizer step at once, so that the step's item count is known before
its first backward pass.

Nothing here is handed to `accelerator.prepare`: a prepared loader repeats rows to even out the ranks, and keeps a
position of its own that differs with the world size (accelerate 1.15, `data_loader.py`, `BatchSamplerShard`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from oneloop import schedule, watchdog
from oneloop.data import sampling
from oneloop.losses import IGNORE_INDEX

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig

Batch = dict[str, torch.Tensor]


def compact(row: dict) -> dict:
    """Hold a row's token lists as (T,) int32 arrays: 4 bytes a token instead of some 24."""
    return {key: np.asarray(value, np.int32) if isinstance(value, list) else value for key, value in row.items()}


def check_same_on_all_ranks(accelerator: Accelerator, rows: list[dict], config: RecipeConfig) -> str:
    """Stop when ranks would train on different rows or settings, each sure of itself: a node with another version of
    a file makes rows be missed or repeated, or ranks wait for one that has finished.

    Returns the rows' sha256, by which a run that continues knows them. Raises ValueError on every rank.
    """
    digest = hashlib.sha256()
    for row in rows:
        ids, labels = (np.ascontiguousarray(row[name], "<i4") for name in ("input_ids", "labels"))
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())
    everyone = gather_object([(digest.hexdigest(), repr(dataclasses.asdict(config)))])
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        raise ValueError(
            f"ranks {different} read other training rows or settings than rank 0. Check that {config.dataset_name!r}, "
            "the tokenizer and the config file are the same on every node."
        )
    return digest.hexdigest()


def collate(rows: list[dict[str, list[int]]], pad_token_id: int) -> Batch:
    """Pad rows on the right to the longest of them.

    rows: dicts with `input_ids` and `labels`, equally long lists or arrays of int. Returns `input_ids`,
    `attention_mask` and `labels`, each (B, T) int64, `lengths` (B,) int64, the tokens of each row, and
    `target_positions` (M,) int64, where in the flattened (B * T) positions the next token carries a loss: found here
    on the host, since a device would have to be waited for. Padding is
    known by length, never by token id: an end-of-turn token that doubles as the padding token keeps its label. No rows
    give one row of one token without label, so that a rank without data still runs the same forward and backward
    passes as the others; its length is given as 0.
    """
    lengths = [len(row["input_ids"]) for row in rows] or [0]
    if not rows:
        rows = [{"input_ids": [pad_token_id], "labels": [IGNORE_INDEX]}]
    shape = (len(rows), max(len(row["input_ids"]) for row in rows))
    batch = {
        "input_ids": torch.full(shape, pad_token_id),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX),
        "lengths": torch.tensor(lengths),
    }
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][i, :length] = torch.as_tensor(row["input_ids"])
        batch["attention_mask"][i, :length] = 1
        batch["labels"][i, :length] = torch.as_tensor(row["labels"])
    has_target = torch.nn.functional.pad(
        batch["labels"][:, 1:] != IGNORE_INDEX, (0, 1)
    )  # the last one predicts nothing
    batch["target_positions"] = has_target.flatten().nonzero()[:, 0]
    return batch


class TrainLoader:
    """Yields the micro-batches of one optimizer step after the other; where to start is the caller's `Progress`."""

    def __init__(self, rows: list[dict], accelerator: Accelerator, config: RecipeConfig, pad_token_id: int):
        self.fingerprint = check_same_on_all_ranks(accelerator, rows, config)
        """sha256 of the tokenised rows in their order in the file."""
        self.rows = rows
        self.lengths = np.array([len(row["input_ids"]) for row in rows])
        self.global_batch_size = config.global_batch_size
        self.seed, self.shuffle = config.seed, config.shuffle
        self.layout = {
            "rank": accelerator.process_index,
            "world_size": accelerator.num_processes,
            "per_device_batch_size": config.per_device_batch_size,
            "accumulation_steps": accelerator.gradient_accumulation_steps,
        }
        self.device = accelerator.device
        self.shows = accelerator.is_main_process
        self.pad_token_id = pad_token_id
        self.last_row_ids: list[int] = []
        """Row numbers (into `rows`) of the newest step over all ranks; for tests, logs and fault reports."""
        self.last_micro_batches: list[np.ndarray] = []
        """The same of this rank alone, micro-batch by micro-batch."""
        self.last_seeds: list[int] = []
        """What torch is seeded with before each of these; see `MicroBatches`."""

    def progress_from_start(self, config: RecipeConfig) -> sampling.Progress:
        """The beginning of a run over these rows, with its length."""
        per_epoch = schedule.steps_per_epoch(len(self.rows), self.global_batch_size)
        total_steps = schedule.total_steps(config.max_steps, config.num_train_epochs, per_epoch)
        warmup_steps = schedule.warmup_steps(config, total_steps)
        if warmup_steps >= total_steps:
            raise ValueError(
                f"warmup_steps / warmup_ratio make {warmup_steps} steps of warm-up in a run of {total_steps}: the "
                "learning rate would never be reached. Shorten the warm-up or train longer."
            )
        return sampling.Progress(total_steps=total_steps)

    def steps(self, progress: sampling.Progress) -> Iterator[MicroBatches]:
        """From `progress` on until its `total_steps`: this rank's micro-batches of each step.

        The caller moves on with `advance`, so that `progress.step` says how many steps are *done* wherever it is read.
        """
        order_epoch, order = -1, np.empty(0)
        # None: shown on a terminal only; a log file gets the tracker's lines.
        bar = tqdm(total=progress.total_steps, initial=progress.step, unit="step", disable=None if self.shows else True)
        while progress.step < progress.total_steps:
            if order_epoch != progress.epoch:
                order_epoch = progress.epoch
                order = sampling.epoch_order(len(self.rows), self.seed, order_epoch, self.shuffle)
            step_rows = order[progress.position : progress.position + self.global_batch_size]
            assert len(step_rows), f"no rows at position {progress.position} of {len(order)}"
            self.last_row_ids = step_rows.tolist()
            # Rows of like length go together: less padding, and the ranks have equally much to do. Which rows make up
            # the step is not touched, so neither is the result.
            by_length = step_rows[np.argsort(self.lengths[step_rows], kind="stable")]
            self.last_micro_batches = sampling.micro_batch_rows(by_length, **self.layout)
            step = progress.step
            self.last_seeds = sampling.micro_batch_seeds(self.seed, step, **self.layout)
            watchdog.beat()
            yield MicroBatches(zip(self.last_seeds, map(self._batch, self.last_micro_batches), strict=True))
            assert progress.step == step + 1, "the loop did not call loader.advance(progress) once"
            bar.update()
        bar.close()

    def advance(self, progress: sampling.Progress) -> None:
        """Count the step whose micro-batches were yielded last as done."""
        progress.advance(len(self.last_row_ids), len(self.rows))

    def _batch(self, row_numbers: np.ndarray) -> Batch:
        return to_device(collate([self.rows[i] for i in row_numbers], self.pad_token_id), self.device)


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

    def __init__(self, rows: list[dict], accelerator: Accelerator, config: RecipeConfig, pad_token_id: int):
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


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch. The tensors are small integers, so pinning them would cost more than it hides."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
