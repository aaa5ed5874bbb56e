"""Training metrics over a logging interval: sums stay on the device, one collective when they are read.

Nothing here waits for the device on a step that does not log.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from oneloop import flops, sharding

if TYPE_CHECKING:
    from accelerate import Accelerator


class Meter:
    """Collects sums micro-batch by micro-batch; `read` makes global metrics of them and starts a new interval."""

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, loader=None):
        """loader: what the loop waits for; the time is taken off its `wait_seconds`."""
        self.accelerator, self.loader = accelerator, loader
        module = accelerator.unwrap_model(model, keep_torch_compile=False)
        self.peak_flops = flops.peak_per_second(accelerator.device, sharding.compute_dtype(accelerator))
        self.flops = flops.Counter.of(module, sharding.weight_counter(module)) if self.peak_flops is not None else None
        self.tokens_seen = 0
        self._start()

    def _start(self) -> None:
        self.parts: dict[str, list[torch.Tensor]] = {}
        self.slots = 0
        self.num_steps = 0
        self.grad_norm = float("nan")
        self.started = time.perf_counter()

    def add(
        self, batch: dict, loss_sum: torch.Tensor, num_items: torch.Tensor, metrics: dict[str, torch.Tensor]
    ) -> None:
        """Count one micro-batch of this rank.

        loss_sum, num_items: scalars of this micro-batch; metrics: name -> scalar sum over the micro-batch's items,
        reported as a mean over items.
        """
        lengths = batch["lengths"]
        values = {"loss": loss_sum.detach(), "items": num_items, "tokens": lengths.sum(), **metrics}
        values["squared_lengths"] = lengths.square().sum()
        self.slots += batch["input_ids"].numel()
        for name, value in values.items():
            self.parts.setdefault(name, []).append(value)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the time of what is no training, such as an evaluation, out of the speeds."""
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def step(self, grad_norm: float) -> None:
        """Count one optimizer step."""
        self.num_steps += 1
        self.grad_norm = grad_norm

    def totals(self) -> dict[str, int]:
        """What has been counted since the start of the run, for a training state."""
        return {"tokens_seen": self.tokens_seen}

    def state(self) -> dict:
        """The interval that is open, as this rank has it, for a training state: JSON, floats as text as they may be
        NaN. Synchronises with the device."""
        return {
            "parts": {
                name: [
                    str(values[0].dtype).removeprefix("torch."),
                    [repr(value) for value in torch.stack(values).tolist()],
                ]
                for name, values in self.parts.items()
            },
            "slots": self.slots,
            "num_steps": self.num_steps,
            "grad_norm": repr(self.grad_norm),
            "seconds": time.perf_counter() - self.started,
        }

    def restore(self, totals: dict[str, int], ranks: list[dict]) -> None:
        """Go on with the interval that was open; `ranks` are the `state` of each rank then. With another number of
        ranks the first one takes all of it, and the sums are the same but for their order."""
        self.tokens_seen = totals["tokens_seen"]
        rank, size = self.accelerator.process_index, self.accelerator.num_processes
        mine = ranks[rank : rank + 1] if len(ranks) == size else ranks if rank == 0 else []
        self._start()
        for one in mine:
            self.slots += one["slots"]
            for name, (dtype, values) in one["parts"].items():
                numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
                self.parts.setdefault(name, []).extend(numbers.to(self.accelerator.device, getattr(torch, dtype)))
        for one in ranks[:1]:  # the same on all ranks
            self.num_steps, self.grad_norm = one["num_steps"], float(one["grad_norm"])
            self.started -= one["seconds"]

    def newest_losses(self) -> list[float]:
        """Loss sums of this rank's micro-batches of the newest step. Synchronises with the device."""
        count = self.accelerator.gradient_accumulation_steps
        return [float(loss) for loss in self.parts["loss"][-count:]]

    def read(self, lr: float) -> dict[str, float]:
        """Global metrics of the interval since the last call, by one collective over all ranks.

        `train/loss` is the mean over all items of all ranks, micro-batches and steps of the interval;
        `train/grad_norm` the norm before clipping at the newest step. Synchronises with the device.
        """
        mine = {name: torch.stack(values).cpu().double().sum().item() for name, values in self.parts.items()}
        mine |= {"slots": self.slots, "peak_memory": peak_memory_bytes(self.accelerator.device)}
        mine["waited"] = 0.0
        if self.loader is not None:
            mine["waited"], self.loader.wait_seconds = self.loader.wait_seconds, 0.0
        # Python numbers: not every device has float64, and fp32 would round sums of whole intervals.
        everyone = gather_object([mine])
        seconds = time.perf_counter() - self.started  # after the gather: the device has finished the interval
        peak_memory, waited = (max(one.pop(name) for one in everyone) for name in ("peak_memory", "waited"))
        total = {name: sum(one[name] for one in everyone) for name in everyone[0]}
        items, tokens = max(total.pop("items"), 1.0), total.pop("tokens")
        self.tokens_seen += int(tokens)
        result = {
            "train/loss": total.pop("loss") / items,
            "train/grad_norm": self.grad_norm,
            "train/lr": lr,
            "train/tokens_per_second": tokens / seconds,
            "train/non_padding_share": tokens / total.pop("slots"),
            "train/tokens_seen": float(self.tokens_seen),
            "train/step_seconds": seconds / max(self.num_steps, 1),
            "train/data_wait_share": waited / seconds,
            "train/peak_memory_gib": peak_memory / 2**30,
        }
        squared_lengths = total.pop("squared_lengths")
        if self.flops is not None:
            done = self.flops.training(tokens, squared_lengths)
            result["train/mfu"] = done / seconds / (self.peak_flops * self.accelerator.num_processes)
        result |= {f"train/{name}": value / items for name, value in total.items()}
        self._start()
        return result


def peak_memory_bytes(device: torch.device) -> int:
    """Highest memory use of this process so far in bytes: the device's allocator, or the resident set on CPU."""
    if device.type != "cpu" and torch.accelerator.is_available():
        # Not every device's allocator keeps statistics (Apple's does not before torch 2.14).
        with contextlib.suppress(RuntimeError):
            return torch.accelerator.max_memory_allocated(device)
    import resource
    import sys

    # Kilobytes on Linux, bytes on macOS (getrusage(2) of each).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
