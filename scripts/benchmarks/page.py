"""docs/benchmarks.md and its picture, from the saved outcomes."""

import importlib.metadata
import platform
from pathlib import Path

from benchmarks.outcome import Outcome, load, markdown

ORDER = ("loop", "loss-head", "startup", "memory")
IF_MEASURED = ("saving", "resuming", "throughput", "packing", "tokenising")
TITLES = {
    "loop": "The loop",
    "loss-head": "The loss head",
    "startup": "Starting",
    "memory": "Memory on each rank",
    "saving": "Saving",
    "resuming": "Continuing",
    "throughput": "Useful throughput",
    "packing": "Packing",
    "tokenising": "Preparing rows",
}
ABOUT = {
    "loop": (
        "A model of 0.7 M parameters in two layers, 8 rows of 64 tokens a step, fp32, one thread: so small that what a "
        "loop costs is seen. Every contender has fused AdamW, clipping at 1, a cosine schedule, the same token ids and "
        "no tracker. The bare loop is what is left when everything else is taken away: collate, the model's own loss, "
        "backward, clip, step. Ours is `main` of `recipes/sft.py`, with its metrics, its guards against steps that are "
        "not finite and its fused loss, which leaves out positions without a label: with a loss on every token, for "
        "which the targets hold, that saves nothing. TRL keeps its default metrics. The contenders are threads of one "
        "process and do one step each in turn; a ratio is the median over the rounds of the ratio within a round. The "
        "A/A control is the bare loop against a second copy of itself: outside 0.93 to 1.07 the run says nothing."
    ),
    "loss-head": (
        "2,048 tokens, hidden size 256, vocabulary 49,152, fp32, forward and backward. Memory is the growth of the "
        "resident set of a fresh process, the head's gradient of 50 MB included. Full logits is what a model's own "
        "loss does; checkpointed are chunks of 256 tokens under torch's checkpointing; TRL's kernel runs here without "
        "Triton, for which it is made."
    ),
    "startup": (
        "Wall seconds from the start of a process, best of several alternated starts: to the end of "
        "`python recipes/sft.py --help` and `trl sft --help`, and to the end of the first optimizer step on a model of "
        "two layers. Nearly all of it is importing torch and transformers."
    ),
    "memory": (
        "Bytes that the tensors of a rank hold, at the end of the last backward pass and after the optimizer's step, "
        "against `oneloop.memory`, which knows only what each strategy shards. Real ranks over gloo train two steps of "
        "`recipes/sft.py` under the shipped files. The fullest rank counts."
    ),
    "saving": (
        "Weights and AdamW moments of 42 M parameters, 503 MB in fp32, saved by one process: the time until the call "
        "returns. Ours, DCP and the raw write have everything on the disk by then; `accelerator.save_state` does not "
        "ask for it. Ours also hashes every byte, and no half of it can be taken for the whole. Alternated, with the "
        "disk at rest before each; medians."
    ),
    "resuming": (
        "An epoch of 200,000 rows, continued at three positions: the time to the first batch. The batches are compared "
        "with those of an epoch that was not interrupted."
    ),
    "throughput": (
        "A model of 7.2 M parameters in six layers with a vocabulary of 8,192, fp32, one thread, 32 conversations a "
        "step of at most 256 tokens and very different lengths. Every contender has fused AdamW, clipping at 1, a "
        "cosine schedule and the same token ids; what counts are the label tokens of all steps over the CPU seconds "
        "of all steps. Ours and the Trainer see the same rows in each step, ours packed into six blocks, the others "
        "in four micro-batches of eight rows, padded to the longest. The Trainer by length picks rows of like length "
        "for its micro-batches (`group_by_length`), which is a change to what is learnt when. TRL packs all rows "
        "before the first step (`bfd`) and takes as many full blocks a step as hold about as many tokens. Ours and "
        "TRL have the layout that was fastest for each: ours all blocks at once, TRL a block at a time, since without "
        "flash attention it pays for attention among all blocks of a micro-batch. The A/A control is the Trainer "
        "against a second copy of itself. The contenders take turns as in `loop`."
    ),
    "packing": (
        "Rows of 2 to 6,000 tokens, lognormal with a median of 220, into blocks of 2,048; those longer than a block "
        "are split. Fewest blocks is the number of tokens over 2,048. TRL's `bfd` discards what is longer than a "
        "block, `wrapped` cuts rows wherever a block ends and lets those of a block see each other; its trainer packs "
        "1,000 rows at a time. Each figure of the last column includes the copying of the tokens; `wrapped` copies "
        "none."
    ),
    "tokenising": (
        "8,000 texts and 2,000 conversations into token ids, with a tokenizer of 16,000 tokens trained on a part of "
        "them. All contenders have the same rows in memory and all cores of the machine, and must come to the same "
        "ids. Alternated, medians."
    ),
}
PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "trl")


