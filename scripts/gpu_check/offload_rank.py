"""Run inside a launch of one process: trains a few steps and writes their seconds and the peak memory.

offload_rank.py RESULT.json [--toy]
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

from gpu_check import device as devices  # noqa: E402
from gpu_check import sizes, training  # noqa: E402


def main(result: str, toy: bool) -> None:
    import torch

    size = sizes.TOY if toy else sizes.REAL
    if toy:
        torch.set_num_threads(1)
    device = devices.find()
    clock, watch = devices.Clock(device), training.PeakWatch(device)
    times = [clock()]

    def step_done() -> None:
        watch()
        times.append(clock())

    rows = training.random_rows(size.three_b, size.offload_tokens)
    with tempfile.TemporaryDirectory() as name:
        training.recipe(
            step_done,
            size.offload_warm_up + size.offload_steps,
            size.three_b,
            rows,
            Path(name),
            device,
            mixed_precision=None,
            global_batch_size=size.offload_rows * size.offload_accumulation,
            per_device_batch_size=size.offload_rows,
            gradient_checkpointing=True,
        )
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    written = {"seconds": seconds[size.offload_warm_up :], "peak_mib": round(watch.bytes / 2**20, 1)}
    Path(result).write_text(json.dumps(written))


if __name__ == "__main__":
    main(sys.argv[1], "--toy" in sys.argv)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
