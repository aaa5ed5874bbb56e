"""Rows: what is read, from which line, in which form, and what is refused under which name."""

import csv
import json
from pathlib import Path

import pytest

from oneloop import sources
from oneloop.data import rows as rows_module
from oneloop.data.rows import BadRow, check, collect, describe, form_of, ignored_columns, normalise, read
from oneloop.mixture import Source

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


def kind_of(row: dict, source: Source | None = None) -> str:
    with pytest.raises(BadRow) as caught:
        normalise(row, source)
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
    for name, content, line, reason in [
        ("b.json", b"[" + GOOD + b",\n" + GOOD[:40], 2, "beyond this element"),
        ("c.json", b"[" + GOOD + b"\n" + GOOD + b"]", 1, "no comma or bracket after this element"),
        ("d.json", b"[" + GOOD + b"]\n[1]", 1, "more text follows"),
    ]:
        # Under "skip" a count of one would stand for all rows that follow: it is the file that is at fault.
        for policy in ("stop", "skip"):
            with pytest.raises(ValueError, match=f"^dataset_name: .*{name}:{line}: .*{reason}"):
                collect(write(tmp_path, name, content), "train", dict, policy)
    assert len(list(read(write(tmp_path, "d.json", GOOD + b"\n" + GOOD), "train"))) == 2
    whole = write(tmp_path, "f.json", GOOD.replace(b", ", b",\n"))
    assert [place for place, row in read(whole, "train")] == [f"{whole}:1"]
    twice = list(read(write(tmp_path, "g.json", b'{"a": 1,\n"a": 2}'), "train"))
    assert [row.kind for _, row in twice] == ["duplicate_key"]
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
    assert ignored_columns({"prompt": "a", "completion": "b", "note": None}) == set()
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
    for name, suffix in (("a.md", ".md"), ("a.parquet.gz", ".gz"), ("a.jsonl.bz2", ".bz2")):
        with pytest.raises(ValueError, match=f"cannot read '{suffix}'"):
            read(write(tmp_path, name, GOOD), "train")
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
        empty = {"prompt": None, "completion": None, "messages": None}
        rows = [{"prompt": "a", "completion": "b"}, {"messages": turns("a", "b")}]
        return datasets.Dataset.from_list([empty | row for row in rows])

    # Only the download is replaced: no test reaches the network. The rows come padded, as from the hub.
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "dataset_commit", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    rows = list(read("org/set", "train[:2]"))
    assert asked == [("org/set", "train[:2]")]
    assert [place for place, _ in rows] == ["org/set[train[:2]]:0", "org/set[train[:2]]:1"]
    assert normalise(rows[0][1]) == {"prompt": "a", "completion": "b"}
    assert normalise(rows[1][1]) == {"messages": turns("a", "b")}
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
        ({"text": "a", "prompt": "b"}, "unknown_columns"),
        ({"text": "a", "chosen": "b"}, "unknown_columns"),
        ({"text": ""}, "empty_text"),
        ({"text": " \n\u3000"}, "empty_text"),
        ({"text": ["a"]}, "not_text"),
        ({"text": "a", "images": ["a.png"]}, "unsupported_field"),
        ({"messages": turns("a", "b"), "tools": {"name": "clock"}}, "bad_tools"),
        ({"messages": turns("a", "b"), "tools": ["clock"]}, "bad_tools"),
        ({"messages": turns("a", "b"), "tools": "{"}, "bad_json"),
        ({"messages": turns("a", "b" * 8_000_001)}, "too_big"),
        ({"text": "b" * 8_000_001}, "too_big"),
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


GSM8K = {"question": "1 + 1?", "answer": "2"}


def test_columns_of_other_names_are_taken_when_told_and_guessed_in_the_message():
    source = Source(path="p", field="datasets[1]", columns={"prompt": "question", "completion": "answer"})
    assert normalise(GSM8K, source) == {"prompt": "1 + 1?", "completion": "2"}
    assert form_of(GSM8K, source) == "prompt_completion"
    assert ignored_columns(GSM8K | {"id": 1, "prompt": "other"}, source) == {"id", "prompt"}
    for row in ({"question": "1 + 1?"}, {"question": "1 + 1?", "answers": "2"}):
        with pytest.raises(
            BadRow, match=r"no column 'answer', which datasets\[1\].columns names for 'completion'"
        ) as bad:
            normalise(row, source)
        assert bad.value.kind == "missing_column"
    # A column that is there without a value is not a misspelt one: that the form needs it is another matter.
    assert kind_of(GSM8K | {"answer": None}, source) == "unknown_columns"
    optional = Source(path="p", columns={"instruction": "question", "input": "context", "output": "answer"})
    assert texts(normalise(GSM8K | {"context": None}, optional)) == [("user", "1 + 1?"), ("assistant", "2")]
    assert texts(normalise(GSM8K | {"context": "c"}, optional))[0] == ("user", "1 + 1?\n\nc")
    assert kind_of(GSM8K, optional) == "missing_column"
    # The columns that were named decide, whatever else the row has.
    both = GSM8K | {"messages": turns("a", "b")}
    assert normalise(both, source)["completion"] == "2" and normalise(both)["messages"] == turns("a", "b")

    for row, guess in [
        (GSM8K, "{prompt: question, completion: answer}"),
        ({"Query": "a", "Response": "b", "id": 1}, "{prompt: Query, completion: Response}"),
        ({"instruction": "a", "context": "", "response": "b"}, "{output: response}"),
        ({"dialogue": turns("a", "b")}, "{messages: dialogue}"),
        ({"content": "a", "url": "b"}, "{text: content}"),
    ]:
        with pytest.raises(BadRow) as bad:
            normalise(row)
        assert bad.value.kind == "unknown_columns" and f"write `columns: {guess}`" in str(bad.value)
        columns = dict(pair.split(": ") for pair in guess[1:-1].split(", "))
        assert normalise(row, Source(path="p", columns=columns)), "the remedy must be one"
    with pytest.raises(BadRow, match="recipe that compares answers"):
        normalise({"prompt": "a", "chosen": "b", "rejected": "c"})


