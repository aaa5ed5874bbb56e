"""Brings a foreign checkpoint under the recipe's names, and writes it as a training state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from import_state.pieces import Checkpoint, Later, Piece
from import_state.recipe import MOMENTS, Target
from import_state.unpickling import Foreign
from oneloop.state import folders, record
from oneloop.state import format as state_format

FILE_BYTES = 4 << 30
"""A file of the state gets no piece more once it has this many bytes."""
ROUNDED = "--allow_16bit_weights"
UNKNOWN = (
    "random states: what dropout draws follows from the recipe's seed and the step",
    "the order in which the other tool visited the rows: the position is step x global_batch_size in this recipe's "
    "order, so rows of the running epoch may come twice or not at all",
    "the frozen weights under an adapter, if there is one: the recipe's base model is taken",
    "tokens seen so far, the loss scale, and the tracker's run",
)
"""What no reader can bring along; goes into the manifest and onto the screen."""


@dataclass(frozen=True)
class Plan:
    """What is going to be written."""

    checkpoint: Checkpoint
    pieces: list[Piece]
    tensors: dict[str, Any]
    """The manifest's table."""
    num_bytes: int


def plan(found: Checkpoint, target: Target, optim: str, allow_16bit: bool) -> Plan:
    """Check that the checkpoint has what the recipe trains, all of it in fp32, and nothing else that was trained.

    Raises Foreign, with what is missing, what is too much, and where shapes differ.
    """
    found.check_tiling()
    names = _own_names(found, target)
    kinds_of = found.kinds_of()
    wanted = ("param", *MOMENTS[optim])
    missing = [name for name in target.shapes if name not in names or "param" not in kinds_of[names[name]]]
    trained = {name for name, kinds in kinds_of.items() if set(kinds) - {"param"}}
    surplus = sorted(trained - set(names.values()))
    if missing or surplus:
        raise Foreign(
            f"{found.folder} is of another model, or of other trained parts of it, than the recipe's: "
            + "; ".join(
                [f"it lacks {_some(missing)}"] * bool(missing) + [f"it has {_some(surplus)} besides"] * bool(surplus)
            )
            + ". Check model_name_or_path, use_peft and the lora_... settings."
        )
    tensors, pieces, rounded = {}, [], set()
    for name, shape in target.shapes.items():
        foreign, table = names[name], {}
        if found.shapes[foreign] != shape:
            raise Foreign(
                f"{found.folder}: {foreign} has shape {list(found.shapes[foreign])}, in the recipe's model "
                f"{list(shape)}. Check model_name_or_path and lora_r."
            )
        extra = sorted(set(kinds_of[foreign]) - set(wanted))
        lacking = [kind for kind in wanted if kind not in kinds_of[foreign]]
        if extra or lacking:
            what = f"lacks {', '.join(lacking)}" if lacking else f"has {', '.join(extra)}"
            raise Foreign(
                f"{found.folder}: {foreign} {what}, but optim {optim} keeps {', '.join(wanted[1:])}: name the "
                "optimizer that the other run used, or import no run in progress but start from its weights."
            )
        for kind in wanted:
            table[kind] = {"dtype": "F32", "shape": list(shape)}
            for piece in kinds_of[foreign][kind]:
                if piece.tensor.dtype != torch.float32:
                    rounded.add((str(piece.tensor.dtype).removeprefix("torch."), kind))
                pieces.append(Piece(name, kind, piece.start, _fp32(piece.tensor)))
        tensors[name] = {"shape": list(shape), "kinds": table, "scalars": dict(found.scalars.get(foreign, {}))}
    _check_rounding(found, rounded, allow_16bit)
    for name, shape in target.buffers.items():
        if name not in names or found.shapes[names[name]] != shape:
            raise Foreign(f"{found.folder} lacks the buffer {name} of shape {list(shape)}. Check model_name_or_path.")
        piece = kinds_of[names[name]]["param"][0]
        pieces.append(Piece(name, "buffer", 0, piece.tensor))
        dtype = state_format.NAMES_OF_DTYPES[piece.tensor.dtype]
        tensors[name] = {
            "shape": list(shape),
            "kinds": {"buffer": {"dtype": dtype, "shape": list(shape)}},
            "scalars": {},
        }
    return Plan(found, pieces, tensors, sum(_size(piece) for piece in pieces))


def _size(piece: Piece) -> int:
    return piece.tensor.numel() * piece.tensor.element_size()


