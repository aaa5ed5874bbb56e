"""G2: LoRA of rank 16 on an 8B model with gradient checkpointing, against peft in a bare loop.

Two runs of the recipe: with `torch_compile: true` in the contest, and as it comes for the comparison with the planner,
whose formulas are about uncompiled layers.
"""

import tempfile
from pathlib import Path

import torch

from gpu_check import contest, training
from gpu_check import device as devices
from gpu_check.loop import LOGITS_BYTES, num_graphs
from gpu_check.report import Report
from gpu_check.sizes import Sizes

TITLE = "LoRA r 16, 8B, gradient checkpointing"
SET_UP_SECONDS = 35
RECOMPUTED = 1.5
"""Products of a LoRA step with all activations recomputed, as a multiple of those without."""
SETTINGS = {"use_peft": True, "lora_r": training.LORA_RANK, "gradient_checkpointing": True}


def run(sizes: Sizes, device: torch.device, report: Report, seconds_left) -> None:
    shape, tokens = sizes.eight_b, sizes.lora_tokens
    rows = training.random_rows(shape, tokens)
    with tempfile.TemporaryDirectory() as name:
        watch = training.PeakWatch(device)
        training.recipe(watch, 3, shape, rows, Path(name), device, **SETTINGS)
    planned = training.planned_peak(shape, True, tokens, gradient_checkpointing=True)
    report.record(peak_mib=round(watch.bytes / 2**20, 1), planned_mib=round(planned / 2**20, 1))
    report.judge("measured peak, off from the plan by", abs(watch.bytes / planned - 1), at_most=0.05)
    devices.release(device)

    frozen = 2 * training.flops_counter(shape, lora=True).matmul_parameters + 2 * shape.vocabulary * shape.hidden
    contest.check_memory(device, 3, frozen, planned + LOGITS_BYTES * tokens * shape.vocabulary)
    step_flops = RECOMPUTED * training.flops_counter(shape, lora=True).training(tokens, tokens**2)
    estimate = step_flops / (contest.ASSUMED_SHARE * devices.matmul_per_second(device, sizes.matmul))
    seconds = seconds_left() - (0 if report.toy else SET_UP_SECONDS)
    rounds = contest.rounds_that_fit(seconds, 3 * estimate, contest.Rounds(sizes.warm_up, sizes.steps))
    report.settings |= {"tokens_a_step": tokens, "row": tokens, "flops_a_step": step_flops, **SETTINGS}
    graphs: list[int] = []
    with tempfile.TemporaryDirectory() as name:

        def ours(step_done):
            before = num_graphs()

            def done():
                if not graphs:
                    graphs.append(num_graphs() - before)
                step_done()

            training.recipe(done, rounds.total, shape, rows, Path(name), device, torch_compile=True, **SETTINGS)

        def peft(step_done):
            training.bare(step_done, rounds.total, shape, rows, device, compiled=False, lora=True)

        result = contest.hold({"ours": ours, "peft": peft, "peft, again": peft}, rounds, device)
    contest.record(report, "lora", result, rounds, "peft, again", "peft")
    report.record(tokens_per_second={name: round(tokens / result.median(name)) for name in result.seconds})
    doubt = result.doubt("peft, again", "peft")
    report.judge("graphs that ours compiled", graphs[0], at_least=1)
    report.judge("throughput, ours / peft", result.ratio("peft", "ours"), at_least=1.2, doubt=doubt)
    report.judge("peak memory, ours / peft", result.peaks["ours"] / result.peaks["peft"], at_most=0.75)
