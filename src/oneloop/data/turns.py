"""Turns the known forms of turns, texts and tools into one: what all forms of rows are made of."""

from typing import Any

from oneloop.data.files import BadRow, parse_json, shown, without_nulls

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT_TOOL_ROLES = ("tool", "function_call", "observation", "function", "function_response")
UNSUPPORTED_KEYS = ("loss", "train")


def messages_of(turns: Any) -> list[dict]:
    """Return a list of turns, or JSON text of one, in the form of `messages`. Raises BadRow."""
    if isinstance(turns, str):
        turns = parse_json(turns)
    if not isinstance(turns, list):
        raise BadRow("not_a_list", f"messages must be a list, this is a {type(turns).__name__}")
    if not turns:
        raise BadRow("empty", "the list of messages is empty")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def with_system(messages: list[dict], row: dict) -> list[dict]:
    """Return the messages behind the row's own `system` text, if it has one. Raises BadRow where there are two."""
    if not row.get("system"):
        return messages
    system = {"role": "system", "content": column_text(row["system"], "system")}
    if messages[0]["role"] != "system":
        return [system, *messages]
    if messages[0]["content"] != system["content"]:
        raise BadRow("two_systems", "the `system` column and the first turn give two different system texts")
    return messages


def refuse_system(row: dict) -> None:
    """Raises BadRow for a `system` text beside raw text, which has no place for it."""
    if row.get("system"):
        raise BadRow("system_on_raw_text", "`system` has no place in a raw prompt: put it into the prompt")


def tools_of(row: dict) -> dict:
    """Return `{"tools": [...]}` or, where a row has none, `{}`. Raises BadRow."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        tools = parse_json(tools)
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("bad_tools", "tools must be a list of objects, each describing a function")
    return {"tools": tools}


def _message(turn: Any, number: int) -> dict:
    if not isinstance(turn, dict):
        raise BadRow("not_a_turn", f"turn {number} is a {type(turn).__name__}, not an object with role and content")
    # An empty list of calls is how columnar storage writes "no calls".
    turn = {key: value for key, value in turn.items() if value is not None and (key != "tool_calls" or value != [])}
    for key in UNSUPPORTED_KEYS:
        if key in turn:
            raise BadRow("unsupported_field", f"turn {number} has {key!r}: mark a reply that is context by `weight: 0`")
    if "weight" in turn and not (isinstance(turn["weight"], int | float) and turn["weight"] in (0, 1)):
        raise BadRow(
            "bad_weight", f"turn {number}: weight is {shown(turn['weight'])}; it must be 0 (context) or 1 (learnt)"
        )
    if "role" not in turn and "from" in turn:
        turn = _from_sharegpt(turn, number)
    role = turn.get("role")
    if role not in ROLES:
        raise BadRow("unknown_role", f"turn {number} has role {shown(role)}; known are {', '.join(ROLES)}")
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
        raise BadRow("tool_roles_in_sharegpt", f"turn {number} is from {shown(name)}: {remedy}")
    if name not in SHAREGPT_ROLES:
        raise BadRow("unknown_role", f"turn {number} is from {shown(name)}; known are {', '.join(SHAREGPT_ROLES)}")
    kept = {"role": SHAREGPT_ROLES[name], "content": turn.get("value"), "weight": turn.get("weight")}
    return without_nulls(kept)


def column_text(content: Any, name: str) -> str:
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
