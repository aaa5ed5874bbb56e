"""Batches of rows: the tokens and labels of single rows, as arrays, cut by one of three rules."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from oneloop.data import chat, chunks, encode, pieces
from oneloop.data.chat import IGNORE_INDEX
from oneloop.data.files import BadRow
from tests import tiny

CASES = Path(__file__).parents[3] / "shared" / "cases"
ROOM = {"max_length": 2000, "truncation": "truncate"}
LONG = "The sky is blue. " * 40
MULTITURN = [
    ["s:Be brief.", "u:Red or blue?", "a:Red.", "u:Why?", "a:Warm."],
    ["u:Tell me in two parts.", "a:Part one.", "a:Part two."],
    ["u:Think first.", "a:<think>maybe 3</think>Three.", "u:Sure?", "a:<think>check</think>Yes."],
]
CONTROL = [
    [
        "u:A turn ends with <|im_end|>\n<|im_start|>assistant\nand the reply starts.",
        "a:The marker <|im_end|> closes it.",
    ],
    ["u:HTML strike: <s>old</s> new", "a:<s>old</s> is struck out.<|im_end|>"],
    ["u:plain", "a:ok"],
]
STRICT = [["s:Be a sailor.", "u:Weather?", "a:Fair."], ["u:First.", "u:Second.", "a:Noted."], ["u:Only me.", "a:Yes."]]
STRICT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system turn in this format') }}{%- endif -%}"
    "{%- for x in messages -%}{%- if (x['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('turns must take turns') }}{%- endif -%}"
    "{{ '<|im_start|>' ~ x['role'] ~ '\\n' ~ x['content'] ~ '<|im_end|>\\n' }}{%- endfor -%}"
)


def talk(*turns: str) -> dict:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]}


def cases(name: str, inline: list) -> list[dict]:
    """The rows of a shared case where the folder is there, and some of the same kind in any case."""
    path = CASES / name
    shared = [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    return [{"messages": row["messages"]} for row in shared] + [talk(*turns) for turns in inline]


def one(tokenizer, example: dict, **options) -> dict:
    """Encode one row in a batch, which must give what it gives alone."""
    rules = encode.Rules(**(ROOM | options))
    found = encode.encode_batch(tokenizer, [example, example], **vars(rules))
    if isinstance(found[0], BadRow):
        with pytest.raises(BadRow) as caught:
            encode.encode_row(tokenizer, example, rules)
        assert (caught.value.kind, str(caught.value)) == (found[0].kind, str(found[0]))
        raise found[0]
    expected = encode.encode_row(tokenizer, example, rules)
    for rows in found:
        assert len(rows) == len(expected)
        for row, other in zip(rows, expected, strict=True):
            assert row.keys() == other.keys()
            for key in row:
                assert np.array_equal(row[key], other[key])
            assert row["input_ids"].dtype == row["labels"].dtype == np.int32
    assert len(found[0]) == 1
    return found[0][0]


def kind_of(tokenizer, example: dict, **options) -> str:
    with pytest.raises(BadRow) as caught:
        one(tokenizer, example, **options)
    return caught.value.kind


def supervised(tokenizer, row: dict) -> list[str]:
    learnt = row["labels"] != IGNORE_INDEX
    assert (row["input_ids"][learnt] == row["labels"][learnt]).all()
    borders = np.flatnonzero(np.diff(np.concatenate([[0], learnt, [0]]).astype(int)))
    return [tokenizer.decode(row["input_ids"][at:to]) for at, to in zip(borders[::2], borders[1::2], strict=True)]


def told(example: dict) -> list[str]:
    return [m["content"] + "<|im_end|>" for m in example["messages"] if m["role"] == "assistant"]


def with_ends(before: str, after: str):
    """Return a tokenizer that puts these tokens around a text."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(tiny.tokenizer(eos="</s>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    return tokenizer


# --- C12, C14, C16, C22 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["", "</s>"])
@pytest.mark.parametrize("inner", [False, True])
def test_c12_start_tokens_are_never_doubled(inner, after):
    tokenizer = with_ends("<s>", after)
    tokenizer.chat_template = ("{{ bos_token }}" if inner else "") + tiny.CHATML
    example = talk("u:a", "a:b")
    row = one(tokenizer, example)
    assert row["input_ids"].tolist() == tokenizer.apply_chat_template(example["messages"], return_dict=False)
    assert row["input_ids"].tolist().count(2) == int(inner)
    for text in ("Name a colour. Teal.", " x", "Name"):
        ids = one(tokenizer, {"text": text})["input_ids"].tolist()
        assert (ids[0], ids[-1], ids.count(2), ids.count(3)) == (2, 3, 1, 1)
        assert ids[1:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]
        pair = one(tokenizer, {"prompt": text, "completion": " Yes."})
        assert (pair["input_ids"][0], pair["input_ids"][-1]) == (2, 3)
        assert supervised(tokenizer, pair) == [" Yes.</s>"]


