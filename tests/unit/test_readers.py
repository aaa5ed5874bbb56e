"""Files: which are found, how rows come out of every type of them, and where reading goes on."""

import copy
import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oneloop import sources
from oneloop.data import files, readers
from oneloop.data.files import BadRow
from oneloop.mixture import Source
from tests.equivalence import launcher
from tests.unit.test_rows import CASES, GOOD

ROWS = [{"prompt": f"p{number} \u2028 \u00e9", "completion": f"c{number}\nline two"} for number in range(25)]
TEXTS = [{"text": f"line {number} \u2028 \u00e9 "} for number in range(25)]
TYPES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.json.gz", "a.json.zst", "a.csv", "a.csv.gz", "a.csv.zst"]
TYPES += ["a.txt", "a.txt.gz", "a.txt.zst", "a.parquet", "stream.arrow", "dictionary.arrow", "file.arrow"]
SEEKING = {"a.jsonl", "a.txt", "a.parquet", "stream.arrow", "dictionary.arrow", "file.arrow"}


def pack(content: bytes, name: str) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    if name.endswith(".zst"):
        buffer = pa.BufferOutputStream()
        with pa.CompressedOutputStream(buffer, "zstd") as stream:
            stream.write(content)
        return buffer.getvalue().to_pybytes()
    return content


