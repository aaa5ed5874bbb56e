"""Reads files row by row, cheaply and without judging a row: what is read can be parsed elsewhere, and anywhere.

A reader hands on each row as it stands in its file, with its line and a cursor. Parsing (`parse`) is a step of its
own, so that one process can read in order while others do the work. Memory stays flat, whatever the size of a file:
JSON lines, CSV and text are held one line at a time, Parquet some megabytes and Arrow a batch at a time. Only a
`.json` file is read whole, since a list has no lines: a large one is better written as JSON lines.

Lines are read by our own reader because columnar loaders report a chunk's row number at best, and drop or merge rows
around a byte-order mark, a cut line or two objects on one line.
"""

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oneloop.data import columnar
from oneloop.data.files import BadRow, file_type, parse_json
from oneloop.mixture import Source

BOM = b"\xef\xbb\xbf"
LINE_LIMIT_BYTES = 64 << 20
# What files turn out to be that have the name of something else: one clear message instead of a bad row a line.
_DISGUISES = {
    b"version https://git-lfs": "is only a pointer of Git LFS to the file: run `git lfs pull`",
    b"\x1f\x8b": "is compressed by gzip: add .gz to its name",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd: add .zst to its name",
    b"PAR1": "is a Parquet file: name it .parquet",
    b"ARROW1": "is an Arrow file: name it .arrow",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"\xff\xfe": "is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text: save it as UTF-8",
}

Cursor = list[int]
"""[line, place]: the line of the row it came with, and where the next one begins: a byte offset in (unpacked) JSON
lines and text, a number of rows elsewhere."""


class Raw(NamedTuple):
    """One row as it stands in its file; cheap to make, to pickle and to hold."""

    line: int
    """Line in JSON lines, CSV and text, row in Parquet and Arrow, both from 1; line of the element in a JSON list;
    index from 0 in a hub data set, which is how `datasets` counts."""
    data: bytes | dict | BadRow
    """An undecoded JSON value; a row of a file with columns, where None stands for an empty cell; or why not."""


def read(path: Path | str, start: Cursor | None = None) -> Iterator[tuple[Raw, Cursor]]:
    """Yield each row with a cursor: `read(path, cursor)` yields what follows the row that came with it.

    Blank lines are no rows. A byte-order mark at the start of a JSON line or a file is left out. In a text file each
    line that is not blank is a row `{"text": ...}`. An empty cell of a CSV file is None, as in files with types.

    Raises ValueError naming the file when it cannot be read on: a compressed or Parquet file that is cut off or
    damaged, a JSON list or CSV file whose rows cannot be told apart from some line on. The rows before were yielded.
    """
    path, line = Path(path), 0
    start = start or [0, 0]
    try:
        kind, compression = file_type(path)
        _refuse_disguise(path, kind, compression)
        for line, data, place in _READERS[kind](path, start):
            yield Raw(line, data), [line, place]
    except (OSError, EOFError, UnicodeError, RecursionError, zlib.error, columnar.Unreadable) as error:
        after = f" beyond row or line {line}" if line else ""
        raise ValueError(f"{path} cannot be read{after}: {error}") from error


def seeks(path: Path | str) -> bool:
    """Whether `start` is found at once, rather than by reading the file again from its beginning."""
    return file_type(Path(path)) in ((".jsonl", ""), (".txt", ""), (".parquet", ""), (".arrow", ""))


def read_hub(source: Source, start: Cursor | None = None) -> Iterator[tuple[Raw, Cursor]]:
    """Yield the rows of a hub data set, which is downloaded first. Raises ValueError naming `source.field`."""
    for index, row in columnar.read_hub(source, (start or [0, 0])[1], streaming=False):
        yield Raw(index, row), [index, index + 1]


def stream_hub(source: Source, start: Cursor | None = None) -> Iterator[tuple[Raw, Cursor]]:
    """Yield the rows of a hub data set as they arrive, nothing kept on disk. Raises ValueError as `read_hub` does.

    `start` skips without decoding where the data set's format allows, and reads again where it does not.
    """
    for index, row in columnar.read_hub(source, (start or [0, 0])[1], streaming=True):
        yield Raw(index, row), [index, index + 1]


