"""The files of a training state: flat ranges of tensors in safetensors, and a manifest that says what they make up.

Every strategy holds the fp32 master of a parameter, and each of its moments, as a contiguous range of the flattened
tensor: the whole of it, a shard of its first dimension, or a fragment of some larger flat partition. So a state is
written as such ranges, whoever wrote them, and any strategy at any world size reads the ranges it needs. The format is
described for other readers in docs/state-format.md.

A state folder is complete and unchanged, or it is not loaded: `manifest.sha256` holds the manifest's hash, the
manifest those of all other files. Nothing in it is executable: no pickle, no code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oneloop.state import durable

FORMAT = "oneloop-state"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
BLOCK_BYTES = 4 << 20
"""What is read, hashed and written at a time."""

_MOST_MAPPED_BYTES = 64 << 20  # pages of a memory map count as memory of the process while it is open

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of number formats in safetensors headers and manifests."""
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}

ABSMAX = ".absmax"
"""Suffix of the kind that holds the scales of a quantised kind, one a block."""

_REQUIRED = (  # without any of these a run would go on with something else than it stopped with
    "format",
    "format_version",
    "progress",
    "layout",
    "world_size",
    "tensors",
    "quantized",
    "files",
    "optimizer",
    "config",
    "topology",
    "ranks",
    "meter",
    "skipped",
    "loss_scaler",
    "data",
    "model",
    "tracker",
    "versions",
    "git_commit",
    "created",
)
_PROGRESS = ("step", "epoch", "position", "total_steps")


