"""Prepares one source: reads, checks and tokenises its rows into an entry of the cache, once for all runs that need
the same."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from oneloop import sources
from oneloop.data import cache, files, readers, rows, workers
from oneloop.data.reports import Report
from oneloop.data.rowsets import Fingerprint
from oneloop.mixture import Source

if TYPE_CHECKING:
    from oneloop.config import RecipeConfig

Encode = Callable[[Any, Any, list[dict], bool], list]
"""A recipe's own part: (settings, tokenizer, examples, for_evaluation) -> for each example a list of its rows, or a
BadRow. A row is {column: (T,) int, or text}, `input_ids` and `labels` among them."""

_CHUNK_ROWS, _CHUNK_BYTES = 512, 1 << 20
_WORTH_PROCESSES = 1 << 20  # bytes of data; less is done before they have started
_GENERAL = ("max_length", "truncation", "split_special_tokens")
_NO_EFFECT_ON_ROWS = ("eval_generations", "eval_match")


class Job(NamedTuple):
    """What rows become, apart from the rows."""

    settings: types.SimpleNamespace
    tokenizer: Any
    encode: Encode
    for_evaluation: bool
    normalise: Callable = rows.normalise
    form_of: Callable = rows.form_of
    ignored_columns: Callable = rows.ignored_columns


class _Settings(types.SimpleNamespace):
    """The fields of a config that rows may depend on, which are those that prepared rows are known by."""

    def __getattr__(self, name: str):
        raise AttributeError(
            f"encode reads config.{name}, but rows may depend only on {', '.join(sorted(vars(self)))}, by which "
            "they are "
            "found again: make it a field of the recipe's own config class"
        )


def settings_of(config: RecipeConfig) -> types.SimpleNamespace:
    """The fields that `encode` may read: what says how rows are cut, and all fields of the recipe's own config
    class."""
    from oneloop.config import RecipeConfig

    general = {field.name for field in dataclasses.fields(RecipeConfig)} - set(_GENERAL)
    names = [field.name for field in dataclasses.fields(config) if field.name not in general]
    return _Settings(**{name: getattr(config, name) for name in names if name not in _NO_EFFECT_ON_ROWS})


def prepare(
    source: Source, job: Job, root: Path, num_proc: int | None, beat: Callable[[], None], shows: bool
) -> tuple[Path, list[str]]:
    """The folder of the source's entry, prepared now unless it is there, and the names of the files it came from.

    Raises ValueError for a source that is neither there nor readable.
    """
    rows.check(source)
    paths = files.find(source)
    names = [f"{source.path}[{source.split}]"] if paths is None else [str(path) for path in paths]
    key = cache.key_of(_identity(source, paths, job, root, beat))
    found = cache.find(root, key)
    if found:
        return found, names
    with cache.claimed(root, key, beat) as writer:
        if writer is not None:
            _write(source, paths, job, writer, num_proc, beat, shows).publish(root / key)
    return root / key, names


# --- what an entry depends on -----------------------------------------------------------------------------------------


def _identity(source: Source, paths: list[Path] | None, job: Job, root: Path, beat) -> dict[str, Any]:
    if paths is None:
        commit = sources.dataset_commit(source.path, source.revision)
        content: Any = {"hub": source.path, "name": source.name, "split": source.split, "revision": commit}
    else:
        content = [[cache.file_sha256(path, root, beat), "".join(path.suffixes[-2:])] for path in paths]
    return {
        "content": content,
        "columns": source.columns,
        "format": source.format,
        "settings": {name: repr(value) for name, value in vars(job.settings).items()},
        "for_evaluation": job.for_evaluation,
        "tokenizer": tokenizer_sha256(job.tokenizer),
        "code": code_sha256(job.encode),
        "versions": {name: metadata.version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }


def tokenizer_sha256(tokenizer) -> str:
    """A digest of all that decides which tokens a text and a conversation become; None is for an `encode` that needs no
    tokenizer."""
    if tokenizer is None:
        return "none"
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left behind by whatever was tokenised last.
    backend.pop("truncation", None), backend.pop("padding", None)
    special = {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())}
    parts = [backend, special, tokenizer.chat_template, type(tokenizer).__name__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def code_sha256(encode: Encode) -> str:
    """A digest of the code that makes rows: this package, and the file of the recipe's `encode`, whole, since what a
    function uses of its file (a pattern, a class, a decorated function) cannot be told for certain."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    file = inspect.getsourcefile(encode) if inspect.isfunction(encode) else None
    if file and Path(file).is_file():
        digest.update(Path(file).read_bytes())
    for text in _sources_of(encode, set()):
        digest.update(text.encode())
    return digest.hexdigest()