def parse(data: bytes | dict | BadRow) -> dict | BadRow:
    """Return the row, or why there is none. Only JSON still has to be parsed; all else is passed through."""
    if not isinstance(data, bytes):
        return data
    try:
        value = parse_json(_decode(data.removeprefix(BOM)))
    except BadRow as bad:
        return bad
    if not isinstance(value, dict):
        return BadRow("not_an_object", f"a row is a JSON object, this is a {type(value).__name__}")
    return value


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
        raise BadRow("bad_utf8", f"{place} is not UTF-8: was it saved as Latin-1? Save the file as UTF-8") from None


# --- opening ----------------------------------------------------------------------------------------------------------


def _refuse_disguise(path: Path, kind: str, compression: str) -> None:
    with path.open("rb") as file:
        start = file.read(32)
    if compression and not start:
        raise ValueError(f"{path} is empty, and a compressed file never is: was it cut off?")
    own = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1", ".arrow": b"ARROW1"}
    for magic, remedy in _DISGUISES.items():
        if start.startswith(magic) and magic != own.get(compression or kind):
            raise ValueError(f"{path} {remedy}")


def _open(path: Path) -> io.BufferedReader:
    _, compression = file_type(path)
    if compression == ".gz":
        raw: Any = gzip.open(path)
    elif compression == ".zst":
        raw = columnar.open_zstd(path)
    else:
        return path.open("rb", buffering=1 << 18)
    return io.BufferedReader(raw, 1 << 18)


def _lines(path: Path, start: Cursor) -> Iterator[tuple[int, bytes | BadRow, int]]:
    """Yield (line, its bytes with the line end, offset of the next). Split at b"\\n" alone: str.splitlines would also
    split inside of text, at U+2028 and its like."""
    line, offset = start
    with _open(path) as file:
        _skip(file, offset, path)
        while raw := file.readline(LINE_LIMIT_BYTES):
            line, offset = line + 1, offset + len(raw)
            data: bytes | BadRow = raw
            if len(raw) == LINE_LIMIT_BYTES and not raw.endswith(b"\n"):
                data = BadRow("too_big", f"the line is longer than {LINE_LIMIT_BYTES >> 20} MiB")
                while not raw.endswith(b"\n") and (raw := file.readline(1 << 20)):
                    offset += len(raw)
            yield line, data, offset


def _skip(file: io.BufferedReader, offset: int, path: Path) -> None:
    if file_type(path)[1]:
        while offset and (block := file.read(min(offset, 1 << 20))):
            offset -= len(block)
    else:
        end = os.fstat(file.fileno()).st_size
        file.seek(offset)
        offset = max(0, offset - end)
    if offset:
        raise ValueError(f"{path} is shorter than it was when it was read last: continue with the file as it was then")


# --- text -------------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path, start: Cursor) -> Iterator[tuple[int, bytes | BadRow, int]]:
    for line, raw, offset in _lines(path, start):
        if isinstance(raw, BadRow):
            yield line, raw, offset
        elif raw.removeprefix(BOM).strip():
            yield line, raw.rstrip(b"\r\n"), offset


def _read_text(path: Path, start: Cursor) -> Iterator[tuple[int, dict | BadRow, int]]:
    for line, raw, offset in _lines(path, start):
        data: dict | BadRow | bytes = raw
        if isinstance(raw, bytes):
            raw = (raw.removeprefix(BOM) if line == 1 else raw).removesuffix(b"\n").removesuffix(b"\r")
            if not raw.strip():
                continue
            try:
                data = {"text": _decode(raw)}
            except BadRow as bad:
                data = bad
        yield line, data, offset


def _read_json(path: Path, start: Cursor) -> Iterator[tuple[int, bytes, int]]:
    for number, (line, raw) in enumerate(_json_values(path), start=1):
        if number > start[1]:
            yield line, raw, number


