"""Pairs and labelled answers: which forms are read, and which rows are refused under which name."""

import json
import math

import pytest

from oneloop.data import preference, readers
from oneloop.data.files import BadRow
from oneloop.mixture import Source
from tests.unit.test_rows import CASES, turns

ASK = turns("Up?")
DOWN, SIDEWAYS = ({"role": "assistant", "content": text} for text in ("Down.", "Sideways."))
LONG = [{"role": "system", "content": "Be brief."}, *turns("Hi.", "Hello.", "Up?")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Up?", "chosen": "Down.", "rejected": "Up."}, ("Up?", "Down.", "Up.")),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": [SIDEWAYS]}, (ASK, [DOWN], [SIDEWAYS])),
        # A prompt column, and whole conversations that repeat it (C47).
        ({"prompt": "Up?", "chosen": [*ASK, DOWN], "rejected": [*ASK, SIDEWAYS]}, (ASK, [DOWN], [SIDEWAYS])),
        ({"prompt": ASK, "chosen": [*ASK, DOWN], "rejected": [*ASK, SIDEWAYS]}, (ASK, [DOWN], [SIDEWAYS])),
        ({"prompt": "Up?", "chosen": [*LONG, DOWN], "rejected": [*LONG, SIDEWAYS]}, (LONG, [DOWN], [SIDEWAYS])),
        # No prompt column: it is what both begin with (C43).
        ({"chosen": [*ASK, DOWN], "rejected": [*ASK, SIDEWAYS]}, (ASK, [DOWN], [SIDEWAYS])),
        ({"chosen": [*LONG, DOWN], "rejected": [*LONG, SIDEWAYS], "prompt": None}, (LONG, [DOWN], [SIDEWAYS])),
        # The answers may be of several turns each.
        (
            {"prompt": ASK, "chosen": [DOWN, *turns("Sure?", "Yes.")], "rejected": [SIDEWAYS]},
            (ASK, [DOWN, *turns("Sure?", "Yes.")], [SIDEWAYS]),
        ),
        # As JSON text, in parts, and with weights, which say nothing here.
        ({"chosen": [*ASK, DOWN], "rejected": [*ASK, SIDEWAYS], "tools": "[]"}, (ASK, [DOWN], [SIDEWAYS])),
        (
            {
                "prompt": ASK,
                "chosen": [DOWN | {"content": [{"type": "text", "text": "Down."}]}],
                "rejected": [SIDEWAYS],
            },
            (ASK, [DOWN], [SIDEWAYS]),
        ),
        (
            {
                "prompt": [*turns("a"), DOWN | {"weight": 0}, *ASK],
                "chosen": [DOWN | {"weight": 1}],
                "rejected": [SIDEWAYS],
            },
            ([*turns("a"), DOWN, *ASK], [DOWN], [SIDEWAYS]),
        ),
        (
            {"prompt": ASK, "chosen": [DOWN], "rejected": [SIDEWAYS], "system": "Be brief."},
            ([LONG[0], *ASK], [DOWN], [SIDEWAYS]),
        ),
    ],
)
def test_pairs(row, expected):
    before = json.dumps(row)
    assert preference.normalise(row) == dict(zip(("prompt", "chosen", "rejected"), expected, strict=True))
    assert json.dumps(row) == before, "the caller's row must stay as it was"


@pytest.mark.parametrize(
    ("label", "expected"),
    [*[(label, True) for label in (True, 1, 1.0, "true", "True", " TRUE ", "1")]]
    + [*[(label, False) for label in (False, 0, 0.0, "false", "False", "0")]],
)
def test_labels(label, expected):
    row = {"prompt": "Up?", "completion": "Down.", "label": label}
    assert preference.normalise(row) == {"prompt": "Up?", "completion": "Down.", "label": expected}
    assert preference.normalise(row)["label"] is expected
    chat = preference.normalise({"prompt": ASK, "completion": [DOWN], "label": label})
    assert chat == {"prompt": ASK, "completion": [DOWN], "label": expected}
    whole = {"prompt": "Up?", "completion": [*ASK, DOWN], "label": label}
    assert preference.normalise(whole) == chat


