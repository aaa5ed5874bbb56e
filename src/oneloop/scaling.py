"""From sums to means: how many items a whole optimizer step has, and what a micro-batch's loss sum is multiplied by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


def count_items(accelerator: Accelerator, count: Callable, micro_batches: list) -> torch.Tensor:
    """Number of items that a whole optimizer step's loss is a mean over, over its micro-batches and all ranks.

    A scalar int64 on the device: not read by the host, so it costs a small all-reduce and no synchronisation.
    """
    return accelerator.reduce(sum(count(batch) for batch in micro_batches), "sum")


def mean_scale(accelerator: Accelerator, num_items: torch.Tensor) -> torch.Tensor:
    """The factor that turns a micro-batch's loss *sum* into its share of the step's loss *mean*: the one place that
    makes up for what the backends do to a loss on its way to a gradient.

    All of them average gradients over ranks (hence times the world size), and `accelerator.backward`, or DeepSpeed's
    engine behind it, divides by the accumulation steps (hence times those). A step without any item gets a finite
    factor for its zero gradients.
    """
    return accelerator.num_processes * accelerator.gradient_accumulation_steps / num_items.clamp(min=1)
