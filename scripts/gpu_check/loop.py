"""G1: the recipe's loop on a 1B model, all weights trained, against a bare loop and transformers' Trainer.

Rows are packed full. Ours and the bare loops compile layer by layer; ours computes the loss without whole logits, the
others as the model does it.
"""

import tempfile
from pathlib import Path

import torch

from gpu_check import contest, training
from gpu_check import device as devices
from gpu_check.report import FAILED, NOT_BUILT, SKIPPED_MEMORY, SKIPPED_TIME, OutOfTime, Report, TooSmall
from gpu_check.sizes import Sizes

TITLE = "loop throughput and MFU: 1B, full, packed rows"
SET_UP_SECONDS = 55
"""Models, optimizers and compilation."""
LOGITS_BYTES = 12
"""Of each logit, where all are held: in bf16, in fp32, and the gradients of both."""
TOO_GOOD = 0.55
"""MFU above which a measuring error is more likely than the figure."""


def run(sizes: Sizes, device: torch.device, report: Report, seconds_left) -> None:
    from oneloop import flops

    shape, tokens = sizes.one_b, sizes.loop_tokens
    counter = training.flops_counter(shape, lora=False)
    step_flops = counter.training(tokens, tokens**2)
    rate = devices.matmul_per_second(device, sizes.matmul)
    peak_rate = flops.peak_per_second(device, torch.bfloat16)
    names = ["ours", "bare", "bare, again", "Trainer"]
    held = 12 * counter.matmul_parameters  # weights and two moments in fp32
    highest = training.planned_peak(shape, False, tokens, False) + LOGITS_BYTES * tokens * shape.vocabulary
    wanted = contest.Rounds(sizes.warm_up, sizes.steps)
    seconds = seconds_left() - (0 if report.toy else SET_UP_SECONDS)
    estimate = step_flops / (contest.ASSUMED_SHARE * rate)
    without_trainer = ""
    try:
        contest.check_memory(device, 4, held, highest)
        rounds = contest.rounds_that_fit(seconds, 4 * estimate, wanted)
    except (OutOfTime, TooSmall) as error:
        without_trainer = SKIPPED_TIME if isinstance(error, OutOfTime) else SKIPPED_MEMORY
        names.remove("Trainer")
        contest.check_memory(device, 3, held, highest)
        rounds = contest.rounds_that_fit(seconds, 3 * estimate, wanted)
    report.settings |= {"tokens_a_step": tokens, "row": tokens, "flops_a_step": step_flops, "dtype": "fp32, bf16"}
    report.record(matmul_tflops=round(rate / 1e12, 1), peak_tflops=None if peak_rate is None else peak_rate / 1e12)
    rows = training.random_rows(shape, tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graphs: list[int] = []

        def ours(step_done):
            def done():
                if not graphs:
                    graphs.append(num_graphs())
                step_done()

            training.recipe(done, rounds.total, shape, rows, folder, device, torch_compile=True)

        def bare(step_done):
            training.bare(step_done, rounds.total, shape, rows, device, compiled=True, lora=False)

        def trainer(step_done):
            training.trainer(step_done, rounds.total, shape, rows, device, folder)

        every = {"ours": ours, "bare": bare, "bare, again": bare, "Trainer": trainer}
        result = contest.hold({name: every[name] for name in names}, rounds, device, optional=("Trainer",))
    contest.record(report, "loop", result, rounds, "bare, again", "bare")
    report.record(tokens_per_second={name: round(tokens / result.median(name)) for name in result.seconds})
    doubt = result.doubt("bare, again", "bare")
    report.judge("graphs that ours compiled", graphs[0], at_least=1)
    report.judge("throughput, ours / bare", result.ratio("bare", "ours"), at_least=0.98, doubt=doubt)
    if "Trainer" in result.seconds:
        report.judge("throughput, ours / Trainer", result.ratio("Trainer", "ours"), at_least=1.15, doubt=doubt)
    else:
        report.leave_out("throughput, ours / Trainer", without_trainer or FAILED)
    report.leave_out("the same on ragged rows, Trainer padding them", NOT_BUILT, "needs packing")
    utilisation = None if peak_rate is None else step_flops / result.median("ours") / peak_rate
    too_good = f"above {TOO_GOOD}: look for a measuring error" if (utilisation or 0) > TOO_GOOD else ""
    report.judge("MFU of ours", utilisation, at_least=0.45, doubt=doubt or too_good)


def num_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