class Damaged(ValueError):
    """A state that is incomplete, changed, or none at all; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Range:
    """Where a piece of a tensor lies: elements [start, start + length) of the flattened tensor.

    phase: for a quantised kind, how far into its first block of `block_size` elements the piece begins.
    """

    name: str
    kind: str
    start: int
    length: int
    phase: int = 0

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        return f"{self.kind}/{self.start}/{self.name}"

    def to_json(self) -> list:
        return [self.name, self.kind, self.start, self.length, *([self.phase] if self.phase else [])]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, entries: Iterable[tuple[str, torch.Tensor]], beat=lambda: None) -> dict[str, Any]:
    """Write 1-D tensors as one safetensors file, through to the disk; returns its `num_bytes` and `sha256`.

    entries: (key, tensor) in any order; tensors may be on a device, and are then copied one after the other. `beat` is
    called before each block, to show life or to inject a fault. The hash is computed beside the writing, where the
    library's own writer would make a second pass over the file necessary. Raises OSError.
    """
    entries = sorted(entries, key=lambda entry: (-entry[1].element_size(), entry[0]))  # keeps every tensor aligned
    header, offset = {"__metadata__": {"format": FORMAT, "format_version": str(FORMAT_VERSION)}}, 0
    for key, tensor in entries:
        end = offset + tensor.numel() * tensor.element_size()
        assert key not in header, f"{key} is given twice"
        header[key] = {
            "dtype": NAMES_OF_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with durable.HashingFile(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in entries:
            data = tensor.detach().to("cpu").contiguous().view(torch.uint8)
            for start in range(0, data.numel(), BLOCK_BYTES):
                beat()
                file.write(memoryview(data[start : start + BLOCK_BYTES].numpy()))
    return {"num_bytes": 8 + len(text) + offset, "sha256": file.sha256}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, then its checksum, through to the disk. Raises OSError, ValueError for NaN in it."""
    data = json.dumps(manifest, indent=1, allow_nan=False).encode()
    durable.write_through(folder / MANIFEST, data)
    durable.write_through(folder / CHECKSUM, f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode())
    durable.sync_folder(folder)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """An opened state folder. `open_state` makes it; tensors are read range by range through a memory map."""

    folder: Path
    manifest: dict[str, Any]
    pieces: dict[tuple[str, str], list[tuple[Range, str]]] = field(default_factory=dict)
    """(name, kind): the ranges that make up the tensor, in order, each with its file."""
    _open: dict[str, Any] = field(default_factory=dict)
    _mapped_bytes: int = 0
    _codes: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.manifest["progress"]["step"]

    @property
    def tensors(self) -> dict[str, dict]:
        """name: {"shape", "kinds": {kind: {"dtype", "shape"}}, "scalars"}; see docs/state-format.md."""
        return self.manifest["tensors"]

    def num_elements(self, name: str, kind: str) -> int:
        """Elements of one kind of a tensor. Raises KeyError for a kind it does not have."""
        return math.prod(self.tensors[name]["kinds"][kind]["shape"])

    def read(self, name: str, kind: str, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of a tensor: (length,) in the kind's dtype; fp32 for a quantised kind.

        Raises Damaged where the files do not hold what the manifest says.
        """
        length = self.num_elements(name, kind) - start if length is None else length
        parts = []
        for piece, file in self._overlapping(name, kind, start, length):
            low, high = max(start, piece.start) - piece.start, min(start + length, piece.start + piece.length)
            part = self._slice(file, piece.key, low, high - piece.start)
            if kind in self.manifest["quantized"] and part.dtype == torch.uint8:  # small tensors may be left in fp32
                part = self._dequantized(part, piece, low, file)
            parts.append(part)
        if not parts:
            is_quantized = kind in self.manifest["quantized"]
            return torch.empty(0, dtype=DTYPES["F32" if is_quantized else self.tensors[name]["kinds"][kind]["dtype"]])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_packed(self, name: str, kind: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A range of a quantised kind as it lies in the files: codes (length,) uint8, and scales (blocks,) float32.

        Only for a range whose blocks are those of the writer; see `Range.phase`. Pieces are joined where one ends with
        a block.
        """
        codes, scales = [], []
        for piece, file in self._overlapping(name, kind, start, length):
            low, high = max(start, piece.start) - piece.start, min(start + length, piece.start + piece.length)
            block = self.manifest["quantized"][kind]["block_size"]
            first = (piece.phase + low) // block
            last = -(-(piece.phase + high - piece.start) // block)
            codes.append(self._slice(file, piece.key, low, high - piece.start))
            scales.append(self._slice(file, _scales_of(piece).key, first, last))
        return torch.cat(codes), torch.cat(scales)

    def _overlapping(self, name: str, kind: str, start: int, length: int) -> list[tuple[Range, str]]:
        return [
            (piece, file)
            for piece, file in self.pieces[name, kind]
            if max(start, piece.start) < min(start + length, piece.start + piece.length)
        ]

    def _slice(self, file: str, key: str, low: int, high: int) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, "pt")
            part = self._open[file].get_slice(key)[low:high]
        except (OSError, SafetensorError) as error:
            raise Damaged(f"{self.folder / file}: {key} cannot be read: {error}") from error
        self._mapped_bytes += part.numel() * part.element_size()
        if self._mapped_bytes > _MOST_MAPPED_BYTES:
            self.close()
        return part

    def _dequantized(self, codes: torch.Tensor, piece: Range, low: int, file: str) -> torch.Tensor:
        rule = self.manifest["quantized"][piece.kind]
        if piece.kind not in self._codes:
            self._codes[piece.kind] = torch.tensor(rule["code"], dtype=torch.float32)
        block = (torch.arange(len(codes)) + (piece.phase + low)) // rule["block_size"]
        first = int(block[0]) if len(block) else 0
        last = int(block[-1]) + 1 if len(block) else 0
        scales = self._slice(file, _scales_of(piece).key, first, last)
        return self._codes[piece.kind][codes.long()] * scales[block - first]

    def num_bytes(self) -> int:
        """Bytes of all its tensor files."""
        return sum(about["num_bytes"] for about in self.manifest["files"].values())

    def close(self) -> None:
        """Let go of the memory maps."""
        self._open.clear()
        self._mapped_bytes = 0


def _scales_of(piece: Range) -> Range:
    return Range(piece.name, piece.kind + ABSMAX, piece.start, 0)


def open_state(folder: str | os.PathLike) -> State:
    """Open a state folder after checking that its manifest is unchanged and its files are there in full length.

    That the files' content is unchanged is for `differences` to say, which reads all of it. Raises Damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        return _checked(State(folder, manifest))
    except Damaged:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:  # a manifest of other hands
        raise Damaged(f"{folder / MANIFEST} is not as docs/state-format.md has it: {error!r}") from error


def _checked(state: State) -> State:
    """Fill in where the pieces lie. Raises Damaged, and what else a manifest of the wrong shape leads to."""
    folder = state.folder
    for name, about in state.manifest["files"].items():
        path = folder / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise Damaged(f"{folder / MANIFEST}: {name!r} is no name of a file of a state")
        size = path.stat().st_size if path.is_file() else None
        num_bytes, _ = about["num_bytes"], about["sha256"]
        if size != num_bytes:
            what = "is missing" if size is None else f"has {size} bytes instead of {num_bytes}"
            raise Damaged(f"{path} {what}")
        for item in about["ranges"]:
            piece = Range(*item)
            values = piece.kind.removesuffix(ABSMAX)
            if piece.length < 0 or (values != piece.kind and values not in state.manifest["quantized"]):
                raise Damaged(f"{folder / MANIFEST}: {name} cannot hold {item}")
            if not piece.kind.endswith(ABSMAX):
                state.pieces.setdefault((piece.name, piece.kind), []).append((piece, name))
    for name, tensor in state.tensors.items():
        for kind, about in tensor["kinds"].items():
            _ = tensor["shape"], tensor["scalars"], DTYPES[about["dtype"]]  # all are needed later
            _check_tiling(state, name, kind)
    for name, kind in state.pieces:
        if kind not in state.tensors.get(name, {"kinds": ()})["kinds"]:
            raise Damaged(f"{folder / MANIFEST} has ranges of {kind} of {name}, but no such tensor")
    for kind, rule in state.manifest["quantized"].items():
        if len(rule["code"]) != 256 or rule["block_size"] < 1:
            raise Damaged(f"{folder / MANIFEST}: the code of {kind} is incomplete")
    return state


def _check_tiling(state: State, name: str, kind: str) -> None:
    """Raises Damaged unless the ranges cover the tensor without hole or overlap."""
    pieces = state.pieces.setdefault((name, kind), [])
    pieces.sort(key=lambda item: (item[0].start, item[0].length))  # an empty piece before one that begins there
    position = 0
    for piece, file in pieces:
        if piece.start != position:
            raise Damaged(f"{state.folder / file}: {kind} of {name} begins at {piece.start} instead of {position}")
        position += piece.length
    if position != state.num_elements(name, kind):
        raise Damaged(
            f"{state.folder}: {kind} of {name} has {position} elements instead of {state.num_elements(name, kind)}"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a state folder, checked against its checksum. Raises Damaged."""
    path = folder / MANIFEST
    try:
        data, checksum = path.read_bytes(), (folder / CHECKSUM).read_bytes()
    except OSError as error:
        raise Damaged(f"{folder} is no complete state: {error.strerror}: {Path(error.filename).name}") from error
    if checksum != f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode():
        raise Damaged(f"{path} is not the file whose checksum {CHECKSUM} holds")
    try:
        manifest = json.loads(data)
    except ValueError as error:
        raise Damaged(f"{path} is no JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged(f"{path} is no manifest of a training state")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise Damaged(
            f"{path} has format version {manifest.get('format_version')}; this oneloop reads {FORMAT_VERSION}. Use the "
            "version that wrote it."
        )
    missing = [name for name in _REQUIRED if name not in manifest]
    progress = manifest.get("progress")
    missing += [f"progress.{name}" for name in _PROGRESS if not isinstance(progress, dict) or name not in progress]
    if missing:
        raise Damaged(f"{path} lacks {', '.join(missing)}: a run cannot be continued without")
    return manifest


def differences(state: State, files: Iterable[str] | None = None, beat=lambda: None) -> list[str]:
    """Read files of a state (all by default) to the last byte; what differs from the manifest, empty if nothing."""
    problems = []
    for name in state.manifest["files"] if files is None else files:
        digest = hashlib.sha256()
        try:
            with open(state.folder / name, "rb", buffering=0) as file:
                while block := file.read(BLOCK_BYTES):
                    beat()
                    digest.update(block)
        except OSError as error:
            problems.append(f"{state.folder / name} cannot be read: {error.strerror}")
            continue
        if digest.hexdigest() != state.manifest["files"][name]["sha256"]:
            problems.append(f"{state.folder / name} was changed after it was written: its sha256 is another one")
    return problems
