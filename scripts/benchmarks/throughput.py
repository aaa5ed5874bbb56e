"""C2: label tokens a second on ragged conversations, the useful work of a step, however the contender lays it out.

All train the same model on the same token ids with the same optimizer (fused AdamW), clipping, cosine schedule and
dtype (fp32). Ours and the Trainer see the same 32 rows in each step; TRL packs all rows before the first step, so its
steps are as many full blocks as hold about as many tokens. Ours is `main` of recipes/sft.py, untouched. Seconds are
those of the process on the CPU, of one thread, so that what else runs on the machine counts for less.
"""

import contextlib
import json
import math
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks import baton, loop, subjects
from benchmarks.outcome import Outcome, Target

SHAPE = {"layers": 6, "hidden": 256, "vocabulary": 8192}
MAX_LENGTH = 256
MEDIAN, SIGMA, SHORTEST = 27.5, 0.9, 8
"""Lengths of conversations as in benchmark C4, an eighth of them."""
ROWS_PER_STEP = 32
MICRO_BATCH = 8
"""Rows: no contender has more positions at a time than this many rows of the greatest length."""
NUM_BLOCKS = 6
"""Blocks a micro-batch when packed: what the rows of a step fill."""
WARM_UP_STEPS = 2
STEPS, QUICK_STEPS = 12, 4
LIMITS = {"Trainer": 1 / 2.2, "TRL, packed": 1 / 1.25}
"""Label tokens a second of the peer over ours: ours is to be faster by 2.2 and 1.25."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def run(quick: bool) -> Outcome:
    """Once with a loss on every token and once with one on the replies, the recipe's default."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    num_steps = QUICK_STEPS if quick else STEPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder / "model")
        lengths = write_rows(folder / "rows.jsonl", (WARM_UP_STEPS + num_steps) * ROWS_PER_STEP)
        every_token = Comparison(folder, num_steps, assistant_only_loss=False)
        replies = Comparison(folder, num_steps, assistant_only_loss=True)
    controls = [one.control() for one in (every_token, replies)]
    targets = [
        Target(f"{name} / ours, {title}", one.rate(name) / one.rate("ours, packed"), limit)
        for title, one in (("every token", every_token), ("replies", replies))
        for name, limit in LIMITS.items()
        if name in one.seconds
    ]
    notes = [
        f"Rows of {lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} on average, median "
        f"{np.median(lengths):.0f}; {num_steps} steps."
    ]
    if not any(name.startswith("TRL") for name in every_token.seconds):
        notes.append("TRL is not installed and was left out (pip install -e .[benchmark]).")
    return Outcome(
        name="throughput",
        targets=targets,
        tables=[every_token.table("loss on every token"), replies.table("loss on the replies")],
        control=max((v for one in controls for v in (one.paired, one.of_medians)), key=lambda value: abs(value - 1)),
        conclusive=all(map(baton.conclusive, controls)),
        notes=notes,
        series={"label tokens per second": {name: every_token.rate(name) for name in every_token.seconds}},
        quick=quick,
    )


# --- rows -------------------------------------------------------------------------------------------------------------


