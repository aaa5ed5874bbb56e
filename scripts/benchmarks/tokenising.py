"""C5: tokens a second of preparing 8,000 texts and 2,000 conversations, against the usual ways to do it.

Every contender gets the same rows in memory and all cores of the machine, and must come to the same ids. What each does
beside: ours makes labels too, in two processes, checks that no turn is lost, and writes two files; `datasets.map`
writes an Arrow file, and `datasets.map` as TRL uses it makes a mask. The texts are paragraphs of prose out of the
documentation in the sources of Python and of packages that this project needs, none of which occurs twice. They have
more different words than collections of questions and answers, so that what ours remembers helps it no more here than
it does there.
"""

import gc
import multiprocessing
import os
import random
import re
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import baton, subjects
from benchmarks.outcome import Outcome, Target

NUM_TEXTS, NUM_CHATS = 8000, 2000
ROUNDS = 5
BATCH = 500
VOCABULARY = 16_000
NUM_PROCESSES = 2
PACKAGES = "numpy torch transformers datasets accelerate pandas pyarrow sympy networkx huggingface_hub fsspec".split()
"""Whose documentation the texts are taken from."""
MARKED = subjects.TEMPLATE.replace(
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n",
    "<|start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}{{ '\n' }}",
)
"""The same text, with the markers that `return_assistant_tokens_mask` needs."""


# --- rows and tokenizer -----------------------------------------------------------------------------------------------


def paragraphs() -> list[str]:
    """Return the paragraphs of docstrings that are mostly words, each once, in the same order each time."""
    paths = sysconfig.get_paths()
    folders = [Path(paths["stdlib"]), *(Path(paths["purelib"]) / name for name in PACKAGES)]
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if "site-packages" in path.relative_to(folder).parts:
                continue
            for docstring in re.findall(r'"""(.*?)"""', path.read_text("utf-8", "replace"), re.DOTALL):
                for words in map(str.split, docstring.split("\n\n")):
                    num_plain = sum(word.strip(".,;:()'\"`").isalpha() for word in words)
                    if len(words) > 8 and num_plain > 0.85 * len(words):
                        found[" ".join(words)] = None
    found = list(found)
    random.Random(0).shuffle(found)
    return found


def rows(num_texts: int, num_chats: int) -> tuple[list[str], list[list[dict]]]:
    """Return texts and conversations, of some 800 characters each, some much longer."""
    draw, left = random.Random(1), iter(paragraphs())

    def text(median: int) -> str:
        size, parts = median * draw.lognormvariate(0, 0.6), []
        while sum(map(len, parts)) < size:
            parts.append(next(left))
        return "\n\n".join(parts)

    chats = []
    for _ in range(num_chats):
        turns = [{"role": "system", "content": "You are a helpful assistant."}] if draw.random() < 0.3 else []
        for _ in range(draw.choice([1, 1, 2, 3])):
            turns.append({"role": "user", "content": text(80)})
            turns.append({"role": "assistant", "content": text(250)})
        chats.append(turns)
    return [text(450) for _ in range(num_texts)], chats


