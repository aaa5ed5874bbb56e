"""Finds where each assistant turn lies in a rendered conversation, and refuses rows of which the template drops a part.

The only witness is the template itself: a row is rendered again with words in it that occur nowhere else, and what
becomes of those words tells what is shown, and where.
"""

import re
from functools import lru_cache
from typing import Any

from oneloop.data.files import BadRow
from oneloop.data.rendering import Span, render, render_with_replies

# Keys that do not show in a turn's text beside its content; any other (reasoning, tool calls) is part of the reply.
PLAIN_KEYS = {"role", "content", "name"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def render_or_none(tokenizer, messages: list[dict], tools: list | None, **options) -> str | None:
    """Render what was made of a row; None where the template refuses it, which says nothing about the row itself."""
    try:
        return render(tokenizer, messages, tools, **options) if messages else None
    except BadRow as bad:
        if bad.kind == "template_runaway":
            # Each further attempt would take as long.
            raise
        return None


def render_toy(tokenizer, messages: list[dict], **options) -> str | None:
    """Render a made-up conversation; None where the template refuses it: it may break a rule that real ones keep."""
    try:
        return render(tokenizer, messages, None, **options)
    except BadRow:
        return None


def refuse_lost_parts(
    tokenizer, text: str, messages: list[dict], tools: list | None, limit: int | None = None
) -> str | None:
    """Return the rendering in which a mark stands for each plain reply, after checking that no part of the row is lost.

    Each other content gets a mark behind it, and each called function one behind its name. All of them must show:
    a reply must not be learnt to a question, a system text or a tool's answer that the model never sees. One rendering
    serves for all this; more are needed only for tools, calls and reasoning. None where the template refuses the marks.
    No rendering may be longer than `limit` characters.

    Raises BadRow("turn_lost"), naming the part and its turn.
    """
    marks, call_marks = marks_for(text, len(messages)), marks_for(text, 2 * len(messages))[len(messages) :]
    last_question = max((index for index, m in enumerate(messages) if m["role"] == "user"), default=-1)
    last_reply = max((index for index, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    marked, expected, added = [], {}, []
    for index, (message, mark) in enumerate(zip(messages, marks, strict=True)):
        plain, content = _is_plain(message), message["content"].rstrip()
        if plain:
            message = message | {"content": mark}
        elif content:
            message = message | {"content": content + mark + message["content"][len(content) :]}
            added.append(mark)
        if plain or content:
            expected[mark] = f"turn {index + 1} ({message['role']})"
        if message.get("tool_calls"):
            message = message | {"tool_calls": [_with_mark(call, call_marks[index]) for call in message["tool_calls"]]}
        marked.append(message)
    rendering = render_or_none(tokenizer, marked, tools, limit=limit)
    if rendering is None:
        # A rule about the contents refuses the marks: then the contents themselves are looked for.
        expected = {m["content"].strip(): f"turn {at + 1} ({m['role']})" for at, m in enumerate(messages)}
        expected = {content: name for content, name in expected.items() if "(assistant)" not in name}
    lost = [name for part, name in expected.items() if part not in (rendering or text)]

    for index, message in enumerate(messages):
        calls = message.get("tool_calls", [])
        named = [call for call in calls if _with_mark(call, "") is not call]
        if rendering is not None and rendering.count(call_marks[index]) < len(named):
            lost.append(f"a tool call of turn {index + 1}")
        groups = [("tool_calls",)] if calls else []
        # Reasoning before the last question is left out on purpose by many templates. Its names stand for each other.
        groups += [REASONING_KEYS] if index == last_reply > last_question else []
        for keys in groups:
            without = {key: value for key, value in message.items() if key not in keys}
            if any(message.get(key) for key in keys) and (
                render_or_none(tokenizer, [*messages[:index], without, *messages[index + 1 :]], tools, limit=limit)
                == text
            ):
                found = " and ".join(key for key in keys if message.get(key))
                lost.append(f"{found} of turn {index + 1} ({message['role']})")
    if tools and render_or_none(tokenizer, messages, None, limit=limit) == text:
        lost.append("tools")
    if lost:
        raise BadRow("turn_lost", f"the chat template leaves out {', '.join(lost)}")
    return rendering and re.sub("|".join(added) or r"(?!)", "", rendering)


def _is_plain(message: dict) -> bool:
    return message["role"] == "assistant" and not set(message) - PLAIN_KEYS


def _with_mark(call: Any, mark: str) -> Any:
    """Return the tool call with a mark behind the function's name, or the same object where it has no name."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return call
    function = function | {"name": function["name"] + mark}
    return call | {"function": function} if "function" in call else function


def _spans_at_once(text: str, messages: list[dict], turns: list[int], marked: str | None) -> list[Span] | None:
    """Find all turns with one rendering; None where the template changes contents or earlier turns, as some do."""
    if marked is None or not all(_is_plain(messages[turn]) for turn in turns):
        return None
    every = marks_for(text, len(messages))
    marks = [every[turn] for turn in turns]
    if any(marked.count(mark) != 1 for mark in marks):
        return None
    first, *following = re.split("|".join(marks), marked)
    spans, position = [], len(first) if text.startswith(first) else len(text)
    for turn, piece in zip(turns, following, strict=True):
        content = messages[turn]["content"]
        shown = next((t for t in (content, content.strip()) if text.startswith(t + piece, position)), None)
        if shown is None:
            return None
        spans.append((position, position + len(shown)))
        position += len(shown) + len(piece)
    return spans if position == len(text) else None


def assistant_spans(
    tokenizer,
    text: str,
    messages: list[dict],
    tools: list | None,
    ends: list[Span],
    marked: str | None,
    limit: int | None = None,
) -> list[Span]:
    """Return (start, end) in `text` of each assistant turn, end of turn included, header excluded.

    `ends` are the places of the tokens that end a turn, `marked` is what `refuse_lost_parts` returned.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRow("no_reply", "no assistant turn to learn from")
    template = tokenizer.get_chat_template(tools=tools)
    if re.search(r"{%-?\s*generation\s*-?%}", template):
        spans = _marked_spans(tokenizer, text, messages, tools, limit)
    else:
        spans = _spans_at_once(text, messages, turns, marked)
        spans = spans or [_span_of_turn(tokenizer, text, messages, tools, turn, limit) for turn in turns]
        lead = _lead(tokenizer, str(tokenizer.chat_template))
        spans = [(start - len(lead) if text[:start].endswith(lead) else start, end) for start, end in spans]
    return [_with_end(text, span, ends) for span in spans]


def _marked_spans(tokenizer, text: str, messages: list[dict], tools: list | None, limit: int | None) -> list[Span]:
    # The places behind `return_assistant_tokens_mask`; the mask itself knows no characters, and counts a token that
    # is half header as reply.
    rendered, spans = render_with_replies(tokenizer, messages, tools, limit=limit)
    found = [(start, end) for start, end in spans if end > start]
    if not found or rendered != text:
        raise BadRow("template_unclear", "the template's generation markers enclose no assistant turn of this row")
    return found


def _span_of_turn(tokenizer, text: str, messages: list[dict], tools: list | None, turn: int, limit: int | None) -> Span:
    """Find one turn by what stands before and after it when its content is replaced by a mark.

    A turn with more than content (tool calls, reasoning), or whose text the template rewrites, begins where the
    prompt for it ends, and ends where the conversation up to it does.
    """
    message = {key: messages[turn][key] for key in PLAIN_KEYS & set(messages[turn])} | {
        "content": marks_for(text, 1)[0]
    }
    marked = render_or_none(tokenizer, [*messages[:turn], message, *messages[turn + 1 :]], tools, limit=limit)
    pieces = (marked or "").split(message["content"])
    end = len(text) - len(pieces[-1]) if len(pieces) > 1 and text.endswith(pieces[-1]) else None
    plain = len(pieces) == 2 and not set(messages[turn]) - PLAIN_KEYS
    if plain and end is not None and text.startswith(pieces[0]) and len(pieces[0]) <= end:
        return len(pieces[0]), end

    prompt = render_or_none(tokenizer, messages[:turn], tools, add_generation_prompt=True, limit=limit)
    so_far = render_or_none(tokenizer, messages[: turn + 1], tools, limit=limit)
    if so_far is not None and text.startswith(so_far):
        end = len(so_far.rstrip())
    # A template that knows no prompt for a reply does not tell where, behind the header, the reply begins.
    headless = (
        prompt == render_or_none(tokenizer, messages[:turn], tools, limit=limit)
        and pieces[0][len(prompt or "") :].strip()
    )
    if prompt is None or end is None or headless or not text.startswith(prompt) or len(prompt) >= end:
        raise BadRow("template_unclear", f"turn {turn + 1} (assistant) cannot be placed in what the template renders")
    return len(prompt), end


@lru_cache(maxsize=8)
def _lead(tokenizer, template: str) -> str:
    """Return what the template puts between the prompt for a reply and the reply; `template` is the cache's key.

    The model has to write it: the space of `[/INST] Yes`, mostly one token with the first word, or the empty block
    that stands for "no reasoning".
    """
    mark = marks_for("", 1)[0]
    for turns in toy_conversations(mark):
        whole, question = render_toy(tokenizer, turns), render_toy(tokenizer, turns[:-1])
        prompt = render_toy(tokenizer, turns[:-1], add_generation_prompt=True)
        if whole and prompt and mark in whole:
            gap = whole.partition(mark)[0].removeprefix(prompt)
            # Where the template knows no prompt for a reply, what is between may be the header of the turn.
            return gap if whole.startswith(prompt) and (prompt != question or not gap.strip()) else ""
    return ""


def toy_conversations(reply: str) -> list[list[dict]]:
    """Return short conversations that end with `reply`, with and without a system turn, which some templates demand."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}]
    return [turns, [{"role": "system", "content": "a"}, *turns]]


def marks_for(text: str, count: int) -> list[str]:
    word = "zq"
    while word in text:
        word += "q"
    return [f"{word}{number}{word}" for number in range(count)]


def is_closed(text: str, span: Span, ends: list[Span]) -> bool:
    return any(span[0] <= at and to <= span[1] and not text[to : span[1]].strip() for at, to in ends)


def _with_end(text: str, span: Span, ends: list[Span]) -> Span:
    """Return the span with the control token that follows it directly, or after white space: the end of the turn."""
    start, end = span
    if is_closed(text, span, ends):
        return span
    at, to = next((place for place in ends if place[1] > end), (len(text), end))
    return span if text[min(at, end) : max(at, end)].strip() else (start, to)