def save(folder: Path) -> None:
    """Write the model, and a tokenizer that gives a byte a token and a turn two more."""
    from tokenizers import AddedToken

    subjects.llama(**SHAPE).save_pretrained(folder)
    tokenizer = subjects.tokenizer()
    tokenizer.add_tokens([AddedToken(f"<|{role}|>", special=True) for role in ("user", "assistant")], True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_rows(path: Path, num_rows: int) -> np.ndarray:
    """Write conversations of a question and a reply, the reply two thirds of it; returns their tokens, (num_rows,)."""
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(math.log(MEDIAN), SIGMA, num_rows)).astype(np.int64).clip(SHORTEST, MAX_LENGTH)
    with open(path, "w", encoding="utf-8") as file:
        for length in lengths:
            text = "".join(map(chr, random.integers(97, 123, length - 4)))
            question = max(1, len(text) // 3)
            turns = [("user", text[:question]), ("assistant", text[question:])]
            row = {"messages": [{"role": role, "content": content} for role, content in turns]}
            file.write(json.dumps(row) + "\n")
    return lengths


# --- the comparison ---------------------------------------------------------------------------------------------------


class Comparison:
    """CPU seconds and label tokens of each counted step of each contender."""

    def __init__(self, folder: Path, num_steps: int, assistant_only_loss: bool):
        self.total = WARM_UP_STEPS + num_steps
        self.model, self.data, self.folder = str(folder / "model"), str(folder / "rows.jsonl"), folder
        self.assistant_only_loss = assistant_only_loss
        self.rows = self._rows_in_the_order_of_the_epoch()
        self.num_tokens: dict[str, list[int]] = {}
        contenders = self.contenders()
        with counted_steps():
            self.seconds = baton.alternate(contenders, num_steps, WARM_UP_STEPS, time.process_time)
        self.num_tokens = {name: counts[WARM_UP_STEPS : self.total] for name, counts in self.num_tokens.items()}
        same = ("ours, packed", "ours, padded", "Trainer", "Trainer, again")
        assert len({tuple(self.num_tokens[name]) for name in same}) == 1, "not the same rows in each step"

    def contenders(self) -> dict[str, baton.Contender]:
        found = {
            "ours, packed": lambda done: self._ours(
                "ours, packed", done, packing=True, per_device_batch_size=NUM_BLOCKS
            ),
            "ours, padded": lambda done: self._ours("ours, padded", done, per_device_batch_size=MICRO_BATCH),
            "Trainer": lambda done: self._trainer("Trainer", done, "sequential"),
            "Trainer, again": lambda done: self._trainer("Trainer, again", done, "sequential"),
            "Trainer, by length": lambda done: self._trainer("Trainer, by length", done, "group_by_length"),
        }
        try:
            import trl
        except ImportError:
            return found
        assert trl.SFTTrainer  # imported now: it takes seconds, which are nobody's step
        return found | {"TRL, packed": lambda done: self._trl("TRL, packed", done)}

    def rate(self, name: str) -> float:
        """Label tokens a second over all counted steps, which are of different sizes."""
        return sum(self.num_tokens[name]) / sum(self.seconds[name])

    def control(self) -> baton.Ratio:
        return baton.ratio(self.seconds["Trainer, again"], self.seconds["Trainer"])

    def table(self, title: str) -> list[list[str]]:
        rows = [
            [title, "CPU ms a step (median)", "label tokens a step (mean)", "label tokens / s", "ours, packed / it"]
        ]
        ours = self.rate("ours, packed")
        for name, seconds in self.seconds.items():
            middle = f"{1000 * statistics.median(seconds):.0f}"
            tokens, rate = statistics.mean(self.num_tokens[name]), self.rate(name)
            rows.append([name, middle, f"{tokens:.0f}", f"{rate:,.0f}", f"{ours / rate:.2f}"])
        return [*rows, ["A/A: Trainer, again / Trainer", "", "", "", str(self.control())]]

    def _rows_in_the_order_of_the_epoch(self) -> list[dict]:
        from transformers import AutoTokenizer

        from oneloop.data import encode, sampling

        with open(self.data, encoding="utf-8") as file:
            examples = [json.loads(line) for line in file]
        rules = {"max_length": MAX_LENGTH, "truncation": "drop", "assistant_only_loss": self.assistant_only_loss}
        encoded = encode.encode_batch(AutoTokenizer.from_pretrained(self.model), examples, **rules)
        rows = [{name: row[name].tolist() for name in ("input_ids", "labels")} for (row,) in encoded]
        assert len(rows) == self.total * ROWS_PER_STEP  # one epoch: no row twice
        order = sampling.epoch_order(len(rows), subjects.load_recipe("sft").SFTConfig.seed, 0, shuffle=True)
        return [rows[i] for i in order]

    # --- contenders ---------------------------------------------------------------------------------------------------

    def _ours(self, name: str, step_done, **settings) -> None:
        recipe = subjects.load_recipe("sft")
        counts = self.num_tokens[name] = []

        def advanced(loader):
            counts.append(sum(num_targets(loader.rows[row]["labels"]) for row in loader.last_row_ids))
            step_done()

        _of_thread.advanced = advanced
        recipe.main(
            recipe.SFTConfig(
                model_name_or_path=self.model,
                dataset_name=self.data,
                output_dir=str(self.folder / name / str(self.assistant_only_loss)),
                data_cache_dir=str(self.folder / name / "rows"),
                global_batch_size=ROWS_PER_STEP,
                max_length=MAX_LENGTH,
                learning_rate=loop.LEARNING_RATE,
                max_steps=self.total,
                logging_steps=loop.LOGGING_STEPS,
                report_to="none",
                assistant_only_loss=self.assistant_only_loss,
                **settings,
            )
        )

    def _trainer(self, name: str, step_done, order: str) -> None:
        from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

        options = loop.settings(self.folder / name, self.total) | {"train_sampling_strategy": order}
        options |= {"per_device_train_batch_size": MICRO_BATCH}
        options |= {"gradient_accumulation_steps": ROWS_PER_STEP // MICRO_BATCH}
        trainer = self._counting(name, Trainer)(
            loop.fresh_model(self.model),
            TrainingArguments(**options),
            train_dataset=self.rows,
            data_collator=DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(self.model)),
            callbacks=[self._when_done(name, step_done)],
        )
        loop.silenced(trainer).train()

    def _trl(self, name: str, step_done) -> None:
        """TRL with its own loss, packing, collator and metrics.

        A block at a time: it lays the blocks of a micro-batch out as one row, which costs attention among all of them
        where there is no flash attention.
        """
        import datasets
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        datasets.disable_progress_bars()
        num_blocks = max(1, round(sum(len(row["input_ids"]) for row in self.rows) / self.total / MAX_LENGTH))
        options = loop.settings(self.folder / name, self.total) | {"per_device_train_batch_size": 1}
        options |= {"gradient_accumulation_steps": num_blocks}
        trainer = self._counting(name, SFTTrainer)(
            loop.fresh_model(self.model),
            SFTConfig(**options, max_length=MAX_LENGTH, packing=True, packing_strategy="bfd"),
            train_dataset=datasets.Dataset.from_list(self.rows),
            processing_class=AutoTokenizer.from_pretrained(self.model),
            callbacks=[self._when_done(name, step_done)],
        )
        loop.silenced(trainer).train()

    def _counting(self, name: str, kind: type) -> type:
        """A Trainer that counts the labels of each micro-batch."""
        counts = self.num_tokens[name] = [0]

        class Counting(kind):
            def training_step(self, model, inputs, *rest, **options):
                counts[-1] += int((inputs["labels"][:, 1:] != -100).sum())
                return super().training_step(model, inputs, *rest, **options)

        return Counting

    def _when_done(self, name: str, step_done):
        def counted():
            self.num_tokens[name].append(0)
            step_done()

        return loop.when_done(counted)


_of_thread = threading.local()
"""`advanced`: what a contender's own thread is told of its loader; several of ours run in one process."""


@contextlib.contextmanager
def counted_steps():
    """Let each thread's `advanced` know when its loader counts a step as done."""
    from oneloop.data import loaders

    advance = loaders.TrainLoader.advance

    def counted(self, progress):
        advance(self, progress)
        _of_thread.advanced(self)

    loaders.TrainLoader.advance = counted
    try:
        yield
    finally:
        loaders.TrainLoader.advance = advance


def num_targets(labels: np.ndarray) -> int:
    """Labels of a row, (T,) int, that something precedes."""
    return int((labels[1:] != -100).sum())