@pytest.mark.parametrize("name", ["CHATML", "CHATML_MARKERS", "STRIP_THINK", "DEFAULT_SYSTEM"])
def test_c14_each_reply_is_learnt_as_rendered(name):
    tokenizer = tiny.tokenizer(getattr(tiny, name))
    for example in cases("C14_multiturn.jsonl", MULTITURN):
        row, expected = one(tokenizer, example), told(example)
        if name == "STRIP_THINK":
            expected = [text.split("</think>")[-1] for text in expected[:-1]] + expected[-1:]
        assert supervised(tokenizer, row) == expected
        assert row["input_ids"].tolist() == tokenizer.apply_chat_template(example["messages"], return_dict=False)
        if name == "CHATML_MARKERS":
            assert np.array_equal(row["labels"], one(tiny.tokenizer(), example)["labels"])


def test_c16_each_row_is_refused_or_used_by_itself(tmp_path):
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = STRICT_TEMPLATE
    found = encode.encode_batch(tokenizer, [talk(*turns) for turns in STRICT], **ROOM)
    assert [getattr(rows, "kind", len(rows) if isinstance(rows, list) else 0) for rows in found] == [
        "template_refused",
        "template_refused",
        1,
    ]
    assert "no system turn in this format" in str(found[0]) and "turns must take turns" in str(found[1])
    for bad in found[:2]:
        assert bad.__traceback__ is None is bad.__cause__ is bad.__context__
        assert str(copy.copy(bad)) == str(bad)
    if (CASES / "C16_strict_template.jinja").is_file():
        tokenizer.chat_template = (CASES / "C16_strict_template.jinja").read_text()
        rows = encode.encode_batch(tokenizer, cases("C16_roles_for_strict_template.jsonl", []), **ROOM)
        assert [row.kind for row in rows[:3]] == ["template_refused"] * 3
    deaf = tiny.CHATML.replace("in messages %}", "in messages if message.role != 'system' %}", 1)
    assert kind_of(tiny.tokenizer(deaf), talk(*STRICT[0])) == "turn_lost"


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", ["CHATML", "CHATML_MARKERS"])
def test_c22_control_text_is_text(name, split):
    tokenizer = tiny.tokenizer(getattr(tiny, name))
    for example in cases("C22_control_text.jsonl", CONTROL):
        row = one(tokenizer, example, split_special_tokens=split)
        assert supervised(tokenizer, row) == told(example)
        ids = row["input_ids"].tolist()
        plain = tokenizer.apply_chat_template(example["messages"], return_dict=False)
        if split:
            assert [ids.count(token) for token in (0, 1, 2, 3)] == [len(example["messages"])] * 2 + [0, 0]
            assert tokenizer.decode(ids) == tokenizer.decode(plain)
        else:
            assert ids == plain


# --- whole documents --------------------------------------------------------------------------------------------------


def test_document_is_learnt_as_a_whole_with_one_end():
    for tokenizer in (tiny.tokenizer(eos="</s>"), tiny.tokenizer(bos=True, eos="</s>"), with_ends("<s>", "</s>")):
        for options in ({}, {"assistant_only_loss": False}):
            row = one(tokenizer, {"text": LONG}, **options)
            ids = row["input_ids"].tolist()
            assert (row["labels"] == row["input_ids"]).all()
            assert ids.count(3) == 1 == ids[-1:].count(3) and ids.count(2) == ids[:1].count(2) <= 1
        for text in ("", " \n\t\u3000"):
            assert kind_of(tokenizer, {"text": text}) == "empty_text"
    # A start or end that the text spells is the one, if it is allowed to be a token at all.
    for tokenizer in (with_ends("<s>", "</s>"), tiny.tokenizer(bos=True, eos="</s>")):
        for text in ("<s>The sky</s>", "<s><s>The sky</s></s>", "The sky</s>", "<s>The sky"):
            ids = one(tokenizer, {"text": text}, split_special_tokens=False)["input_ids"].tolist()
            assert ids == [2, *tokenizer("The sky", add_special_tokens=False)["input_ids"], 3]
            ids = one(tokenizer, {"text": text})["input_ids"].tolist()
            assert (ids.count(2), ids.count(3)) == (1, 1) and tokenizer.decode(ids) == f"<s>{text}</s>"
    assert kind_of(tiny.tokenizer(eos="</s>"), {"text": "</s></s>"}, split_special_tokens=False) == "no_target"