PAIR = {"prompt": "Up?", "chosen": "Down.", "rejected": "Up."}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "Up?", "chosen": "Down."}, "unknown_columns"),
        ({"messages": turns("a", "b")}, "unknown_columns"),
        ({"prompt": "Up?", "completion": "Down."}, "unknown_columns"),
        (PAIR | {"rejected": "Down."}, "equal_pair"),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": [dict(DOWN)]}, "equal_pair"),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": [DOWN | {"weight": 1}]}, "equal_pair"),
        ({"chosen": [*ASK, DOWN], "rejected": [*ASK, DOWN]}, "equal_pair"),
        (PAIR | {"chosen": ""}, "empty_reply"),
        (PAIR | {"rejected": " \n"}, "empty_reply"),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": [DOWN | {"content": ""}]}, "empty_reply"),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": []}, "empty"),
        ({"prompt": [], "chosen": [DOWN], "rejected": [SIDEWAYS]}, "empty"),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": [SIDEWAYS, *turns("And?")]}, "no_reply"),
        ({"chosen": [*ASK, DOWN], "rejected": turns("Down?", "Up.")}, "no_prompt"),
        ({"chosen": [DOWN], "rejected": [SIDEWAYS]}, "no_prompt"),
        ({"chosen": "a b", "rejected": "a c"}, "no_prompt"),
        # They part at a question: no answer is compared with another to the same one.
        ({"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "x", "y")}, "prompts_differ"),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "b", "c", "d")}, "prompts_differ"),
        ({"prompt": turns("Other?"), "chosen": [*ASK, DOWN], "rejected": [*ASK, SIDEWAYS]}, "prompts_differ"),
        ({"prompt": "Other?", "chosen": [*ASK, DOWN], "rejected": [*ASK, SIDEWAYS]}, "prompts_differ"),
        ({"prompt": "Up?", "chosen": [DOWN], "rejected": [SIDEWAYS]}, "mixed_forms"),
        ({"prompt": ASK, "chosen": "Down.", "rejected": "Up."}, "mixed_forms"),
        (PAIR | {"rejected": [SIDEWAYS]}, "mixed_forms"),
        (PAIR | {"completion": "Down.", "label": True}, "mixed_forms"),
        (PAIR | {"rejected": 3}, "mixed_forms"),
        ({"prompt": ASK, "chosen": 3, "rejected": 4}, "not_a_list"),
        ({"prompt": ASK, "chosen": [DOWN], "rejected": [SIDEWAYS | {"role": "gpt5"}]}, "unknown_role"),
        ({"prompt": ASK, "chosen": [DOWN | {"weight": 0}], "rejected": [SIDEWAYS]}, "unsupported_field"),
        (PAIR | {"images": ["a.png"]}, "unsupported_field"),
        (PAIR | {"system": "Be brief."}, "system_on_raw_text"),
        (PAIR | {"prompt": "x" * 8_000_001}, "too_big"),
        *[(PAIR | {"margin": score}, "bad_score") for score in (math.nan, math.inf, "high", True, [1], 10**400)],
        (PAIR | {"score_chosen": "nan"}, "bad_score"),
        *[
            ({"prompt": "a", "completion": "b", "label": label}, "bad_label")
            for label in (2, -1, 0.5, math.nan, "yes", "", [True])
        ],
        ({"prompt": "a", "completion": " ", "label": True}, "empty_reply"),
        ({"prompt": "a", "completion": [DOWN], "label": True}, "mixed_forms"),
    ],
)
def test_rows_that_cannot_be_compared_have_a_name(row, kind):
    with pytest.raises(BadRow) as caught:
        preference.normalise(row)
    assert caught.value.kind == kind


def test_scores_and_tools_are_passed_on_and_other_columns_named():
    tools = [{"type": "function", "function": {"name": "clock"}}]
    row = {"prompt": ASK, "chosen": [DOWN], "rejected": [SIDEWAYS], "tools": tools, "margin": 2, "id": 7}
    found = preference.normalise(row | {"score_chosen": "3.5", "score_rejected": None})
    assert (found["tools"], found["margin"], found["score_chosen"]) == (tools, 2.0, 3.5)
    assert "score_rejected" not in found and "id" not in found
    assert preference.ignored_columns(row) == {"id"}
    assert preference.ignored_columns(PAIR | {"tools": tools, "system": ""}) == {"tools", "system"}


def test_columns_and_form_of_the_source():
    source = Source(
        path="p", field="datasets[0]", columns={"prompt": "question", "chosen": "best", "rejected": "worst"}
    )
    row = {"question": "Up?", "best": "Down.", "worst": "Up.", "note": "n"}
    assert preference.normalise(row, source) == PAIR
    assert preference.ignored_columns(row, source) == {"note"} and preference.form_of(row, source) == "preference"
    with pytest.raises(BadRow, match=r"no column 'worst', which datasets\[0\].columns names for 'rejected'"):
        preference.normalise({"question": "Up?", "best": "Down."}, source)
    with pytest.raises(ValueError, match=r"datasets\[0\].columns has 'choosen'.*did you mean chosen") as error:
        preference.normalise(row, Source(path="p", field="datasets[0]", columns={"choosen": "best"}))
    assert not isinstance(error.value, BadRow)
    with pytest.raises(ValueError, match="format is 'prefrence': did you mean preference"):
        preference.normalise(row, Source(path="p", format="prefrence"))
    both = {"prompt": "Up?", "completion": "Down.", "label": 1, "rejected": None, "chosen": None}
    assert preference.form_of(both) == "unpaired_preference"
    with pytest.raises(BadRow, match="format is preference, but there is no 'chosen'"):
        preference.normalise(both, Source(path="p", format="preference"))
    assert {preference.form_of(row) for row in (PAIR, {"chosen": 1, "rejected": 2})} == {
        "preference",
        "implicit_preference",
    }


@pytest.mark.parametrize(("name", "count"), [("C43_preference.jsonl", 3), ("C47_pairs.jsonl", 2)])
def test_shared_cases(name, count):
    if not (CASES / name).is_file():
        pytest.skip(f"the folder of shared cases is not beside the repository (no {name})")
    found = [preference.normalise(readers.parse(raw.data)) for raw, _ in readers.read(CASES / name)]
    assert len(found) == count
    for row in found:
        assert [[turn["role"] for turn in row[part]] for part in ("prompt", "chosen", "rejected")] == [
            ["user"],
            ["assistant"],
            ["assistant"],
        ]
