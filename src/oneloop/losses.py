"""Training objectives as pure functions on tensors that return *sums*, so that the one division happens where both
the sum and the count are global (over micro-batches and ranks).

Letters in shapes: B rows, T tokens in a row (padded), V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
"""Label of a position that carries no loss; the value that `torch.nn.functional.cross_entropy` ignores by default."""


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    """Count the positions that the next-token loss is a mean over.

    labels: (B, T) int64, `IGNORE_INDEX` where nothing is learnt. Returns a scalar int64 on the same device.
    The first column never counts: no position predicts it.
    """
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over supervised positions of -log p(token t+1 | tokens <= t), in fp32.

    logits: (B, T, V) float; labels: (B, T) int64. Returns a scalar fp32. A batch without any target gives 0 with
    zero gradients (not NaN), so a rank that has run out of rows can take part in the collective backward pass.
    """
    flat_logits = logits[:, :-1].reshape(-1, logits.size(-1)).float()
    return F.cross_entropy(flat_logits, labels[:, 1:].reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


@torch.no_grad()
def num_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count the supervised positions whose most likely token is the label.

    logits: (B, T, V) float; labels: (B, T) int64. Returns a scalar int64.
    """
    return (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()
