"""C1: what the recipe's loop costs on a model so small that a step is mostly loop.

The contenders train the same model on the same token ids with the same optimizer (fused AdamW), clipping, cosine
schedule, dtype (fp32), batch and logging interval, without a tracker. Ours is `main` of recipes/sft.py, untouched; it
is stopped where it counts a step as done.
"""

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks import baton, subjects
from benchmarks.outcome import Outcome, Target

SHAPE = {"layers": 2, "hidden": 128, "vocabulary": 2048}
BATCH_SIZE = 8
LEARNING_RATE = 1e-3
LOGGING_STEPS = 10


LIMITS = {"bare": 1.05, "Trainer": 1.00, "TRL": 0.75}


def run(quick: bool) -> Outcome:
    """Alternate the contenders; peers that are not installed are left out with a word.

    With a loss on every token all contenders do the same work, and the targets hold for that. With a loss on the
    replies alone, the recipe's default, ours computes less.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    num_steps = 20 if quick else 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subjects.save(folder / "model", **SHAPE)
        subjects.write_rows(folder / "rows.jsonl", num_rows=64, num_characters=37)
        every_token = alternate(folder, num_steps, assistant_only_loss=False)
        replies = alternate(folder, num_steps, assistant_only_loss=True)
    control = baton.ratio(every_token["bare, again"], every_token["bare"])
    ratios = {other: baton.ratio(every_token["ours"], every_token[other]) for other in LIMITS if other in every_token}
    return Outcome(
        name="loop",
        targets=[Target(f"ours / {other}", one.paired, LIMITS[other]) for other, one in ratios.items()],
        tables=[table("loss on every token", every_token), table("loss on the replies", replies)],
        control=max(control.paired, control.of_medians, key=lambda value: abs(value - 1)),
        conclusive=baton.conclusive(control),
        notes=[] if "TRL" in ratios else ["TRL is not installed and was left out (pip install -e .[benchmark])."],
        series={"milliseconds": {name: 1000 * statistics.median(values) for name, values in every_token.items()}},
        quick=quick,
    )


def table(title: str, seconds: dict[str, list[float]]) -> list[list[str]]:
    rows = [[title, "ms a step (median)", "ours / it, paired", "ours / it, of medians"]]
    for name, values in seconds.items():
        one = baton.ratio(seconds["ours"], values)
        cells = ["", ""] if name in ("ours", "bare, again") else [f"{one.paired:.3f}", f"{one.of_medians:.3f}"]
        rows.append([name, f"{1000 * statistics.median(values):.1f}", *cells])
    control = baton.ratio(seconds["bare, again"], seconds["bare"])
    return [*rows, ["A/A: bare, again / bare", "", f"{control.paired:.3f}", f"{control.of_medians:.3f}"]]


def alternate(folder: Path, num_steps: int, assistant_only_loss: bool) -> dict[str, list[float]]:
    """Seconds of each step of each contender."""
    total = baton.WARM_UP_STEPS + num_steps
    model, data = str(folder / "model"), str(folder / "rows.jsonl")
    rows = encode(data, model, assistant_only_loss)
    contenders = {
        "ours": lambda step_done: ours(step_done, total, folder, model, data, assistant_only_loss),
        "bare": lambda step_done: bare(step_done, total, model, rows),
        "bare, again": lambda step_done: bare(step_done, total, model, rows),
        "Trainer": lambda step_done: trainer(step_done, total, folder, model, rows),
    }
    try:
        import trl
    except ImportError:
        pass
    else:
        assert trl.SFTTrainer  # imported now: it takes seconds, which are nobody's step
        contenders["TRL"] = lambda step_done: trl_sft(step_done, total, folder, model, rows)
    return baton.alternate(contenders, num_steps)


def encode(data: str, model: str, assistant_only_loss: bool) -> list[dict]:
    """The rows as the recipe itself tokenises them."""
    from transformers import AutoTokenizer

    from oneloop.data import chat

    tokenizer = AutoTokenizer.from_pretrained(model)
    rules = {"max_length": 1024, "truncation": "drop", "split_special_tokens": True}
    with open(data, encoding="utf-8") as file:
        conversations = [json.loads(line)["messages"] for line in file]
    rows = [
        chat.encode_messages(tokenizer, messages, assistant_only_loss=assistant_only_loss, **rules)
        for messages in conversations
    ]
    assert len({len(row["input_ids"]) for row in rows}) == 1
    return [{"input_ids": list(row["input_ids"]), "labels": list(row["labels"])} for row in rows]


def collate(rows: list[dict]) -> dict:
    """A batch of rows that need no padding."""
    import torch

    batch = {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels")}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def fresh_model(path: str):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.use_cache = False
    return model.train()


# --- contenders -------------------------------------------------------------------------------------------------------


def ours(step_done, total: int, folder: Path, model: str, data: str, assistant_only_loss: bool) -> None:
    from oneloop.data import loaders

    recipe = subjects.load_recipe("sft")
    advance = loaders.TrainLoader.advance

    def counted(self, progress):
        advance(self, progress)
        step_done()

    loaders.TrainLoader.advance = counted
    try:
        recipe.main(
            recipe.SFTConfig(
                model_name_or_path=model,
                dataset_name=data,
                output_dir=str(folder / "ours"),
                global_batch_size=BATCH_SIZE,
                per_device_batch_size=BATCH_SIZE,
                learning_rate=LEARNING_RATE,
                max_steps=total,
                logging_steps=LOGGING_STEPS,
                report_to="none",
                assistant_only_loss=assistant_only_loss,
            )
        )
    finally:
        loaders.TrainLoader.advance = advance


def bare(step_done, total: int, model_path: str, rows: list[dict]) -> None:
    """The least that a training loop can be."""
    import torch

    model = fresh_model(model_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for step in range(total):
        start = step * BATCH_SIZE % len(rows)
        loss = model(**collate(rows[start : start + BATCH_SIZE])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % LOGGING_STEPS == 0:
            loss.item()
        step_done()


def settings(folder: Path, total: int) -> dict:
    """TrainingArguments of the two Trainers."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH_SIZE,
        "max_steps": total,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": LOGGING_STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


def when_done(step_done):
    """The callback by which a Trainer tells that a step is done; its log lines go nowhere."""
    from transformers import TrainerCallback

    class StepDone(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            step_done()

    return StepDone()


def silenced(trainer):
    """Do not let a Trainer print a line at each interval: the others write theirs elsewhere."""
    from transformers import PrinterCallback, ProgressCallback

    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    return trainer


def trainer(step_done, total: int, folder: Path, model: str, rows: list[dict]) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**settings(folder / "trainer", total))
    silenced(
        Trainer(
            fresh_model(model), arguments, train_dataset=rows, data_collator=collate, callbacks=[when_done(step_done)]
        )
    ).train()


def trl_sft(step_done, total: int, folder: Path, model: str, rows: list[dict]) -> None:
    """TRL with its own loss, collator and metrics; only what all share is set."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(**settings(folder / "trl", total), max_length=None, packing=False)
    silenced(
        SFTTrainer(
            fresh_model(model),
            arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[when_done(step_done)],
        )
    ).train()
