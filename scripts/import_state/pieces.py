"""What a reader of a foreign checkpoint hands to the writer: contiguous pieces of tensors, read when written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from import_state.unpickling import Foreign


class Later:
    """A 1-D tensor that is read from its file when it is written, and let go again: it has just what
    `oneloop.state.format.write_tensors` asks a tensor for."""

    def __init__(self, length: int, dtype: torch.dtype, read: Callable[[], torch.Tensor]):
        self.dtype, self.shape, self._read = dtype, (length,), read

    def numel(self) -> int:
        return self.shape[0]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def detach(self) -> torch.Tensor:
        tensor = self._read()
        assert tensor.shape == self.shape and tensor.dtype == self.dtype
        return tensor


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + length) of one kind of a flattened tensor."""

    name: str
    kind: str
    start: int
    tensor: torch.Tensor | Later


@dataclass
class Checkpoint:
    """A foreign checkpoint as far as a training state can take it over."""

    what: str
    """In words, for messages and for the record."""
    folder: Path
    world_size: int | None
    steps: dict[str, int] = field(default_factory=dict)
    """Where a step is written, and which; the first counts."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Every tensor that has pieces."""
    pieces: list[Piece] = field(default_factory=list)
    scalars: dict[str, dict[str, int]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the importing person should know."""

    def add(self, name: str, kind: str, start: int, tensor: torch.Tensor | Later) -> None:
        if tensor.numel():
            self.pieces.append(Piece(name, kind, start, tensor))

    def kinds_of(self) -> dict[str, dict[str, list[Piece]]]:
        """name -> kind -> its pieces in order."""
        found: dict[str, dict[str, list[Piece]]] = {}
        for piece in self.pieces:
            found.setdefault(piece.name, {}).setdefault(piece.kind, []).append(piece)
        for kinds in found.values():
            for pieces in kinds.values():
                pieces.sort(key=lambda piece: piece.start)
        return found

    def check_tiling(self) -> None:
        """Raises Foreign unless the pieces of each tensor make it up without hole or overlap."""
        for name, kinds in self.kinds_of().items():
            for kind, pieces in kinds.items():
                position = 0
                for piece in pieces:
                    if piece.start != position:
                        raise Foreign(f"{self.folder}: {kind} of {name} has a hole or an overlap at {position}.")
                    position += piece.tensor.numel()
                if position != math.prod(self.shapes[name]):
                    raise Foreign(
                        f"{self.folder}: {kind} of {name} has {position} elements, its shape "
                        f"{list(self.shapes[name])} wants {math.prod(self.shapes[name])}."
                    )


def flat(value, place: str) -> torch.Tensor:
    """A tensor out of a file as plain contiguous elements. Raises Foreign for anything else under that name."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise Foreign(f"{place} is no dense tensor.")
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise Foreign(f"{place} is a {type(value).__name__}, which holds a part of a tensor: name the folder as saved.")
    return value.detach().contiguous().reshape(-1)


def step_of(value, place: str) -> int:
    """A step counter, which tools keep as a number or as a tensor of one. Raises Foreign."""
    try:
        number = float(value)
        if number != int(number) or number < 0:
            raise ValueError(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise Foreign(f"{place} is no step: {value!r:.60}.") from error
    return int(number)
