"""Rows: what is read, from which line, in which form, and what is refused under which name."""

import csv
import json
from pathlib import Path

import pytest

from oneloop import sources
from oneloop.data.rows import BadRow, collect, normalise, read

CASES = Path(__file__).parents[3] / "shared" / "cases"
GOOD = b'{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]}'
SHAREGPT = [
    {"conversations": [{"from": "human", "value": "Tea?"}, {"from": "gpt", "value": "Yes."}]},
    {
        "conversations": [
            {"from": "system", "value": "One word."},
            {"from": "human", "value": "Sky?"},
            {"from": "gpt", "value": "Blue."},
        ]
    },
    {"conversations": [{"from": "user", "value": "Sea?"}, {"from": "assistant", "value": "Green."}]},
    {
        "conversations": [
            {"from": "gpt", "value": "I begin."},
            {"from": "human", "value": "Fine."},
            {"from": "gpt", "value": "Good."},
        ]
    },
    {"conversations": [{"from": "human", "value": "No reply follows."}]},
    {"conversations": [{"from": "human", "value": "Rate it."}, {"from": "tiny-lm-v2", "value": "Nine."}]},
    {
        "conversations": [
            {"from": "human", "value": "Use the clock."},
            {"from": "function_call", "value": "{}"},
            {"from": "observation", "value": "09:00"},
            {"from": "gpt", "value": "Nine."},
        ]
    },
    {
        "system": "Row level system text.",
        "conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hi there."}],
    },
    {"conversations": [{"role": "user", "content": "OpenAI keys."}, {"role": "assistant", "content": "Accepted."}]},
    {"conversations": []},
]


def write(folder: Path, name: str, content: bytes | list) -> str:
    if isinstance(content, list):
        content = b"".join(json.dumps(row).encode() + b"\n" for row in content)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def case_or_inline(where: str, folder: Path, name: str, inline: bytes | list) -> str:
    """Return the shared case file, or the same kind of file written here, so the behaviour is tested either way."""
    if where == "inline":
        return write(folder, name, inline)
    if not (CASES / name).is_file():
        pytest.skip(f"the folder of shared cases is not beside the repository (no {name})")
    return str(CASES / name)


def texts(row: dict) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row["messages"]]


def turns(*contents: str) -> list[dict]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 4, contents, strict=False)]


def kind_of(row: dict) -> str:
    with pytest.raises(BadRow) as caught:
        normalise(row)
    return caught.value.kind


both = pytest.mark.parametrize("where", ["inline", "file"])


@both
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("C20_bom.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD + b"\n"),
        ("C20_crlf_blank_lines.jsonl", GOOD + b"\r\n" + GOOD + b"\r\n\r\n  \r\n"),
        ("C20_no_final_newline.jsonl", GOOD + b"\n" + GOOD),
    ],
)
def test_harmless_oddities_give_the_two_rows_of_the_clean_file(tmp_path, where, name, content):
    path = case_or_inline(where, tmp_path, name, content)
    rows = list(read(path, "train"))
    assert [place for place, _ in rows] == [f"{path}:1", f"{path}:2"]
    assert all(set(row) == {"messages"} and len(normalise(row)["messages"]) == 2 for _, row in rows)


@both
@pytest.mark.parametrize(
    ("name", "content", "line", "kind", "good"),
    [
        ("C20_cut_line.jsonl", GOOD + b"\n" + GOOD + b'\n{"messages": [{"ro\n' + GOOD, 3, "bad_json", 4),
        ("C20_array_line.jsonl", GOOD + b"\n" + GOOD + b'\n["a"]\n' + GOOD, 3, "not_an_object", 4),
        ("C20_two_objects_one_line.jsonl", GOOD + GOOD + b"\n" + GOOD + b"\n", 1, "two_values", 2),
        ("C21_latin1.jsonl", GOOD.replace(b"Hi", b"caf\xe9") + b"\n", 1, "bad_utf8", 0),
        ("C21_lone_surrogate.jsonl", GOOD.replace(b"Hi", b"\\ud83d") + b"\n" + GOOD, 1, "lone_surrogate", 1),
    ],
)
def test_broken_lines_are_named_and_leave_the_others(tmp_path, where, name, content, line, kind, good):
    path = case_or_inline(where, tmp_path, name, content)
    if where == "inline":
        good = content.count(GOOD) - (2 if kind == "two_values" else 0)
    rows = list(read(path, "train"))
    assert [(place, row.kind) for place, row in rows if isinstance(row, BadRow)] == [(f"{path}:{line}", kind)]
    assert sum(isinstance(row, dict) for _, row in rows) == good
    with pytest.raises(ValueError) as error:
        collect(path, "train", lambda row: row, "stop")
    assert f"{path}:{line}: " in str(error.value) and "on_bad_row: skip" in str(error.value)
    assert kind in str(error.value)
    if good:
        kept, report = collect(path, "train", lambda row: row, "skip")
        assert len(kept) == report.num_kept == good and report.reasons == {kind: 1}


