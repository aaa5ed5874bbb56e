"""Reads rows from files, folders and the hub, and hands on what cannot be read as a value with its place.

A bad row is a value here, not an exception: one policy (`on_bad_row`) decides for cut lines, unknown roles and rows
the template refuses alike, and nothing is dropped without a count.
"""

import csv
import difflib
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from oneloop import sources

FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
SPLITS = {"train": ["train", "training"], "test": ["test", "eval"], "validation": ["validation", "valid", "val", "dev"]}
SPLIT_NAMES = {name: split for split, names in SPLITS.items() for name in names}


class BadRow(ValueError):
    """A row that cannot be used; `kind` is the short word under which it is counted."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def read(source: str, split: str, *, field: str = "dataset_name") -> Iterator[tuple[str, dict | BadRow]]:
    """Yield `(where, row)` for a file, a folder of files or a hub data set; `where` is `path:line`.

    Lines are read by our own reader because columnar loaders report a chunk's row number at best, and drop or merge
    rows around a byte-order mark, a cut line or two objects on one line. A Parquet file has rows for lines. A folder's
    files are taken in the order of their names; when some are named for a split (`train.jsonl`, `data/test-0.parquet`),
    only those of `split` are read, so that test rows never leak into training. Errors name the config's `field`.

    Raises ValueError for a source that is neither there nor loadable, and for one without any row.
    """
    path = Path(source).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise ValueError(f"{field} {source!r} cannot be read: {error.strerror}") from error
    if exists:
        if not re.fullmatch(r"[\w.-]+", split):
            raise ValueError(f"split {split!r}: slices work for hub data sets only, and {source!r} is a local path")
        rows = chain.from_iterable(_read_file(file, field) for file in _files(path, split, field))
    else:
        rows = _read_hub(source, split, field)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{field} {source!r} holds no row (split {split!r})")
    return chain([first], rows)


def _files(path: Path, split: str, field: str) -> list[Path]:
    if path.is_file():
        if path.suffix.lower() not in FILE_TYPES:
            sources.refuse_pickled_data([path], field)
            raise ValueError(f"{field} {str(path)!r}: cannot read {path.suffix!r}; known are {', '.join(FILE_TYPES)}")
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in FILE_TYPES
        and not file.is_dir()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if any(path.rglob("*.arrow")):
        raise ValueError(f"{field} {str(path)!r} was written by `save_to_disk`; write it with `to_parquet` instead")
    if not files:
        sources.refuse_pickled_data(path.rglob("*"), field)
        raise ValueError(f"{field} {str(path)!r} is a folder without a file of {', '.join(FILE_TYPES)}")
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(path)).lower())
        named = next((SPLIT_NAMES[word] for word in reversed(words) if word in SPLIT_NAMES), None)
        by_split.setdefault(named, []).append(file)
    if set(by_split) == {None}:
        return files
    wanted = SPLIT_NAMES.get(split.lower(), split)
    if wanted not in by_split:
        found = ", ".join(sorted(name for name in by_split if name))
        raise ValueError(f"{field} {str(path)!r} has no file for split {split!r}; its files are named for: {found}")
    return by_split[wanted]


def _read_file(path: Path, field: str) -> Iterator[tuple[str, dict | BadRow]]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
    try:
        for line, row in readers[path.suffix.lower()](path):
            yield f"{path}:{line}", row
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(f"{field}: {path} cannot be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    # A binary file is split at b"\n" alone; str.splitlines would also split inside text at U+2028 and its like.
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if raw.strip():
                yield line, _row_of(raw)


def _row_of(raw: bytes | str) -> dict | BadRow:
    try:
        value = parse_json(_decode(raw) if isinstance(raw, bytes) else raw)
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


def parse_json(text: str) -> Any:
    """Parse one JSON value; text that no tokenizer can encode is refused here, where the line is still known."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise BadRow(
                "two_values", f"more than one value on the line (column {error.colno}): one per line"
            ) from None
        raise BadRow("bad_json", f"not valid JSON ({error.msg}, column {error.colno}): is the line cut off?") from None
    except RecursionError:
        raise BadRow("bad_json", "nested too deeply to be parsed") from None
    except ValueError:
        # Python refuses to convert numbers of more than some 4300 digits.
        raise BadRow("bad_json", "holds a number with too many digits") from None
    # A tokenizer fails on half a surrogate pair with a type error; only an escape can bring one into valid UTF-8.
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise BadRow(
                "lone_surrogate", "holds half of a surrogate pair (\\ud800 to \\udfff), not a character"
            ) from None
    return value