def test_text_that_no_tokenizer_can_take_is_refused_alone():
    tokenizer, half = tiny.tokenizer(), "a\ud800b"
    bad = [{"text": half}, {"prompt": half, "completion": "x"}, talk("u:a", f"a:{half}")]
    found = encode.encode_batch(tokenizer, [*bad, {"text": "a"}], **ROOM)
    assert [getattr(one, "kind", "kept") for one in found] == ["lone_surrogate"] * 3 + ["kept"]
    assert all("\ud800" not in str(one) for one in found[:3])
    assert {kind_of(tokenizer, row) for row in bad} == {"lone_surrogate"}


# --- the batch --------------------------------------------------------------------------------------------------------


def test_kinds_of_rows_may_be_mixed_and_keep_their_places():
    tokenizer = tiny.tokenizer(bos=True, eos="</s>")
    pair = {"prompt": "a", "completion": "b"}
    examples = [talk("u:a", "a:b"), {"text": "The sky"}, talk("u:only"), pair, {"text": " "},
                talk("u:<s>", "a:<|im_end|>"), talk("u:c", "a:d")] * 40  # fmt: skip
    rules = encode.Rules(**ROOM)
    found = encode.encode_batch(tokenizer, examples, **ROOM)
    assert len(found) == len(examples) == 280
    for example, rows in zip(examples, found, strict=True):
        if isinstance(rows, BadRow):
            assert rows.kind in ("no_reply", "empty_text")
            continue
        (expected,) = encode.encode_row(tokenizer, example, rules)
        assert all(np.array_equal(rows[0][key], expected[key]) for key in expected)
    assert encode.encode_batch(tokenizer, [], **ROOM) == []
    assert encode.encode_batch(tokenizer, [{"text": ""}], **ROOM)[0].kind == "empty_text"


def test_what_is_wrong_with_all_rows_is_raised():
    for tokenizer, example, words in (
        (tiny.tokenizer(None), talk("u:a", "a:b"), "--chat_template"),
        (no_end(), {"text": "a"}, "eos_token"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            encode.encode_batch(tokenizer, [example], **ROOM)
        assert not isinstance(caught.value, BadRow)
    with pytest.raises(ValueError, match="truncation"):
        encode.encode_batch(tiny.tokenizer(), [{"text": "a"}], max_length=8, truncation="cut")


def no_end():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.eos_token = None
    return tokenizer


def test_values_that_are_nested_too_deeply_are_refused_alone():
    deep = 1
    for _ in range(20_000):
        deep = [deep]
    odd = talk("u:a", "a:b")
    odd["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": deep}}}]
    for depth in range(20, 900, 40):
        less = 1
        for _ in range(depth):
            less = {"a": less}
        call = {"function": {"name": "f", "arguments": less}}
        row = talk("u:a", "a:b")
        row["messages"][1]["tool_calls"] = [call]
        found = encode.encode_batch(tiny.tokenizer(), [row, odd, talk("u:a", "a:b")], **ROOM)
        assert found[0].kind in ("turn_lost", "nested_too_deep") and found[1].kind == "nested_too_deep"
        assert isinstance(found[2], list)
    del odd, row, found
    while isinstance(deep, list):  # an object so deep must be taken apart by hand
        (deep,) = deep


def test_weights_and_templates_without_end_follow_the_rows():
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer = tiny.tokenizer(template, eos="</s>")
    example = talk("u:a", "a:b", "u:c", "a:d")
    assert supervised(tokenizer, one(tokenizer, example)) == ["b", "d\n</s>"]
    example["messages"][-1]["weight"] = 0
    assert supervised(tokenizer, one(tokenizer, example)) == ["b"]
    assert one(tokenizer, example, assistant_only_loss=False)["labels"].tolist()[-1] == 3
    # The end of a turn that a template with rules of its own writes where another one opens the next turn.
    doubled = tiny.CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{{ message['content'] }}")
    assert supervised(tiny.tokenizer(doubled), one(tiny.tokenizer(doubled), talk("u:a", "a:b "))) == ["b b <|im_end|>"]