def _json_values(path: Path) -> Iterator[tuple[int, bytes]]:
    with _open(path) as file:
        raw = file.read().removeprefix(BOM)
    text = raw.decode("utf-8", errors="surrogateescape")
    if not text.lstrip(" \t\r\n").startswith("["):
        # Either one object, perhaps over many lines, or JSON lines under another name.
        if _is_one_value(text):
            yield 1, raw
        else:
            for line, part in enumerate(io.BytesIO(raw), start=1):
                if part.removeprefix(BOM).strip():
                    yield line, part.rstrip(b"\r\n")
        return
    # Elements are cut out one by one, because a list parsed in one piece no longer knows its lines.
    # Only their ends are looked for, so a number that Python refuses to convert is left for `parse` to refuse.
    decoder, space = json.JSONDecoder(parse_int=len, parse_float=len), re.compile(r"[ \t\r\n]*")
    position, line, counted = space.match(text, text.index("[") + 1).end(), 1, 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        # What follows a broken element cannot be told apart from it: to go on would drop rows that nobody counts.
        fault = f"{path}:{line}: {{}}: the file cannot be read beyond this element. Is it cut off?"
        try:
            end = decoder.raw_decode(text, position)[1]
        except (ValueError, RecursionError) as error:
            raise ValueError(fault.format(f"not valid JSON ({getattr(error, 'msg', error)})")) from None
        yield line, text[position:end].encode("utf-8", errors="surrogateescape")
        position = space.match(text, end).end()
        if text[position : position + 1] == ",":
            position = space.match(text, position + 1).end()
        elif text[position : position + 1] != "]":
            raise ValueError(fault.format("no comma or bracket after this element"))
    if text[position + 1 :].strip():
        raise ValueError(f"{path}:{line}: more text follows the closing bracket: a .json file holds one list")


def _is_one_value(text: str) -> bool:
    try:
        json.loads(text, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return True


def _read_csv(path: Path, start: Cursor) -> Iterator[tuple[int, dict | BadRow, int]]:
    # Python's own reader: it keeps "4" a text, where a columnar reader makes a number of it, and knows the line.
    csv.field_size_limit(LINE_LIMIT_BYTES)
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(_csv_lines(file, path), strict=True)
        number, last = 0, 0
        try:
            names = next(filter(None, reader), [])
            _check_names(names, path)
            last = reader.line_num
            for cells in reader:
                line, last = last + 1, reader.line_num
                number += bool(cells)
                if cells and number > start[1]:
                    yield line, _csv_row(names, cells), number
        except csv.Error as error:
            raise ValueError(
                f"{path}:{last + 1}: not valid CSV ({error}): the file cannot be read beyond this row. Is a quote "
                "missing, or one in a text not doubled?"
            ) from error


def _csv_lines(file: io.TextIOWrapper, path: Path) -> Iterator[str]:
    while line := file.readline(LINE_LIMIT_BYTES):
        if len(line) == LINE_LIMIT_BYTES:
            raise ValueError(f"{path} has a line longer than {LINE_LIMIT_BYTES >> 20} MiB: is it a CSV file?")
        yield line


def _check_names(names: list[str], path: Path) -> None:
    columnar.refuse_double_names(names, path)
    if not _is_utf8("".join(names)):
        raise ValueError(f"{path} has column names that are not UTF-8: save the file as UTF-8")


def _csv_row(names: list[str], cells: list[str]) -> dict | BadRow:
    if len(cells) != len(names):
        return BadRow("bad_csv", f"{len(cells)} cells under {len(names)} column names")
    if not _is_utf8("".join(cells)):
        return BadRow("bad_utf8", "not UTF-8: save the file as UTF-8")
    # A cell cannot be absent, so an empty one stands for that.
    return {name: cell or None for name, cell in zip(names, cells, strict=True)}


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a byte that could not be decoded, kept as half of a surrogate pair
        return False
    return True


def _by_row(read_rows: Any) -> Any:
    return lambda path, start: ((number, row, number) for number, row in read_rows(path, start[1]))


_READERS = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_text,
    ".parquet": _by_row(columnar.read_parquet),
    ".arrow": _by_row(columnar.read_arrow),
}