def test_a_surrogate_pair_is_a_character(tmp_path):
    path = write(tmp_path, "a.jsonl", GOOD.replace(b"Hi", b"\\ud83d\\ude00"))
    assert normalise(next(read(path, "train"))[1])["messages"][0]["content"] == "\U0001f600."


@both
def test_odd_unicode_neither_splits_nor_loses_text(tmp_path, where):
    text = "join \u200d, rtl \u05e9, line\u2028sep\u2029, nel\x85, nul:\x00."
    content = json.dumps({"messages": turns(text, "ok")}, ensure_ascii=False).encode() + b"\n" + GOOD + b"\n"
    rows = list(read(case_or_inline(where, tmp_path, "C21_unicode.jsonl", content), "train"))
    assert len(rows) == 2
    shown = normalise(rows[0][1])["messages"][0]["content"]
    assert "\u2028" in shown and "\x00" in shown
    assert where == "file" or shown == text


@both
def test_sharegpt_rows_keep_all_turns_or_are_refused_by_name(tmp_path, where):
    path = case_or_inline(where, tmp_path, "C17_sharegpt.jsonl", SHAREGPT)
    kept, report = collect(path, "train", lambda row: row, "skip")
    roles = [[message["role"] for message in row["messages"]] for row in kept]
    assert roles == [
        ["user", "assistant"],
        ["system", "user", "assistant"],
        ["user", "assistant"],
        ["assistant", "user", "assistant"],
        ["system", "user", "assistant"],
        ["user", "assistant"],
    ]
    assert kept[4]["messages"][0]["content"] == "Row level system text."
    assert report.reasons == {"no_reply": 1, "unknown_role": 1, "tool_roles_in_sharegpt": 1, "empty": 1}
    assert str(report) == ("read 10, kept 6; refused: empty 1, no_reply 1, tool_roles_in_sharegpt 1, unknown_role 1")
    assert [line.split(": ")[0] for line in report.first] == [f"{path}:{line}" for line in (5, 6, 7, 10)]
    assert "tiny-lm-v2" in report.first[1] and "function_call" in report.first[2]


@both
def test_mixed_schemas_give_each_row_its_own_form(tmp_path, where):
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    rows = [
        {"messages": turns("Plain row.", "Plain answer.")},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Parts, "}, {"type": "text", "text": "two."}]},
                {"role": "assistant", "content": [{"type": "text", "text": "Joined."}]},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Time?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "09:00"},
                {"role": "assistant", "content": "Nine.", "tool_calls": []},
            ]
        },
        {"prompt": "Prompt column row.", "completion": " Completion column row."},
        {"messages": turns("Extra keys.", "Ignored."), "score": 3, "source": "unit"},
        {"messages": json.dumps(turns("Stored as a string.", "Parsed."))},
    ]
    kept, report = collect(case_or_inline(where, tmp_path, "C19_mixed_schema.jsonl", rows), "train", dict, "stop")
    assert (report.num_read, report.num_kept) == (6, 6)
    assert texts(kept[0]) == [("user", "Plain row."), ("assistant", "Plain answer.")]
    assert not any(mark in text for _, text in texts(kept[1]) for mark in "[]{}'\"")
    assert [role for role, _ in texts(kept[2])] == ["user", "assistant", "tool", "assistant"]
    assert kept[2]["messages"][1]["content"] == "" and kept[2]["messages"][1]["tool_calls"] == [call]
    assert "tool_calls" not in kept[2]["messages"][3]
    assert kept[3] == {"prompt": "Prompt column row.", "completion": " Completion column row."}
    assert set(kept[4]) == {"messages"}
    assert texts(kept[5])[0] == ("user", "Stored as a string.")


def test_columnar_padding_with_null_changes_no_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"messages": [{"role": "user", "content": "Time?"}, {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]}]},
        {"messages": [{"role": "user", "content": "Date?"}, {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "day", "arguments": {"year": 1}}}]}]},
        {"prompt": "a", "completion": "b"},
    ]  # fmt: skip
    table = pa.Table.from_pylist([{"messages": None, "prompt": None, "completion": None} | row for row in rows])
    assert "year" in str(table.schema) and table.to_pylist()[2]["messages"] is None
    pq.write_table(table, tmp_path / "a.parquet")
    read_back = list(read(str(tmp_path / "a.parquet"), "train"))
    assert [place[-2:] for place, _ in read_back] == [":1", ":2", ":3"]
    assert [normalise(row) for _, row in read_back] == [normalise(row) for row in rows]


