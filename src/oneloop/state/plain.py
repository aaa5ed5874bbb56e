"""A training state as a folder that plain transformers or peft load, made tensor by tensor.

What `export` writes at the end of a run, made later from files alone: no device, no launch, and never a whole model in
memory. The model's skeleton lies on torch's meta device; each tensor is read, converted and written on its own. Names,
number formats and settings are those of `export`, whose functions are asked for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oneloop import export, models, sources, tracking
from oneloop.state import folders
from oneloop.state import format as state_format
from oneloop.state.format import Damaged, State

MAX_FILE_BYTES = 5_000_000_000
"""Largest weight file of a model, unless a single tensor is larger."""
BLOCK_ELEMENTS = 4 << 20
"""What is read, converted and written at a time."""


# --- folders ----------------------------------------------------------------------------------------------------------


def verified(folder: Path) -> State:
    """Open a state and read all of it once, so that nothing is exported of one that was changed. Raises Damaged."""
    state = state_format.open_state(folder)
    problems = state_format.differences(state)
    if problems:
        raise Damaged("; ".join(problems))
    return state


def check_free(target: Path) -> None:
    """Refuse a name to write to that has content already. Raises ValueError."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already. Give a folder that does not, or move that one.")


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which gets its name when all has gone well, and else is removed."""
    check_free(target)
    os.umask(tracking.file_mask())  # weights are for those who may see the run
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# --- where values come from -------------------------------------------------------------------------------------------


class _StateValues:
    """What was trained, from a state: fp32 masters, and buffers that changed."""

    def __init__(self, state: State):
        self._state = state
        self._kinds = {
            name: kind
            for name, about in state.tensors.items()
            for kind in ("buffer", "param")
            if kind in about["kinds"]
        }

    def __contains__(self, name: str) -> bool:
        return name in self._kinds

    def __iter__(self) -> Iterator[str]:
        return (name for name, kind in self._kinds.items() if kind == "param")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state.tensors[name]["shape"])

    def blocks(self, name: str) -> Iterator[torch.Tensor]:
        """The flattened tensor in pieces, each (n,), n <= BLOCK_ELEMENTS."""
        num_elements = self._state.num_elements(name, self._kinds[name])
        for start in range(0, num_elements, BLOCK_ELEMENTS):
            yield self._state.read(name, self._kinds[name], start, min(BLOCK_ELEMENTS, num_elements - start))
            self._state.close()  # pages of a memory map count as this process's memory as long as it is open


class FileValues:
    """What was not trained, from the safetensors of a model or an adapter, by the names it has there."""

    def __init__(self, folder: Path, whole: str = "model.safetensors"):
        from safetensors import safe_open

        self._folder, self._paths = folder, {}
        index = folder / f"{whole}.index.json"
        names = [whole] if (folder / whole).is_file() or not index.is_file() else _shards(index)
        for name in names:
            if (folder / name).is_file():
                with safe_open(folder / name, "pt") as file:
                    self._paths |= dict.fromkeys(file.keys(), folder / name)

    def __contains__(self, key: str) -> bool:
        return key in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def blocks(self, key: str) -> Iterator[torch.Tensor]:
        """The flattened tensor in pieces, each (n,) in the dtype of the file."""
        from safetensors import safe_open

        with safe_open(self._paths[key], "pt") as file:
            part = file.get_slice(key)
            shape = part.get_shape()
        rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:])) if shape and math.prod(shape) else 1
        for start in range(0, shape[0] if shape else 1, rows):
            with safe_open(self._paths[key], "pt") as file:
                block = file.get_slice(key)[start : start + rows] if shape else file.get_tensor(key)
                yield block.flatten()

    def whole(self, key: str) -> torch.Tensor:
        """The tensor in fp32, in memory of its own."""
        from safetensors import safe_open

        if key not in self._paths:
            raise ValueError(f"{self._folder} has no tensor {key}: it does not belong to the model that is written.")
        with safe_open(self._paths[key], "pt") as file:
            return file.get_tensor(key).to(torch.float32, copy=True)


def _shards(index: Path) -> list[str]:
    return sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A tensor of a file to be written: what the header says of it, and a function that yields its values in order."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_space(folder: Path, pieces: list[Piece]) -> None:
    """Refuse what will not fit, before hours are spent on it. Raises ValueError."""
    needed, free = sum(piece.num_bytes for piece in pieces), folders.free_bytes(folder)
    if free is not None and free < needed:
        raise ValueError(f"{folder}: {needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")


def write_files(folder: Path, pieces: list[Piece], name: str, max_bytes: float | None = None) -> list[str]:
    """Write tensors as one safetensors file, or as several and their index; returns the files' names.

    Raises OSError; ValueError for values that are not finite, or as many as the header does not say.
    """
    max_bytes = MAX_FILE_BYTES if max_bytes is None else max_bytes
    shards: list[list[Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(p.num_bytes for p in shards[-1]) + piece.num_bytes > max_bytes:
            shards.append([])
        shards[-1].append(piece)
    if len(shards) == 1:
        _write_file(folder / name, pieces)
        return [name]
    stem, weight_map = name.removesuffix(".safetensors"), {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard)
        weight_map |= {piece.key: file for piece in shard}
    totals = {
        "total_parameters": sum(math.prod(piece.shape) for piece in pieces),
        "total_size": sum(piece.num_bytes for piece in pieces),
    }
    index = {"metadata": totals, "weight_map": weight_map}
    (folder / f"{name}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return sorted(set(weight_map.values()))


def _write_file(path: Path, pieces: list[Piece]) -> None:
    pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for piece in pieces:
        ends = [offset, offset + piece.num_bytes]
        dtype = state_format.NAMES_OF_DTYPES[piece.dtype]
        header[piece.key] = {"dtype": dtype, "shape": list(piece.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            start = file.tell()
            for block in piece.blocks():
                if block.is_floating_point() and not bool(torch.isfinite(block).all()):
                    raise ValueError(f"{piece.key} holds values that are not finite: the training has diverged")
                data = block.detach().to(piece.dtype).contiguous().flatten().view(torch.uint8)
                file.write(memoryview(data.numpy()))
            if file.tell() - start != piece.num_bytes:
                raise ValueError(f"{piece.key} has {file.tell() - start} bytes instead of {piece.num_bytes}")
        file.flush()
        os.fsync(file.fileno())


# --- models -----------------------------------------------------------------------------------------------------------


def skeleton(config, base: sources.BaseModel, **kwargs) -> torch.nn.Module:
    """The base model without its values: names, shapes, and what transformers knows of its files. Raises ValueError."""
    from transformers import AutoModelForCausalLM

    return models.from_source(
        AutoModelForCausalLM,
        sources.find_model(base, config.trust_remote_code),
        config,
        dtype=torch.float32,
        device_map={"": "meta"},
        use_safetensors=models.use_safetensors(config),
        **kwargs,
    )


@dataclass(frozen=True)
class _Group:
    """Tensors of the model, by their names there, and the tensors of its files that they make up."""

    names: list[str]
    made: dict[str, torch.Tensor]
    is_renamed_only: bool


def groups_of(module: torch.nn.Module) -> list[_Group]:
    """What of the model goes where in its files.

    Mostly one tensor makes one. Experts that are fused in memory make many; what is split in memory and fused in the
    file is taken layer by layer. Asked of transformers itself, with tensors that have no values.
    """
    ignored = set(module._keys_to_ignore_on_save or ())
    values = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors = {name: values[name].detach() for name in export.tensor_names(module, False) if name not in ignored}
    expected = {key: tensor.shape for key, tensor in export.in_file_format(module, dict(tensors)).items()}

    def group(names: list[str]) -> _Group:
        made = export.in_file_format(module, {name: tensors[name] for name in names})
        # transformers 5.24 passes on the very tensor that it only renames (core_model_loading.py, `WeightRenaming`)
        return _Group(names, made, len(names) == 1 and [*made.values()][0] is tensors[names[0]])

    for part_of in (lambda name: name, lambda name: re.split(r"(?<=\d)\.", name)[0]):
        parts: dict[str, list[str]] = {}
        for name in tensors:
            parts.setdefault(part_of(name), []).append(name)
        with contextlib.suppress(Exception):  # a conversion that misses the tensors of another part fails in many ways
            found = [group(names) for names in parts.values()]
            shapes = [(key, tensor.shape) for one in found for key, tensor in one.made.items()]
            if len(shapes) == len(expected) and dict(shapes) == expected:
                return found
    return [group([*tensors])]


def model_pieces(module, dtype: torch.dtype, trained, frozen: FileValues) -> list[Piece]:
    """The tensors of a model's files: `trained` by their names in the model, the others by those in `frozen`.

    Raises ValueError for tensors that are in neither, do not fit, or would be left out.
    """
    shapes = {name: tuple(t.shape) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    pieces, used = [], set()
    groups = groups_of(module)
    for group in groups:
        present = [name for name in group.names if name in trained]
        used.update(present)
        for name in present:
            if trained.shape(name) != shapes[name]:
                raise ValueError(
                    f"{name} is {list(trained.shape(name))} where the base model has {list(shapes[name])}: they do not "
                    "belong together. Name the model that it was trained from: --model_name_or_path FOLDER"
                )
        if not present:
            pieces += [_frozen_piece(module, key, tensor, dtype, frozen) for key, tensor in group.made.items()]
            continue
        if len(present) != len(group.names):
            missing = ", ".join(sorted(set(group.names) - set(present))[:3])
            raise ValueError(f"{present[0]} is stored together with {missing}, which was not trained: not supported.")
        blocks_of = _converted(module, group, shapes, trained)
        pieces += [
            Piece(key, dtype if tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape), blocks_of(key))
            for key, tensor in group.made.items()
        ]
    if left := set(trained) - used:
        raise ValueError(f"the base model has no {sorted(left)[0]} ({len(left)} in all); --model_name_or_path names it")
    if all(group.is_renamed_only for group in groups):
        pieces.sort(key=lambda piece: piece.key)  # as safetensors does, whose very bytes come out then
    return pieces


def _converted(module, group: _Group, shapes: dict, trained) -> Callable:
    """A function that gives the `blocks` of each key that the group makes."""
    if group.is_renamed_only:
        return lambda _: lambda: trained.blocks(group.names[0])
    kept: dict[str, torch.Tensor] = {}  # the keys of a group are written one after the other, each once

    def blocks(key: str) -> Iterator[torch.Tensor]:
        if key not in kept:
            whole = {name: torch.cat(list(trained.blocks(name))).view(shapes[name]) for name in group.names}
            kept.update(export.in_file_format(module, whole))
        yield kept.pop(key)

    return lambda key: lambda: blocks(key)


def _frozen_piece(module, key: str, tensor: torch.Tensor, dtype: torch.dtype, frozen: FileValues) -> Piece:
    stored = next((name for name in (key, key.removeprefix(f"{module.base_model_prefix}.")) if name in frozen), None)
    if stored is None:
        raise ValueError(f"{key} was not trained and is not in the files of the base model {module.name_or_path!r}.")
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    # Through fp32, as a model to be trained is loaded.
    through = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return Piece(key, kept, tuple(tensor.shape), lambda: (block.to(through) for block in frozen.blocks(stored)))


def write_state(state: State, config, folder: Path) -> tuple[str, torch.dtype, list[Piece]]:
    """Write a state's model or adapter into `folder`: weights, settings and tokenizer, as `export.save` at that step.

    Returns what it is, its dtype and tensors. Raises ValueError and OSError.
    """
    tokenizer = models.load_tokenizer(config)
    base = sources.base_model_of(config)
    module = skeleton(config, base)
    module.config.use_cache = False  # as in training; the finished config.json has it on again
    models.align_for_generation(module, tokenizer)
    is_adapter = config.use_peft or base.adapter is not None
    values = _StateValues(state)
    dtype = export.export_dtype(config, is_adapter)
    if is_adapter:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # of an adapter that is continued
            module = models.with_adapter(config, module, base)
        module.peft_config["default"].revision = state.manifest["config"].get("model_revision")
        pieces = _adapter_pieces(module, dtype, values)
    else:
        found = sources.find_model(base, config.trust_remote_code)
        pieces = model_pieces(module, dtype, values, FileValues(found.folder))
    check_space(folder, pieces)
    export.write_settings(module, folder, dtype, is_adapter)  # first: it removes weight files that it does not know
    tokenizer.save_pretrained(folder)
    name = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    write_files(folder, pieces, name, math.inf if is_adapter else None)
    return "adapter" if is_adapter else "model", dtype, pieces


def _adapter_pieces(module, dtype: torch.dtype, values: _StateValues) -> list[Piece]:
    wanted = export.tensor_names(module, True)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if left := set(values) - set(wanted):
        raise ValueError(f"the adapter of the state's config has no {sorted(left)[0]} ({len(left)} in all)")
    for name in wanted:
        if name not in values or values.shape(name) != shapes[name]:
            what = list(values.shape(name)) if name in values else "nothing"
            raise ValueError(f"the state holds {what} where its adapter has {name} {list(shapes[name])}.")
    return [
        Piece(key, dtype, shapes[name], lambda name=name: values.blocks(name))
        for name, key in sorted(wanted.items(), key=lambda item: item[1])
    ]
