"""Finds the files that a source's path stands for, and defines what all readers share: bad rows and strict JSON.

A bad row is a value here, not an exception: one policy (`on_bad_row`) decides for cut lines, unknown roles and rows
the template refuses alike, and nothing is dropped without a count.
"""

import difflib
import glob
import itertools
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oneloop import sources
from oneloop.mixture import Source

TEXT_TYPES = (".jsonl", ".json", ".csv", ".txt")
COMPRESSIONS = (".gz", ".zst")
FILE_TYPES = (*TEXT_TYPES, ".parquet", ".arrow")
KNOWN_TYPES = f"{', '.join(FILE_TYPES)}; all but the last two also with {' or '.join(COMPRESSIONS)}"
SPLITS = {"train": ["train", "training"], "test": ["test", "eval"], "validation": ["validation", "valid", "val", "dev"]}
SPLIT_NAMES = {name: split for split, names in SPLITS.items() for name in names}
# What tools write beside data: `datasets` (save_to_disk, its cache, the hub) and people (README.txt).
_BOOKKEEPING = re.compile(r"dataset_infos?\.json|dataset_dict\.json|cache-.*\.arrow", re.IGNORECASE)
_NO_DATA = re.compile(r"(readme|licen[sc]e|notice|copying|citation|changelog|requirements)\b.*\.txt", re.IGNORECASE)
_MAX_DEPTH = 100


class BadRow(ValueError):
    """A row that cannot be used; `kind` is the short word under which it is counted. Travels between processes."""

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)  # pickle makes it again from these
        self.kind = kind

    def __str__(self) -> str:
        return self.args[1]


# --- JSON -------------------------------------------------------------------------------------------------------------


def parse_json(text: str) -> Any:
    """Parse one JSON value, strictly: what Python's parser lets pass, and training would only choke on later or never
    notice, is refused here, where the line is still known.

    That is text which no tokenizer can encode, an object with a key twice (one value would be dropped), NaN, Infinity
    and numbers beyond a float, and nesting so deep that templates fail on it. Raises BadRow.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise BadRow(
                "two_values", f"more than one value on the line (column {error.colno}): one per line"
            ) from None
        raise BadRow("bad_json", f"not valid JSON ({error.msg}, column {error.colno}): is the line cut off?") from None
    except RecursionError:
        raise BadRow("bad_json", "nested too deeply to be parsed") from None
    except BadRow:
        raise
    except ValueError:
        # Python refuses to convert numbers of more than some 4300 digits.
        raise BadRow("bad_json", "holds a number with too many digits") from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deep(value):
        raise BadRow("bad_json", f"nested too deeply: more than {_MAX_DEPTH} levels")
    # A tokenizer fails on half a surrogate pair with a type error; only an escape can bring one into valid UTF-8.
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise BadRow(
                "lone_surrogate", "holds half of a surrogate pair (\\ud800 to \\udfff), not a character"
            ) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise BadRow("duplicate_key", f"an object has the key {shown(twice)} twice: which value is meant?")
    return value


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise BadRow("bad_number", "holds a number too large for a float")
    return value


def _constant(name: str) -> None:
    raise BadRow("bad_number", f"holds {name}, which is not JSON: leave the key out, or write null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        if not (level := list(itertools.chain.from_iterable(inner))):
            return False
    return True


def without_nulls(value: Any) -> Any:
    """Return `value` without null keys at any depth: columnar storage pads absent keys with null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def shown(value: Any) -> str:
    """A value for a message, cut to what is needed to recognise it: messages end up in logs, where no sample should."""
    text = repr(value[:40] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= 48 else f"{text[:44]}..."


def printable(text: str) -> str:
    """Somebody's text for a terminal or a log: control characters must not act there, nor begin a line of their own."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# --- finding files ----------------------------------------------------------------------------------------------------


def file_type(path: Path) -> tuple[str, str] | None:
    """The type of a file and its compression by its name, as in (".jsonl", ".gz"), or None for what is no input."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix.lower()
        return (inner, suffix) if inner in TEXT_TYPES else None
    return (suffix, "") if suffix in FILE_TYPES else None


def find(source: Source) -> list[Path] | None:
    """Return the local files of a source in a fixed order, or None for what must be the id of a hub data set.

    A folder stands for all its files of known types, in the order of their names, hidden ones left out; when some are
    named for a split (`train.jsonl`, `data/test-0.parquet`), only those of `source.split` are taken, so that test rows
    never leak into training. The same holds for what a glob matches, unless all of it is named for one split: then
    the pattern has chosen. A folder written by `save_to_disk` has the files, and the splits, that it lists itself.
    A file in a folder that is a link to somewhere outside of it is refused: a data set that was handed on must not
    make a run read other files. What the user names himself, links and `..` included, is taken as it is.

    Raises ValueError naming `source.field`.
    """
    found = _found(source)
    for file in found or ():
        if not file.is_file():
            what = "a link that leads nowhere" if file.is_symlink() else "neither a file nor a folder"
            raise ValueError(f"{source.field}: {file} is {what}: remove it, or name the others")
    return found


def _found(source: Source) -> list[Path] | None:
    name = source.path if len(source.path) <= 200 else f"{source.path[:200]}..."
    path = Path(source.path).expanduser()
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if glob.has_magic(source.path):
            return _matched(path, source, name)
        if file_type(path) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source.path):
            raise ValueError(f"{source.field} {name!r} does not exist{near_names(path)}") from None
        return None
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{source.field} {name!r} cannot be read: {reason}") from error
    _check_local(source)
    if path.is_file():
        if not file_type(path):
            sources.refuse_pickled_data([path], source.field)
            raise ValueError(f"{source.field} {name!r}: cannot read {path.suffix!r}; known are {KNOWN_TYPES}")
        if source.split.lower() not in SPLIT_NAMES:
            near = difflib.get_close_matches(source.split, SPLIT_NAMES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{source.field}: {name!r} is one file and has no split {source.split!r}{hint}")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{source.field} {name!r} is neither a file nor a folder")
    if (path / "dataset_dict.json").is_file():
        return _of_dataset_dict(path, source)
    if not (files := _folder(path, source)):
        sources.refuse_pickled_data(path.rglob("*"), source.field)
        raise ValueError(f"{source.field} {name!r} is a folder without a file of {KNOWN_TYPES}")
    return _of_split(files, path, source, name)


