"""Runs parts in a process of their own, so that whatever one does to the device ends with it.

python -m gpu_check.worker FOLDER SECONDS PART... [--toy]    every part writes FOLDER/PART.json
"""

import os
import sys
import time
import traceback
from pathlib import Path

from gpu_check.report import FAILED, SKIPPED_MEMORY, SKIPPED_TIME, OutOfTime, Report, TooSmall


def main(folder: str, seconds: float, parts: list[str], toy: bool) -> None:
    ends = time.monotonic() + seconds
    import torch
    import transformers

    from gpu_check import device as devices
    from gpu_check import loop, lora, loss_head, offload, planner, sizes

    transformers.logging.set_verbosity_error()
    if toy:
        torch.set_num_threads(1)
        trace_only()
    device = devices.find()
    modules = {"G1": loop, "G2": lora, "G3": loss_head, "G4": planner, "G5": offload}
    for part in parts:
        started = time.monotonic()
        module = modules[part]
        report = Report(part, module.TITLE, Path(folder) / f"{part}.json", toy, machine=devices.describe(device))
        report.save()
        status = None
        try:
            module.run(sizes.TOY if toy else sizes.REAL, device, report, lambda: ends - time.monotonic())
        except (OutOfTime, TooSmall) as error:
            why = SKIPPED_TIME if isinstance(error, OutOfTime) else SKIPPED_MEMORY
            status = why if not report.bars else None
            report.leave_out("the rest", why, str(error))
        except Exception as error:
            status, report.error = FAILED, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        report.seconds = round(time.monotonic() - started, 1)
        report.finish(status)
        devices.release(device)


def trace_only() -> None:
    """Let torch.compile trace, differentiate and run its graphs, but compile no kernel: that would take minutes."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    compile_fx.compile_fx = lambda graph, inputs, **_: aot_eager(graph, inputs)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--toy"]
    main(words[0], float(words[1]), words[2:], "--toy" in sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of contenders that failed must not hold the process
