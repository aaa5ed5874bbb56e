"""C8: what it costs to continue late in an epoch of 200,000 rows rather than early: the time to the first batch.

Ours computes the order of an epoch and takes what stands at the position. Accelerate's `skip_first_batches` and the
Trainer count their way to it. Of the Trainer, which does not let its data be continued alone, the time to the first
step is taken, and that of a cold start subtracted.
"""

import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks import subjects
from benchmarks.outcome import Outcome, Target

ROWS, QUICK_ROWS = 200_000, 20_000
BATCH_SIZE = 8
NUM_TOKENS = 32
POSITIONS = (0.02, 0.50, 0.95)
ROUNDS = 30
TRAINER_ROUNDS = 10
NUM_COMPARED = 20
SHAPE = {"layers": 1, "hidden": 16, "vocabulary": 512}


def run(quick: bool) -> Outcome:
    """Ours and Accelerate's alternated; the Trainer by itself."""
    import torch

    torch.set_num_threads(1)
    num_rows = QUICK_ROWS if quick else ROWS
    rows = make_rows(num_rows)
    starts = {share: int(num_rows * share) // BATCH_SIZE * BATCH_SIZE for share in POSITIONS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loader = our_loader(rows, folder)
        equal = {share: same_batches(loader, start) for share, start in starts.items()}
        peer = accelerate_loader(rows)
        seconds: dict[tuple[str, float], list[float]] = {}
        for number in range(ROUNDS + 2):
            for share in POSITIONS[number % 3 :] + POSITIONS[: number % 3]:
                for who, first in (("ours", ours), ("ours, again", ours), ("skip_first_batches", skipped)):
                    began = time.perf_counter()
                    first(loader if first is ours else peer, starts[share])
                    seconds.setdefault((who, share), []).append(time.perf_counter() - began)
        medians = {key: statistics.median(values[2:]) for key, values in seconds.items()}
        medians |= trainer_seconds(rows, starts, folder, 3 if quick else TRAINER_ROUNDS)
    late, early = POSITIONS[-1], POSITIONS[0]
    table = [["position in the epoch", *(f"{100 * share:.0f} %" for share in POSITIONS), "late / early"]]
    for who in dict.fromkeys(who for who, _ in medians):
        cells = [f"{1000 * medians[who, share]:.1f} ms" for share in POSITIONS]
        table.append([who, *cells, f"{medians[who, late] / medians[who, early]:.2f}"])
    control = medians["ours, again", late] / medians["ours", late]
    num_equal = sum(equal.values())
    return Outcome(
        name="resuming",
        targets=[
            Target("ours at 95 % / ours at 2 %", medians["ours", late] / medians["ours", early], 1.1),
            Target("ours / Trainer, at 95 %", medians["ours", late] / max(medians["Trainer", late], 1e-9), 0.3),
            Target(
                f"batches of {NUM_COMPARED * len(POSITIONS)} that differ", NUM_COMPARED * len(POSITIONS) - num_equal, 0
            ),
        ],  # fmt: skip
        tables=[table],
        control=control,
        conclusive=0.93 <= control <= 1.07,
        notes=[
            f"{num_rows:,} rows of {NUM_TOKENS} tokens, {BATCH_SIZE} a batch; the Trainer's cold start is subtracted."
        ],
        series={"milliseconds": {f"{who}, {share}": 1000 * value for (who, share), value in medians.items()}},
        quick=quick,
    )


def make_rows(num_rows: int) -> list[dict]:
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, SHAPE["vocabulary"], (num_rows, NUM_TOKENS), dtype=np.int32)
    return [{"input_ids": row, "labels": row} for row in tokens]


# --- ours -------------------------------------------------------------------------------------------------------------


