"""G3: the loss head alone, forward and backward in bf16, against whole logits, torch.compile and other fused heads.

Memory is what is held beyond the inputs at the highest point, both gradients included, as in the table of Cut Cross
Entropy that its bar comes from.
"""

import importlib.util
import math

import torch
import torch.nn.functional as F

from gpu_check import contest
from gpu_check import device as devices
from gpu_check.report import SKIPPED_MEMORY, SKIPPED_TIME, OutOfTime, Report
from gpu_check.sizes import Head, Sizes

TITLE = "loss head, forward and backward"
COMPILE_SECONDS = 5


# --- contenders: (hidden (N, D), weight (V, D), labels (N,) int64) -> scalar loss sum ---------------------------------


def full(hidden, weight, labels):
    """All logits at once, then in fp32, as transformers' own loss has them."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


def ours(hidden, weight, labels):
    from oneloop import losses

    return losses.linear_cross_entropy_sum(hidden, weight, labels)[0]


def torch_chunked(hidden, weight, labels):
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def liger(hidden, weight, labels):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # The weight's gradient summed in fp32, as ours is.
    return LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)(weight, hidden, labels)


def trl(hidden, weight, labels):
    from benchmarks.loss_head import trl

    return trl(hidden, weight, labels)


def contenders(report: Report) -> dict:
    """Those that can be had here; the others are named in a note."""
    found = {"ours": ours, "full": full, "full, again": full, "torch.compile": None}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["torch, chunked"] = torch_chunked
    for name, module, function in (("Liger", "liger_kernel", liger), ("TRL", "trl", trl)):
        if importlib.util.find_spec(module) is not None:
            found[name] = function
        else:
            report.note(f"{name} is not installed and was left out.")
    return found


# --- the part ---------------------------------------------------------------------------------------------------------


def run(sizes: Sizes, device: torch.device, report: Report, seconds_left) -> None:
    rate = devices.matmul_per_second(device, sizes.matmul)
    every = contenders(report)
    for index, head in enumerate((sizes.first_head, sizes.small_head, sizes.large_head)):
        bars = bars_of(index, head)
        # For each shape anew: one that has been seen with other sizes compiles for all of them.
        every["torch.compile"] = torch.compile(full, dynamic=False)
        try:
            result, rounds = measure(head, every, sizes, device, rate, seconds_left, report)
        except (OutOfTime, torch.OutOfMemoryError) as error:
            why = SKIPPED_TIME if isinstance(error, OutOfTime) else SKIPPED_MEMORY
            for name, _, _ in bars:
                report.leave_out(name, why, str(error).splitlines()[0])
            continue
        doubt = result.doubt("full, again", "full")
        contest.record(report, str(head), result, rounds, "full, again", "full")
        if index == 0:
            gradients = 2 * head.hidden * (head.tokens + head.vocabulary)
            mib = result.peaks["ours"] / 2**20
            report.record(mib_of_the_two_bf16_gradients=round(gradients / 2**20, 1))
            report.judge(f"memory of ours at {head}", mib, at_most=1200, unit="MiB")
        for name, other, limit in bars:
            report.judge(name, result.ratio("ours", other), at_most=limit, doubt=doubt)


def relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Size of the difference of two tensors as a share of the second; infinite where it is no number."""
    share = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
    return share if math.isfinite(share) else math.inf


def bars_of(index: int, head: Head) -> list[tuple[str, str, float]]:
    """Name, other contender and limit of the time ratios: at few tokens it is the whole logits that count."""
    other, limit = ("full", 1.3) if index == 1 else ("torch.compile", 1.05)
    return [(f"time, ours / {other} at {head}", other, limit)]


def measure(head: Head, every: dict, sizes: Sizes, device, rate: float, seconds_left, report: Report):
    """Compare what ours gives with whole logits once, then alternate. Returns (result, rounds)."""
    torch.manual_seed(0)
    hidden = torch.randn(head.tokens, head.hidden, device=device).bfloat16().requires_grad_()
    weight = torch.randn(head.vocabulary, head.hidden, device=device).mul_(head.hidden**-0.5).bfloat16()
    weight.requires_grad_()
    labels = torch.randint(head.vocabulary, (head.tokens,), device=device)
    found = {}
    for name in ("full", "ours"):
        loss = every[name](hidden, weight, labels)
        loss.backward()
        found[name] = [loss.detach(), hidden.grad, weight.grad]
        hidden.grad = weight.grad = None
    largest = max(relative(mine, theirs) for mine, theirs in zip(found["ours"], found["full"], strict=True))
    report.judge(f"difference from whole logits at {head}", largest, at_most=0.02)
    del found, loss
    devices.release(device)

    estimate = len(every) * 6 * head.tokens * head.hidden * head.vocabulary / (contest.ASSUMED_SHARE * rate)
    seconds = seconds_left() - (0 if report.toy else COMPILE_SECONDS)
    rounds = contest.rounds_that_fit(seconds, estimate, contest.Rounds(sizes.warm_up, sizes.steps))

    def contender(loss_sum):
        def steps(step_done):
            for _ in range(rounds.total):
                loss_sum(hidden, weight, labels).backward()
                hidden.grad = weight.grad = None
                step_done()

        return steps

    others = tuple(name for name in every if name not in ("ours", "full", "full, again", "torch.compile"))
    entrants = {name: contender(loss_sum) for name, loss_sum in every.items()}
    return contest.hold(entrants, rounds, device, optional=others), rounds
