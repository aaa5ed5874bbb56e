"""Turns the known forms of rows into one, and counts every row that cannot be used and everything left out of one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oneloop.data.files import BadRow, parse_json, read, without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT_TOOL_ROLES = ("tool", "function_call", "observation", "function", "function_response")
KNOWN_FORMS = "`messages`, `conversations`, `prompt` + `completion`, `instruction` + `output` (`input`, `system`)"
# Kinds the user asked for by `truncation: drop`: counted like the others, but never a reason to stop.
DROP_KINDS = {"too_long"}
# What other tools read a meaning into, and we do not: to go on without it would train on something else.
UNSUPPORTED_COLUMNS = {
    "history": "write the earlier turns as `messages`",
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), "rows are text only"),
}
UNSUPPORTED_TURN_KEYS = ("loss", "train")


def normalise(row: dict) -> dict:
    """Return `{"messages": [...], "tools"?: [...]}` or, for raw text, `{"prompt": str, "completion": str}`.

    The form is told by the columns that hold a value: a mixed file has all columns in each row. Other columns
    are ignored, see `ignored_columns`. A message with `weight: 0` is context, not a target; the turns of a `prompt`
    list get it here.

    Raises BadRow for a row of no known form, a role it cannot place, and a row without a reply.
    """
    row = {name: value for name, value in row.items() if value is not None}
    for name in UNSUPPORTED_COLUMNS:
        if row.get(name):
            raise BadRow("unsupported_field", f"column {name!r} cannot be used: {UNSUPPORTED_COLUMNS[name]}")
    if "messages" in row or "conversations" in row:
        messages = _messages(row.get("messages", row.get("conversations")))
    elif "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            if row.get("system"):
                raise BadRow("system_on_raw_text", "`system` has no place in a raw prompt: put it into the prompt")
            if not row["completion"].strip():
                raise BadRow("empty_reply", "the completion is empty")
            return {"prompt": row["prompt"], "completion": row["completion"]}
        if not isinstance(row["prompt"], list) or not isinstance(row["completion"], list):
            raise BadRow("mixed_forms", "prompt and completion must both be texts or both be lists of messages")
        context = [m | {"weight": 0} if m["role"] == "assistant" else m for m in _messages(row["prompt"])]
        messages = context + _messages(row["completion"])
    elif "instruction" in row and "output" in row:
        question = "\n\n".join(_column_text(row[name], name) for name in ("instruction", "input") if row.get(name))
        answer = _column_text(row["output"], "output")
        messages = _messages([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    else:
        raise BadRow("unknown_columns", f"columns found: {', '.join(sorted(row))}; known forms are {KNOWN_FORMS}")

    if row.get("system"):
        system = {"role": "system", "content": _column_text(row["system"], "system")}
        if messages[0]["role"] != "system":
            messages = [system, *messages]
        elif messages[0]["content"] != system["content"]:
            raise BadRow("two_systems", "the `system` column and the first turn give two different system texts")
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
        raise BadRow("no_reply", "no assistant turn to learn from")
    tools = parse_json(row["tools"]) if isinstance(row.get("tools"), str) and row["tools"] else row.get("tools")
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def ignored_columns(row: dict) -> set[str]:
    """Return the columns with a value that `normalise` makes no use of."""
    if "messages" in row or "conversations" in row:
        used = {"messages" if row.get("messages") is not None else "conversations", "system", "tools"}
    elif "prompt" in row and "completion" in row:
        used = {"prompt", "completion", "system"} | ({"tools"} if isinstance(row["prompt"], list) else set())
    else:
        used = {"instruction", "input", "output", "system", "tools"}
    return {name for name, value in row.items() if value is not None and value != [] and name not in used}


def _messages(turns: Any) -> list[dict]:
    if isinstance(turns, str):
        turns = parse_json(turns)
    if not isinstance(turns, list):
        raise BadRow("not_a_list", f"messages must be a list, this is a {type(turns).__name__}")
    if not turns:
        raise BadRow("empty", "the list of messages is empty")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int) -> dict:
    if not isinstance(turn, dict):
        raise BadRow("not_a_turn", f"turn {number} is a {type(turn).__name__}, not an object with role and content")
    # An empty list of calls is how columnar storage writes "no calls".
    turn = {key: value for key, value in turn.items() if value is not None and (key != "tool_calls" or value != [])}
    for key in UNSUPPORTED_TURN_KEYS:
        if key in turn:
            raise BadRow("unsupported_field", f"turn {number} has {key!r}: mark a reply that is context by `weight: 0`")
    if "weight" in turn and not (isinstance(turn["weight"], int | float) and turn["weight"] in (0, 1)):
        raise BadRow("bad_weight", f"turn {number}: weight is {turn['weight']!r}; it must be 0 (context) or 1 (learnt)")
    if "role" not in turn and "from" in turn:
        turn = _from_sharegpt(turn, number)
    role = turn.get("role")
    if role not in ROLES:
        raise BadRow("unknown_role", f"turn {number} has role {role!r}; known are {', '.join(ROLES)}")
    # A tool call may come without content; templates print an absent key as nothing or as "None", so it is set.
    if "content" not in turn and "tool_calls" not in turn:
        raise BadRow("empty_reply" if role == "assistant" else "no_content", f"turn {number} ({role}) has no content")
    turn["content"] = _text(turn.get("content", ""), f"turn {number} ({role})")
    if role == "assistant" and "tool_calls" not in turn and not turn["content"].strip():
        raise BadRow("empty_reply", f"turn {number} (assistant) is empty")
    if "tool_calls" in turn:
        if not isinstance(turn["tool_calls"], list):
            raise BadRow("bad_tool_call", f"turn {number}: tool_calls is not a list")
        turn["tool_calls"] = [_with_parsed_arguments(call, number) for call in turn["tool_calls"]]
    return turn


def _from_sharegpt(turn: dict, number: int) -> dict:
    name = str(turn["from"])
    if name in SHAREGPT_TOOL_ROLES:
        remedy = "ShareGPT has no exact form for tools; write `messages` with tool_calls"
        raise BadRow("tool_roles_in_sharegpt", f"turn {number} is from {name!r}: {remedy}")
    if name not in SHAREGPT_ROLES:
        raise BadRow("unknown_role", f"turn {number} is from {name!r}; known are {', '.join(SHAREGPT_ROLES)}")
    kept = {"role": SHAREGPT_ROLES[name], "content": turn.get("value"), "weight": turn.get("weight")}
    return without_nulls(kept)


def _column_text(content: Any, name: str) -> str:
    if isinstance(content, list) and any(isinstance(part, str) for part in content):
        raise BadRow("not_text", f"{name}: a list of texts (several answers?); a column must be one text")
    return _text(content, name)


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRow("not_text", f"{name}: content must be text or a list of text parts")
    return "".join(texts)


def _with_parsed_arguments(call: Any, number: int) -> dict:
    """Return the call with its arguments as an object: templates write them as JSON, and would quote a string twice."""
    if not isinstance(call, dict):
        raise BadRow("bad_tool_call", f"turn {number}: a tool call is a {type(call).__name__}, not an object")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": parse_json(function["arguments"] or "{}")}}


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


def collect(
    source: str, split: str, encode: Callable[[dict], Any], on_bad_row: str, *, field: str = "dataset_name"
) -> tuple[list, Report]:
    """Read, normalise and encode all rows of a source; return the results in order, and the report.

    With `on_bad_row="stop"` the error comes after the last row, so that it names the kinds and numbers of the whole
    source instead of one row at a time. Rows of `DROP_KINDS` are counted and never stop a run. The key
    `num_cut` of an encoded row is taken off and counted. Errors name the config's `field`.

    Raises ValueError for bad rows under "stop", and always when no row is left.
    """
    if on_bad_row not in ("stop", "skip"):
        raise ValueError(f"on_bad_row must be 'stop' or 'skip', not {on_bad_row!r}")
    kept, report, stopping = [], Report(), []
    for where, row in read(source, split, field=field):
        report.num_read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            encoded = encode(normalise(row))
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
        report.ignored |= ignored_columns(row)
        kept.append(encoded)
    report.num_kept = len(kept)
    if stopping and on_bad_row == "stop":
        raise ValueError(
            f"{field} {source!r} has rows that cannot be used ({report}):\n  " + "\n  ".join(stopping) + "\n"
            "Correct them, or set `on_bad_row: skip` to train without them."
        )
    if not kept:
        raise ValueError(f"{field} {source!r} leaves no row to use ({report}):\n  " + "\n  ".join(report.first))
    return kept, report
