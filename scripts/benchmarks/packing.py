"""C4: 20,000 ragged rows into blocks of 2,048 tokens: how many blocks, whether a token is lost, how fast.

Every token of the rows has a number of its own, so what came out is compared with what went in token by token. TRL's
`pack_dataset` gets the same rows, and packs 1,000 at a time, as its trainer calls it, or all at once. That rows in a
block do not see each other is measured with a small model: each token's loss in a block against that of its row alone,
and against that of the same block when the row before it is another one.
"""

import gc
import math
import statistics
import time

import numpy as np

from benchmarks import baton, subjects
from benchmarks.outcome import Outcome, Target

CAPACITY = 2048
ROWS, QUICK_ROWS = 20_000, 2_000
MEDIAN, SIGMA = 220, 0.9
NUM_OVER_LONG, LONGEST = 60, 6000
ROUNDS = 15
ROWS_PER_STEP = 128
"""For the blocks that a run makes: those of the rows of one optimizer step, on one rank."""
SHAPE = {"layers": 2, "hidden": 64, "vocabulary": 512}
NUM_COMPARED = 4


def run(quick: bool) -> Outcome:
    """Ours, a copy of it and TRL's in turn; without TRL ours alone."""
    import torch

    torch.set_num_threads(1)
    lengths = draw_lengths(QUICK_ROWS if quick else ROWS)
    rows = make_rows(lengths)
    pieces, num_left_out = fitted(rows)
    contenders = {
        "ours": lambda: ours(pieces),
        "ours, without the tokens": lambda: best_fit(pieces),
        "ours, again": lambda: ours(pieces),
        **trl(rows),
    }
    seconds, found = alternate(contenders, 2 if quick else ROUNDS)
    found["ours, a step at a time"] = steps(pieces)
    num_tokens = int(lengths.sum())
    table = [
        ["", "blocks", "blocks / fewest", "tokens kept", "rows cut that fit", "keeps rows apart", "M tokens / CPU s"]
    ]
    for name in [*contenders, "ours, a step at a time"]:
        blocks, apart = found.get(name, (None, True))
        if blocks is None:
            continue
        kept, doubled, num_cut = compared(blocks, lengths)
        assert not doubled, f"{name} has tokens twice"
        speed = f"{num_tokens / 1e6 / statistics.median(seconds[name]):.1f}" if name in seconds else ""
        share = f"{kept / num_tokens:.6f}"
        ratio = f"{len(blocks) / fewest(lengths):.4f}"
        table.append([name, f"{len(blocks):,}", ratio, share, str(num_cut), "yes" if apart else "no", speed])
    bare = num_tokens / 1e6 / statistics.median(seconds["ours, without the tokens"])
    blocks = found["ours"][0]
    kept, _, num_cut = compared(blocks, lengths)
    difference, influence, naive = isolation(pieces)
    control = baton.ratio(seconds["ours, again"], seconds["ours"])
    notes = [
        f"{len(lengths):,} rows, {num_tokens:,} tokens, {int((lengths > CAPACITY).sum())} rows longer than a block; "
        f"{fewest(lengths):,} blocks would hold the tokens if rows could be cut anywhere. Which rows go together is "
        f"found at {bare:.0f} M tokens a CPU second; `ours` copies the tokens as well, as TRL does. `ours, a step at a "
        f"time` are the blocks of a run: of {ROWS_PER_STEP} rows each, in the order of an epoch.",
        f"A row's loss moves by up to {naive:.2f} where the positions of a block do not start again at each row.",
    ]
    if num_left_out:
        notes.append(f"{num_left_out} pieces of one token were left out: nothing precedes it that it could follow.")
    if len(contenders) == 3:
        notes.append("TRL is not installed and was left out (pip install -e .[benchmark]).")
    return Outcome(
        name="packing",
        targets=[
            Target("blocks / fewest", len(blocks) / fewest(lengths), 1.002),
            Target("tokens lost", num_tokens - kept, 0),
            Target("rows cut that fit", num_cut, 0),
            Target("CPU seconds for a million tokens", statistics.median(seconds["ours"]) / num_tokens * 1e6, 0.1),
            Target("a token's loss, packed - alone", difference, 1e-5),
            Target("a token's loss, moved by another row", influence, 0),
        ],
        tables=[table],
        control=max(control.paired, control.of_medians, key=lambda value: abs(value - 1)),
        conclusive=baton.conclusive(control),
        notes=notes,
        series={"seconds": {name: statistics.median(values) for name, values in seconds.items()}},
        quick=quick,
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def draw_lengths(num_rows: int) -> np.ndarray:
    """Tokens of each row, (num_rows,) int64: lognormal from 2 to a block, and some rows that are longer."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(math.log(MEDIAN), SIGMA, num_rows)).astype(np.int64).clip(2, CAPACITY)
    over_long = random.choice(num_rows, NUM_OVER_LONG, replace=False)
    lengths[over_long] = random.integers(CAPACITY + 1, LONGEST, NUM_OVER_LONG)
    return lengths


def make_rows(lengths: np.ndarray) -> list[dict]:
    """Rows whose tokens are numbered through all of them; every one has a label."""
    ends = np.cumsum(lengths)
    numbers = [np.arange(end - length, end, dtype=np.int32) for end, length in zip(ends, lengths, strict=True)]
    return [{"input_ids": row, "labels": row} for row in numbers]


def fitted(rows: list[dict]) -> tuple[list[dict], int]:
    """The rows as preparing leaves them, long ones split; and the pieces that were left out."""
    from oneloop.data import pieces

    fitting = [piece for row in rows for piece in pieces.fit(row, CAPACITY, "split")]
    return fitting, sum(piece.get("num_left_out", 0) for piece in fitting)


def fewest(lengths: np.ndarray) -> int:
    return -(-int(lengths.sum()) // CAPACITY)


def compared(blocks: list[np.ndarray], lengths: np.ndarray) -> tuple[int, int, int]:
    """Tokens that are in the blocks, how many are twice, and the rows no longer than a block that are in several."""
    tokens = np.concatenate(blocks)
    times = np.bincount(tokens, minlength=int(lengths.sum()))
    row_of_token = np.repeat(np.arange(len(lengths)), lengths)
    block_of_token = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
    places = np.unique(row_of_token[tokens] * len(blocks) + block_of_token) // len(blocks)
    num_cut = int(((np.bincount(places, minlength=len(lengths)) > 1) & (lengths <= CAPACITY)).sum())
    return int((times > 0).sum()), int((times > 1).sum()), num_cut


# --- contenders: each returns the tokens of each block, and whether it is known where rows begin ----------------------


def best_fit(pieces: list[dict]) -> tuple[None, bool]:
    _packed(pieces)
    return None, True


def ours(pieces: list[dict]) -> tuple[list[np.ndarray], bool]:
    blocks = _packed(pieces)
    return [np.concatenate([pieces[row]["input_ids"] for row in block]) for block in blocks], True


def _packed(pieces: list[dict]) -> list[np.ndarray]:
    from oneloop.data import packing

    return packing.best_fit(np.array([len(piece["input_ids"]) for piece in pieces]), CAPACITY)


def steps(pieces: list[dict]) -> tuple[list[np.ndarray], bool]:
    """The blocks that a loader makes in one epoch."""
    from oneloop.data import packing, sampling

    lengths = np.array([len(piece["input_ids"]) for piece in pieces])
    order = sampling.epoch_order(len(pieces), 0, 0, shuffle=True)
    blocks = []
    for start in range(0, len(order), ROWS_PER_STEP):
        rows = order[start : start + ROWS_PER_STEP]
        blocks += [rows[block] for block in packing.balanced(lengths[rows], CAPACITY, 1)]
    return [np.concatenate([pieces[row]["input_ids"] for row in block]) for block in blocks], True


def trl(rows: list[dict]) -> dict:
    """TRL's ways to pack, none where it is not installed."""
    try:
        from trl.data_utils import pack_dataset
    except ImportError:
        return {}
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"input_ids": [row["input_ids"] for row in rows]})

    def packed(strategy: str, **options):
        done = pack_dataset(table, CAPACITY, strategy, options | {"load_from_cache_file": False})
        return _Later(done), "seq_lengths" in done.column_names

    return {
        "TRL bfd": lambda: packed("bfd"),
        "TRL bfd_split": lambda: packed("bfd_split"),
        "TRL bfd_split, all at once": lambda: packed("bfd_split", batch_size=-1),
        "TRL wrapped": lambda: packed("wrapped"),
    }