def our_loader(rows: list[dict], folder: Path):
    """The loader of the recipes on these rows; what it does with all of them once is a cold start's business too."""
    from accelerate import Accelerator

    from oneloop.data import loaders

    config = subjects.load_recipe("sft").SFTConfig(
        model_name_or_path="none",
        dataset_name="none",
        output_dir=str(folder / "run"),
        global_batch_size=BATCH_SIZE,
        per_device_batch_size=BATCH_SIZE,
    )
    return loaders.TrainLoader(rows, Accelerator(cpu=True), config, pad_token_id=0)


def progress_at(loader, position: int):
    """What a training state says of where a run stands, as it is read from one."""
    from oneloop.data import sampling

    total = -(-len(loader.rows) // BATCH_SIZE)
    saved = json.dumps(asdict(sampling.Progress(position // BATCH_SIZE, 0, position, total)))
    return sampling.Progress(**json.loads(saved))


def ours(loader, position: int) -> None:
    list(next(loader.steps(progress_at(loader, position))))


def same_batches(loader, position: int) -> int:
    """How many of the next batches are those of an epoch that was not interrupted, byte for byte."""
    whole = batches(loader, 0, position + NUM_COMPARED * BATCH_SIZE)[-NUM_COMPARED:]
    resumed = batches(loader, position, position + NUM_COMPARED * BATCH_SIZE)
    return sum(one == other for one, other in zip(whole, resumed, strict=True))


def batches(loader, first: int, last: int) -> list[bytes]:
    """The bytes of every batch from one position of the epoch to another."""
    progress, found = progress_at(loader, first), []
    for micro_batches in loader.steps(progress):
        parts = [batch[key].numpy().tobytes() for batch in micro_batches for key in sorted(batch)]
        found.append(b"".join(parts))
        loader.advance(progress)
        if progress.position >= last:
            return found
    return found


# --- peers ------------------------------------------------------------------------------------------------------------


def collate(rows: list[dict]) -> dict:
    import numpy as np
    import torch

    return {key: torch.from_numpy(np.stack([row[key] for row in rows]).astype(np.int64)) for key in rows[0]}


def accelerate_loader(rows: list[dict]):
    import torch
    from accelerate import Accelerator

    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    return Accelerator(cpu=True).prepare(loader)


def skipped(loader, position: int) -> None:
    from accelerate import skip_first_batches

    next(iter(skip_first_batches(loader, position // BATCH_SIZE)))


class _FirstStep(Exception):
    """Ends a Trainer where its first step begins."""


def trainer_seconds(rows: list[dict], starts: dict, folder: Path, rounds: int) -> dict:
    """("Trainer", share): median seconds to the first step of a continued training, above those of a cold start."""
    import transformers

    transformers.logging.set_verbosity_error()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=-1,
        num_train_epochs=1,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )

    class Timed(transformers.Trainer):
        def training_step(self, *_, **__):
            raise _FirstStep

    class StopAfterOne(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = True

    def made(kind, callbacks=()):
        return kind(
            subjects.llama(**SHAPE, heads=2),
            arguments,
            train_dataset=rows,
            data_collator=collate,
            callbacks=list(callbacks),
        )

    made(transformers.Trainer, [StopAfterOne()]).train()  # writes checkpoint-1
    checkpoint = folder / "trainer" / "checkpoint-1"
    seconds: dict = {}
    places = [(None, 0), *starts.items()]
    for number in range(rounds + 1):
        for share, start in places[number % 4 :] + places[: number % 4]:
            about = json.loads((checkpoint / "trainer_state.json").read_text())
            about["global_step"] = start // BATCH_SIZE
            (checkpoint / "trainer_state.json").write_text(json.dumps(about))
            trainer = made(Timed)
            began = time.perf_counter()
            try:
                trainer.train(resume_from_checkpoint=str(checkpoint) if share else None)
            except _FirstStep:
                seconds.setdefault(share, []).append(time.perf_counter() - began)
    medians = {share: statistics.median(values[1:]) for share, values in seconds.items()}
    return {("Trainer", share): medians[share] - medians[None] for share in starts}