def _own_names(found: Checkpoint, target: Target) -> dict[str, str]:
    """The recipe's name -> the checkpoint's. A name that stands for a tied parameter gives way to the first one."""
    names: dict[str, str] = {}
    for foreign in found.shapes:
        own = target.name_of(foreign)
        if own is None:
            continue
        if own in names and own not in target.aliases.values():
            raise Foreign(f"{found.folder} has {own} twice: as {names[own]} and as {foreign}.")
        trained = any(piece.name == foreign and piece.kind != "param" for piece in found.pieces)
        if own not in names or trained:
            names[own] = foreign
    return names


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fp32(tensor: torch.Tensor | Later) -> torch.Tensor | Later:
    if tensor.dtype == torch.float32:
        return tensor
    return Later(tensor.numel(), torch.float32, lambda: tensor.detach().float())


def _check_rounding(found: Checkpoint, rounded: set[tuple[str, str]], allow_16bit: bool) -> None:
    if not rounded:
        return
    dtypes = " and ".join(sorted({dtype for dtype, _ in rounded}))
    kinds = ", ".join(sorted({"weights" if kind == "param" else kind for _, kind in rounded}))
    if any(not dtype.startswith(("float", "bfloat")) for dtype, _ in rounded):
        raise Foreign(f"{found.folder} has {kinds} in {dtypes}, from which fp32 values cannot be made.")
    if not allow_16bit:
        raise Foreign(
            f"{found.folder} has {kinds} in {dtypes} only: what it would go on from is rounded, and training here "
            f"keeps fp32. Import a checkpoint with fp32 masters, or accept the rounded values with {ROUNDED}."
        )
    found.notes.append(f"{kinds} were saved in {dtypes}: rounded values were widened to fp32.")


# --- writing ----------------------------------------------------------------------------------------------------------


def write(plan: Plan, config, progress: dict[str, int], output_dir: Path) -> Path:
    """Write the state, file by file, and publish it. Raises ValueError where it cannot go, OSError."""
    root = output_dir / folders.FOLDER
    if known := folders.published(root):
        raise Foreign(
            f"{known[0]} is there already, and a run would go on from the newest of them: name another OUT_DIR."
        )
    free = folders.free_bytes(root)
    if free is not None and free < plan.num_bytes * 1.01 + (1 << 20):
        raise Foreign(f"{output_dir} has {free:,} bytes free, and the state needs {plan.num_bytes:,}: make room.")
    partial = root / (folders.name_of(progress["step"]) + folders.PARTIAL)
    root.mkdir(parents=True, exist_ok=True)
    folders.clean(root)
    partial.mkdir()
    files = {}
    for number, pieces in enumerate(_by_file(plan.pieces)):
        entries = [
            (state_format.Range(piece.name, piece.kind, piece.start, piece.tensor.numel()), piece.tensor)
            for piece in pieces
        ]
        name = f"rank-{number:05d}.safetensors"
        about = state_format.write_tensors(partial / name, [(span.key, tensor) for span, tensor in entries])
        files[name] = about | {"ranges": [span.to_json() for span, _ in entries]}
    state_format.write_manifest(partial, _manifest(plan, config, progress, files))
    return folders.publish(partial)


def _by_file(pieces: list[Piece]) -> Iterator[list[Piece]]:
    current, size = [], 0
    for piece in pieces:
        current.append(piece)
        size += _size(piece)
        if size >= FILE_BYTES:
            yield current
            current, size = [], 0
    if current:
        yield current


def _manifest(plan: Plan, config, progress: dict[str, int], files: dict[str, Any]) -> dict[str, Any]:
    from oneloop import config as config_module
    from oneloop import redaction

    found = plan.checkpoint
    return {
        "format": state_format.FORMAT,
        "format_version": state_format.FORMAT_VERSION,
        "progress": progress,
        "layout": "whole",
        "world_size": found.world_size or 1,
        "tensors": plan.tensors,
        "quantized": {},
        "files": files,
        "optimizer": {"name": config.optim},
        "config": redaction.redact_value(config_module.to_dict(config)),
        "topology": {"strategy": found.what, "world_size": found.world_size or 1},
        "ranks": [],
        "meter": None,
        "skipped": None,
        "loss_scaler": None,
        "data": None,
        "model": None,
        "tracker": {"name": None, "run_id": None},
        "versions": found.versions,  # those of the run that made the numbers, as far as it said
        "git_commit": None,
        "created": record.now(),
        "imported_from": {
            "what": found.what,
            "folder": str(found.folder.resolve()),
            "world_size": found.world_size,
            "steps": found.steps,
            "notes": found.notes,
            "unknown": list(UNKNOWN),
        },
    }
