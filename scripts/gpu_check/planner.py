"""G4: `oneloop.memory` against what a device really held: {1B, 3B} x {full, LoRA} x gradient checkpointing on and off.

Each configuration trains twice on a device made smaller: with a tenth more than is foreseen it must run, which gives
the peak, and with a tenth less it must run out of memory.
"""

import itertools
import tempfile
from pathlib import Path

import torch

from gpu_check import contest, training
from gpu_check import device as devices
from gpu_check.report import NOT_MEASURED, SKIPPED_MEMORY, SKIPPED_TIME, Report
from gpu_check.sizes import Shape, Sizes

TITLE = "planner accuracy, 8 configurations"
MARGIN = 0.10
STEPS = 3
SECONDS_EACH = 12
"""What a configuration may take; the next one is not begun with less."""


def run(sizes: Sizes, device: torch.device, report: Report, seconds_left) -> None:
    cases = list(itertools.product(("1B", "3B"), ("full", "LoRA"), (False, True)))
    shapes = {"1B": sizes.one_b, "3B": sizes.three_b}
    found: dict[str, dict] = {}
    for size, method, checkpointing in cases:
        name = f"{size}, {method}, checkpointing {'on' if checkpointing else 'off'}"
        if seconds_left() < SECONDS_EACH and not report.toy:
            report.note(f"{name}: {SKIPPED_TIME}")
            continue
        planned = training.planned_peak(shapes[size], method == "LoRA", sizes.planner_tokens, checkpointing)
        total = devices.total_bytes(device)
        if total is not None and planned * (1 + MARGIN) > contest.USABLE_SHARE * total:
            report.note(f"{name}: {SKIPPED_MEMORY}")
            continue
        found[name] = measure(shapes[size], method == "LoRA", checkpointing, sizes.planner_tokens, device, planned)
        report.record(configurations=found)
    errors = [one["measured_mib"] / one["planned_mib"] - 1 for one in found.values() if one["measured_mib"]]
    why = "" if len(errors) == len(cases) else f"{len(errors)} of {len(cases)} configurations"
    report.judge("measured, off from the plan by at most", max(map(abs, errors), default=None), at_most=0.05)
    report.judge("measured, above the plan by at most", max(errors, default=None), at_most=0.02)
    if devices.can_limit(device) and found:
        right = sum(one["runs_above"] and not one["runs_below"] for one in found.values())
        report.judge(f"right verdicts, of {len(found)}", right, at_least=len(found))
    else:
        report.leave_out("right verdicts", NOT_MEASURED, "this device's memory cannot be limited")
    if why:
        report.note(f"measured: {why}")


def measure(shape: Shape, lora: bool, checkpointing: bool, tokens: int, device: torch.device, planned: float) -> dict:
    """Planned and measured peak of one configuration, and whether it runs a margin above and below the plan."""
    peak = above = below = None
    if devices.can_limit(device):
        peak = attempt(shape, lora, checkpointing, tokens, device, planned * (1 + MARGIN))
        above = peak is not None
        below = attempt(shape, lora, checkpointing, tokens, device, planned * (1 - MARGIN)) is not None
    if peak is None:
        peak = attempt(shape, lora, checkpointing, tokens, device, None)
    mib = [None if value is None else round(value / 2**20, 1) for value in (planned, peak)]
    return {"planned_mib": mib[0], "measured_mib": mib[1], "runs_above": above, "runs_below": below}


def attempt(
    shape: Shape, lora: bool, checkpointing: bool, tokens: int, device: torch.device, limit: float | None
) -> int | None:
    """Train a few steps and return the peak in bytes; None where memory ran out."""
    watch = training.PeakWatch(device)  # frees what an earlier attempt left, before the limit is set
    settings = {"gradient_checkpointing": checkpointing}
    if lora:
        settings |= {"use_peft": True, "lora_r": training.LORA_RANK}
    rows = training.random_rows(shape, tokens)
    with tempfile.TemporaryDirectory() as name:
        try:
            if limit is None:
                training.recipe(watch, STEPS, shape, rows, Path(name), device, **settings)
            else:
                with devices.limited(device, limit):
                    training.recipe(watch, STEPS, shape, rows, Path(name), device, **settings)
        except torch.OutOfMemoryError:
            return None
    return watch.bytes
