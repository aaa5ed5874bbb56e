"""C3: memory and time of the loss head, forward and backward, at a size where the logits are most of a step.

Memory is the growth of the resident set in a fresh process, so that nothing that was freed earlier counts. Time is CPU
time, alternated in one process. Shapes: N tokens, D hidden, V vocabulary; everything in fp32.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import baton
from benchmarks.outcome import Outcome, Target

N, D, V = 2048, 256, 49152
CHECKPOINT_CHUNK = 256
TRL_CHUNK = 32768
"""What TRL itself passes (trl 1.16, trainer/utils.py)."""


# --- contenders: (hidden (N, D), weight (V, D), labels (N,) int64) -> scalar loss sum ---------------------------------


def full(hidden, weight, labels):
    """All logits at once, as a model's own loss does."""
    import torch.nn.functional as F

    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")


def checkpointed(hidden, weight, labels):
    """Chunks of tokens under torch's own checkpointing."""
    from torch.utils.checkpoint import checkpoint

    parts = zip(hidden.split(CHECKPOINT_CHUNK), labels.split(CHECKPOINT_CHUNK), strict=True)
    return sum(checkpoint(full, part, weight, targets, use_reentrant=False) for part, targets in parts)


def ours(hidden, weight, labels):
    from oneloop import losses

    return losses.linear_cross_entropy_sum(hidden, weight, labels)[0]


def trl(hidden, weight, labels):
    from trl.kernels import ChunkedLogProbFunction

    # Without entropy and the other statistics, which no contender computes.
    return -ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, TRL_CHUNK, None, 1.0, ())[0].sum()


CONTENDERS = {"ours": ours, "full": full, "checkpointed": checkpointed, "TRL": trl}


def inputs(num_tokens: int, vocabulary: int):
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, D, requires_grad=True)
    weight = (torch.randn(vocabulary, D) * D**-0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (num_tokens,))


def measure(name: str) -> dict:
    """One forward and backward pass in this process, which must have done none before."""
    import resource
    import time

    import torch

    torch.set_num_threads(1)
    loss_sum = CONTENDERS[name]
    loss_sum(*inputs(2 * CHECKPOINT_CHUNK, 512)).backward()  # loads kernels and their buffers
    tensors = inputs(N, V)
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak is that of what follows
    before = resident_bytes()
    started = time.process_time()
    loss = loss_sum(*tensors)
    loss.backward()
    return {
        "seconds": time.process_time() - started,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "loss": loss.item(),
        "hidden norm": tensors[0].grad.double().norm().item(),
        "weight norm": tensors[1].grad.double().norm().item(),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def in_fresh_process(name: str) -> dict:
    command = [sys.executable, "-m", "benchmarks.loss_head", name]
    output = subprocess.check_output(command, cwd=Path(__file__).parents[1], text=True)
    return json.loads(output.splitlines()[-1])


def run(quick: bool) -> Outcome:
    """Memory of each in a process of its own, time of ours against full logits alternated."""
    import importlib.util
    import time

    import torch

    torch.set_num_threads(1)
    names, notes = list(CONTENDERS), []
    if importlib.util.find_spec("trl") is None:
        names.remove("TRL")
        notes.append("TRL is not installed and was left out (pip install -e .[benchmark]).")
    results = {name: in_fresh_process(name) for name in names}

    def contender(loss_sum):
        def steps(step_done):
            for _ in range(warm_up + num_steps):
                loss_sum(*tensors).backward()
                tensors[0].grad = tensors[1].grad = None
                step_done()

        return steps

    warm_up, num_steps = (1, 3) if quick else (2, 10)
    tensors = inputs(N, V)
    timed = {"ours": contender(ours), "full": contender(full), "full, again": contender(full)}
    seconds = baton.alternate(timed, num_steps, warm_up, time.thread_time)
    control = baton.ratio(seconds["full, again"], seconds["full"])
    speed = baton.ratio(seconds["ours"], seconds["full"])
    memory = {name: result["bytes"] / results["full"]["bytes"] for name, result in results.items()}
    targets = [Target("memory, ours / full", memory["ours"], 0.12)]
    if "TRL" in names:
        targets.append(Target("memory, ours / TRL", memory["ours"] / memory["TRL"], 0.20))
    targets.append(Target("CPU time, ours / full", speed.paired, 1.10))
    for what in ("loss", "hidden norm", "weight norm"):
        difference = abs(results["ours"][what] / results["full"][what] - 1)
        targets.append(Target(f"relative difference of the {what}", difference, 1e-6))
    head = ["contender", "MB more", "of full logits", "CPU s in a fresh process", "loss", "gradient norms"]
    table = [head]
    for name, one in results.items():
        norms = f"{one['hidden norm']:.7g}, {one['weight norm']:.7g}"
        megabytes = f"{one['bytes'] / 1e6:.0f}"
        table.append([name, megabytes, f"{memory[name]:.3f}", f"{one['seconds']:.2f}", f"{one['loss']:.7g}", norms])
    medians = {name: f"{statistics.median(values):.2f}" for name, values in seconds.items()}
    times = [["alternated", "CPU s (median)", "/ full, paired", "of medians"]]
    times.append(["ours", medians["ours"], f"{speed.paired:.3f}", f"{speed.of_medians:.3f}"])
    times.append(["full", medians["full"], "", ""])
    times.append(["A/A: full, again", medians["full, again"], f"{control.paired:.3f}", f"{control.of_medians:.3f}"])
    return Outcome(
        name="loss-head",
        targets=targets,
        tables=[table, times],
        control=max(control.paired, control.of_medians, key=lambda value: abs(value - 1)),
        conclusive=baton.conclusive(control),
        notes=notes,
        series={"megabytes": {name: one["bytes"] / 1e6 for name, one in results.items()}},
        quick=quick,
    )


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
