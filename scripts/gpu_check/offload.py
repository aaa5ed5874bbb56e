"""G5: a 3B model, all weights trained, with parameters, gradients and optimizer on the host, against all on the device.

Both are launched with a shipped Accelerate file. Two launches are two processes, so there is no A/A control; a ratio
of 2.5 is far from what separates two runs of the same code.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from benchmarks import subjects

from gpu_check.report import NOT_BUILT, OutOfTime, Report
from gpu_check.sizes import Sizes

TITLE = "CPU offload: step time, 3B, full"
FILES = {"on the device": "single", "offloaded": "fsdp2_offload"}
SECONDS_EACH = 35
"""The least that a launch takes; none is begun with less."""


def run(sizes: Sizes, device: torch.device, report: Report, seconds_left) -> None:
    tokens = sizes.offload_tokens * sizes.offload_rows * sizes.offload_accumulation
    report.settings |= {"tokens_a_step": tokens, "row": sizes.offload_tokens, "gradient_checkpointing": True}
    report.settings |= {"files": FILES, "warm_up": sizes.offload_warm_up, "steps": sizes.offload_steps}
    found = {}
    for name, file in FILES.items():
        if seconds_left() < SECONDS_EACH and not report.toy:
            raise OutOfTime(f"{seconds_left():.0f} s are left for {name}")
        found[name] = launch(file, report.toy, seconds_left())
        report.record(launches=found)
    medians = {name: statistics.median(one["seconds"]) for name, one in found.items()}
    report.record(median_seconds=medians, peak_mib={name: one["peak_mib"] for name, one in found.items()})
    report.judge("step time, offloaded / not", medians["offloaded"] / medians["on the device"], at_most=2.5)
    for name in ("stall of an asynchronous save", "share of throughput lost to it", "losses after kill and resume"):
        report.leave_out(name, NOT_BUILT, "needs checkpoints")


def launch(file: str, toy: bool, seconds: float) -> dict:
    """Train in a launch of one process; returns what `offload_rank.py` wrote. Raises OutOfTime, or RuntimeError with
    the launch's output."""
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "result.json"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        command += ["--config_file", str(subjects.ROOT / "accelerate_configs" / f"{file}.yaml")]
        command += ["--main_process_port", "0", str(Path(__file__).with_name("offload_rank.py"))]
        command += [str(result), *(["--toy"] if toy else [])]
        # What an earlier part of this process told Accelerate is not for these.
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
        process = subprocess.Popen(
            command, env=kept, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            from gpu_check.processes import kill_family

            kill_family(process)
            raise OutOfTime(f"{file} was not done after {seconds:.0f} s") from None
        print(output[-4000:])
        if process.returncode or not result.exists():
            raise RuntimeError(f"{file}: exit {process.returncode}\n{output[-4000:]}")
        return json.loads(result.read_text())
