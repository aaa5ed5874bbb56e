"""Optimizer steps that were not applied because their loss or gradient was not finite: counted, told, and limited.

One bad row or one overflow must not end a week of training, nor may NaN ever reach the weights. Such a step leaves
parameters and optimizer state exactly as they were, on every rank (`sharding.clip_grad_norm` sees to that); the rows
are used, the schedule moves on. Too many of them mean that the training itself has gone wrong, and stop it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import gather_object

from oneloop import sharding

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig
    from oneloop.data.loaders import TrainLoader
    from oneloop.data.sampling import Progress
    from oneloop.meter import Meter

SKIPPED_FILE = "skipped_steps.jsonl"
WINDOW = 100
"""Steps over which skipped ones are counted, and over which a norm is called unusual."""
SPIKE = 10.0
"""A gradient norm this many times the median of the window is counted as a spike."""


class SkippedSteps:
    """Watches the gradient norm of each step; `record` is called once per optimizer step on every rank."""

    def __init__(self, accelerator: Accelerator, config: RecipeConfig, limit: int = 5):
        """limit: how many of the last `WINDOW` steps may be skipped; with the dynamic loss scale of fp16, whose search
        skips steps by design, how many in a row (but at least 20)."""
        self.accelerator = accelerator
        self.path = Path(config.output_dir) / SKIPPED_FILE
        self.searches_scale = sharding.mixed_precision(accelerator) == "fp16"
        self.limit = max(limit, 20) if self.searches_scale else limit
        self.recent: deque[bool] = deque(maxlen=self.limit + 1 if self.searches_scale else WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.num_skipped = self.num_spikes = 0

    def record(self, grad_norm: float, window: Meter, loader: TrainLoader, progress: Progress) -> None:
        """Count the step that `loader` yielded last; call it before `loader.advance`.

        grad_norm: the norm before clipping, NaN for a step that was not applied. Collective for such a step: its rows,
        losses and seeds of every rank go into `skipped_steps.jsonl`. Raises ValueError, on every rank, when
        there are too many.
        """
        skipped = not math.isfinite(grad_norm)
        self.recent.append(skipped)
        if not skipped:
            if len(self.norms) >= 20 and grad_norm > SPIKE * statistics.median(self.norms):
                self.num_spikes += 1
            self.norms.append(grad_norm)
            return
        self.num_skipped += 1
        step = progress.step + 1  # as the metrics count: steps done
        mine = [
            {"rank": self.accelerator.process_index, "rows": rows.tolist(), "loss_sum": repr(loss)}
            for rows, loss in zip(loader.last_micro_batches, window.newest_losses(), strict=True)
        ]
        for micro_batch, seed in zip(mine, loader.last_seeds, strict=True):
            micro_batch["seed"] = seed  # of torch's generators before it
        everyone = gather_object([mine])
        if self.accelerator.is_main_process:
            line = {
                "step": step,
                "epoch": progress.epoch,
                "rows": loader.last_row_ids,
                "micro_batches": [micro_batch for theirs in everyone for micro_batch in theirs],
            }
            where = f"rows in {self.path}"
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:  # a full disk must not end what a bad row does not
                where = f"rows {loader.last_row_ids}; {self.path} cannot be written: {error}"
            print(
                f"step {step} was not applied: its loss or gradient is not finite ({where})",
                file=sys.stderr,
                flush=True,
            )
        if sum(self.recent) > self.limit:
            what = "in a row" if self.searches_scale else f"of the last {len(self.recent)}"
            raise ValueError(
                f"{sum(self.recent)} steps {what} had a loss or gradient that is not finite; none of them was applied. "
                f"Look at the rows in {self.path}, lower learning_rate, or compute in bf16 instead of fp16. The "
                "weights are as they were before these steps."
            )

    def state(self) -> dict:
        """The counts, for a training state."""
        return {
            "num_skipped": self.num_skipped,
            "num_spikes": self.num_spikes,
            "recent": [int(skipped) for skipped in self.recent],
            "norms": list(self.norms),
        }

    def restore(self, state: dict) -> None:
        """Go on counting from what `state` returned."""
        self.num_skipped, self.num_spikes = state["num_skipped"], state["num_spikes"]
        self.recent.extend(bool(skipped) for skipped in state["recent"])
        self.norms.extend(state["norms"])

    def metrics(self) -> dict[str, float]:
        """Counts since the start of the run."""
        return {
            "train/skipped_steps": float(self.num_skipped),
            "train/grad_norm_spikes": float(self.num_spikes),
        }