def _read_json(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not raw.lstrip().startswith(b"["):
        # Either one object, perhaps over many lines, or JSON lines under another name.
        whole = _row_of(raw) if raw.strip() else None
        yield from [(1, whole)] if isinstance(whole, dict) else _read_jsonl(path)
        return
    text = raw.decode("utf-8", errors="surrogateescape")
    # Elements are parsed one by one, because a list parsed in one piece no longer knows its lines.
    decoder, space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")
    position, line, counted = space.match(text, text.index("[") + 1).end(), 1, 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            end = decoder.raw_decode(text, position)[1]
        except (ValueError, RecursionError) as error:
            # What follows a broken element cannot be told apart from it, so the rest of the file goes with it.
            reason = getattr(error, "msg", error)
            yield line, BadRow("bad_json", f"not valid JSON ({reason}): the file cannot be read beyond this element")
            return
        yield line, _row_of(text[position:end].encode("utf-8", errors="surrogateescape"))
        position = space.match(text, end).end()
        if text[position : position + 1] == ",":
            position = space.match(text, position + 1).end()
        elif text[position : position + 1] != "]":
            yield line, BadRow("bad_json", "no comma or bracket after this element: is the file cut off?")
            return
    if text[position + 1 :].strip():
        yield line, BadRow("two_values", "more text follows the closing bracket: a .json file holds one list")


def _read_parquet(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for line, row in enumerate(rows, start=1):
                yield line, without_nulls(row)
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _read_csv(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    # Python's own reader: it keeps "4" a text, where a columnar reader makes a number of it, and knows the line.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        names = next(reader, [])
        last = reader.line_num
        while True:
            line = last + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield line, BadRow("bad_csv", f"not valid CSV ({error}): is a quote missing?")
                return
            last = reader.line_num
            if cells is None:
                return
            if cells and len(cells) != len(names):
                yield line, BadRow("bad_csv", f"{len(cells)} cells under {len(names)} column names")
            elif any("\udc80" <= character <= "\udcff" for character in "".join(cells)):
                yield line, BadRow("bad_utf8", "not UTF-8: save the file as UTF-8")
            elif cells:
                # A cell cannot be absent, so an empty one stands for a missing key.
                yield line, {name: cell for name, cell in zip(names, cells, strict=True) if cell}


def _read_hub(source: str, split: str, field: str) -> Iterator[tuple[str, dict | BadRow]]:
    path = Path(source).expanduser()
    near = _near_names(path)
    if path.suffix.lower() in FILE_TYPES or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"{field} {source!r} does not exist{near}")
    import datasets

    try:
        rows = datasets.load_dataset(source, split=split, revision=sources.dataset_commit(source))
    except (OSError, ValueError) as error:
        reason = f"as a hub data set, split {split!r}: {error}"
        raise ValueError(f"{field} {source!r} is no existing path{near}, and {reason}") from error
    for index, row in enumerate(rows):
        yield f"{source}[{split}]:{index}", without_nulls(row)


def _near_names(path: Path) -> str:
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:5]
    return f" ({parent} has: {', '.join(near)})" if near else f" ({parent} is empty)"


def without_nulls(value: Any) -> Any:
    """Return `value` without null keys at any depth: columnar storage pads absent keys with null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
