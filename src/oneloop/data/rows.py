"""Turns the known forms of rows into one, and counts every row that cannot be used and everything left out of one."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from oneloop.data import files, readers
from oneloop.data.files import BadRow, shown
from oneloop.data.turns import column_text, messages_of, refuse_system, tools_of, with_system
from oneloop.mixture import Source

FORMATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
"""Form of a row -> the columns it must have. Where a row has those of several, the first of them counts."""
OPTIONAL_COLUMNS = ("system", "tools", "input")
PREFERENCE_COLUMNS = ("chosen", "rejected", "label", "margin", "score_chosen", "score_rejected")
KNOWN_FORMS = (
    "`messages`, `conversations`, `prompt` + `completion`, `instruction` + `output` (`input`, `system`), `text` alone"
)
# Kinds the user asked for by `truncation: drop`: counted like the others, but never a reason to stop.
DROP_KINDS = {"too_long"}
# What other tools read a meaning into, and we do not: to go on without it would train on something else.
UNSUPPORTED_COLUMNS = {
    "history": "write the earlier turns as `messages`",
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), "rows are text only"),
}
# Some two million tokens: no model reads that many, and a tokenizer would be busy with it for minutes.
MAX_CHARACTERS = 8_000_000
# What columns of other files are called that hold the same: named in a message, never taken without being asked.
_LIKE_PROMPT = ("question", "query", "problem", "instruction", "prompt", "input", "user", "q")
_LIKE_COMPLETION = ("answer", "response", "completion", "output", "solution", "reply", "target", "assistant", "a")
_LIKE_TEXT = ("content", "document", "article", "body", "raw_content", "story")
_LIKE_MESSAGES = ("conversation", "dialogue", "dialog", "chat", "turns")


def normalise(row: dict, source: Source | None = None) -> dict:
    """Return `{"messages": [...], "tools"?: [...]}` or, for raw text, `{"prompt": str, "completion": str}` or
    `{"text": str}`.

    The form is `source.format`, or told by the columns that hold a value: a mixed file has all columns in each row.
    `source.columns` gives columns of the file our names first. Other columns are ignored, see `ignored_columns`. A
    message with `weight: 0` is context, not a target; the turns of a `prompt` list get it here.

    Raises BadRow for a row of no known form, a role it cannot place, a row without a reply, and one of more than
    MAX_CHARACTERS; ValueError for a source that `check` refuses.
    """
    row = renamed(row, source)
    form = _form(row, source)
    for name in UNSUPPORTED_COLUMNS:
        if row.get(name):
            raise BadRow("unsupported_field", f"column {name!r} cannot be used: {UNSUPPORTED_COLUMNS[name]}")
    if form == "text":
        if not isinstance(row["text"], str):
            raise BadRow("not_text", f"text is a {type(row['text']).__name__}: it must be one text")
        if not row["text"].strip():
            raise BadRow("empty_text", "the text is empty")
        return of_bearable_size({"text": row["text"]})
    if form in ("messages", "sharegpt"):
        messages = messages_of(row[FORMATS[form][0]])
    elif form == "prompt_completion":
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            refuse_system(row)
            if not row["completion"].strip():
                raise BadRow("empty_reply", "the completion is empty")
            return of_bearable_size({"prompt": row["prompt"], "completion": row["completion"]})
        if not isinstance(row["prompt"], list) or not isinstance(row["completion"], list):
            raise BadRow("mixed_forms", "prompt and completion must both be texts or both be lists of messages")
        context = [m | {"weight": 0} if m["role"] == "assistant" else m for m in messages_of(row["prompt"])]
        messages = context + messages_of(row["completion"])
    else:
        question = "\n\n".join(column_text(row[name], name) for name in ("instruction", "input") if row.get(name))
        answer = column_text(row["output"], "output")
        messages = messages_of([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    messages = with_system(messages, row)
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
        raise BadRow("no_reply", "no assistant turn to learn from")
    return of_bearable_size({"messages": messages, **tools_of(row)})


def form_of(row: dict, source: Source | None = None) -> str:
    """Return under which of FORMATS `normalise` reads the row. Raises BadRow as it does."""
    return _form(renamed(row, source), source)


def describe(counts: Mapping[str, int]) -> str:
    """Return the forms found, as one line: {"messages": 7400, "alpaca": 73} -> "messages 7,400 rows, alpaca 73"."""
    parts = [f"{form} {count:,}" for form, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return ", ".join([f"{parts[0]} row{'s' * (max(counts.values()) != 1)}", *parts[1:]]) if parts else "no rows"


def ignored_columns(row: dict, source: Source | None = None) -> set[str]:
    """Return the columns with a value that `normalise` makes no use of, under the names the file has."""
    ours = (source.columns or {}) if source else {}
    values = renamed(row, source)
    form = _form(values, source)
    is_raw = form == "text" or (form == "prompt_completion" and isinstance(values["prompt"], str))
    used = {*FORMATS[form], *(() if is_raw else ("system", "tools")), *(("input",) if form == "alpaca" else ())}
    in_file = {ours.get(name, name) for name in used}
    return {name for name, value in row.items() if value is not None and value != [] and name not in in_file}


def check(source: Source, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> None:
    """Raises ValueError, naming the entry, for a `format` or a name in `columns` that no form of rows has."""
    if source.format is not None and source.format not in formats:
        near = difflib.get_close_matches(source.format, formats, n=1)
        raise ValueError(
            f"{source.field}.format is {source.format!r}: "
            + (f"did you mean {near[0]}?" if near else f"known are {', '.join(formats)}")
        )
    known = {name for names in formats.values() for name in names} | {*OPTIONAL_COLUMNS, *PREFERENCE_COLUMNS}
    for name in source.columns or {}:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            turned = source.columns[name] in known
            raise ValueError(
                f"{source.field}.columns has {name!r}, which is no column of ours: "
                + (f"write {source.columns[name]}: {name} (our name first)" if turned else "")
                + ("" if turned else f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}")
            )


def renamed(row: dict, source: Source | None, formats: Mapping[str, tuple[str, ...]] = FORMATS) -> dict:
    """Return the columns that hold a value, under our names. Raises BadRow for a row without a column to be renamed."""
    if source is None or (source.columns is None and source.format is None):
        return {name: value for name, value in row.items() if value is not None}
    check(source, formats)
    ours = source.columns or {}
    for our_name, name in ours.items():
        if name not in row:
            raise BadRow(
                "missing_column",
                f"there is no column {shown(name)}, which {source.field}.columns names for {our_name!r}; "
                f"columns found: {names_of(row)}",
            )
    taken = {*ours, *ours.values()}
    values = {name: value for name, value in row.items() if name not in taken}
    values |= {our_name: row[name] for our_name, name in ours.items()}
    return {name: value for name, value in values.items() if value is not None}


def chosen_form(row: dict, source: Source | None, formats: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the form of a row whose columns have our names: the one the source asks for, or the first whose columns
    are all there; of those with a column that was renamed, if one was. None if there is none.

    Raises BadRow for a row without the columns of the form asked for.
    """
    if source is not None and source.format is not None:
        if missing := [name for name in formats[source.format] if name not in row]:
            raise BadRow(
                "missing_column",
                f"{source.field}.format is {source.format}, but there is no {missing[0]!r}; columns found: "
                f"{names_of(row)}",
            )
        return source.format
    given = set(source.columns or {}) if source else set()
    asked = {form: names for form, names in formats.items() if given & set(names)} or formats
    return next((form for form, names in asked.items() if all(name in row for name in names)), None)


