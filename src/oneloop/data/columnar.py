"""Reads rows of files that store columns (Parquet, Arrow) and of data sets from the hub, a few megabytes at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop import sources
from oneloop.data.files import BadRow, near_names, without_nulls
from oneloop.mixture import Source

if TYPE_CHECKING:
    import pyarrow

_CHUNK_BYTES = 8 << 20
_CHUNK_ROWS = 1024


class Unreadable(Exception):
    """A file of columns is damaged, cut off, or not what its name says."""


def read_parquet(path: Path, start: int) -> Iterator[tuple[int, dict | BadRow]]:
    """Yield (number from 1, row) of the rows after the first `start`; row groups before are not touched.

    Raises Unreadable.
    """
    import pyarrow.parquet

    done = 0
    try:
        # Without the first two, whole row groups are in memory at once, and those can be as large as the file
        # (pyarrow 26, parquet/core.py, ParquetFile: pre_buffer is on by default). Checksums: where a file has them.
        options = {"pre_buffer": False, "buffer_size": 1 << 20, "page_checksum_verification": True}
        with pyarrow.parquet.ParquetFile(path, **options) as file:
            refuse_double_names(file.schema_arrow.names, path)
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                if done + metadata.num_rows <= start:
                    done += metadata.num_rows
                    continue
                batch_size = _rows_per_chunk(metadata.num_rows, metadata.total_byte_size)
                for batch in file.iter_batches(batch_size, row_groups=[group], use_threads=False):
                    skipped = min(max(start - done, 0), batch.num_rows)
                    yield from enumerate(_rows(batch.slice(skipped)), start=done + skipped + 1)
                    done += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise Unreadable(f"not a readable Parquet file ({error})") from error


def read_arrow(path: Path, start: int) -> Iterator[tuple[int, dict | BadRow]]:
    """Yield (number from 1, row) of the rows after the first `start` of an Arrow stream, which is what `datasets`
    writes, or an Arrow file, which is what others do. One record batch is in memory at a time, as it was written.

    Raises Unreadable.
    """
    import pyarrow

    try:
        with path.open("rb") as opened:
            is_file = opened.read(6) == b"ARROW1"
            # An end mark is optional in a stream; but all that write one close it, and without it nobody could tell
            # a file that was cut between two batches.
            opened.seek(-min(8, path.stat().st_size), 2)
            if not is_file and opened.read() != b"\xff\xff\xff\xff\x00\x00\x00\x00":
                raise Unreadable("not a whole Arrow file: its end is missing. Is it cut off?")
        done = 0
        for batch in (_file_batches if is_file else _stream_batches)(path, start):
            # A number stands for a batch that was skipped.
            num_rows = batch if isinstance(batch, int) else batch.num_rows
            if done + num_rows > start:
                skipped = max(start - done, 0)
                yield from enumerate(_rows(batch.slice(skipped)), start=done + skipped + 1)
            done += num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise Unreadable(f"not a readable Arrow file ({error})") from error


def _file_batches(path: Path, start: int) -> Iterator[pyarrow.RecordBatch | int]:
    import pyarrow

    # In a mapping of the file, batches are found without being read. But they are read from the file itself: pages of
    # a mapping count as this process's memory for as long as they stay.
    with pyarrow.memory_map(str(path)) as mapped, pyarrow.OSFile(str(path)) as file:
        finder, reader = pyarrow.ipc.open_file(mapped), pyarrow.ipc.open_file(file)
        refuse_double_names(reader.schema.names, path)
        done = 0
        for index in range(reader.num_record_batches):
            num_rows = finder.get_batch(index).num_rows
            done += num_rows
            yield num_rows if done <= start else reader.get_batch(index)


def _stream_batches(path: Path, start: int) -> Iterator[pyarrow.RecordBatch | int]:
    import pyarrow

    offset = done = 0
    if start:
        # See above: only the headers of the batches in front are read.
        with pyarrow.memory_map(str(path)) as mapped:
            reader = pyarrow.ipc.open_stream(mapped)
            # A dictionary stands in front of the batches that refer to it: then there is no starting further on.
            for batch in [] if "dictionary<" in str(reader.schema) else reader:
                if done + batch.num_rows > start:
                    break
                done, offset = done + batch.num_rows, mapped.tell()
    with pyarrow.OSFile(str(path)) as file:
        reader = pyarrow.ipc.open_stream(file)
        refuse_double_names(reader.schema.names, path)
        if offset:
            file.seek(offset)
            yield done
        yield from reader


def _rows(batch: pyarrow.RecordBatch) -> Iterator[dict | BadRow]:
    step = _rows_per_chunk(batch.num_rows, batch.nbytes)
    for start in range(0, batch.num_rows, step):
        piece = batch.slice(start, step)
        try:
            rows: list[dict | BadRow] = piece.to_pylist()
        except (ValueError, OverflowError):
            # One cell that is no text or no date fails the whole piece.
            rows = [_row(piece, index) for index in range(piece.num_rows)]
        for row in rows:
            yield row if isinstance(row, BadRow) else _with_none(row)


def _row(batch: pyarrow.RecordBatch, index: int) -> dict | BadRow:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return BadRow("bad_utf8", "a text in it is not UTF-8")
    except (ValueError, OverflowError):
        return BadRow("bad_value", "a value in it is out of its type's range")


def _with_none(row: dict) -> dict:
    # At the top the null stays: a column that is there, without a value in this row.
    return {name: without_nulls(value) for name, value in row.items()}


def _rows_per_chunk(num_rows: int, num_bytes: int) -> int:
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES * num_rows // max(num_bytes, 1)))


def refuse_double_names(names: list[str], path: Path) -> None:
    """Raises ValueError for a column name that occurs twice: a row has room for one value only."""
    if double := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{path} has more than one column named {double[0]!r}: rename one")


def open_zstd(path: Path) -> pyarrow.CompressedInputStream:
    """The unpacked bytes of a .zst file; reading raises OSError where it is damaged or cut off."""
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")


def read_hub(source: Source, start: int, *, streaming: bool) -> Iterator[tuple[int, dict | BadRow]]:
    """Yield (index from 0, row) of a hub data set after its first `start` rows.

    Raises ValueError naming `source.field` for what is neither there nor loadable.
    """
    import datasets

    options: dict[str, Any] = {"split": source.split}
    options["revision"] = sources.dataset_commit(source.path, source.revision)
    if source.name:
        options["name"] = source.name
    if streaming:
        options["streaming"] = True
    path = Path(source.path)
    try:
        rows = datasets.load_dataset(source.path, **options)
        if start:
            # All rows of a data set on disk cannot be skipped (datasets 5.2, arrow_dataset.py, select).
            rows = rows.skip(start) if streaming or start < len(rows) else []
        for index, row in enumerate(rows, start=start):
            yield index, _with_none(row)
    except Exception as error:  # unknown, gated, unreachable, damaged: each has a class of its own
        reason = f"as a hub data set, split {source.split!r}: {error}"
        raise ValueError(
            f"{source.field} {source.path!r} is no existing path{near_names(path)}, and {reason}"
        ) from error
