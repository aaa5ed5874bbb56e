"""Pickles of another tool's checkpoint, read so that nothing in them runs.

A pickle is a program. torch's own files are read by its restricted reader, which knows tensors, plain values and the
few classes named below. The index of a torch.distributed.checkpoint folder is a bare pickle, which torch itself reads
without any restriction (torch 2.15, distributed/checkpoint/filesystem.py, `read_metadata`): here it is read with
stand-ins for the classes that belong into it, and anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from oneloop.state.format import DTYPES

TRUST = "--trust_checkpoint"


class Foreign(ValueError):
    """A checkpoint that cannot be imported; the message names the file, what is wrong, and what helps."""


class _Bare:
    """Stands in for a class of the other tool: keeps what it was made of, and does nothing with it."""

    def __init__(self, *arguments):
        self.arguments = arguments


class _Number(int):
    """Stands in for an enumeration whose members are numbers."""


def _stand_ins() -> list[tuple[type, str]]:
    """What deepspeed 0.19.8 puts into its files beside tensors and plain values (`state_dict` of the optimizers in
    runtime/zero/stage_1_and_2.py, stage3.py and runtime/bf16_optimizer.py), by full name. None of it is imported."""
    bare = (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
    # One class each: torch's reader keeps them in a set.
    return [(type("StandIn", (_Bare,), {}), name) for name in bare] + [
        (type("StandIn", (_Number,), {}), "deepspeed.runtime.zero.config.ZeroStageEnum")
    ]


def load(path: Path, trust: bool) -> Any:
    """What a file of `torch.save` holds, its tensors mapped from the file instead of read. Raises Foreign."""
    if not path.is_file():
        raise Foreign(f"{path} is missing. Copy the whole checkpoint, from all nodes that wrote it.")
    if not zipfile.is_zipfile(path):
        raise Foreign(f"{path} is cut off, or no file that torch.save has written: it is not read.")
    return _load(path, path, trust, mmap=True)


def load_part(path: Path, offset: int, length: int, trust: bool) -> Any:
    """What `torch.save` has written into a part of a file. Raises Foreign."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise Foreign(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != length or not zipfile.is_zipfile(io.BytesIO(data)):
        raise Foreign(f"{path} is cut off, or holds at {offset} nothing that torch.save has written: it is not read.")
    return _load(path, io.BytesIO(data), trust)


def _load(path: Path, source, trust: bool, **options) -> Any:
    try:
        if trust:
            return torch.load(source, map_location="cpu", weights_only=False, **options)
        with torch.serialization.safe_globals(_stand_ins()):
            return torch.load(source, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise Foreign(_refusal(path, _first_line(error))) from error
    except Exception as error:  # a damaged file shows as many kinds of errors as there are ways to be damaged
        raise Foreign(f"{path} cannot be read: {type(error).__name__}: {_first_line(error)}") from error


def _refusal(path: Path, what: str) -> str:
    return (
        f"{path} holds more than tensors and plain values, and could run code when it is read: {what} If you trust "
        f"whoever wrote it, {TRUST} reads it nevertheless."
    )


def _first_line(error: Exception) -> str:
    """torch's advice on how to switch its caution off is none that should be passed on."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    text = (telling or lines or ["?"])[0]
    text = text.removeprefix("WeightsUnpickler error: ").split(" Please use ")[0].split(" was not an allowed")[0]
    return text if text.endswith(".") else f"{text}."


# --- the index of a torch.distributed.checkpoint folder ---------------------------------------------------------------

_INDEX_CLASSES = {  # torch 2.15: distributed/checkpoint/metadata.py and filesystem.py
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
}


class Record:
    """What an object of the index was: the name of its class, and the values it was given."""

    kind = ""

    def __init__(self, *arguments):
        self.arguments = arguments
        self.values: dict[str, Any] = {}
        self.state: Any = None

    def __new__(cls, *arguments):
        made = super().__new__(cls)
        made.__init__(*arguments)  # the pickle of a dataclass creates it without
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.values = state

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)


class _IndexReader(pickle.Unpickler):
    """Gives the pickle nothing but stand-ins made for this one reading: even an object that the pickle tampers with
    is no part of torch or of this program."""

    def __init__(self, file):
        super().__init__(file)
        self._allowed = {
            (module, name): type(name, (Record,), {"kind": name})
            for module, names in _INDEX_CLASSES.items()
            for name in names
        }
        self._allowed |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()}
        self._allowed |= {
            ("torch", "Size"): lambda *sizes: tuple(*sizes),
            ("torch.serialization", "_get_layout"): lambda name: name,
            ("collections", "OrderedDict"): lambda *items: dict(*items),
            ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
            ("pathlib._local", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._allowed[module, name]


def load_index(path: Path) -> Record:
    """The index of a torch.distributed.checkpoint folder, as stand-ins.

    There is no way around the restriction: whoever wrote it, an index has no need of anything else. Raises Foreign.
    """
    try:
        with open(path, "rb") as file:
            index = _IndexReader(file).load()
    except OSError as error:
        raise Foreign(f"{path} cannot be read: {error.strerror}") from error
    except pickle.UnpicklingError as error:
        raise Foreign(f"{path} is no index of a checkpoint, and could run code when it is read: {error}.") from error
    except Exception as error:  # a cut or flipped index fails in as many ways as pickle has opcodes
        raise Foreign(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(index, Record) or index.kind != "Metadata":
        raise Foreign(f"{path} is no index of a torch.distributed.checkpoint folder.")
    return index