def _form(row: dict, source: Source | None) -> str:
    form = chosen_form(row, source, FORMATS)
    if form == "text" and (source is None or not (source.format or source.columns)):
        # Beside a half of another form, text may be anything: its rendering, a part of it, a note.
        others = {name for names in FORMATS.values() for name in names} - {"text"} | {"chosen", "rejected"}
        form = None if others & set(row) else form
    if form is None:
        raise BadRow(
            "unknown_columns", f"columns found: {names_of(row)}; known forms are {KNOWN_FORMS}{_remedy(row, source)}"
        )
    return form


def _remedy(row: dict, source: Source | None) -> str:
    if "chosen" in row and "rejected" in row:
        return ". These are pairs of answers: train them by a recipe that compares answers"
    if source is not None and source.columns:
        return ""
    lower = {str(name).lower(): name for name in row}

    def like(names: tuple[str, ...], kind: type) -> str | None:
        return next((str(lower[name]) for name in names if name in lower and isinstance(row[lower[name]], kind)), None)

    prompt, completion = like(_LIKE_PROMPT, str), like(_LIKE_COMPLETION, str)
    if "instruction" in row and completion:
        guess = f"output: {completion}"
    elif prompt and completion:
        guess = f"prompt: {prompt}, completion: {completion}"
    elif messages := like(_LIKE_MESSAGES, list):
        guess = f"messages: {messages}"
    elif (text := like(_LIKE_TEXT, str)) and not prompt:
        guess = f"text: {text}"
    else:
        return ". Give its columns our names by `columns:` in the `datasets` list"
    return f". If that is what they hold, write `columns: {{{guess}}}` in the `datasets` list"