def test_names_that_no_form_has_are_errors_at_once():
    for columns, message in [
        ({"promt": "question"}, r"datasets\[0\].columns has 'promt'.*did you mean prompt"),
        ({"question": "prompt"}, r"write prompt: question \(our name first\)"),
        ({"xyzw": "q"}, "known are .*completion.*"),
    ]:
        source = Source(path="p", field="datasets[0]", columns=columns)
        for attempt in (lambda source=source: check(source), lambda source=source: normalise(GSM8K, source)):
            with pytest.raises(ValueError, match=message) as error:
                attempt()
            assert not isinstance(error.value, BadRow), "the config is at fault, not the row"
    with pytest.raises(ValueError, match=r"datasets\[0\].format is 'alpacca': did you mean alpaca"):
        check(Source(path="p", field="datasets[0]", format="alpacca"))
    with pytest.raises(ValueError, match="known are messages, sharegpt"):
        check(Source(path="p", format="qqq"))
    check(Source(path="p", columns={"chosen": "a", "rejected": "b", "system": "c"}, format="messages"))


def test_a_form_that_is_asked_for_is_the_one_taken():
    row = {"messages": turns("a", "b"), "prompt": "p", "completion": "c", "text": "t"}
    found = {form: normalise(row, Source(path="p", format=form)) for form in ("messages", "prompt_completion", "text")}
    assert found["messages"]["messages"] == turns("a", "b")
    assert found["prompt_completion"] == {"prompt": "p", "completion": "c"} and found["text"] == {"text": "t"}
    with pytest.raises(
        BadRow, match="format is alpaca, but there is no 'instruction'; columns found: completion, mess"
    ):
        normalise(row, Source(path="p", format="alpaca"))
    assert ignored_columns(row, Source(path="p", format="text")) == {"messages", "prompt", "completion"}
    assert ignored_columns(row, Source(path="p", format="messages")) == {"prompt", "completion", "text"}


def test_forms_are_told_by_columns_and_counted_in_a_line():
    rows = {
        "messages": {"messages": turns("a", "b"), "text": "rendered", "prompt": None},
        "sharegpt": {"conversations": turns("a", "b")},
        "prompt_completion": {"prompt": "a", "completion": "b", "text": "a b"},
        "alpaca": {"instruction": "a", "output": "b", "text": "a b"},
        "text": {"text": "a", "url": "u", "meta": {"id": 1}},
    }
    assert set(rows) == set(rows_module.FORMATS)
    assert {form: form_of(row) for form, row in rows.items()} == {form: form for form in rows}
    assert normalise(rows["text"]) == {"text": "a"} and ignored_columns(rows["text"]) == {"url", "meta"}
    assert describe({"alpaca": 73, "messages": 7400}) == "messages 7,400 rows, alpaca 73"
    assert describe({"text": 1}) == "text 1 row" and describe({}) == "no rows"


def test_messages_hold_no_sample_text():
    secret = "the patient's name is " + "x" * 100
    rows = [
        {"messages": [{"role": secret, "content": "a"}]},
        {"messages": [{"role": [secret], "content": "a"}]},
        {"conversations": [{"from": secret, "value": "a"}]},
        {"messages": [{"role": "user", "content": "a", "weight": secret}]},
        {"messages": [{"role": "user", "content": {secret: 1}}]},
        {f"{secret}{number}": 1 for number in range(500)},
    ]
    for row in rows:
        with pytest.raises(BadRow) as bad:
            normalise(row)
        assert secret not in str(bad.value) and len(str(bad.value)) < 1500


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
    for name, content, message in [
        ("c.csv", b'"prompt,completion\na,b\n', "c.csv:1: not valid CSV"),
        ("d.csv", b'prompt,completion\na,b\nc,"d\ne,f\n', "d.csv:3: not valid CSV .* cannot be read beyond this row"),
        ("e.csv", b'prompt,completion\na,b\nc,"d" e\nf,g\n', "e.csv:3: not valid CSV"),
        ("f.csv", b"prompt,completion,prompt\na,b,c\n", "f.csv has more than one column named 'prompt'"),
        ("g.csv", b"caf\xe9,completion\na,b\n", "g.csv has column names that are not UTF-8"),
    ]:
        for policy in ("stop", "skip"):
            with pytest.raises(ValueError, match=f"^dataset_name: .*{message}"):
                collect(write(tmp_path, name, content), "train", dict, policy)
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


def test_a_source_brings_its_columns_and_its_name(tmp_path):
    path = write(tmp_path, "a.jsonl", [GSM8K | {"id": 1}, {"question": "2?", "answr": "2"}])
    source = Source(path=path, field="datasets[2]", columns={"prompt": "question", "completion": "answer"})
    kept, report = collect(source, None, dict, "skip")
    assert kept == [{"prompt": "1 + 1?", "completion": "2"}] and report.ignored == {"id"}
    assert report.reasons == {"missing_column": 1} and report.first[0].startswith(
        f"{path}:2: there is no column 'answer'"
    )
    with pytest.raises(ValueError, match=r"^datasets\[2\] .*a.jsonl' has rows that cannot be used"):
        collect(source, None, dict, "stop")
    with pytest.raises(ValueError, match=r"^datasets\[2\].format"):
        read(Source(path=path, field="datasets[2]", format="alpacca"))


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
