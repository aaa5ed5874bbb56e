"""Turns the known forms of rows that compare or judge answers into two: pairs, and single answers with a label."""

import math
from typing import Any

from oneloop.data import rows
from oneloop.data.files import BadRow, shown
from oneloop.data.turns import messages_of, refuse_system, tools_of, with_system
from oneloop.mixture import Source

FORMATS = {
    "preference": ("prompt", "chosen", "rejected"),
    "implicit_preference": ("chosen", "rejected"),
    "unpaired_preference": ("prompt", "completion", "label"),
}
"""Form of a row -> the columns it must have. Where a row has those of several, the first of them counts."""
SCORES = ("margin", "score_chosen", "score_rejected")
KNOWN_FORMS = (
    "`prompt` + `chosen` + `rejected`, `chosen` + `rejected` as whole conversations, `prompt` + `completion` + `label`"
)
LABELS = {"true": True, "1": True, "false": False, "0": False}


def normalise(row: dict, source: Source | None = None) -> dict:
    """Return `{"prompt", "chosen", "rejected"}`, each a list of messages or each raw text, or `{"prompt", "completion",
    "label": bool}`; beside that `tools`, where a row has them, and of SCORES those it has, as floats.

    Where chosen and rejected are whole conversations, the prompt is the messages with which both begin; a `prompt`
    column must then say the same, as a list of these messages or as the text of the last of them. What is compared
    begins with an assistant turn and ends with one. A label is true or false, 1 or 0, or one of these words as text.

    Raises BadRow for a row of no known form, answers that are equal or empty, and prompts that differ.
    """
    row = rows.renamed(row, source, FORMATS)
    form = _form(row, source)
    for name in rows.UNSUPPORTED_COLUMNS:
        if row.get(name):
            raise BadRow("unsupported_field", f"column {name!r} cannot be used: {rows.UNSUPPORTED_COLUMNS[name]}")
    if form == "unpaired_preference":
        label = _label(row["label"])
        prompt, (completion,) = _parts(row, ("completion",))
        found = {"prompt": prompt, "completion": completion, "label": label}
    else:
        prompt, (chosen, rejected) = _parts(row, ("chosen", "rejected"))
        if chosen == rejected:
            raise BadRow("equal_pair", "chosen and rejected are equal: there is nothing to prefer")
        found = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    found |= {name: _score(row[name], name) for name in SCORES if name in row}
    return rows.of_bearable_size(found | ({} if isinstance(prompt, str) else tools_of(row)))


def form_of(row: dict, source: Source | None = None) -> str:
    """Return under which of FORMATS `normalise` reads the row. Raises BadRow as it does."""
    return _form(rows.renamed(row, source, FORMATS), source)


def ignored_columns(row: dict, source: Source | None = None) -> set[str]:
    """Return the columns with a value that `normalise` makes no use of, under the names the file has."""
    ours = (source.columns or {}) if source else {}
    values = rows.renamed(row, source, FORMATS)
    names = FORMATS[_form(values, source)]
    is_raw = any(isinstance(values[name], str) for name in names if name in ("chosen", "completion"))
    in_file = {ours.get(name, name) for name in (*names, *SCORES, *(() if is_raw else ("system", "tools")))}
    return {name for name, value in row.items() if value is not None and value != [] and name not in in_file}


def _form(row: dict, source: Source | None) -> str:
    form = rows.chosen_form(row, source, FORMATS)
    if form is None:
        raise BadRow("unknown_columns", f"columns found: {rows.names_of(row)}; known forms are {KNOWN_FORMS}")
    if {"chosen", "rejected", "completion"} <= row.keys():
        raise BadRow("mixed_forms", "there are both chosen + rejected and completion: which is meant?")
    return form


def _parts(row: dict, names: tuple[str, ...]) -> tuple[Any, list]:
    """Return the prompt and the answers in the columns `names`."""
    columns = [*(("prompt",) if "prompt" in row else ()), *names]
    is_text = {name: isinstance(row[name], str) for name in columns}
    if all(is_text.values()):
        if "prompt" not in row:
            raise BadRow("no_prompt", "chosen and rejected are texts: put what both begin with into a column `prompt`")
        refuse_system(row)
        for name in names:
            if not row[name].strip():
                raise BadRow("empty_reply", f"{name} is empty")
        return row["prompt"], [row[name] for name in names]
    if any(is_text[name] for name in names):
        raise BadRow("mixed_forms", f"{', '.join(columns)} must all be texts or all be lists of messages")

    answers = [_whole(row[name], name) for name in names]
    if is_text.get("prompt"):
        if all(turns[0]["role"] == "assistant" for turns in answers):
            raise BadRow("mixed_forms", "the prompt is a text and the answers are messages: write it as messages, too")
        prompt = _common_prompt(answers)
        if prompt[-1]["role"] != "user" or prompt[-1]["content"].strip() != row["prompt"].strip():
            raise BadRow("prompts_differ", "the `prompt` text is not the last turn before the answers begin to differ")
    elif "prompt" in row:
        prompt = messages_of(row["prompt"])
    else:
        prompt = _common_prompt(answers)
    # Whole conversations repeat the prompt; answers alone do not.
    answers = [turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns for turns in answers]
    for name, turns in zip(names, answers, strict=True):
        if any(turn.get("weight") == 0 for turn in turns):
            raise BadRow("unsupported_field", f"{name} has a turn of weight 0: answers are compared whole")
        if not turns or turns[0]["role"] != "assistant":
            raise BadRow(
                "prompts_differ", f"{name} does not go on with an assistant turn where the prompt ends, nor repeats it"
            )
    if not prompt:
        raise BadRow("no_prompt", "there is nothing before the answers")
    return with_system(_unweighted(prompt), row), [_unweighted(turns) for turns in answers]


def _unweighted(messages: list[dict]) -> list[dict]:
    # A prompt is context and an answer is not, whatever a row says.
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def _whole(turns: Any, name: str) -> list[dict]:
    messages = messages_of(turns)
    if messages[-1]["role"] != "assistant":
        raise BadRow("no_reply", f"{name} ends with a {messages[-1]['role']} turn: it must end with an assistant turn")
    return messages


def _common_prompt(answers: list[list[dict]]) -> list[dict]:
    """Return the messages with which all of the conversations begin."""
    if len(answers) == 1:
        # Of one conversation alone, the prompt is all but its last turn.
        return answers[0][:-1]
    common = 0
    while all(common < len(turns) and turns[common] == answers[0][common] for turns in answers):
        common += 1
    if common == len(answers[0]) == len(answers[1]):
        raise BadRow("equal_pair", "chosen and rejected are equal: there is nothing to prefer")
    if not common:
        raise BadRow("no_prompt", "chosen and rejected have no first turn in common")
    return answers[0][:common]


def _label(value: Any) -> bool:
    label = LABELS.get(value.strip().lower()) if isinstance(value, str) else None
    if label is None and isinstance(value, bool | int | float) and value in (0, 1):
        label = bool(value)
    if label is None:
        raise BadRow("bad_label", f"label is {shown(value)}: it must be true or false, or 1 or 0")
    return label


def _score(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow("bad_score", f"{name} is {shown(value)}: it must be a finite number")
    return number
