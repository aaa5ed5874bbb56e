"""The device under test: its clock, its memory counters, its name; no maker is named.

Without an accelerator the process stands in for the device, so that every line of a check can be tried without one.
"""

import contextlib
import gc
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "bitsandbytes",
    "liger-kernel",
    "trl",
)


def find() -> torch.device:
    """The accelerator there is, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


class Clock:
    """Seconds on the device's own time line: each reading is an event behind all work queued so far, waited for.

    Milliseconds since the first event come as fp32, so a clock is exact to 0.03 ms for eight minutes.
    """

    def __init__(self, device: torch.device):
        self.make = None if device.type == "cpu" else torch.get_device_module(device).Event
        if self.make is not None:
            self.first = self._event()

    def _event(self):
        event = self.make(enable_timing=True)
        event.record()  # on the current stream, which every thread shares unless it chose another
        event.synchronize()
        return event

    def __call__(self) -> float:
        if self.make is None:
            return time.perf_counter()
        return self.first.elapsed_time(self._event()) / 1000


# --- memory -----------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def allocated_bytes(device: torch.device) -> int:
    """What tensors hold now; on CPU the resident set."""
    if device.type != "cpu":
        return torch.accelerator.memory_allocated()
    import psutil

    return psutil.Process().memory_info().rss


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """The most that tensors have held since `reset_peak`."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return allocated_bytes(device)


def release(device: torch.device) -> None:
    """Give back what nothing refers to any more, cycles included."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


def total_bytes(device: torch.device) -> int | None:
    """The device's memory; None on CPU."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).get_device_properties(device).total_memory


def can_limit(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "set_per_process_memory_fraction")


@contextlib.contextmanager
def limited(device: torch.device, num_bytes: float):
    """Let this process allocate no more than `num_bytes` beyond what it has reserved: a smaller device, in effect."""
    module, total = torch.get_device_module(device), total_bytes(device)
    module.set_per_process_memory_fraction(min(1.0, (torch.accelerator.memory_reserved() + num_bytes) / total), device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(1.0, device)


# --- what it is -------------------------------------------------------------------------------------------------------


def matmul_per_second(device: torch.device, size: int) -> float:
    """FLOP/s of a product of two square bf16 matrices of random numbers: what this device really gives."""
    clock = Clock(device)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(8):
        started = clock()
        left @ right
        seconds.append(clock() - started)
    return 2 * size**3 / sorted(seconds[3:])[2]


def describe(device: torch.device) -> dict:
    """Device, driver, runtime and packages, for the record."""
    import psutil

    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    runtimes = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else None
    total = total_bytes(device)
    return {
        "device": name or platform.processor() or platform.machine(),
        "device_type": device.type,
        "num_devices": torch.accelerator.device_count(),
        "memory_gib": None if total is None else round(total / 2**30, 1),
        "driver": driver_version() if device.type != "cpu" else None,
        "runtime": {name: version for name, version in runtimes.items() if version},
        "python": platform.python_version(),
        "packages": versions,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def driver_version() -> str | None:
    """What the maker's own tool says; None where there is none."""
    for command in (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion", "--csv"],
    ):
        if shutil.which(command[0]):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                answer = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True).stdout
                return answer.strip().splitlines()[-1].strip()
    return None
