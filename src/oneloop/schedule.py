"""Arithmetic of a run: learning rate of each update, number of updates, micro-batches in one.

All of it is pure functions of the step, so there is nothing to save, nothing that counts processes or micro-batches by
mistake, and a resumed run is on the curve by construction.
"""

import math
from fractions import Fraction

WSD_DECAY_SHARE = Fraction(1, 10)
"""Share of all steps over which warmup_stable_decay falls to 0 at the end."""


def lr_at(step: int, *, learning_rate: float, lr_scheduler_type: str, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of update `step`, counted from 0.

    Warm-up is linear from 0, so the very first update with warm-up moves nothing, and the peak is update
    `warmup_steps`. The decay reaches 0 at `total_steps`, one past the last update. Raises ValueError for an unknown
    `lr_scheduler_type`.
    """
    if step < warmup_steps:
        return learning_rate * step / warmup_steps
    if lr_scheduler_type == "constant":
        return learning_rate
    # Past the end the rate stays at its last value, 0: an update there must not start a new curve.
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if lr_scheduler_type == "linear":
        return learning_rate * (1 - progress)
    if lr_scheduler_type == "cosine":
        return learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if lr_scheduler_type == "warmup_stable_decay":
        decay_steps = min(math.ceil(WSD_DECAY_SHARE * total_steps), max(1, total_steps - warmup_steps))
        return learning_rate * min(1.0, max(0, total_steps - step) / decay_steps)
    raise ValueError(
        f"lr_scheduler_type is {lr_scheduler_type!r}: give one of constant, linear, cosine, warmup_stable_decay"
    )


def warmup_steps(config, total_steps: int) -> int:
    """Updates of warm-up: `config.warmup_steps`, or `config.warmup_ratio` of all updates, rounded up."""
    # A share such as 0.07 is meant as typed; as a binary float, 0.07 * 100 is above 7 and would round up to 8.
    return config.warmup_steps or math.ceil(Fraction(str(config.warmup_ratio)) * total_steps)


def accumulation_steps(global_batch_size: int, per_device_batch_size: int, world_size: int) -> int:
    """Micro-batches of one device in one optimizer step.

    Raises ValueError when the global batch cannot be divided evenly: a part of it would weigh differently, or be lost.
    """
    together = per_device_batch_size * world_size
    steps, left = divmod(global_batch_size, together)
    if left or steps < 1:
        near = [size for size in (steps * together, (steps + 1) * together) if size > 0]
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of per_device_batch_size {per_device_batch_size} "
            f"x {world_size} processes = {together}: use global_batch_size {' or '.join(map(str, near))}, "
            f"or another per_device_batch_size"
        )
    return steps


def is_even(config) -> bool:
    """Whether all optimizer steps have equally many micro-batches."""
    return not config.packing and config.batch_unit == "sequences" and not config.streaming


def nominal_accumulation(config, world_size: int) -> int:
    """Micro-batches of one device in one optimizer step, where all steps have equally many; else 1, and each step says
    how many it has. Raises ValueError as `accumulation_steps` does."""
    if not is_even(config):
        return 1
    return accumulation_steps(config.global_batch_size, config.per_device_batch_size, world_size)


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Optimizer steps in one pass over the data; the last may hold fewer rows."""
    return math.ceil(num_rows / global_batch_size)


def total_steps(max_steps: int, num_train_epochs: float, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run, at least 1.

    `max_steps` above 0 wins over epochs; a fraction of an epoch is rounded up.
    """
    if max_steps > 0:
        return max_steps
    return max(1, math.ceil(Fraction(str(num_train_epochs)) * steps_per_epoch))