def tokenizer_for(texts: list[str]):
    """Train a tokenizer of the kind that comes with most models of today, on a part of the texts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts[: len(texts) // 4], trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|end|>")])
    built = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    built.chat_template = subjects.TEMPLATE
    return built


# --- contenders: each returns the ids of all rows, conversations first, as lists or arrays ----------------------------


class Contenders:
    """The ways to prepare one set of rows; a class, because forked workers must find the rows where they are."""

    def __init__(self, num_texts: int, num_chats: int, folder: Path):
        import datasets

        datasets.disable_progress_bars()
        self.texts, self.chats = rows(num_texts, num_chats)
        self.tokenizer, self.folder = tokenizer_for(self.texts), folder
        self.examples = [{"messages": chat} for chat in self.chats] + [{"text": text} for text in self.texts]
        self.tables = {}
        for name, column in (("messages", self.chats), ("text", self.texts)):
            path = str(folder / f"{name}.parquet")
            datasets.Dataset.from_dict({name: column}).to_parquet(path)
            cache = str(folder / "cache")
            self.tables[name] = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir=cache)

    def encode(self, start: int) -> list[tuple[np.ndarray, np.ndarray]]:
        from oneloop.data import encode

        rules = {"max_length": 1_000_000, "truncation": "truncate"}
        found = encode.encode_batch(self.tokenizer, self.examples[start : start + BATCH], **rules)
        return [(row["input_ids"], row["labels"]) for (row,) in found]

    def ours(self, num_processes: int = NUM_PROCESSES) -> list[np.ndarray]:
        starts = range(0, len(self.examples), BATCH)
        if num_processes == 1:
            # What a process has learnt must not help it in the next round.
            from oneloop.data import chunks

            chunks._memory.cache_clear()
            encoded = [row for start in starts for row in self.encode(start)]
        else:
            global _contenders
            _contenders = self
            with multiprocessing.get_context("fork").Pool(num_processes, _alone) as pool:
                encoded = [row for part in pool.imap(_encode, starts) for row in part]
        for at, name in enumerate(("input_ids", "labels")):
            np.concatenate([row[at] for row in encoded]).tofile(self.folder / name)
        return [ids for ids, _ in encoded]

    def map(self, num_proc: int | None = None) -> list[list[int]]:
        eos, tokenizer = self.tokenizer.eos_token_id, self.tokenizer

        def conversations(batch):
            return {"input_ids": tokenizer.apply_chat_template(batch["messages"], return_dict=True)["input_ids"]}

        def documents(batch):
            return {"input_ids": [ids + [eos] for ids in tokenizer(batch["text"])["input_ids"]]}

        options = {"batched": True, "num_proc": num_proc}
        return self._mapped("messages", conversations, **options) + self._mapped("text", documents, **options)

    def map_as_trl(self) -> list[list[int]]:
        """Row by row: with the mask of the template's markers, and the end token put on in a pass of its own.

        As trl 1.16 (trainer/sft_trainer.py, `_prepare_dataset`) does it for `assistant_only_loss`.
        """
        eos, tokenizer = self.tokenizer.eos_token, self.tokenizer

        def conversation(row):
            options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": MARKED}
            found = tokenizer.apply_chat_template(row["messages"], **options)
            return {"input_ids": found["input_ids"], "assistant_masks": found["assistant_masks"]}

        def with_end(row):
            return {"text": row["text"] + eos}

        def document(row):
            return {"input_ids": tokenizer(text=row["text"])["input_ids"]}

        ended = self.tables["text"].map(with_end, load_from_cache_file=False)
        chats = self._mapped("messages", conversation)
        return chats + self._mapped("text", document, table=ended)

    def one_by_one(self) -> list[list[int]]:
        """A loop over the rows, as in most scripts."""
        eos, tokenizer = self.tokenizer.eos_token_id, self.tokenizer
        chats = [tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"] for chat in self.chats]
        return chats + [tokenizer(text)["input_ids"] + [eos] for text in self.texts]

    def _mapped(self, name: str, function, table=None, **options):
        table = self.tables[name] if table is None else table
        done = table.map(function, remove_columns=table.column_names, load_from_cache_file=False, **options)
        return _Later(done)


class _Later:
    """Ids in a table that are read when no clock runs."""

    def __init__(self, *tables):
        self.tables = tables

    def __add__(self, other: "_Later") -> "_Later":
        return _Later(*self.tables, *other.tables)

    def __iter__(self):
        for table in self.tables:
            yield from table.with_format("numpy")["input_ids"]


_contenders: Contenders


def _alone() -> None:
    # Otherwise each collection writes to all objects of the parent, and so copies their pages.
    gc.freeze()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _encode(start: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return _contenders.encode(start)


# --- the comparison ---------------------------------------------------------------------------------------------------


def run(quick: bool) -> Outcome:
    """Let all contenders prepare all rows in turn, and compare the medians of their times."""
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        return compared(
            Contenders(*((800, 200) if quick else (NUM_TEXTS, NUM_CHATS)), Path(name)), 2 if quick else ROUNDS, quick
        )


def compared(all_of_them: Contenders, num_rounds: int, quick: bool) -> Outcome:
    contenders = {
        "ours, 2 processes": all_of_them.ours,
        "datasets.map(batched)": all_of_them.map,
        "as TRL does": all_of_them.map_as_trl,
        "row by row": all_of_them.one_by_one,
        "datasets.map(batched), 2 processes": lambda: all_of_them.map(NUM_PROCESSES),
        "ours, 1 process": lambda: all_of_them.ours(1),
        "datasets.map(batched), again": all_of_them.map,
    }
    ours, base, trl, single, *_, again = contenders
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    reference, num_different = None, 0
    for number in range(num_rounds + 1):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            # The library's own default: its threads are on but where processes were forked.
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
            started = time.perf_counter()
            found = contenders[name]()
            seconds[name].append(time.perf_counter() - started)
            if number == 0:
                ids = [np.asarray(row, np.int32) for row in found]
                reference = ids if reference is None else reference
                assert len(ids) == len(reference) == len(all_of_them.examples)
                num_different += sum(not np.array_equal(a, b) for a, b in zip(ids, reference, strict=True))
    # The first round loads and compiles.
    seconds = {name: times[1:] for name, times in seconds.items()}
    num_tokens = sum(map(len, reference))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    control = baton.ratio(seconds[again], seconds[base])
    table = [["", "s (median)", "thousand tokens / s", "ours is faster by"]]
    for name, median in medians.items():
        table.append([name, f"{median:.2f}", f"{num_tokens / median / 1e3:.0f}", f"{median / medians[ours]:.2f}"])
    limits = {base: 2.0, trl: 2.0, single: 1.8}
    targets = [
        Target(f"time, ours / {name}", medians[ours] / medians[name], 1 / limit) for name, limit in limits.items()
    ]
    targets.append(Target("rows with other ids", num_different, 0))
    return Outcome(
        name="tokenising",
        targets=targets,
        tables=[table],
        control=control.of_medians,
        conclusive=baton.conclusive(control),
        notes=[f"{len(all_of_them.examples)} rows, {num_tokens} tokens, {num_rounds} rounds, {os.cpu_count()} cores."],
        series={"seconds": medians},
        quick=quick,
    )