def test_json_list_has_the_lines_of_its_elements(tmp_path):
    content = b"[\n" + GOOD + b",\n\n" + GOOD + b",\n3\n]\n"
    rows = list(read(write(tmp_path, "a.json", content), "train"))
    assert [place.rsplit(":", 1)[1] for place, _ in rows] == ["2", "4", "5"]
    assert rows[2][1].kind == "not_an_object"
    cut = list(read(write(tmp_path, "b.json", b"[" + GOOD + b",\n" + GOOD[:40]), "train"))
    assert [isinstance(row, BadRow) for _, row in cut] == [False, True] and cut[1][0].endswith("b.json:2")
    tail = list(read(write(tmp_path, "c.json", b"[" + GOOD + b"]\n[1]"), "train"))
    assert [getattr(row, "kind", None) for _, row in tail] == [None, "two_values"]
    assert len(list(read(write(tmp_path, "d.json", GOOD + b"\n" + GOOD), "train"))) == 2
    latin = list(read(write(tmp_path, "e.json", b"[" + GOOD.replace(b"Hi", b"\xe9") + b",\n" + GOOD + b"]"), "train"))
    assert [getattr(row, "kind", None) for _, row in latin] == ["bad_utf8", None]


def test_csv_keeps_text_and_line_numbers(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        rows = [["instruction", "input", "output"], ["Add\nthem", "", "4"], ["Why?", "2", "07"], ["short"]]
        csv.writer(file).writerows(rows)
    read_rows = list(read(str(tmp_path / "a.csv"), "train"))
    assert [place.rsplit(":", 1)[1] for place, _ in read_rows] == ["2", "4", "5"]
    assert texts(normalise(read_rows[0][1])) == [("user", "Add\nthem"), ("assistant", "4")]
    assert texts(normalise(read_rows[1][1])) == [("user", "Why?\n\n2"), ("assistant", "07")]
    assert read_rows[2][1].kind == "bad_csv"
    write(tmp_path, "b.csv", b"prompt,completion\ncaf\xe9,b\na,b\n")
    assert [getattr(row, "kind", row) for _, row in read(str(tmp_path / "b.csv"), "train")] == [
        "bad_utf8",
        {"prompt": "a", "completion": "b"},
    ]


def test_folders_are_read_in_order_and_by_split(tmp_path):
    write(tmp_path, "plain/b.jsonl", [{"prompt": "b", "completion": "b"}])
    write(tmp_path, "plain/a.jsonl", [{"prompt": "a", "completion": "a"}])
    write(tmp_path, "plain/.hidden.jsonl", [{"prompt": "h", "completion": "h"}])
    assert [row["prompt"] for _, row in read(str(tmp_path / "plain"), "train")] == ["a", "b"]
    for split in ("train", "test"):
        write(tmp_path, f"hub/data/{split}-00000-of-00001.jsonl", [{"prompt": split, "completion": "x"}])
    for split in ("train", "test"):
        assert [row["prompt"] for _, row in read(str(tmp_path / "hub"), split)] == [split]
    with pytest.raises(ValueError, match="split 'validation'.*test, train"):
        read(str(tmp_path / "hub"), "validation")


def test_sources_that_cannot_be_read_say_what_is_there(tmp_path):
    write(tmp_path, "rows_train.jsonl", GOOD)
    with pytest.raises(ValueError, match="dataset_name .*rows_trian.jsonl.* does not exist.*rows_train.jsonl"):
        read(str(tmp_path / "rows_trian.jsonl"), "train")
    for name, content in [("empty.jsonl", b""), ("blank.jsonl", b"\n \n"), ("empty.json", b"[]"), ("e.csv", b"a,b\n")]:
        with pytest.raises(ValueError, match="holds no row"):
            read(write(tmp_path, name, content), "train")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder without a file"):
        read(str(tmp_path / "folder"), "train")
    with pytest.raises(ValueError, match="cannot read '.txt'"):
        read(write(tmp_path, "a.txt", GOOD), "train")
    with pytest.raises(ValueError, match="slices work for hub data sets only"):
        read(str(tmp_path / "rows_train.jsonl"), "train[:10]")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        read(write(tmp_path, "a.parquet", GOOD), "train")


def test_a_hub_id_is_loaded_through_datasets(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(source, split, revision):
        asked.append((source, split))
        if source == "org/gone":
            raise FileNotFoundError("no such data set")
        return datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}, {"messages": turns("a", "b")}])

    # Only the download is replaced: no test reaches the network. The rows come padded, as from the hub.
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "dataset_commit", lambda name: None)
    monkeypatch.chdir(tmp_path)
    rows = list(read("org/set", "train[:2]"))
    assert asked == [("org/set", "train[:2]")]
    assert [place for place, _ in rows] == ["org/set[train[:2]]:0", "org/set[train[:2]]:1"]
    assert rows[0][1] == {"prompt": "a", "completion": "b"} and "prompt" not in rows[1][1]
    with pytest.raises(ValueError, match="dataset_name 'org/gone' is no existing path.*no such data set"):
        read("org/gone", "train")