def save(path: Path, rows: list[dict]) -> Path:
    """Write rows in the type that the name says, in several row groups or batches where the type has such."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    kind = files.file_type(path)[0]
    if kind in (".parquet", ".arrow"):
        table = pa.Table.from_pylist(rows)
        if path.name.startswith("dictionary"):
            table = table.set_column(0, "prompt", table["prompt"].dictionary_encode())
        if kind == ".parquet":
            pq.write_table(table, path, row_group_size=7)
        else:
            write = pa.ipc.new_file if path.name.startswith("file") else pa.ipc.new_stream
            with pa.OSFile(str(path), "wb") as file, write(file, table.schema) as writer:
                for batch in table.to_batches(7):
                    writer.write_batch(batch)
        return path
    if kind == ".jsonl":
        # Blank lines, other line ends and marks are in the way, to be counted and passed over.
        text = "\ufeff" + lines[0] + "\r\n\n  \n" + "\n".join(lines[1:-1]) + "\r\n\r\n" + lines[-1]
    elif kind == ".json":
        text = "\ufeff [\n" + ",\n\n".join(lines) + "\n]\n"
    elif kind == ".txt":
        text = "\ufeff" + "\n\n".join(row["text"] for row in rows) + "\r\n"
    else:
        cells = ['"' + row["prompt"] + '","' + row["completion"] + '"\n' for row in rows]
        text = "\ufeffprompt,completion\r\n" + "\n".join(cells)
    path.write_bytes(pack(text.encode(), path.name))
    return path


def rows_of(path: Path | str, start: list[int] | None = None) -> list:
    return [(raw.line, readers.parse(raw.data), cursor) for raw, cursor in readers.read(path, start)]


@pytest.mark.parametrize("name", TYPES)
def test_every_type_gives_the_same_rows_and_goes_on_after_any_of_them(tmp_path, name):
    rows = TEXTS if ".txt" in name else ROWS
    path = save(tmp_path / name, rows)
    found = rows_of(path)
    assert [row for _, row, _ in found] == rows
    expected = {".jsonl": [1, *range(4, 27), 28], ".json": range(2, 52, 2), ".csv": range(2, 77, 3)}
    expected |= {".txt": range(1, 51, 2)}
    kind = files.file_type(path)[0]
    assert [line for line, _, _ in found] == list(expected.get(kind, range(1, 26)))
    for index, (_, _, cursor) in enumerate(found):
        assert len(cursor) == 2 and json.loads(json.dumps(cursor)) == cursor
        assert rows_of(path, cursor) == found[index + 1 :]
    assert readers.seeks(path) == (name in SEEKING)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "stream.arrow"])
def test_what_is_sought_is_not_read_through(tmp_path, name):
    path = save(tmp_path / name, TEXTS if name == "a.txt" else ROWS)
    found = rows_of(path)
    content = bytearray(path.read_bytes())
    # What lies before is destroyed, but for the head of the file: the Arrow schema, the first bytes of Parquet.
    first = content.find(b"p0")
    start, end = {"a.parquet": (4, 60), "stream.arrow": (first, first + 20)}.get(name, (0, 200))
    content[start:end] = b"\xff" * (end - start)
    path.write_bytes(content)
    assert rows_of(path, found[20][2]) == found[21:]
    try:
        assert rows_of(path)[:5] != found[:5]
    except ValueError:
        pass


def test_a_file_that_has_become_shorter_is_no_silent_end(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt"):
        path = save(tmp_path / name, TEXTS)
        cursor = rows_of(path)[20][2]
        save(path, TEXTS[:5])
        with pytest.raises(ValueError, match=f"{name} is shorter than it was"):
            rows_of(path, cursor)


both = pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])


@both
def test_shared_cases_read_the_same_when_packed(tmp_path, suffix):
    cases = {  # file -> line -> kind of what is refused; None for a good row
        "C20_bom": {1: None, 2: None},
        "C20_crlf_blank_lines": {1: None, 2: None},
        "C20_no_final_newline": {1: None, 2: None},
        "C20_cut_line": {1: None, 2: None, 3: "bad_json", 4: None, 5: None},
        "C20_array_line": {1: None, 2: None, 3: "not_an_object", 4: None, 5: None},
        "C20_two_objects_one_line": {1: "two_values", 2: None, 3: None},
        "C21_latin1": {1: "bad_utf8"},
        "C21_lone_surrogate": {1: "lone_surrogate", 2: None},
        "C21_unicode": {1: None, 2: None},
        "C17_sharegpt": dict.fromkeys(range(1, 11)),
        "C19_mixed_schema": dict.fromkeys(range(1, 7)),
    }
    if not CASES.is_dir():
        pytest.skip("the folder of shared cases is not beside the repository")
    for case, expected in cases.items():
        content = (CASES / f"{case}.jsonl").read_bytes()
        path = tmp_path / f"{case}.jsonl{suffix}"
        path.write_bytes(pack(content, path.name))
        found = rows_of(path)
        assert {line: getattr(row, "kind", None) for line, row, _ in found} == expected
        for index, (_, _, cursor) in enumerate(found):
            rest = [(line, str(row)) for line, row, _ in rows_of(path, cursor)]
            assert rest == [(line, str(row)) for line, row, _ in found[index + 1 :]]
        plain = [str(row) for _, row, _ in rows_of(CASES / f"{case}.jsonl")]
        assert plain == [str(row) for _, row, _ in found]


@pytest.mark.parametrize("name", [name for name in TYPES if files.file_type(Path(name))[1] or "." not in name[:6]])
def test_a_cut_file_is_an_error_of_the_file(tmp_path, name):
    rows = TEXTS if ".txt" in name else ROWS
    whole = save(tmp_path / name, rows * 40).read_bytes()
    cut = tmp_path / f"cut_{name}"
    assert [row for _, row, _ in rows_of(tmp_path / name)] == rows * 40
    for length in (0, 1, 3, 17, len(whole) // 3, len(whole) - 9, len(whole) - 1):
        cut.write_bytes(whole[:length])
        found = []
        with pytest.raises(ValueError, match=f"cut_{name}") as error:
            found.extend(itertools.islice(map(lambda item: readers.parse(item[0].data), readers.read(cut)), 2000))
        assert not isinstance(error.value, BadRow)
        assert found == (rows * 40)[: len(found)] and len(found) < 1000


def test_cut_and_damaged_files_of_columns_are_named(tmp_path):
    for name in ("a.parquet", "stream.arrow", "dictionary.arrow", "file.arrow"):
        whole = save(tmp_path / name, ROWS * 40).read_bytes()
        for length in (0, 3, 17, len(whole) // 3, len(whole) - 9, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:length])
            with pytest.raises(ValueError, match=f"{name} cannot be read.*(Parquet|Arrow)"):
                rows_of(tmp_path / name)
        middle = len(whole) // 2
        (tmp_path / name).write_bytes(whole[: middle - 200] + b"\xff" * 400 + whole[middle + 200 :])
        try:
            found = [row for _, row, _ in rows_of(tmp_path / name)]
            assert any(isinstance(row, BadRow) for row in found), "neither refused nor noticed"
        except ValueError as error:
            assert name in str(error)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_damaged_packed_file_is_named(tmp_path, name):
    whole = save(tmp_path / name, ROWS * 400).read_bytes()
    middle = len(whole) // 2
    (tmp_path / name).write_bytes(whole[:middle] + b"\xff" * 64 + whole[middle + 64 :])
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        rows_of(tmp_path / name)
    joined = pack(b'{"a": 1}\n', name) + pack(b'{"a": 2}\n', name)
    (tmp_path / name).write_bytes(joined)
    assert [row for _, row, _ in rows_of(tmp_path / name)] == [{"a": 1}, {"a": 2}], "joined files are one"


def test_a_file_of_another_type_than_its_name_is_one_message(tmp_path):
    contents = {
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n": "pointer of Git LFS",
        gzip.compress(GOOD): "compressed by gzip: add .gz",
        pack(GOOD, ".zst"): "compressed by zstd: add .zst",
        b"PAR1" + b"\x00" * 50: "is a Parquet file",
        GOOD.decode().encode("utf-16"): "is UTF-16 text: save it as UTF-8",
        b"PK\x03\x04" + b"\x00" * 50: "is a zip archive",
    }
    for name in ("a.jsonl", "a.json", "a.csv", "a.txt"):
        for content, message in contents.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{name} .*{message}"):
                rows_of(tmp_path / name)
    for name in ("a.parquet", "a.arrow", "a.jsonl.gz", "a.csv.zst"):
        (tmp_path / name).write_bytes(next(iter(contents)))
        with pytest.raises(ValueError, match=f"{name} is only a pointer of Git LFS"):
            rows_of(tmp_path / name)


@both
def test_an_endless_line_is_one_bad_row_and_is_not_held(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(readers, "LINE_LIMIT_BYTES", 100)
    long = json.dumps({"text": "x" * 5_000_000}).encode()
    exact = json.dumps({"text": "y" * (99 - 12)}).encode()
    assert len(exact) == 99
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(b'{"a": 1}\n' + long + b"\n" + exact + b"\n" + long + b"\n" + b'{"a": 2}', path.name))
    found = rows_of(path)
    assert [(line, getattr(row, "kind", None)) for line, row, _ in found] == [
        (1, None),
        (2, "too_big"),
        (3, None),
        (4, "too_big"),
        (5, None),
    ]
    for index, (_, _, cursor) in enumerate(found):
        assert [line for line, _, _ in rows_of(path, cursor)] == [line for line, _, _ in found[index + 1 :]]
    csv = tmp_path / f"a.csv{suffix}"
    for cell in (b"x" * 500, b'"' + b"x\n" * 500):
        csv.write_bytes(pack(b"prompt,completion\na,b\n" + cell + b",c\n", csv.name))
        with pytest.raises(ValueError, match="a.csv.*(has a line longer than|field larger than)"):
            rows_of(csv)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured where Linux states it")
def test_memory_stays_flat(tmp_path):
    """A file of 100 MB of every type, in Parquet as a single row group; Python and its packages are there before."""
    body = " ".join(f"{number * 2654435761 % 2**32:x}" for number in range(700))
    rows = [{"prompt": f"{number}", "completion": f"{number} {body}"} for number in range(16_000)]
    table = pa.Table.from_pylist(rows)
    assert table.nbytes > 100_000_000
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10**6, use_dictionary=False, compression="none")
    for name, write in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with pa.OSFile(str(tmp_path / name), "wb") as file, write(file, table.schema) as writer:
            for batch in table.to_batches(1000):
                writer.write_batch(batch)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt"):
        (tmp_path / name).write_bytes(pack(lines, name))
    (tmp_path / "a.csv").write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in rows))
    del rows, table, lines
    # Not `ru_maxrss`: a process starts with that of the one that started it.
    code = (
        "import pathlib, sys, pyarrow.parquet\n"
        "from oneloop.data import readers\n"
        "def peak():\n"
        "    status = pathlib.Path('/proc/self/status').read_text()\n"
        "    return int(status.partition('VmHWM:')[2].split()[0])\n"
        "for path in sys.argv[1:]:\n"
        "    before, count = peak(), sum(1 for _ in readers.read(path))\n"
        "    print(path.rsplit('/', 1)[1], count, (peak() - before) // 1000)\n"
    )
    names = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.csv", "stream.arrow", "file.arrow", "a.parquet"]
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in names)]
    output = subprocess.check_output(command, env=launcher.environment(), text=True).split("\n")[:-1]
    assert [line.split()[:2] for line in output] == [[name, "16000"] for name in names]
    assert max(int(line.split()[2]) for line in output) < 64, output


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_cell_that_is_no_text_costs_its_row_only(tmp_path):
    texts = pa.array([b"a", b"\xff\xfe", b"c"] * 700, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    found = rows_of(tmp_path / "a.parquet")
    assert [getattr(row, "kind", row) for _, row, _ in found] == [{"text": "a"}, "bad_utf8", {"text": "c"}] * 700
    days = pa.array([0, 2**30, 1], pa.int32()).view(pa.date32())
    pq.write_table(pa.table({"text": ["a", "b", "c"], "at": days}), tmp_path / "b.parquet")
    assert [getattr(row, "kind", None) for _, row, _ in rows_of(tmp_path / "b.parquet")] == [None, "bad_value", None]
    with pa.OSFile(str(tmp_path / "c.arrow"), "wb") as file:
        batch = pa.record_batch([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
        with pa.ipc.new_stream(file, batch.schema) as writer:
            writer.write_batch(batch)
    with pytest.raises(ValueError, match="c.arrow has more than one column named 'text'"):
        rows_of(tmp_path / "c.arrow")


def test_large_cells_are_made_a_few_at_a_time(tmp_path):
    cell = "x" * 1_000_000
    pq.write_table(pa.table({"text": [f"{number}{cell}" for number in range(40)]}), tmp_path / "a.parquet")
    lengths = [len(row["text"]) for _, row, _ in rows_of(tmp_path / "a.parquet")]
    assert lengths == [len(str(number)) + 1_000_000 for number in range(40)]


def test_text_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone \r\n\n \t\n\xef\xbb\xbftwo\rstill two\ncaf\xe9\nlast")
    found = rows_of(path)
    assert [(line, getattr(row, "kind", row)) for line, row, _ in found] == [
        (1, {"text": "one "}),
        (4, {"text": "\ufefftwo\rstill two"}),
        (5, "bad_utf8"),
        (6, {"text": "last"}),
    ]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"a": 1, "a": 2}', "duplicate_key"),
        (b'{"a": {"b": [{"c": 1, "c": 1}]}}', "duplicate_key"),
        (b'{"a": NaN}', "bad_number"),
        (b'{"a": [-Infinity]}', "bad_number"),
        (b'{"a": 1e999}', "bad_number"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "bad_json"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "bad_json"),
        (b'{"a": "\x00"}', "bad_json"),
        (b'\xef\xbb\xbf{"a": 1}', None),
        (b'{"a": ' + b"[" * 90 + b"]" * 90 + b', "b": 1.5e3, "c": "\\u0000", "": null}', None),
    ],
)
def test_what_strict_json_refuses(line, kind):
    assert getattr(readers.parse(line), "kind", None) == kind


def test_bad_rows_travel_between_processes():
    # A copy is made the way pickle makes one.
    bad = copy.deepcopy(readers.Raw(3, BadRow("kind", "what is wrong"))).data
    assert (bad.kind, str(bad), type(bad)) == ("kind", "what is wrong", BadRow)


def test_strict_json_is_not_slow():
    import time

    line = json.dumps({"messages": [{"role": "user", "content": "word " * 50, "weight": 0}] * 10}).encode()

    def seconds(function, argument) -> float:
        best = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(200):
                function(argument)
            best.append(time.perf_counter() - start)
        return min(best)

    assert seconds(readers.parse, line) < 12 * seconds(json.loads, line)


# --- finding ----------------------------------------------------------------------------------------------------------


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(GOOD)


def found(path: Path | str, split: str = "train", under: Path | None = None, **options) -> list[str]:
    paths = files.find(Source(path=str(path), split=split, **options))
    return [os.path.relpath(file, under) if under else file.name for file in paths]


def refused(path: Path | str, message: str, split: str = "train", **options) -> str:
    with pytest.raises(ValueError, match=message) as error:
        files.find(Source(path=str(path), split=split, field="datasets[3]", **options))
    assert "datasets[3]" in str(error.value)
    return str(error.value)


def test_folders_hold_all_types(tmp_path):
    names = ["a.jsonl", "b.JSON", "c.csv.gz", "d/e.parquet", "d/f.jsonl.zst", "g.arrow", "h.json.gz"]
    touch(tmp_path, *names, ".hidden.jsonl", ".cache/x.jsonl", "README.txt", "LICENSE-2.txt", "notes.md", "x.bz2")
    touch(tmp_path, "dataset_infos.json", "dataset_info.json", "cache-0af.arrow", "p.parquet.gz")
    assert found(tmp_path, under=tmp_path) == names
    touch(tmp_path, "more.txt")
    refused(tmp_path, r"holds text files \(more.txt\) beside files of rows: .*glob")
    touch(tmp_path, "texts/a.txt", "texts/b/c.txt.gz", "texts/README.txt")
    assert found(tmp_path / "texts") == ["a.txt", "c.txt.gz"]


def test_globs(tmp_path, monkeypatch):
    touch(tmp_path, "a1.jsonl", "a2.jsonl", "b.csv", "notes.md", "sub/c.jsonl", "sub/deep/d.jsonl", ".h.jsonl")
    assert found(tmp_path / "*.jsonl") == found(tmp_path / "a?.jsonl") == found(tmp_path / "a[12].jsonl")
    assert found(tmp_path / "*.jsonl") == ["a1.jsonl", "a2.jsonl"]
    assert found(tmp_path / "**" / "*.jsonl") == ["a1.jsonl", "a2.jsonl", "c.jsonl", "d.jsonl"]
    everything = ["a1.jsonl", "a2.jsonl", "b.csv", "c.jsonl", "d.jsonl"]
    assert found(tmp_path / "**") == found(tmp_path / "*") == everything, "each once, folders with what is in them"
    assert found(tmp_path / "sub" / ".." / "a*.jsonl") == ["a1.jsonl", "a2.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert found("*.jsonl") == ["a1.jsonl", "a2.jsonl"] and found("s*/c.jsonl") == ["c.jsonl"]
    touch(tmp_path, "x[1].jsonl")
    assert found(tmp_path / "x[1].jsonl") == ["x[1].jsonl"], "a file that has this name is no pattern"
    refused(tmp_path / "z*.jsonl", r"matches nothing.*a1.jsonl")
    refused(tmp_path / "*.md", "matches only 1 other files")
    touch(tmp_path, "q/rows.pkl")
    refused(tmp_path / "q" / "*", "can run code")


def test_the_split_of_what_a_glob_matches(tmp_path):
    touch(tmp_path, "train-0.jsonl", "train-1.jsonl", "test.jsonl")
    assert found(tmp_path / "*.jsonl") == ["train-0.jsonl", "train-1.jsonl"]
    assert found(tmp_path / "*.jsonl", "test") == ["test.jsonl"]
    assert found(tmp_path / "test*.jsonl") == ["test.jsonl"], "the pattern has chosen"
    refused(tmp_path / "*.jsonl", "no file for split 'validation'; its files are named for: test, train", "validation")
    touch(tmp_path, "other/part.jsonl", "other/eval.jsonl")
    refused(tmp_path / "other" / "*.jsonl", "no file for split 'train'.*test")
    # Names above the pattern say nothing.
    touch(tmp_path, "train/x/a.jsonl", "train/x/b.jsonl")
    assert found(tmp_path / "train" / "x" / "*.jsonl", "test") == ["a.jsonl", "b.jsonl"]


def test_folders_written_by_datasets(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"prompt": f"p{number}", "completion": "c"} for number in range(2500)])
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    touch(tmp_path, "one/data-00007-of-00008.arrow", "one/cache-1.arrow")
    assert found(tmp_path / "one") == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    places = files.find(Source(path=str(tmp_path / "one"), split="train"))
    read = [row["prompt"] for path in places for _, row, _ in rows_of(path)]
    assert read == [f"p{number}" for number in range(2500)]
    everything = list(readers.read(places[0]))
    for at in (0, 998, 999, 1000, 1248, 1249):
        assert list(readers.read(places[0], everything[at][1])) == everything[at + 1 :]

    splits = {"train": rows.select(range(3)), "test": rows.select(range(4)), "extra": rows.select(range(5))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "dict")
    for split, count in (("train", 3), ("test", 4), ("extra", 5), ("eval", 4)):
        (path,) = files.find(Source(path=str(tmp_path / "dict"), split=split))
        assert len(rows_of(path)) == count
    refused(tmp_path / "dict", "has no split 'validation'; it has: extra, test, train", "validation")
    assert found(tmp_path / "dict" / "*" / "*.arrow", under=tmp_path / "dict") == ["train/data-00000-of-00001.arrow"]
    assert found(tmp_path / "o*") == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert found(tmp_path / "one" / "**") == found(tmp_path / "one") + ["data-00007-of-00008.arrow"]

    state = tmp_path / "one" / "state.json"
    for content, message in [
        ('{"_data_files": [{"filename": "../../secret.arrow"}]}', "state.json names '../../secret.arrow'"),
        ('{"_data_files": [{"filename": "/etc/passwd"}]}', "state.json names '/etc/passwd'"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow, which is not there"),
        ('{"_data_files": [3]}', "state.json names 3"),
        ("{", "state.json cannot be read"),
        ("[]", "not written by `save_to_disk`"),
        ('{"_data_files": [], "_indices_data_files": [1]}', "save the data set again"),
    ]:
        state.write_text(content)
        refused(tmp_path / "one", message)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["../one"]}')
    refused(tmp_path / "dict", "dataset_dict.json names '../one'", "train")


def test_links_out_of_a_folder_are_refused_and_those_the_user_names_are_not(tmp_path):
    touch(tmp_path, "outside/secret.jsonl", "data/a.jsonl", "data/sub/b.jsonl")
    data = tmp_path / "data"
    (data / "again.jsonl").symlink_to(data / "a.jsonl")
    (data / "subagain").symlink_to(data / "sub")
    assert found(data) == ["a.jsonl", "again.jsonl", "b.jsonl"], "a folder is read once, under its own name"
    for link, target in [
        ("c.jsonl", tmp_path / "outside" / "secret.jsonl"),
        ("c.jsonl", Path("..") / "outside" / "secret.jsonl"),
        ("c.jsonl", tmp_path / "nowhere.jsonl"),
        ("c.jsonl", data / "sub" / ".." / ".." / "outside" / "secret.jsonl"),
        ("folder", tmp_path / "outside"),
        ("c.jsonl", Path("/dev/zero")),
    ]:
        (data / link).symlink_to(target)
        for path in (data, tmp_path / "dat*"):
            message = refused(path, "is a link to .*, outside of the folder")
            assert str(data / link) in message
        (data / link).unlink()
    # Named by the user: the link itself, a glob of links, and a folder that is a link.
    (data / "c.jsonl").symlink_to(tmp_path / "outside" / "secret.jsonl")
    assert found(data / "c.jsonl") == found(data / "c*.jsonl") == ["c.jsonl"]
    (data / "c.jsonl").unlink()
    (tmp_path / "linked").symlink_to(data)
    assert found(tmp_path / "linked") == ["a.jsonl", "again.jsonl", "b.jsonl"]
    # A download from the hub is a folder of links into its own cache.
    touch(tmp_path, "hub/datasets--o--n/blobs/0af", "hub/datasets--o--n/snapshots/c0/x", "hub/other")
    snapshot = tmp_path / "hub" / "datasets--o--n" / "snapshots" / "c0"
    (snapshot / "a.jsonl").symlink_to(Path("..") / ".." / "blobs" / "0af")
    assert found(snapshot) == ["a.jsonl"]
    (snapshot / "b.jsonl").symlink_to(Path("..") / ".." / ".." / "other")
    refused(snapshot, "b.jsonl is a link to .*other, outside")


def test_names_that_no_file_can_have(tmp_path):
    for name in ("x" * 4096, "x" * 4096 + ".jsonl", "d/" * 3000 + "*.jsonl", "*" * 5000, str(tmp_path / ("y" * 300))):
        message = refused(name, "cannot be read: File name too long")
        assert len(message) < 400
    refused("a\0b.jsonl", "cannot be read: .*null")


def test_what_is_neither_file_nor_folder_is_not_waited_for(tmp_path):
    touch(tmp_path, "data/a.jsonl")
    os.mkfifo(tmp_path / "data" / "b.jsonl")
    assert found(tmp_path / "data") == ["a.jsonl"]
    refused(tmp_path / "data" / "b.jsonl", "neither a file nor a folder")


def test_options_of_the_hub_have_no_place_on_a_path(tmp_path):
    touch(tmp_path, "a.jsonl")
    for path in (tmp_path, tmp_path / "a.jsonl", tmp_path / "*.jsonl"):
        refused(path, "revision 'main' has a meaning for hub data sets only", revision="main")
        refused(path, "name 'socratic' has a meaning for hub data sets only", name="socratic")
        refused(path, "slices work for hub data sets only", split="train[:10]")
    assert files.find(Source(path="openai/gsm8k", name="main", split="train[:10]", revision="abc")) is None
    refused("openai/gsm8k/x", "does not exist")
    refused("gsm8k.jsonl.gz", "does not exist")


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_hub_data_sets(monkeypatch):
    import datasets

    asked = []

    def load(path, **options):
        asked.append(options)
        rows = [{"prompt": f"p{number}", "completion": None, "more": {"a": None, "b": 1}} for number in range(5)]
        found = datasets.Dataset.from_list(rows)
        return found.to_iterable_dataset() if options.get("streaming") else found

    # Only the download is replaced: no test reaches the network.
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "dataset_commit", lambda *_: "c0ffee")
    for read, streaming in ((readers.read_hub, {}), (readers.stream_hub, {"streaming": True})):
        asked.clear()
        source = Source(path="org/set", split="train[:5]", field="datasets[1]")
        items = list(read(source))
        assert [raw.line for raw, _ in items] == [0, 1, 2, 3, 4]
        assert items[3][0].data == {"prompt": "p3", "completion": None, "more": {"b": 1}}
        for index, (_, cursor) in enumerate(items):
            assert list(read(source, cursor)) == items[index + 1 :]
        assert asked[0] == {"split": "train[:5]", "revision": "c0ffee"} | streaming
        list(read(Source(path="org/set", name="main", revision="v1")))
        assert asked[-1] == {"split": "train", "revision": "c0ffee", "name": "main"} | streaming

    class Gone(Exception):
        pass

    def broken(path, **options):
        yield {"a": 1}
        raise Gone("connection lost")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(ValueError, match=r"datasets\[1\] 'org/set' .*connection lost"):
        list(readers.stream_hub(source))


def test_readers_close_what_they_open(tmp_path):
    """A stream that is left early must not hold its file: a run opens thousands."""
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    for name in TYPES:
        path = save(tmp_path / name, TEXTS if ".txt" in name else ROWS)
        reading = readers.read(path)
        next(reading)
        reading.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before