def names_of(row: dict) -> str:
    names = [files.printable(str(name)[:40]) for name in sorted(row, key=str)[:20]]
    return ", ".join(names) + (f" and {len(row) - 20} more" if len(row) > 20 else "")


def of_bearable_size(example: dict) -> dict:
    num_characters, rest = 0, [example]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            num_characters += len(value)
        else:
            rest += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if num_characters > MAX_CHARACTERS:
        raise BadRow(
            "too_big", f"{num_characters:,} characters are more than a row may have ({MAX_CHARACTERS:,}): split it"
        )
    return example


@dataclass
class Report:
    """What became of a source's rows; printed once, and the same on every rank because every rank reads all rows."""

    num_read: int = 0
    num_kept: int = 0
    reasons: dict[str, int] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    num_cut: int = 0
    """Rows cut to max_length."""
    tokens_cut: int = 0
    ignored: set[str] = field(default_factory=set)
    """Columns of kept rows that no use is made of."""

    def __str__(self) -> str:
        text = f"read {self.num_read}, kept {self.num_kept}"
        if self.reasons:
            text += "; refused: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.reasons.items()))
        if self.num_cut:
            rows = "1 row" if self.num_cut == 1 else f"{self.num_cut} rows"
            text += f"; cut to max_length: {rows} ({self.tokens_cut} tokens)"
        return text + (f"; ignored columns: {', '.join(sorted(self.ignored))}" if self.ignored else "")


def read(
    source: str | Source, split: str = "train", *, field: str = "dataset_name"
) -> Iterator[tuple[str, dict | BadRow]]:
    """Yield `(where, row)` for all rows of a source, or of a path, with `where` as `path:line`.

    Raises ValueError, naming the config's field, for a source that is neither there nor loadable, at once, and for one
    without any row or with a damaged file.
    """
    if isinstance(source, str):
        source = Source(path=source, split=split, field=field)
    check(source)
    found = files.find(source)
    rows = _of_hub(source) if found is None else chain.from_iterable(_of_file(path, source) for path in found)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{source.field} {source.path!r} holds no row (split {source.split!r})")
    return chain([first], rows)


def _of_file(path: Path, source: Source) -> Iterator[tuple[str, dict | BadRow]]:
    try:
        for raw, _ in readers.read(path):
            yield f"{path}:{raw.line}", readers.parse(raw.data)
    except ValueError as error:
        raise ValueError(f"{source.field}: {error}") from error


def _of_hub(source: Source) -> Iterator[tuple[str, dict | BadRow]]:
    for raw, _ in readers.read_hub(source):
        yield f"{source.path}[{source.split}]:{raw.line}", raw.data


def collect(
    source: str | Source,
    split: str | None,
    encode: Callable[[dict], Any],
    on_bad_row: str,
    *,
    field: str = "dataset_name",
) -> tuple[list, Report]:
    """Read, normalise and encode all rows of a source; return the results in order, and the report.

    With `on_bad_row="stop"` the error comes after the last row, so that it names the kinds and numbers of the whole
    source instead of one row at a time. Rows of `DROP_KINDS` are counted and never stop a run. The key
    `num_cut` of an encoded row is taken off and counted. `split` and `field`, the config's name for the source in
    errors, go with a path; a Source has its own.

    Raises ValueError for bad rows under "stop", and always when no row is left.
    """
    if on_bad_row not in ("stop", "skip"):
        raise ValueError(f"on_bad_row must be 'stop' or 'skip', not {on_bad_row!r}")
    if isinstance(source, str):
        source = Source(path=source, split=split, field=field)
    kept, report, stopping = [], Report(), []
    for where, row in read(source):
        report.num_read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            encoded = encode(normalise(row, source))
        except BadRow as bad:
            report.reasons[bad.kind] += 1
            report.first.append(f"{where}: {bad}")
            if bad.kind not in DROP_KINDS:
                stopping.append(report.first[-1])
            del report.first[10:], stopping[10:]
            continue
        num_cut = encoded.pop("num_cut", 0) if isinstance(encoded, dict) else 0
        report.num_cut += num_cut > 0
        report.tokens_cut += num_cut
        report.ignored |= ignored_columns(row, source)
        kept.append(encoded)
    report.num_kept = len(kept)
    if stopping and on_bad_row == "stop":
        raise ValueError(
            f"{source.field} {source.path!r} has rows that cannot be used ({report}):\n  "
            + "\n  ".join(stopping)
            + "\nCorrect them, or set `on_bad_row: skip` to train without them."
        )
    if not kept:
        raise ValueError(
            f"{source.field} {source.path!r} leaves no row to use ({report}):\n  " + "\n  ".join(report.first)
        )
    return kept, report
