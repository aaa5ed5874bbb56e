"""Folders of torch.distributed.checkpoint (DCP), as sharded training in plain torch writes them.

`.metadata` is the index: the shape of every tensor, the boxes it was cut into, and where in which file each box lies.
A box lies there as `torch.save` writes a tensor. Accelerate's `save_state` and transformers' Trainer make two such
folders, `pytorch_model_fsdp_0` with `model.<name>` and `optimizer_0` with `optimizer.state.<name>.<kind>`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch

from import_state.pieces import Checkpoint, Later, flat, step_of
from import_state.unpickling import Foreign, Record, load_index, load_part

INDEX = ".metadata"
_MODEL, _STATE = "model.", "optimizer.state."


def folders(folder: Path) -> list[Path]:
    """The DCP folders of a checkpoint: itself, or those of model and optimizer inside; empty if it has none."""
    if (folder / INDEX).is_file():
        return [folder]
    inside = [folder / name for name in ("pytorch_model_fsdp_0", "model_0", "optimizer_0")]
    return [path for path in inside if (path / INDEX).is_file() or any(path.glob("*.distcp"))]


def read(folder: Path, parts: list[Path], trust: bool) -> Checkpoint:
    """A checkpoint of one or two DCP folders. Raises Foreign."""
    found = Checkpoint("FSDP, torch.distributed.checkpoint", folder, None)
    files = set()
    for part in parts:
        if not (part / INDEX).is_file():
            raise Foreign(f"{part} lacks {INDEX}, which is written last: the checkpoint was never completed.")
        files |= _read_folder(found, part, trust)
    ranks = {int(match[1]) for name in files if (match := re.fullmatch(r"__(\d+)_\d+\.distcp", name))}
    found.world_size = max(ranks) + 1 if ranks else None
    if not any(piece.kind != "param" for piece in found.pieces):
        raise Foreign(
            f"{folder} holds weights but no moments of an optimizer (optimizer_0, or keys {_STATE}...): nothing of a "
            "run in progress."
        )
    if not any(piece.kind == "param" for piece in found.pieces):
        raise Foreign(
            f"{folder} holds moments of an optimizer but no weights (pytorch_model_fsdp_0, or keys model...)."
        )
    steps = {scalars["step"] for scalars in found.scalars.values() if "step" in scalars}
    if len(steps) == 1:
        found.steps["step of the optimizer"] = steps.pop()
    return found


def _read_folder(found: Checkpoint, folder: Path, trust: bool) -> set[str]:
    """Add what one folder holds; returns the names of its files."""
    path = folder / INDEX
    index = load_index(path)
    tensors, places = index["state_dict_metadata"], index["storage_data"]
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise Foreign(f"{path} has no list of tensors, or none of where they lie.")
    where = {}
    for entry, place in places.items():
        offset = entry["offset"] if isinstance(entry, Record) else None
        name = entry["fqn"] if isinstance(entry, Record) else None
        where[name, tuple(offset) if offset is not None else None] = _checked_place(path, place)
    for key, about in tensors.items():
        target = _meaning(key)
        if target is None:
            continue
        name, kind = target
        if getattr(about, "kind", "") == "BytesStorageMetadata":
            if kind == "step":
                value = load_part(*_place(where, path, key, None), trust)
                found.scalars.setdefault(name, {})["step"] = step_of(value, f"{path}: {key}")
        elif getattr(about, "kind", "") == "TensorStorageMetadata":
            _read_tensor(found, name, kind, key, about, where, path, trust)
        else:
            raise Foreign(f"{path}: {key} is neither a tensor nor a plain value.")
    return {file.name for file, _, _ in where.values()}


def _meaning(key: str) -> tuple[str, str] | None:
    """(name, kind) of a key of the checkpoint; None for what a state has no use for, such as learning rates."""
    if key.startswith(_STATE):
        name, _, kind = key.removeprefix(_STATE).rpartition(".")
        return (name, kind) if name else None
    if key.startswith(_MODEL):
        return key.removeprefix(_MODEL), "param"
    return None


def _checked_place(path: Path, place) -> tuple[Path, int, int]:
    """File, offset and length of an entry of the index, which may only lead to files beside it."""
    relative = place["relative_path"] if isinstance(place, Record) else None
    numbers = [place["offset"], place["length"]] if relative is not None else []
    if not isinstance(relative, str) or not re.fullmatch(r"[\w-][\w.-]*\.distcp", relative, re.ASCII):
        raise Foreign(f"{path} names {relative!r:.80} as a file of the checkpoint: expected is NAME.distcp beside it.")
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise Foreign(f"{path}: {relative} has no valid offset and length: {numbers}.")
    if place["transform_descriptors"]:
        raise Foreign(f"{path}: {relative} is compressed ({place['transform_descriptors']}), which cannot be read.")
    return path.parent / relative, numbers[0], numbers[1]


def _place(where: dict, path: Path, key: str, offset: tuple[int, ...] | None) -> tuple[Path, int, int]:
    found = where.get((key, offset)) or (where.get((key, None)) if offset is None or not any(offset) else None)
    if found is None:
        raise Foreign(f"{path} does not say where {key} at {offset} lies.")
    if not found[0].is_file():
        raise Foreign(f"{found[0]} is missing. Copy the whole checkpoint, from all nodes that wrote it.")
    return found


def _read_tensor(
    found: Checkpoint, name: str, kind: str, key: str, about: Record, where: dict, path: Path, trust: bool
) -> None:
    try:
        shape = tuple(map(int, about["size"]))
        dtype = about["properties"].state[0]
        boxes = [(tuple(map(int, box["offsets"])), tuple(map(int, box["sizes"]))) for box in about["chunks"]]
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise Foreign(f"{path}: what it says of {key} is no tensor: {error}") from error
    if not isinstance(dtype, torch.dtype):
        raise Foreign(f"{path}: {key} has numbers of kind {dtype!r:.60}, which cannot be imported.")
    if kind != "param" and not shape:
        if kind == "step":
            value = load_part(*_place(where, path, key, ()), trust)
            found.scalars.setdefault(name, {})["step"] = step_of(value, f"{path}: {key}")
        return
    if found.shapes.setdefault(name, shape) != shape:
        raise Foreign(f"{path}: {key} has shape {list(shape)}, in another part {list(found.shapes[name])}.")
    parts = [(offsets, sizes, _place(where, path, key, offsets)) for offsets, sizes in boxes if math.prod(sizes)]

    def reader(sizes, place) -> Callable[[], torch.Tensor]:
        def read_box() -> torch.Tensor:
            tensor = load_part(*place, trust)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes or tensor.dtype != dtype:
                raise Foreign(f"{place[0]}: at {place[1]} lies something else than the part of {key} it should hold.")
            return flat(tensor, f"{place[0]}: {key}")

        return read_box

    if all(_is_range(shape, sizes) for _, sizes, _ in parts):
        for offsets, sizes, place in parts:
            start = sum(offset * math.prod(shape[axis + 1 :]) for axis, offset in enumerate(offsets))
            found.add(name, kind, start, Later(math.prod(sizes), dtype, reader(sizes, place)))
        return

    def read_whole() -> torch.Tensor:  # cut across rows: no box is a range, so this tensor is held at once
        whole = torch.zeros(shape, dtype=dtype)
        for offsets, sizes, place in parts:
            region = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
            whole[region] = reader(sizes, place)().view(sizes)
        return whole.view(-1)

    if sum(math.prod(sizes) for _, sizes, _ in parts) != math.prod(shape):
        raise Foreign(f"{path}: the parts of {key} do not make it up.")
    found.add(name, kind, 0, Later(math.prod(shape), dtype, read_whole))


def _is_range(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a box is one range of the flattened tensor: whole in all axes behind the first that is longer than 1."""
    cut = next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes))
    return all(size == full for size, full in zip(sizes[cut + 1 :], shape[cut + 1 :], strict=True))