def _check_local(source: Source) -> None:
    if not re.fullmatch(r"[\w.-]+", source.split):
        raise ValueError(
            f"{source.field}: split {source.split!r}: slices work for hub data sets only, and {source.path!r} is a "
            "local path"
        )
    for option in ("name", "revision"):
        if value := getattr(source, option):
            raise ValueError(
                f"{source.field}: {option} {value!r} has a meaning for hub data sets only, and {source.path!r} is a "
                "local path: drop it"
            )


def _matched(pattern: Path, source: Source, name: str) -> list[Path]:
    _check_local(source)
    matches = sorted(Path(match) for match in glob.glob(str(pattern), recursive=True))
    found: dict[Path, None] = {}
    for match in matches:
        if match.is_dir():
            found |= dict.fromkeys(_folder(match, source))
        elif file_type(match) and not _BOOKKEEPING.fullmatch(match.name):
            found[match] = None
    files = [file for file in found if not (file.name == "state.json" and (file.parent / "dataset_info.json").exists())]
    fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    if not files:
        sources.refuse_pickled_data(matches, source.field)
        what = f"only {len(matches)} other files or folders" if matches else "nothing"
        raise ValueError(f"{source.field} {name!r} matches {what}: known are {KNOWN_TYPES}{near_names(fixed / 'a')}")
    files = _without_notes(sorted(files), source, name)
    if len({_split_of(file, fixed) for file in files}) == 1:
        return files
    return _of_split(files, fixed, source, name)


def _folder(folder: Path, source: Source) -> list[Path]:
    """The data files of a folder and the folders in it, whatever their split."""
    found: list[Path] = []

    def stop(error: OSError) -> None:
        raise ValueError(f"{source.field}: {error.filename} cannot be read: {error.strerror}") from error

    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # Links to folders are not followed: inside, the files have another name; outside, they are refused.
        _refuse_links_out(folder, [Path(parent, name) for name in folders], source)
        saved = _saved(Path(parent), source) if {"state.json", "dataset_info.json"} <= set(names) else None
        for name in names:
            file = Path(parent, name)
            if name.startswith(".") or not file_type(file) or _BOOKKEEPING.fullmatch(name):
                continue
            if saved is not None and (name == "state.json" or file.suffix == ".arrow" and file not in saved):
                continue
            _refuse_links_out(folder, [file], source)
            # A pipe would be waited for; a link to nowhere is an error when it is read.
            if file.is_file() or not file.exists():
                found.append(file)
    return _without_notes(sorted(found), source, str(folder))