class _Later:
    """The blocks of a table, read when no clock runs."""

    def __init__(self, table):
        self.table = table

    def blocks(self) -> list[np.ndarray]:
        return list(self.table.with_format("numpy")["input_ids"])


def alternate(contenders: dict, num_rounds: int) -> tuple[dict[str, list[float]], dict]:
    """CPU seconds of each in each round, after one that is not counted, and what each returned.

    In an order drawn for each round: what follows TRL finds the processor's caches full of other things.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    found = {}
    names, random = list(contenders), np.random.default_rng(2)
    for number in range(num_rounds + 1):
        for name in random.permutation(names).tolist():
            gc.collect()
            began = time.process_time()
            result = contenders[name]()
            seconds[name].append(time.process_time() - began)
            if number == 0 and name != "ours, again":
                blocks, apart = result
                found[name] = (blocks.blocks() if isinstance(blocks, _Later) else blocks, apart)
    return {name: values[1:] for name, values in seconds.items()}, found


# --- whether rows see each other --------------------------------------------------------------------------------------


def isolation(pieces: list[dict]) -> tuple[float, float, float]:
    """The largest difference of a token's loss in a block from that in its row alone; the largest change of one when
    the block's first row is replaced; and the first again for positions that do not start again at each row."""
    import torch

    from oneloop.data.batches import collate, collate_packed

    model = subjects.llama(**SHAPE).eval()
    random = np.random.default_rng(1)

    def drawn(length: int) -> dict:
        tokens = random.integers(0, SHAPE["vocabulary"], length, dtype=np.int32)
        return {"input_ids": tokens, "labels": tokens}

    # Of all blocks those of the most rows, and the last, which is the least full.
    blocks = sorted(_packed(pieces), key=len)[-NUM_COMPARED:] + _packed(pieces)[-1:]
    difference = influence = naive = 0.0
    with torch.no_grad():
        for block in blocks:
            rows = [drawn(len(pieces[row]["input_ids"])) for row in block]
            alone = torch.cat([losses(model, collate([row], 0))[0] for row in rows])
            batch = collate_packed([rows], 0, flat=False)
            packed = losses(model, batch)[0]
            difference = max(difference, float((packed - alone).abs().max()))
            other = [drawn(len(rows[0]["input_ids"])), *rows[1:]]
            start = len(rows[0]["input_ids"])
            changed = losses(model, collate_packed([other], 0, flat=False))[0]
            influence = max(influence, float((changed - packed)[start:].abs().max()))
            through = batch | {"position_ids": torch.arange(packed.shape[0])[None]}
            naive = max(naive, float((losses(model, through)[0] - alone).abs().max()))
    return difference, influence, naive


def losses(model, batch: dict):
    """The loss of each token, (B, T) float; 0 where there is no label. The first of each row has none."""
    import torch

    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits = model(**inputs).logits[:, :-1]
    found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return torch.nn.functional.pad(found, (1, 0))
