"""Two thousand odd rows: each is used with all its text, or refused by name, once, and the others do not suffer."""

import csv
import json
import random
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oneloop.data import chat, preference, readers, rows
from oneloop.data.files import BadRow
from tests import odd_rows, tiny
from tests.unit.test_readers import pack

SEED, COUNT = 20, 2000
RULES = {"max_length": 10**6, "truncation": "truncate"}
# A row that takes longer than this hangs; on a busy machine, with the largest cells.
LIMIT_SECONDS = 60.0


def write(folder: Path, name: str, lines: list[bytes]) -> Path:
    (folder / name).write_bytes(pack(b"\n".join(lines), name))
    return folder / name


def encode(example: dict) -> list[int]:
    tokenizer = tiny.tokenizer()
    if "messages" in example:
        row = chat.encode_messages(tokenizer, example["messages"], tools=example.get("tools"), **RULES)
    else:
        prompt, completion = example.get("prompt", ""), example.get("completion", example.get("text"))
        row = chat.encode_text(tokenizer, prompt, completion, **RULES)
    assert any(label != -100 for label in row["labels"][1:])
    return row["input_ids"]


def outcome(data: bytes | dict | BadRow, normalise=rows.normalise, encode=encode) -> tuple[str | None, str | None]:
    """Return (kind it is refused as, text it is trained as); one of them is None."""
    row = readers.parse(data)
    try:
        if isinstance(row, BadRow):
            raise row
        return None, tiny.tokenizer().decode(encode(normalise(row)))
    except BadRow as bad:
        # A message may go to any log: it tells the place and the fault, not what the row holds.
        assert len(str(bad)) < 1000
        return bad.kind, None


def assert_holds(texts: tuple[str, ...], trained: str, kind: str) -> None:
    """All texts are in it, in their order and none twice in the same place."""
    at = 0
    for text in texts:
        at = trained.find(text, at)
        assert at >= 0, f"{kind}: lost {text[:80]!r}"
        at += len(text)
    assert "None" in "".join(texts) or "None" not in trained, kind


@pytest.mark.timeout(240)
def test_every_odd_row_is_used_whole_or_refused_by_name(tmp_path):
    given = odd_rows.generate(SEED, COUNT)
    assert len(given) == COUNT and len({kind for kind, _, _ in given}) == len(odd_rows.KINDS) >= 90
    path = write(tmp_path, "a.jsonl", [line for _, line, _ in given])
    expected = {number: item for number, item in enumerate(given, start=1) if item[2] is not None}
    found, reasons, wrong = {}, Counter(), []
    for raw, cursor in readers.read(path):
        assert raw.line not in found and cursor[0] == raw.line
        kind, _, expectation = expected[raw.line]
        start = time.perf_counter()
        refused, trained = outcome(raw.data)
        assert time.perf_counter() - start < LIMIT_SECONDS, f"line {raw.line} ({kind}) hangs"
        found[raw.line] = refused
        if refused is not None:
            reasons[refused] += 1
        if isinstance(expectation, str) or refused is not None:
            if refused != expectation:
                wrong.append((raw.line, kind, expectation if isinstance(expectation, str) else "used", refused))
        else:
            assert_holds(expectation, trained, kind)
    assert wrong == []
    assert set(found) == set(expected), "each row once, and no row that is none"
    num_kept = sum(refused is None for refused in found.values())
    assert num_kept + sum(reasons.values()) == len(expected)
    assert num_kept > 400 and len(reasons) >= 25

    # The report of a run says the same (what only the template refuses aside).
    kept, report = rows.collect(str(path), "train", dict, "skip")
    by_template = reasons.pop("turn_lost")
    assert (report.num_read, len(kept), report.reasons) == (len(expected), num_kept + by_template, reasons)
    first = [line for line, refused in found.items() if refused not in (None, "turn_lost")][:10]
    assert [place.split(": ")[0] for place in report.first] == [f"{path}:{line}" for line in first]
    with pytest.raises(ValueError, match="has rows that cannot be used"):
        rows.collect(str(path), "train", dict, "stop")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_odd_rows_are_the_same_rows(tmp_path, suffix):
    lines = [line for _, line, _ in odd_rows.generate(SEED + 1, COUNT)]
    plain = write(tmp_path, "a.jsonl", lines)
    packed = write(tmp_path, f"a.jsonl{suffix}", lines)
    assert packed.stat().st_size < plain.stat().st_size / 2
    expected = [raw for raw, _ in readers.read(plain)]
    found = list(readers.read(packed))
    assert [raw for raw, _ in found] == expected and len(expected) > 1900
    for at in random.Random(SEED).sample(range(len(found)), 5):
        assert [raw for raw, _ in readers.read(packed, found[at][1])] == expected[at + 1 :]


