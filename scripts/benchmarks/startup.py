"""C6: from the start of a process to the help page, and to the end of the first optimizer step of a tiny model.

Each figure is the best of several alternated starts: what a start takes when nothing disturbs it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import subjects
from benchmarks.outcome import Outcome, Target

SHAPE = {"layers": 2, "hidden": 64, "vocabulary": 512}
ROUNDS = 5


def run(quick: bool) -> Outcome:
    """Start ours and TRL in turn; without TRL only the absolute limit counts."""
    import importlib.util

    rounds = 2 if quick else ROUNDS
    has_trl = importlib.util.find_spec("trl") is not None
    here = [sys.executable, "-m", "benchmarks.startup"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = subjects.save(folder / "model", **SHAPE)
        data = subjects.write_rows(folder / "rows.jsonl", num_rows=8, num_characters=37)
        recipe = str(subjects.ROOT / "recipes" / "sft.py")
        commands = {
            "ours: help": [sys.executable, recipe, "--help"],
            "ours: first step": [*here, "ours", model, data, str(folder)],
        }
        if has_trl:
            program = "from trl.cli.main import main; main()"
            commands["TRL: help"] = [sys.executable, "-c", program, "sft", "--help"]
            commands["TRL: first step"] = [*here, "trl", model, data, str(folder)]
        seconds = {name: [] for name in commands}
        for _ in range(rounds):
            for name, command in commands.items():
                seconds[name].append(timed(command))
    best = {name: min(values) for name, values in seconds.items()}
    targets = [Target("seconds to the help page", best["ours: help"], 1.0)]
    notes = []
    if has_trl:
        targets.append(Target("help, ours / TRL", best["ours: help"] / best["TRL: help"], 0.10))
        targets.append(Target("first step, ours / TRL", best["ours: first step"] / best["TRL: first step"], 0.5))
    else:
        notes.append("TRL is not installed and was left out (pip install -e .[benchmark]).")
    table = [["start", "best, s", "all, s"]]
    table += [[name, f"{best[name]:.2f}", " ".join(f"{v:.2f}" for v in values)] for name, values in seconds.items()]
    return Outcome(name="startup", targets=targets, tables=[table], notes=notes, series={"seconds": best}, quick=quick)


def timed(command: list[str]) -> float:
    """Seconds from the start of a process to its end, or to the moment that it prints."""
    started = time.monotonic()
    process = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    ended = time.monotonic()
    if process.returncode:
        raise RuntimeError(f"{command}: exit {process.returncode}\n{process.stderr[-3000:]}")
    moments = [line.split()[1] for line in process.stdout.splitlines() if line.startswith("first-step ")]
    return (float(moments[0]) if moments else ended) - started


def first_step_done() -> None:
    """Tell the moment by the clock that all processes of the machine share, and leave."""
    print(f"first-step {time.monotonic()}", flush=True)
    os._exit(0)


def ours(model: str, data: str, folder: str) -> None:
    recipe = subjects.load_recipe("sft")
    from oneloop.data import loaders

    loaders.TrainLoader.advance = lambda self, progress: first_step_done()
    recipe.main(
        recipe.SFTConfig(
            model_name_or_path=model,
            dataset_name=data,
            output_dir=f"{folder}/ours",
            global_batch_size=8,
            per_device_batch_size=8,
            max_steps=2,
            report_to="none",
        )
    )


def trl(model: str, data: str, folder: str) -> None:
    """The script that TRL's own documentation begins with, on the same files."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            first_step_done()

    arguments = SFTConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=8,
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    rows = load_dataset("json", data_files=data, split="train")
    SFTTrainer(model, arguments, train_dataset=rows, callbacks=[Stop()]).train()


if __name__ == "__main__":
    {"ours": ours, "trl": trl}[sys.argv[1]](*sys.argv[2:])