def _sources_of(function, seen: set) -> Iterator[str]:
    if not inspect.isfunction(function) or function in seen:
        return
    seen.add(function)
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):  # typed into an interactive session
        yield repr(function.__code__.co_code) + repr(function.__code__.co_consts)
    for name in sorted(_names_in(function.__code__)):
        value = function.__globals__.get(name)
        if inspect.isfunction(value) and value.__module__ == function.__module__:
            yield from _sources_of(value, seen)
        elif isinstance(value, str | int | float | tuple | list | dict | set | frozenset):
            yield f"{name} = {value!r}"
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        yield from _sources_of(value, seen) if inspect.isfunction(value) else [repr(value)]


def _names_in(compiled) -> set[str]:
    inner = [constant for constant in compiled.co_consts if inspect.iscode(constant)]
    return set(compiled.co_names).union(*map(_names_in, inner))


# --- rows ------------------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    file: int
    raws: list[readers.Raw]


class Encoded(NamedTuple):
    """The rows of a chunk."""

    report: Report
    columns: dict[str, tuple[str, bytes, np.ndarray]]
    """name -> (dtype, values one after the other, length of each row (N,))."""
    num_rows: int
    rejected: list[dict]


def chunks(paths: list[Path] | None, source: Source) -> Iterator[_Chunk]:
    """All rows of a source, some together. Raises ValueError, naming the source, for a file that is damaged."""
    for number in range(1 if paths is None else len(paths)):
        together, size = [], 0
        try:
            for raw, _ in readers.read_hub(source) if paths is None else readers.read(paths[number]):
                together.append(raw)
                size += len(raw.data) if isinstance(raw.data, bytes) else 1000
                if len(together) == _CHUNK_ROWS or size > _CHUNK_BYTES:
                    yield _Chunk(number, together)
                    together, size = [], 0
        except ValueError as error:
            raise ValueError(f"{source.field}: {error}") from error
        if together:
            yield _Chunk(number, together)


def encode_chunk(source: Source, job: Job, chunk: _Chunk) -> Encoded:
    """Check and tokenise the rows of a chunk. Raises what is wrong with all rows, such as a missing template."""
    report, kept, rejected = Report(num_read=len(chunk.raws)), [], []
    examples, origins = [], []

    def refuse(raw: readers.Raw, bad: files.BadRow) -> None:
        report.refuse(chunk.file, raw.line, bad.kind, str(bad))
        if bad.kind not in rows.DROP_KINDS:
            # A number: the same content may lie elsewhere when the entry is found again.
            about = {"file": chunk.file, "line": raw.line, "kind": bad.kind}
            rejected.append(about | {"reason": str(bad), "row": shown(raw.data)})

    for raw in chunk.raws:
        row = readers.parse(raw.data)
        try:
            if isinstance(row, files.BadRow):
                raise row
            examples.append(job.normalise(row, source))
            origins.append((raw, row))
        except files.BadRow as bad:
            refuse(raw, bad)
    found = job.encode(job.settings, job.tokenizer, examples, job.for_evaluation)
    assert len(found) == len(examples), "encode gave another number of results than it got examples"
    ignored: set[str] = set()
    for (raw, row), result in zip(origins, found, strict=True):
        if isinstance(result, files.BadRow):
            refuse(raw, result)
            continue
        digest = hashlib.blake2b(
            b"".join(np.asarray(one["input_ids"], "<i4").tobytes() for one in result), digest_size=8
        )
        about = {"file": chunk.file, "line": raw.line, "digest": int.from_bytes(digest.digest(), "little")}
        kept += [(one, about) for one in result]
        form = job.form_of(row, source)
        report.forms[form] = report.forms.get(form, 0) + 1
        ignored |= job.ignored_columns(row, source)
        report.num_kept += 1
        report.num_pieces += len(result) - 1
    report.ignored = sorted(ignored)
    rejected.sort(key=lambda one: one["line"])
    report.first.sort(key=lambda one: one[:2])
    return Encoded(report, _columns(kept, report), len(kept), rejected)