TEXT_COLUMNS = ("prompt", "completion", "instruction", "input", "output", "text", "system", "tools", "messages")


def flat_rows() -> list[tuple[str, dict, odd_rows.Expectation]]:
    """The odd rows that columns of text can hold: lists become JSON text, where that is one of the forms."""
    found = []
    for kind, line, expectation in odd_rows.generate(SEED + 2, COUNT):
        row = readers.parse(line) if expectation is not None and kind not in odd_rows.RARE else None
        if not isinstance(row, dict):
            continue
        row = {name: value for name, value in row.items() if value is not None}
        row |= {name: json.dumps(row[name]) for name in ("messages", "tools") if isinstance(row.get(name), list)}
        if row and row.keys() <= set(TEXT_COLUMNS) and all(isinstance(value, str) for value in row.values()):
            found.append((kind, row, expectation))
    assert len(found) > 700 and len({kind for kind, _, _ in found}) > 40
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv", "a.csv.gz", "a.json", "a.json.zst"])
def test_odd_rows_of_other_types_of_files(tmp_path, name):
    given = flat_rows()
    path = tmp_path / name
    all_columns = [dict.fromkeys(TEXT_COLUMNS) | row for _, row, _ in given]
    if name in ("a.parquet", "a.arrow"):
        table = pa.Table.from_pylist(all_columns)
        if name == "a.parquet":
            pq.write_table(table, path, row_group_size=100)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    elif name.startswith("a.csv"):
        with (tmp_path / "plain.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, TEXT_COLUMNS, quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(all_columns)
        path.write_bytes(pack((tmp_path / "plain.csv").read_bytes(), name))
    else:
        content = json.dumps([row for _, row, _ in given], indent=1, ensure_ascii=False).encode()
        path.write_bytes(pack(content, name))
    found = [readers.parse(raw.data) for raw, _ in readers.read(path)]
    assert len(found) == len(given)
    num_kept = 0
    for row, (kind, direct, expectation) in zip(found, given, strict=True):
        refused = None
        try:
            example = rows.normalise(row)
        except BadRow as bad:
            refused = bad.kind
        if refused is None:
            num_kept += 1
            assert example == rows.normalise(direct), kind
        elif name.startswith("a.csv") and "" in direct.values():
            # An empty cell is no value: the row is refused for lacking it, not for its being empty.
            assert isinstance(expectation, str) or kind == "empty question", kind
        else:
            assert refused == expectation, kind
    assert num_kept > 300


@pytest.mark.timeout(120)
def test_odd_pairs(tmp_path):
    given = odd_rows.generate_pairs(SEED, 1000)
    assert {kind for kind, _, _ in given} == set(odd_rows.PAIRS) and len(odd_rows.PAIRS) >= 20
    path = write(tmp_path, "pairs.jsonl", [line for _, line, _ in given])
    found, wrong = 0, []

    def encode_both(example: dict) -> list[int]:
        """Tokens of the prompt with each answer behind it."""
        ids = []
        for name in ("chosen", "rejected", "completion"):
            if isinstance(example.get(name), str):
                ids += encode({"prompt": example["prompt"], "completion": example[name]})
            elif name in example:
                ids += encode({"messages": example["prompt"] + example[name]})
        return ids

    for (raw, _), (kind, _, expectation) in zip(readers.read(path), given, strict=True):
        found += 1
        refused, trained = outcome(raw.data, preference.normalise, encode_both)
        if refused != (expectation if isinstance(expectation, str) else None):
            wrong.append((raw.line, kind, expectation, refused))
        elif refused is None:
            assert_holds(expectation, trained, kind)
    assert wrong == [] and found == 1000


def test_the_generator_is_a_function_of_its_arguments():
    assert odd_rows.generate(3, 300) == odd_rows.generate(3, 300) != odd_rows.generate(4, 300)
    assert len(odd_rows.generate(3, 5)) == 5
    for count in (300, 900):
        made = Counter(kind for kind, _, _ in odd_rows.generate(3, count))
        assert made.total() == count and all(made[kind] == 1 for kind in odd_rows.RARE)