def _without_notes(files: list[Path], source: Source, name: str) -> list[Path]:
    """Leave README.txt and its like out, and refuse other text files beside rows: which of them is data?"""
    files = [file for file in files if not _NO_DATA.fullmatch(file.name)]
    texts = [file for file in files if file_type(file)[0] == ".txt"]
    if texts and len(texts) < len(files):
        raise ValueError(
            f"{source.field} {name!r} holds text files ({texts[0].name}) beside files of rows: name those that are "
            "meant by a glob, such as *.jsonl"
        )
    return files


def _of_split(files: list[Path], folder: Path, source: Source, name: str) -> list[Path]:
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file, folder), []).append(file)
    if set(by_split) == {None}:
        return files
    wanted = SPLIT_NAMES.get(source.split.lower(), source.split)
    if wanted not in by_split:
        found = ", ".join(sorted(split for split in by_split if split))
        raise ValueError(
            f"{source.field} {name!r} has no file for split {source.split!r}; its files are named for: {found}"
        )
    return by_split[wanted]


def _split_of(file: Path, folder: Path) -> str | None:
    words = re.split(r"[^a-z]+", os.path.relpath(file, folder).lower())
    return next((SPLIT_NAMES[word] for word in reversed(words) if word in SPLIT_NAMES), None)


def _of_dataset_dict(folder: Path, source: Source) -> list[Path]:
    splits = _json_file(folder / "dataset_dict.json", "splits", source)
    wanted = SPLIT_NAMES.get(source.split.lower())
    split = next((name for name in splits if name == source.split), None)
    split = split or next((name for name in splits if wanted and SPLIT_NAMES.get(name.lower()) == wanted), None)
    if split is None:
        raise ValueError(
            f"{source.field} {str(folder)!r} has no split {source.split!r}; it has: {', '.join(sorted(splits))}"
        )
    files = _saved(folder / split, source)
    _refuse_links_out(folder, files, source)
    return files


def _saved(folder: Path, source: Source) -> list[Path]:
    """The files of a data set that `save_to_disk` wrote: others may be left there from before."""
    names = [
        entry.get("filename") if isinstance(entry, dict) else entry
        for entry in _json_file(folder / "state.json", "_data_files", source)
    ]
    files = [folder / name for name in _plain(names, folder / "state.json", source)]
    if missing := [file.name for file in files if not file.exists()]:
        raise ValueError(f"{source.field}: {folder / 'state.json'} names {missing[0]}, which is not there")
    return files


def _json_file(path: Path, key: str, source: Source) -> list:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{source.field}: {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise ValueError(f"{source.field}: {path} was not written by `save_to_disk`: it has no list {key!r}")
    if content.get("_indices_data_files"):
        # datasets before 1.7: the rows are those that another file points to.
        raise ValueError(f"{source.field}: {path} is of a version of datasets long gone: save the data set again")
    return content[key] if key != "splits" else _plain(content[key], path, source)


def _plain(names: list, path: Path, source: Source) -> list[str]:
    for name in names:
        if not isinstance(name, str) or not name or re.search(r"[/\\\0]|^\.\.?$", name):
            raise ValueError(f"{source.field}: {path} names {shown(name)}: expected are names of what is beside it")
    return names


def _refuse_links_out(folder: Path, paths: Iterable[Path], source: Source) -> None:
    real = os.path.realpath(folder)
    # A data set downloaded from the hub is a folder of links into the `blobs` of its own cache folder.
    blobs = os.path.join(os.path.dirname(os.path.dirname(real)), "blobs")
    inside = (real, blobs) if os.path.basename(os.path.dirname(real)) == "snapshots" else (real,)
    for path in paths:
        target = os.path.realpath(path)
        if not any(target.startswith(root.rstrip(os.sep) + os.sep) for root in inside):
            raise ValueError(
                f"{source.field} {source.path!r}: {path} is a link to {target}, outside of the folder: name that path "
                "itself, or copy the file"
            )


def near_names(path: Path) -> str:
    """What lies where `path` was looked for, as the end of a message: the likeliest names, or a few."""
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:5]
    return f" ({parent} has: {', '.join(near)})" if near else f" ({parent} is empty)"