def test_forms_of_rows():
    assert texts(normalise({"instruction": "Add.", "input": "1 1", "output": "2", "system": "Be brief."})) == [
        ("system", "Be brief."),
        ("user", "Add.\n\n1 1"),
        ("assistant", "2"),
    ]
    assert texts(normalise({"instruction": "Add.", "input": "", "output": "2", "system": ""}))[0] == ("user", "Add.")
    lists = normalise({"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]})
    assert [m.get("weight") for m in lists["messages"]] == [None, 0, None, None]
    assert texts(normalise({"messages": turns("a", "b", "c")})) == [("user", "a"), ("assistant", "b"), ("user", "c")]
    tools = [{"type": "function", "function": {"name": "clock"}}]
    assert normalise({"messages": turns("a", "b"), "tools": json.dumps(tools)})["tools"] == tools
    assert "tools" not in normalise({"messages": turns("a", "b"), "tools": None})
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    told = normalise({"messages": [*turns("a"), {"role": "assistant", "tool_calls": [call]}]})["messages"][1]
    assert told["tool_calls"][0]["function"]["arguments"] == {"x": 1} and told["content"] == ""
    assert call["function"]["arguments"] == '{"x": 1}', "the caller's row must stay as it was"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "a"}, "unknown_columns"),
        ({"prompt": "a"}, "unknown_columns"),
        ({"messages": []}, "empty"),
        ({"messages": "[{"}, "bad_json"),
        ({"messages": 3}, "not_a_list"),
        ({"messages": ["a"]}, "not_a_turn"),
        ({"messages": [{"content": "a"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown_role"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}, "no_content"),
        ({"messages": turns("a", "")}, "empty_reply"),
        ({"messages": turns("a", " \n")}, "empty_reply"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": None}]}, "empty_reply"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": 3}]}, "not_text"),
        ({"messages": [*turns("a"), {"role": "assistant", "tool_calls": 3}]}, "bad_tool_call"),
        ({"messages": [*turns("a"), {"role": "assistant", "tool_calls": ["f"]}]}, "bad_tool_call"),
        ({"messages": turns("a")}, "no_reply"),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}]}, "no_reply"),
        ({"messages": [{"role": "system", "content": "x"}, *turns("a", "b")], "system": "y"}, "two_systems"),
        *[
            ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": weight}]}, "bad_weight")
            for weight in ("0", "1", 0.5, -1, 2, [0])
        ],
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": "0"}]},
            "bad_weight",
        ),
        ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "train": False}]}, "unsupported_field"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "loss": 0}]},
            "unsupported_field",
        ),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "unsupported_field"),
        ({"messages": turns("a", "b"), "images": ["a.png"]}, "unsupported_field"),
        ({"instruction": "a", "output": ["b", "c"]}, "not_text"),
        ({"instruction": ["a", "b"], "output": "c"}, "not_text"),
        ({"messages": turns("a", "b"), "system": ["c", "d"]}, "not_text"),
        ({"prompt": "a", "completion": " "}, "empty_reply"),
        ({"prompt": "a", "completion": turns("a", "b")}, "mixed_forms"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "system_on_raw_text"),
    ],
)
def test_rows_that_cannot_be_used_have_a_name(row, kind):
    assert kind_of(row) == kind


def test_weights_of_zero_and_one_and_empty_columns_are_taken():
    for weight in (0, 1, 0.0, 1.0, True):
        messages = [*turns("a"), {"role": "assistant", "content": "b", "weight": weight}, *turns("c", "d")]
        assert normalise({"messages": messages, "images": []})["messages"][1]["weight"] == weight
    assert len(normalise({"instruction": "a", "output": "b", "history": []})["messages"]) == 2