def _columns(kept: list[tuple[dict, dict]], report: Report) -> dict[str, tuple[str, bytes, np.ndarray]]:
    counts = ("num_cut", "num_left_out", "tokens_left_out")
    for row, _ in kept:
        ids = row["input_ids"]
        cut = row.get("num_cut", 0)
        report.num_cut += cut > 0
        report.tokens_cut += int(cut)
        report.num_left_out += int(row.get("num_left_out", 0))
        report.tokens_left_out += int(row.get("tokens_left_out", 0))
        report.num_tokens += len(ids)
        report.num_targets += int(np.count_nonzero(np.asarray(row["labels"])[1:] != -100))
        report.highest_id = max(report.highest_id, int(np.max(ids)))
        report.longest = max(report.longest, len(ids))
    if not kept:
        return {}
    names = [name for name in kept[0][0] if name not in counts]
    columns = {}
    for name in names:
        values = [row[name] for row, _ in kept]
        if isinstance(values[0], str):
            encoded = [value.encode() for value in values]
            columns[name] = (cache.TEXT, b"".join(encoded), np.array([len(value) for value in encoded]))
        else:
            arrays = [np.asarray(value, "<f4" if np.asarray(value).dtype.kind == "f" else "<i4") for value in values]
            lengths = np.array([len(array) for array in arrays])
            columns[name] = (arrays[0].dtype.str, np.concatenate(arrays).tobytes(), lengths)
    ones = np.ones(len(kept), np.int64)
    for name, dtype in {"file": "<i4", "line": "<i8", "digest": "<u8"}.items():
        columns[name] = (dtype, np.array([about[name] for _, about in kept], dtype).tobytes(), ones)
    return columns


def shown(data: bytes | dict | files.BadRow) -> Any:
    """A row as it was read, as it goes into `rejected.jsonl`."""
    if isinstance(data, bytes):
        return data.decode("utf-8", errors="backslashreplace")
    return data if isinstance(data, dict) else None


# --- writing ----------------------------------------------------------------------------------------------------------


class _Finished(NamedTuple):
    writer: cache.Writer
    meta: dict[str, Any]

    def publish(self, target: Path) -> None:
        self.writer.publish(target, self.meta)


def _write(
    source: Source, paths: list[Path] | None, job: Job, writer: cache.Writer, num_proc: int | None, beat, shows: bool
) -> _Finished:
    size = sum(path.stat().st_size for path in paths or [])
    count = 1 if paths is not None and size < _WORTH_PROCESSES else workers.num_processes(num_proc)
    report, fingerprint = Report(), Fingerprint()
    work = functools.partial(encode_chunk, source, job)
    label = f"prepare {source.path}"
    with tqdm(desc=label[-60:], unit=" rows", disable=None if shows else True, leave=False) as bar:
        for chunk in workers.in_order(work, chunks(paths, source), count, beat):
            report.add(chunk.report)
            writer.add(chunk.columns, chunk.num_rows)
            for line in chunk.rejected:
                writer.reject(line)
            for ids, labels in tokens_of(chunk):
                fingerprint.update(ids, labels)
            bar.update(chunk.report.num_read)
    meta = {"report": dataclasses.asdict(report), "fingerprint": fingerprint.hexdigest()}
    return _Finished(writer, meta)


def tokens_of(chunk: Encoded) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`input_ids` and `labels`, (T,) int32 each, of each row."""
    if not chunk.num_rows:
        return
    ids, labels = (np.frombuffer(chunk.columns[name][1], "<i4") for name in ("input_ids", "labels"))
    at = 0
    for length in chunk.columns["input_ids"][2].tolist():
        yield ids[at : at + length], labels[at : at + length]
        at += length
