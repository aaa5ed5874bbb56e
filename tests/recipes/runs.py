"""Runs the real recipe inside the test process, as one rank, on a tiny model."""

import json
from pathlib import Path

from tests import tiny
from tests.equivalence.scenario import ROOT, load_recipe

SHARED_CASES = ROOT.parent / "shared" / "cases"


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turns(*contents: str) -> dict:
    """A row of alternating user and assistant turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def settings(folder: Path, rows: list[dict] | str, **changes) -> dict:
    """A complete sft config on the tiny model; `rows` are written to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "tiny"
    if "model_name_or_path" not in changes and not model.exists():
        tiny.save(model)
    values = {
        "model_name_or_path": str(model),
        "dataset_name": rows if isinstance(rows, str) else write_rows(folder / "rows.jsonl", rows),
        "output_dir": str(folder / "run"),
        "data_cache_dir": str(folder / "data_cache"),
        "report_to": "none",
        "logging_steps": 1,
        "shuffle": False,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
        "export_dtype": "fp32",
    }
    return values | changes


def train(folder: Path, rows: list[dict] | str, **changes) -> Path:
    """Train in this process and return the output folder."""
    recipe = load_recipe(ROOT / "recipes" / "sft.py")
    config = recipe.SFTConfig(**settings(folder, rows, **changes))
    recipe.main(config)
    return Path(config.output_dir)
