"""Rows as the model will see them, for people to look at, and a picture of their lengths."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oneloop.data import packing, sampling
from oneloop.data.files import printable
from oneloop.losses import IGNORE_INDEX

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig
    from oneloop.data.rowsets import RowSet

_GREEN, _GREY, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def examples(config: RecipeConfig, accelerator: Accelerator, tokenizer, rows: RowSet) -> None:
    """Print the first `show_examples` rows of the first epoch, and draw the lengths of all into output_dir.

    The text is that of the token ids, decoded with control tokens; what carries a loss is green on a terminal and
    between guillemets elsewhere. With packing, the rows of the first step are shown block by block.
    """
    if accelerator.is_main_process:
        order = rows.order.epoch(config.seed, 0, config.shuffle)
        if config.packing:
            size = config.global_batch_size
            step = sampling.rows_of_step(order, 0, size, rows.lengths_of if config.batch_unit == "tokens" else None)
            each = accelerator.num_processes * config.per_device_batch_size
            blocks = packing.balanced(rows.lengths_of(step), config.max_length, each)
            for number, block in enumerate(blocks[: config.show_examples], start=1):
                tokens = int(rows.lengths_of(step[block]).sum())
                print(f"=== block {number}: {len(block)} rows, {tokens} of at most {config.max_length} tokens ===")
                for row in step[block]:
                    _print(tokenizer, rows, int(row))
        else:
            for row in order[: config.show_examples]:
                _print(tokenizer, rows, int(row))
        path = Path(config.output_dir) / "lengths.png"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        print(f"lengths: {histogram(rows, config.max_length, path)}", flush=True)
    accelerator.wait_for_everyone()


def _print(tokenizer, rows: RowSet, number: int) -> None:
    row = rows[number]
    learnt = sum(label != IGNORE_INDEX for label in row["labels"][1:])
    print(f"--- {rows.where(number)}: {len(row['input_ids'])} tokens, {learnt} learnt ---")
    print(text(tokenizer, row["input_ids"], row["labels"], sys.stdout.isatty()), flush=True)


def text(tokenizer, input_ids, labels, in_colour: bool) -> str:
    """The row's text; input_ids, labels: (T,) int. The first token is never learnt: it is predicted from nothing."""
    learnt = np.array(labels) != IGNORE_INDEX
    learnt[:1] = False
    borders = [0, *(np.flatnonzero(np.diff(learnt)) + 1), len(learnt)]
    marks = (_GREEN, _PLAIN, _GREY, _PLAIN) if in_colour else ("«", "»", "", "")
    parts = []
    for start, end in zip(borders, borders[1:], strict=False):
        before, after = marks[:2] if learnt[start] else marks[2:]
        piece = tokenizer.decode(list(map(int, input_ids[start:end])), clean_up_tokenization_spaces=False)
        # Control characters of a terminal in somebody's text must not act on this one.
        parts.append(before + re.sub(r"[^\n\t]+", lambda match: printable(match[0]), piece) + after)
    return "".join(parts)


def histogram(rows: RowSet, max_length: int, path: Path) -> Path:
    """Draw how long the rows are, and how the tokens spread over them, to a PNG; returns its path."""
    from matplotlib.figure import Figure

    lengths = rows.lengths_of(np.arange(len(rows)))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    longest = int(lengths.max())
    width = -(-longest // 60)  # whole numbers of tokens, or neighbouring bars would stand for unequally many lengths
    edges = np.arange(0, longest + width + 1, width)
    left.hist(lengths, edges, color="#4878a8")
    left.set(
        xlabel="tokens in a row", ylabel="rows", title=f"{len(lengths):,} rows, median {int(np.median(lengths)):,}"
    )
    right.hist(lengths, edges, weights=lengths, color="#c0703a")
    right.set(
        xlabel="tokens in a row", ylabel="tokens", title=f"{int(lengths.sum()):,} tokens, longest {lengths.max():,}"
    )
    for axes in (left, right):
        axes.axvline(max_length, color="black", linewidth=0.8, linestyle="--") if longest > max_length // 2 else None
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path
