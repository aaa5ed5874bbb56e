"""The command: recognises what a folder is, has it read, and writes the state."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

DESCRIPTION = "Turns a checkpoint of another tool into a training state, from which a recipe goes on."
EPILOG = """CHECKPOINT is a folder of DeepSpeed (ZeRO-1, 2, 3), of torch.distributed.checkpoint (FSDP), or of unsharded
training, as engine.save_checkpoint, Accelerate's save_state or transformers' Trainer write them. Flags that are not
listed are the recipe's own, as in the run that will go on. What is taken over, and what cannot be: docs/import.md."""


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="import_state.py", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder that the other tool has written")
    parser.add_argument("output_dir", metavar="OUT_DIR", type=Path, help="output_dir of the run that will go on")
    parser.add_argument("--config", metavar="RECIPE_YAML", type=Path, required=True, help="config file of that run")
    parser.add_argument("--step", type=int, help="optimizer steps done, where the checkpoint does not know or is wrong")
    parser.add_argument(
        "--allow_16bit_weights", action="store_true", help="go on from rounded weights where there are no fp32 ones"
    )
    parser.add_argument(
        "--trust_checkpoint", action="store_true", help="unpickle the checkpoint's files: runs code that is in them"
    )
    return parser.parse_known_args()


def main() -> int:
    arguments, overrides = parse()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from oneloop import redaction

    redaction.guard_streams()
    try:
        print(f"state: {convert(arguments, overrides)}", flush=True)
    except ValueError as error:
        if os.environ.get("ONELOOP_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        print(f"error: {error.filename or arguments.output_dir}: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    return 0


def convert(arguments: argparse.Namespace, overrides: list[str]) -> Path:
    """Import one checkpoint; returns the folder of the state. Raises ValueError, OSError."""
    from import_state import recipe, writing
    from import_state.unpickling import Foreign
    from oneloop import sources
    from oneloop.launch import machine

    machine.check_versions()
    folder = arguments.checkpoint
    if not folder.is_dir():
        raise Foreign(f"CHECKPOINT: {folder} is no folder.")
    kind = recognise(folder)  # before a model is built or data are read
    module, config = recipe.recipe_config(arguments.config, arguments.output_dir, overrides)
    sources.check(config)
    target = recipe.target_of(config)
    found = read(kind, folder, target, arguments.trust_checkpoint)
    planned = writing.plan(found, target, config.optim, arguments.allow_16bit_weights)
    step = step_of(found, arguments.step)
    for about in planned.tensors.values():
        if "param" in about["kinds"]:
            about["scalars"].setdefault("step", step)
    progress = recipe.progress(config, recipe.num_rows(module, config), step)
    state = writing.write(planned, config, progress, arguments.output_dir)
    ranks = f"{found.world_size} rank(s)" if found.world_size else "one writer"
    print(f"read: {found.what}, {ranks}")
    print(f"      {len(target.shapes)} tensors, {planned.num_bytes:,} bytes of weights and moments, in fp32 as saved")
    where = {key: value for key, value in progress.items() if key != "total_steps"}
    print(f"      {', '.join(f'{key} {value}' for key, value in where.items())} of {progress['total_steps']} steps")
    for note in found.notes:
        print(f"note: {note}")
    for unknown in writing.UNKNOWN:
        print(f"not taken over: {unknown}")
    return state


def recognise(folder: Path) -> str:
    """Which of the readers a folder is for. Raises Foreign for a folder that is for none."""
    from import_state import distcp, partitions, replicated
    from import_state.unpickling import Foreign

    # Accelerate puts DeepSpeed's folder into a folder `pytorch_model` of its own; both name it in `latest`.
    if partitions.tag_folder(folder) is not None:
        return "partitions"
    if distcp.folders(folder):
        return "distcp"
    if replicated.is_one(folder):
        return "replicated"
    if (folder / "zero").is_dir() or (folder / "universal_checkpoint_info.pt").exists():
        raise Foreign(f"{folder} is a universal checkpoint of DeepSpeed: name the folder that it was made from.")
    if replicated.weights_alone(folder):
        raise Foreign(
            f"{folder} holds weights but no optimizer: nothing of a run in progress. Start a run from it with "
            "--model_name_or_path."
        )
    if any(path.name.startswith("checkpoint") and path.is_dir() for path in folder.iterdir()):
        raise Foreign(f"{folder} holds folders of several checkpoints: name one of them.")
    raise Foreign(
        f"{folder} is no checkpoint that is known: looked for were *_optim_states.pt or `latest` (DeepSpeed), "
        ".metadata or pytorch_model_fsdp_0 (torch.distributed.checkpoint), and model.safetensors beside optimizer.bin "
        "or optimizer.pt."
    )


def read(kind: str, folder: Path, target, trust: bool):
    """Have the folder read, and look what transformers' Trainer says of the step. Raises Foreign."""
    from import_state import distcp, partitions, replicated
    from import_state.unpickling import Foreign

    try:
        if kind == "partitions":
            found = partitions.read(partitions.tag_folder(folder), trust)
        elif kind == "distcp":
            found = distcp.read(folder, distcp.folders(folder), trust)
        else:
            found = replicated.read(folder, target, trust)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        # Files that are read, but in which other things lie where they should not.
        raise Foreign(f"{folder} is not laid out as its names say: {type(error).__name__}: {error}") from error
    trainer = folder / "trainer_state.json"
    if trainer.is_file():
        found.steps = trainer_step(trainer) | found.steps
    return found


def trainer_step(path: Path) -> dict[str, int]:
    from import_state.unpickling import Foreign

    try:
        step = json.loads(path.read_text(encoding="utf-8"))["global_step"]
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"global_step is {step!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Foreign(f"{path} does not say the step: {error}") from error
    return {path.name: step}


def step_of(found, given: int | None) -> int:
    """The step the run goes on from. Raises Foreign where nobody knows it."""
    from import_state.unpickling import Foreign

    if given is not None:
        if given < 0:
            raise Foreign(f"--step is {given}: give the number of optimizer steps done.")
        return given
    if not found.steps:
        raise Foreign(f"{found.folder} does not say at which step it was saved: give --step.")
    if len(set(found.steps.values())) > 1:
        said = ", ".join(f"{where}: {step}" for where, step in found.steps.items())
        found.notes.append(f"the checkpoint names several steps ({said}); the first counts, --step overrides it.")
    return next(iter(found.steps.values()))