def write(results: Path, docs: Path) -> None:
    """Write both files. Raises FileNotFoundError where a benchmark has not been run."""
    outcomes = {name: load(results / f"{name}.json") for name in ORDER}
    outcomes |= {name: load(path) for name in IF_MEASURED if (path := results / f"{name}.json").exists()}
    (docs / "benchmarks.md").write_text(text(outcomes), encoding="utf-8")
    draw(outcomes, docs / "benchmarks.png")


def machine() -> str:
    """The processor, without the name of the host."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        count = sum(line.startswith("processor") for line in lines)
    except (OSError, StopIteration):
        return platform.machine()
    return f"{count} cores of {model}"


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join([f"Python {platform.python_version()}", *found])


def text(outcomes: dict[str, Outcome]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "Written by `python scripts/benchmark.py all --write-docs`, which exits with 0 only if all targets below hold.",
        "",
        f"Machine: {machine()}, no GPU. {versions()}.",
        "",
        "![Time of a step, memory of the loss head, time to start, bytes a parameter on each rank](benchmarks.png)",
        "",
        "| benchmark | target | measured | at most | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, outcome in outcomes.items():
        for target in outcome.targets:
            verdict = "holds" if target.holds else "missed"
            lines.append(f"| {name} | {target.name} | {target.value:.3g} | {target.limit:g} | {verdict} |")
        if outcome.control is not None:
            verdict = "conclusive" if outcome.conclusive else "inconclusive"
            lines.append(f"| {name} | A/A control | {outcome.control:.3f} | 0.93 to 1.07 | {verdict} |")
    for name, outcome in outcomes.items():
        lines += ["", f"## {TITLES[name]}", "", ABOUT[name], "", f"    python scripts/benchmark.py {name}", ""]
        for table in outcome.tables:
            lines += [*markdown(table), ""]
        lines += [*outcome.notes, f"Measured on {outcome.date}."]
    lines += [
        "",
        "## What is not measured here",
        "",
        "Everything above ran on a CPU. Nothing is said about the speed of a GPU, of its kernels or of communication "
        "between GPUs, and nothing about throughput on real data. A CPU flatters a loss in chunks, and a tiny model "
        "shows the cost of a loop at its worst. `scripts/gpu_check.py` measures what one GPU can tell.",
    ]
    return "\n".join(lines) + "\n"


def draw(outcomes: dict[str, Outcome], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subfigures(2, 1, height_ratios=(2, 3))
    loop, head, start = above.subplots(1, 3)
    _bars(loop, outcomes["loop"].series["milliseconds"], "ms a step: the loop on a tiny model", "{:.0f}")
    _bars(head, outcomes["loss-head"].series["megabytes"], "MB: loss head of 2,048 x 49,152", "{:.0f}")
    _bars(start, outcomes["startup"].series["seconds"], "s to help, and to the first step", "{:.1f}")
    _memory(below, outcomes["memory"].series["bytes per parameter"])
    figure.savefig(path, dpi=110)


def _bars(axes, values: dict[str, float], title: str, number: str) -> None:
    colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colors)
    axes.bar_label(bars, [number.format(value) for value in values.values()], padding=3)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    axes.set_xlim(0, 1.15 * max(values.values()))
    axes.spines[["top", "right"]].set_visible(False)


def _memory(figure, values: dict[str, list[float]]) -> None:
    """Measured bars with the formula as a line on each, after backward."""
    precisions = {"no": "fp32", "bf16": "bf16"}
    for axes, (precision, title) in zip(figure.subplots(1, 2, sharey=True), precisions.items(), strict=True):
        chosen = {key: value for key, value in values.items() if key.endswith(f", {precision}, after backward")}
        labels = [", ".join(key.split(", ")[:2]) for key in chosen]
        measured, predicted = zip(*chosen.values(), strict=True)
        places = range(len(chosen))
        axes.bar(places, measured, color="tab:blue", label="measured")
        axes.hlines(predicted, [p - 0.45 for p in places], [p + 0.45 for p in places], color="black", label="formula")
        axes.set_xticks(list(places), labels, rotation=60, ha="right", fontsize=8)
        axes.set_title(f"bytes a parameter on a rank after backward, {title} (file, ranks)", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper right", fontsize=8)