def test_the_report_tells_what_was_cut_and_which_columns_were_ignored(tmp_path):
    rows = [{"prompt": "p", "completion": str(number), "source": "s", "id": number} for number in range(3)]
    rows.append({"messages": turns("a", "b"), "prompt": None, "tools": []})
    path = write(tmp_path, "a.jsonl", rows)

    def encode(row):
        return {"input_ids": [1]} | ({"num_cut": int(row["completion"])} if row.get("completion", "0") != "0" else {})

    kept, report = collect(path, "train", encode, "stop")
    assert kept == [{"input_ids": [1]}] * 4 and (report.num_cut, report.tokens_cut) == (2, 3)
    assert str(report) == "read 4, kept 4; cut to max_length: 2 rows (3 tokens); ignored columns: id, source"
    report = collect(write(tmp_path, "b.jsonl", rows[1:2]), "train", encode, "stop")[1]
    assert "; cut to max_length: 1 row (1 tokens)" in str(report)


def test_faults_of_files_are_errors_that_name_the_file(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert len(list(read(write(tmp_path, "upper/A.JSONL", GOOD), "train"))) == 1
    assert len(list(read(str(tmp_path / "upper"), "train"))) == 1
    (tmp_path / "upper" / "folder.jsonl").mkdir()
    assert len(list(read(str(tmp_path / "upper"), "train"))) == 1
    (tmp_path / "upper" / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="gone.jsonl"):
        list(read(str(tmp_path / "upper"), "train"))
    with pytest.raises(ValueError, match="gone.jsonl"):
        list(read(str(tmp_path / "upper" / "gone.jsonl"), "train"))
    with pytest.raises(ValueError, match="dataset_name .*xxx"):
        read("x" * 5000 + ".jsonl", "train")
    pq.write_table(pa.table({"prompt": ["a" * 3000] * 50, "completion": ["b"] * 50}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    damaged = write(tmp_path, "b.parquet", b"PAR1" + b"\xff" * 60 + whole[64:])
    with pytest.raises(ValueError, match="b.parquet"):
        list(read(damaged, "train"))
    with pytest.raises(ValueError, match="c.csv"):
        list(read(write(tmp_path, "c.csv", b'"prompt,completion\na,b\n'), "train"))
    number = b'{"messages": ' + b"9" * 5000 + b"}"
    for name, content in (("n.jsonl", GOOD + b"\n" + number), ("n.json", b"[" + GOOD + b"," + number + b"]")):
        rows = list(read(write(tmp_path, name, content), "train"))
        assert [getattr(row, "kind", None) for _, row in rows] == [None, "bad_json"]


def test_errors_name_the_field_of_the_source(tmp_path):
    bad, field = write(tmp_path, "bad.jsonl", b"{"), {"field": "eval_dataset_name"}
    (tmp_path / "empty").mkdir()
    for source in (str(tmp_path / "gone.jsonl"), str(tmp_path / "empty"), write(tmp_path, "blank.jsonl", b"\n")):
        with pytest.raises(ValueError, match="^eval_dataset_name"):
            read(source, "train", **field)
    for policy in ("stop", "skip"):
        with pytest.raises(ValueError, match="^eval_dataset_name"):
            collect(bad, "train", dict, policy, **field)


def test_collect_counts_and_decides(tmp_path):
    path = write(tmp_path, "a.jsonl", [{"prompt": "p", "completion": str(number)} for number in range(20)])

    def encode(row):
        number = int(row["completion"])
        if number >= 5:
            raise BadRow("too_long" if number % 2 else "no_target_left", f"row {number}")
        return number

    kept, report = collect(path, "train", encode, "skip")
    assert kept == [0, 1, 2, 3, 4] and report.reasons == {"too_long": 8, "no_target_left": 7}
    assert len(report.first) == 10 and report.first[0] == f"{path}:6: row 5"
    with pytest.raises(ValueError) as error:
        collect(path, "train", encode, "stop")
    assert f"{path}:7: row 6" in str(error.value) and "row 5" not in str(error.value)
    assert "no_target_left 7" in str(error.value)

    def dropping(row):
        if row["completion"] != "3":
            raise BadRow("too_long", "long")
        return 3

    assert collect(path, "train", dropping, "stop")[0] == [3], "rows the user asked to drop do not stop a run"

    def refuse(row):
        raise BadRow("too_long", "40 tokens are over max_length 8")

    for policy in ("stop", "skip"):
        with pytest.raises(ValueError, match="leaves no row(.|\n)*max_length 8"):
            collect(path, "train", refuse, policy)
    with pytest.raises(ValueError, match="on_bad_row"):
        collect(path, "train", encode, "ignore")

    def broken(row):
        raise ValueError("no chat template")

    with pytest.raises(ValueError, match="^no chat template$"):
        collect(path, "train", broken, "skip")
