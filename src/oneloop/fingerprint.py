"""A short value that tells local files apart, for the record of a run: a folder has no commit hash.

It answers "is this the model, or the data, of that run?", in a second where reading 100 GB would take minutes. It is no
proof against somebody who changes single weights on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

_WHOLE_UP_TO_BYTES = 64 << 20
_NUM_SPOTS = 64
_SPOT_BYTES = 4096
_LOADED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".bin", ".py")


def of_model(folder: Path) -> dict[str, str | int]:
    """The fingerprint of the files that loaders read, all at the top of a model's or an adapter's folder; a README or
    a training state beside them changes nothing. Raises OSError."""
    return _of_files(folder, [file for file in folder.iterdir() if file.is_file() and file.suffix in _LOADED])


def of_data(path: Path) -> dict[str, str | int]:
    """The fingerprint of a file, or of all files of a folder that are not hidden. Raises OSError."""
    if path.is_file():
        return _of_files(path.parent, [path])
    found = (file for file in path.rglob("*") if file.is_file())
    return _of_files(
        path, [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    )


def _of_files(folder: Path, files: Iterable[Path]) -> dict[str, str | int]:
    digest, num_files, num_bytes = hashlib.sha256(), 0, 0
    for file in sorted(files):
        size = file.stat().st_size
        num_files, num_bytes = num_files + 1, num_bytes + size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        for block in _blocks(file, size):
            digest.update(block)
    return {"sha256": digest.hexdigest(), "num_files": num_files, "num_bytes": num_bytes}


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    """The content; of a large file the header of safetensors and spots all over it: training moves nearly every
    weight, so one of many spots shows it."""
    with file.open("rb") as opened:
        if size <= _WHOLE_UP_TO_BYTES:
            while block := opened.read(1 << 20):
                yield block
            return
        start = opened.read(8)  # of safetensors: the length of the header
        header_bytes = int.from_bytes(start, "little") if file.suffix == ".safetensors" else 0
        yield start + opened.read(min(header_bytes, _WHOLE_UP_TO_BYTES))
        for spot in range(_NUM_SPOTS):
            opened.seek(spot * (size - _SPOT_BYTES) // (_NUM_SPOTS - 1))
            yield opened.read(_SPOT_BYTES)
