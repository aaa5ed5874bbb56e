"""From sums to means: how many items a whole optimizer step has, and what a micro-batch's loss sum is multiplied by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oneloop import sharding, watchdog

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def count_items(accelerator: Accelerator, count: Callable, micro_batches: list) -> torch.Tensor:
    """Number of items that a whole optimizer step's loss is a mean over, over its micro-batches and all ranks.

    A scalar int64 on the device: not read by the host, so it costs a small all-reduce and no synchronisation. Tells the
    backends how many micro-batches the step has.
    """
    # Their number differs from step to step where rows are packed or tokens counted.
    sharding.set_accumulation(accelerator, len(micro_batches))
    return accelerator.reduce(sum(count(batch) for batch in micro_batches), "sum")


def share_of_mean(accelerator: Accelerator, loss_sum: torch.Tensor, num_items: torch.Tensor) -> torch.Tensor:
    """A micro-batch's loss *sum* as its share of the step's loss *mean*, to be differentiated: the one place that makes
    up for what the backends do to a loss on its way to a gradient.

    All of them average gradients over ranks (hence times the world size), and `accelerator.backward`, or DeepSpeed's
    engine behind it, divides by the accumulation steps (hence times those). A step without any item gets a finite
    factor for its zero gradients. A loss that is not finite makes the factor NaN, and so every gradient of the step on
    every rank, which is what tells them all that the step must not be applied.

    loss_sum: scalar fp32; num_items: scalar int64, over all micro-batches and ranks. Returns a scalar fp32.
    """
    watchdog.beat()  # a rank that is still in its loss is behind one that is done with it
    factor = accelerator.num_processes * accelerator.gradient_accumulation_steps / num_items.clamp(min=1)
    return loss_sum * (factor + 0 * loss_sum.detach())
