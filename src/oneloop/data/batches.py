"""Rows into the tensors of one forward pass, padded or packed. B rows or blocks, T positions, D rows in all."""

from __future__ import annotations

import numpy as np
import torch

from oneloop.losses import IGNORE_INDEX

Batch = dict[str, torch.Tensor]


def collate(rows: list[dict], pad_token_id: int) -> Batch:
    """Pad rows on the right to the longest of them.

    rows: dicts with `input_ids` and `labels`, equally long lists or arrays of int. Returns `input_ids`,
    `attention_mask` and `labels`, each (B, T) int64, `lengths` (D,) int64, the tokens of each row, and
    `target_positions` (M,) int64, where in the flattened (B * T) positions the next token carries a loss: found here
    on the host, since a device would have to be waited for. Padding is
    known by length, never by token id: an end-of-turn token that doubles as the padding token keeps its label. No rows
    give one row of one token without label, so that a rank without data still runs the same forward and backward
    passes as the others; its length is given as 0.
    """
    ends = [len(row["input_ids"]) for row in rows]
    batch = _filled([[row] for row in rows], max(ends, default=1), pad_token_id)
    mask = torch.zeros(batch["input_ids"].shape, dtype=torch.int64)
    for i, end in enumerate(ends or [1]):
        mask[i, :end] = 1
    return {"attention_mask": mask} | _with_targets(batch)


def collate_packed(blocks: list[list[dict]], pad_token_id: int, flat: bool) -> Batch:
    """Lay the rows of each block side by side; each sees only itself.

    What tells a model where a row begins is its position ids, which start again from 0 (transformers 5.24,
    masking_utils.py, `find_packed_sequence_indices`), provided that it gets no mask and keeps no cache. Returns what
    `collate` does, with `position_ids` (B, T) int64 instead of a mask. Blocks shorter than the longest end in padding
    that is a row of its own. flat: all blocks in one row, B = 1, as flash attention needs it
    (modeling_flash_attention_utils.py, `_is_packed_sequence`).
    """
    blocks = [block for block in blocks if block]
    if flat:
        blocks = [[row for block in blocks for row in block]] if blocks else []
    ends = [sum(len(row["input_ids"]) for row in block) for block in blocks]
    batch = _filled(blocks, max(ends, default=1), pad_token_id)
    width = batch["input_ids"].shape[1]
    positions = np.zeros(batch["input_ids"].shape, np.int64)
    for i, block in enumerate(blocks):
        lengths = [len(row["input_ids"]) for row in block] + [width - ends[i]]
        positions[i] = np.concatenate([np.arange(length) for length in lengths])
    return {"position_ids": torch.from_numpy(positions)} | _with_targets(batch)


def _filled(blocks: list[list[dict]], width: int, pad_token_id: int) -> Batch:
    shape = (max(len(blocks), 1), width)
    input_ids, labels = np.full(shape, pad_token_id, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
    lengths = []
    for i, block in enumerate(blocks):
        at = 0
        for row in block:
            length = len(row["input_ids"])
            input_ids[i, at : at + length] = row["input_ids"]
            labels[i, at : at + length] = row["labels"]
            labels[i, at] = IGNORE_INDEX  # predicted from nothing, or from another row
            lengths.append(length)
            at += length
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "lengths": torch.tensor(lengths or [0]),
    }


def _with_targets(batch: Batch) -> Batch:
    has_target = batch["labels"][:, 1:] != IGNORE_INDEX
    has_target = torch.nn.functional.pad(has_target, (0, 1))  # the last one predicts nothing
    return batch | {"target_positions": has_target.flatten().nonzero()[:, 0]}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch. The tensors are small integers, so pinning them would cost more than it hides."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}