def test_unknown_text_is_refused_where_it_would_be_learnt():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", *map(chr, range(32, 127)), "\u010a", "\u0120"]
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = tiny.CHATML
    assert kind_of(tokenizer, talk("u:a", "a:\u00e9")) == "unknown_token"
    assert supervised(tokenizer, one(tokenizer, talk("u:\u00e9", "a:b"))) == ["b<|im_end|>"]
    assert kind_of(tokenizer, talk("u:\u00e9", "a:b"), assistant_only_loss=False) == "unknown_token"
    assert kind_of(tokenizer, {"text": "\u00e9"}) == kind_of(tokenizer, {"prompt": "a", "completion": "\u00e9"})
    assert len(one(tokenizer, {"prompt": "\u00e9", "completion": "a"})["labels"]) == 4


def test_tokenizer_with_its_own_call_is_left_to_the_rows(monkeypatch):
    class Own(type(tiny.tokenizer())):
        def __call__(self, text, **options):
            return super().__call__(text.replace("sky", "SKY"), **options)

    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.__class__ = Own
    row = one(tokenizer, {"prompt": "The sky", "completion": " is blue"})
    assert tokenizer.decode(row["input_ids"]).startswith("The SKY")


def test_state_of_the_tokenizer_does_not_matter():
    """Cutting and padding that somebody has switched on is off, as it is in a call of the tokenizer."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    whole = one(tokenizer, {"text": LONG})
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert np.array_equal(
        encode.encode_batch(tokenizer, [{"text": LONG}], **ROOM)[0][0]["input_ids"], whole["input_ids"]
    )
    row = encode.encode_batch(tokenizer, [talk("u:a", "a:b")], **ROOM)[0][0]
    assert supervised(tokenizer, row) == ["b<|im_end|>"]


def test_memory_is_dropped_when_the_tokenizer_changes_and_when_it_is_full(monkeypatch):
    tokenizer = copy.deepcopy(tiny.tokenizer(eos="</s>"))
    before = one(tokenizer, {"text": "The harbour lamp"})
    memory = chunks.memory_for(tokenizer)
    assert memory is chunks.memory_for(tokenizer) and " harbour" in memory.parts
    tokenizer.add_tokens([chunks_token("harbour")])
    assert chunks.memory_for(tokenizer) is not memory
    row = one(tokenizer, {"text": "The harbour lamp"})
    assert tokenizer.convert_tokens_to_ids("harbour") in row["input_ids"]
    assert not np.array_equal(row["input_ids"], before["input_ids"])
    memory = chunks.memory_for(tokenizer)
    monkeypatch.setattr(chunks, "MOST_CHARACTERS", 30)
    for number in range(40):
        one(tokenizer, {"text": f"lamp{number} The harbour sky"})
        assert memory.num_characters <= 80 and len(memory.parts) <= 20
    tokenizer.backend_tokenizer.model.dropout = 0.5
    assert chunks.memory_for(tokenizer) is None


def chunks_token(text: str):
    from tokenizers import AddedToken

    return AddedToken(text, normalized=False)


@pytest.mark.parametrize("rules", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}])
def test_tokens_that_reach_beyond_themselves_rule_the_memory_out(rules):
    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_tokens([AddedToken("<odd>", **rules)])
    assert chunks.memory_for(tokenizer) is None
    one(tokenizer, {"text": "The <odd> sky <odd>. x<odd>y"})


def test_added_token_may_come_about_between_chunks():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.add_tokens([chunks_token("<a|b>"), chunks_token("x y")])
    texts = ["q <a", "q |b", "q >c", "<a|b>", "<a |b >c x y", "<a|b> x y"] + [
        f"{i}<a|b{j}>c x y" for i in "<x" for j in "yb"
    ]
    for _ in range(3):
        for text in texts:
            one(tokenizer, {"text": text})
            one(tokenizer, {"prompt": text, "completion": text}, split_special_tokens=False)
    memory = chunks.memory_for(tokenizer)
    memory._learn([" <a", "|b", ">c", " x"])  # in an order in which they make one
    assert memory.is_sound and {" <a", "|b", ">c"} <= memory.parts.keys()


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, lambda values: np.array(values, np.int32)])
def test_pieces_are_a_partition(form):
    labels = [IGNORE_INDEX, 1, 2, 3, 4, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 8, 9, 10]
    row = {"input_ids": form(range(11)), "labels": form(labels)}
    assert pieces.fit(row, 11, "split") == [row] == pieces.fit(row, 11, "drop")
    for size in range(2, 11):
        found = pieces.fit(row, size, "split")
        expected = []
        # No piece is a single token, which would have nothing to be learnt from: it takes one from the piece before.
        ends = {5: [5, 9, 11], 10: [9, 11]}.get(size, [*range(size, 11, size), 11])
        for start, end in zip([0, *ends], ends, strict=False):
            piece = [label if index else IGNORE_INDEX for index, label in enumerate(labels[start:end])]
            if set(piece) != {IGNORE_INDEX}:
                expected.append((list(range(start, end)), piece))
        assert [(list(piece["input_ids"]), list(piece["labels"])) for piece in found] == expected
        lost = 11 - sum(len(piece["labels"]) for piece in found)
        counts = {"num_left_out", "tokens_left_out"}
        assert all(not counts & piece.keys() for piece in found[1:])
        assert found[0].get("tokens_left_out", 0) == lost
        assert found[0].get("num_left_out", 0) == len(range(0, 11, size)) - len(found)
    assert list(row["labels"]) == labels, "the row itself is as it was"
    cut = pieces.fit(row, 4, "truncate")
    assert [list(piece["input_ids"]) for piece in cut] == [[0, 1, 2, 3]] and cut[0]["num_cut"] == 7


def test_rows_that_no_rule_can_save():
    def kind(labels, size, truncation):
        with pytest.raises(BadRow) as caught:
            pieces.fit({"input_ids": labels, "labels": labels}, size, truncation)
        return caught.value.kind

    none = IGNORE_INDEX
    assert kind([1, none, none], 8, "truncate") == "no_target", "the first token is predicted from nothing"
    assert kind([none, none, none, 1], 2, "truncate") == "no_target_left"
    assert kind([none, none, 1, none], 2, "split") == "no_target_left", "its only target begins a piece"
    assert kind([none, 1, 1], 2, "drop") == "too_long"
    assert kind([none, none, 1], 1, "split") == "no_target_left"


def test_batch_is_cut_by_each_rule():
    tokenizer, example = tiny.tokenizer(), talk("u:a", f"a:{LONG}")
    whole = one(tokenizer, example)
    length = len(whole["labels"])
    cut = one(tokenizer, example, max_length=20)
    assert cut["num_cut"] == length - 20 and np.array_equal(cut["labels"], whole["labels"][:20])
    assert kind_of(tokenizer, example, max_length=length - 1, truncation="drop") == "too_long"
    assert kind_of(tokenizer, talk(f"u:{LONG}", "a:b"), max_length=20) == "no_target_left"
    for size in (20, 64):
        assert length % size != 1
        options = {"max_length": size, "truncation": "split"}
        (rows,) = encode.encode_batch(tokenizer, [example], **options)
        assert all(len(row["labels"]) <= size for row in rows) and "num_left_out" not in rows[0]
        assert np.array_equal(np.concatenate([row["input_ids"] for row in rows]), whole["input_ids"])
        labels = whole["labels"].copy()
        labels[size::size] = IGNORE_INDEX
        assert np.array_equal(np.concatenate([row["labels"] for row in rows]), labels)
    (rows,) = encode.encode_batch(tokenizer, [talk(f"u:{LONG}", "a:b")], max_length=20, truncation="split")
    assert len(rows) == 1 and rows[0]["num_left_out"] >= 5 and supervised(tokenizer, rows[0]) == ["b<|im_end|>"]
    assert chat.encode_messages(tokenizer, example["messages"], max_length=20, truncation="split") == {
        key: values.tolist() for key, values in whole.items()
    }


@pytest.mark.parametrize("length", [8, 9, 16, 17, 18, 25])
def test_split_rows_keep_every_token_and_their_end(length):
    row = {"input_ids": np.arange(length, dtype=np.int32), "labels": np.arange(length, dtype=np.int32)}
    found = pieces.fit(row, 8, "split")
    assert np.concatenate([piece["input_ids"] for piece in found]).tolist() == list(range(length))
    assert all(2 <= len(piece["input_ids"]) <= 8 for piece in found) and "num_left_out" not in found[0]
    assert found[-1]["labels"][-1] == length - 1, "the token that ends the row is learnt"
    assert sum(int((piece["labels"] != IGNORE_INDEX).sum()) for piece in found) == length - (len(found) - 1)
