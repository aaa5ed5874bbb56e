"""Turns a conversation or a raw text into token ids and labels, with the labels taken from the rendering itself.

T is the number of tokens of a row. The conversation is rendered once, as a whole, and tokenised once: rendering turn
by turn gives other tokens, doubles the start token, and breaks on templates that rewrite earlier turns. Where a turn
lies in that text is found by rendering again with the turn replaced by a word that occurs nowhere else. A row whose
turns cannot be placed is refused; it is never trained on everything or on nothing.
"""

import re
from operator import contains
from pathlib import Path
from typing import Any

from oneloop.data.rows import BadRow

IGNORE_INDEX = -100
# Keys that do not show in a turn's text beside its content; any other (reasoning, tool calls) is part of the reply.
PLAIN_KEYS = {"role", "content", "name"}

Span = tuple[int, int]
Token = tuple[int, int, int]  # id, start, end


def load_template(tokenizer, path: str | None) -> None:
    """Set the tokenizer's chat template from a Jinja file; `None` keeps the tokenizer's own.

    Raises ValueError, naming `chat_template`, when the file cannot be read or is no valid template.
    """
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    if path is None:
        return
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"chat_template {path!r} is not a file: give the path of a Jinja template")
    template = file.read_text(encoding="utf-8")
    try:
        # No conversation is rendered: this only compiles, since any made-up one may be against the template's rules.
        render_jinja_template([], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat_template {path!r}, line {error.lineno}: {error.message}") from error
    tokenizer.chat_template = template


def encode_messages(
    tokenizer,
    messages: list[dict],
    *,
    tools: list | None = None,
    assistant_only_loss: bool = True,
    split_special_tokens: bool = True,
    max_length: int,
    truncation: str,
) -> dict[str, list[int]]:
    """Return `{"input_ids": (T,), "labels": (T,)}` of a conversation as `normalise` returns it.

    The ids are those of `apply_chat_template(messages, tokenize=True)`, with two stated differences: an end token is
    added when the template closes the last assistant turn with none, and under `split_special_tokens` the text of a
    control token inside a message stays text. Labels cover each assistant turn as rendered and the special token that
    closes it, never the header; turns with `weight: 0` are context. A token is a target only if all of it is.

    Raises BadRow for a row the template refuses or whose turns cannot be placed, ValueError without a template.
    """
    _check_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, which messages need: name a Jinja file by --chat_template"
        )
    weights = [m.get("weight", 1) for m in messages if m["role"] == "assistant"]
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
    text = render(tokenizer, messages, tools)
    for number, message in enumerate(messages, start=1):
        if message["role"] in ("system", "developer", "user") and message["content"].strip() not in text:
            raise BadRow("turn_lost", f"the chat template leaves out turn {number} ({message['role']})")
    tokens, controls = _tokenise(tokenizer, text, messages, tools, split_special_tokens)

    # An end token is the tokenizer's own only where the template writes none; never two.
    unclosed = messages[-1]["role"] == "assistant" and not _is_closed(text, (0, len(text)), controls)
    input_ids = [token for token, *_ in tokens]
    if not assistant_only_loss:
        input_ids += [_eos_id(tokenizer)] * unclosed
        return _cut(input_ids, list(input_ids), max_length, truncation)

    spans = _assistant_spans(tokenizer, text, messages, tools, controls)
    if len(spans) != len(weights) and not all(weights):
        raise BadRow("template_unclear", "the template's generation markers do not match the turns that have `weight`")
    if unclosed:
        # Whatever the template writes after the last reply must be learnt too, or the model never gets to its end.
        spans[-1] = (spans[-1][0], len(text))
    if not all(weights):
        spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
    labels = _labels(tokens, spans)
    if unclosed:
        input_ids.append(_eos_id(tokenizer))
        labels.append(input_ids[-1] if weights[-1] else IGNORE_INDEX)
    return _cut(input_ids, labels, max_length, truncation)


def encode_text(
    tokenizer,
    prompt: str,
    completion: str,
    *,
    assistant_only_loss: bool = True,
    split_special_tokens: bool = True,
    max_length: int,
    truncation: str,
) -> dict[str, list[int]]:
    """Return `{"input_ids": (T,), "labels": (T,)}` of raw text: no template, one end token, labels on the completion.

    Both texts are tokenised in one piece, so that the row has the tokens the model meets when it continues the prompt;
    a token that lies across the border is context. A start token is there once if the tokenizer adds one.

    Raises BadRow for a row without a target or over `max_length`, ValueError for a tokenizer without an end token.
    """
    _check_tokenizer(tokenizer)
    eos = _eos_id(tokenizer)
    text = prompt + completion
    encoding = tokenizer(text, return_offsets_mapping=True, split_special_tokens=split_special_tokens, verbose=False)
    input_ids = list(encoding["input_ids"])
    from_text = [sequence is not None for sequence in encoding.sequence_ids(0)]
    text_tokens = [token for token, inside in zip(_tokens(encoding, text), from_text, strict=True) if inside]
    text_labels = iter(_labels(text_tokens, [(len(prompt), len(text))]))
    # Tokens that the tokenizer adds by itself have no place in the text; only an end token among them is a target.
    labels = [next(text_labels) if inside else IGNORE_INDEX for inside in from_text]
    if not input_ids or input_ids[-1] != eos:
        input_ids, labels = [*input_ids, eos], [*labels, eos]
    labels[-1] = eos
    return _cut(input_ids, labels if assistant_only_loss else list(input_ids), max_length, truncation)


def end_of_turn_token(tokenizer) -> str | None:
    """Return the special token with which the template closes an assistant turn, or None if it writes none.

    It is where generation must stop; it often differs from `tokenizer.eos_token`.
    """
    if not tokenizer.chat_template:
        return None
    mark = _marks("", 1)[0]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    rest = render(tokenizer, turns, None).partition(mark)[2].lstrip()
    return next((token for token in _closing_tokens(tokenizer) if rest.startswith(token)), None)


def _check_tokenizer(tokenizer) -> None:
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets: labels need a fast tokenizer")


def _eos_id(tokenizer) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, so a row cannot be ended: set one in its configuration")
    return tokenizer.eos_token_id


def render(tokenizer, messages: list[dict], tools: list | None, add_generation_prompt: bool = False) -> str:
    import jinja2

    try:
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # Its own exception, or a Python fault in an expression that was not written for such a row.
        raise BadRow("template_refused", f"the chat template refuses the row: {error}") from error


def _tokens(encoding, text: str) -> list[Token]:
    """Return (id, start, end) of each token, without holes between neighbours.

    Some byte-level tokenizers trim white space off the offsets they report; the space before a word belongs to it.
    """
    tokens, last = [], 0
    for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        tokens.append((token, last if text[last:start].isspace() else start, end))
        last = max(last, end)
    return tokens


def _control_tokens(tokenizer) -> dict[str, int]:
    """Return text and id of the special tokens, longest first, since a regular expression takes the first that fits."""
    found = {str(token): id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _tokenise(tokenizer, text: str, messages: list, tools: list | None, split: bool) -> tuple[list[Token], list[Span]]:
    """Return the tokens of `text`, and the places of the control tokens the template itself wrote.

    To tell those from the same words inside a message, the row is rendered again with each such word in its data
    replaced by as many characters of a kind that occurs nowhere. All else is in the same place then, and whatever
    control token is left is the template's.
    """
    controls = _control_tokens(tokenizer)
    pattern = re.compile("|".join(map(re.escape, controls)) or r"(?!)")

    def encode(piece: str, as_text: bool = False) -> list[Token]:
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return _tokens(tokenizer(piece, split_special_tokens=as_text, **options), piece)

    blank = text
    filler = next(character for character in map(chr, range(0xE000, 0xF8FF)) if character not in text)
    blank_messages, blank_tools = _replace(pattern, filler, [messages, tools])
    if (blank_messages, blank_tools) != (messages, tools):
        blank = render(tokenizer, blank_messages, blank_tools)
        # What has changed must be control text, and nothing else may have moved.
        expected = zip(text, _replace(pattern, filler, text), strict=True)
        if len(blank) != len(text) or not all(map(contains, expected, blank)):
            raise BadRow("template_unclear", "the template treats text that spells a control token in a way of its own")
    tokens = encode(blank)
    control_ids, closing = set(controls.values()), set(_closing_tokens(tokenizer).values())
    places = [(start, end) for token, start, end in tokens if token in closing]
    if blank == text or not split:
        return (tokens if blank == text else encode(text)), places

    # Only the stretches that spell a control token are encoded anew: all others keep the tokens they always have.
    parts: list[Token] = []
    last = None
    for index in [*(at for at, token in enumerate(tokens) if token[0] in control_ids), len(tokens)]:
        start = 0 if last is None else tokens[last][2]
        end = tokens[index][1] if index < len(tokens) else len(text)
        if filler in blank[start:end]:
            before = "" if last is None else blank[slice(*tokens[last][1:])]
            parts += [
                (token, at + start, to + start) for token, at, to in _encode_as_text(encode, before, text[start:end])
            ]
        else:
            parts += tokens[0 if last is None else last + 1 : index]
        parts += tokens[index : index + 1]
        last = index
    return parts, places


def _encode_as_text(encode, before: str, text: str) -> list[Token]:
    # Some tokenizers mark the start of a text with a space that they do not put after a control token (`before`):
    # there, the text is encoded behind a character that does not merge with it, which is then taken off.
    marks_start = before and [token for token, *_ in encode(before + "a")[-1:]] != [token for token, *_ in encode("a")]
    for lead in "~\n\t" if marks_start else [""]:
        tokens = encode(lead + text, as_text=True)
        if not lead or any(start == 1 for _, start, _ in tokens):
            return [(token, start - len(lead), end - len(lead)) for token, start, end in tokens if end > len(lead)]
    raise BadRow(
        "template_unclear", "this tokenizer cannot encode control text as text: set split_special_tokens: false"
    )


def _replace(pattern: re.Pattern, filler: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {_replace(pattern, filler, key): _replace(pattern, filler, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(pattern, filler, item) for item in value]
    return pattern.sub(lambda match: filler * len(match[0]), value) if isinstance(value, str) else value


def _closing_tokens(tokenizer) -> dict[str, int]:
    """Return the control tokens that can end a turn; a start token opens the next one, unless both are the same."""
    opening = {tokenizer.bos_token} - {tokenizer.eos_token}
    return {token: id_ for token, id_ in _control_tokens(tokenizer).items() if token not in opening}


def _is_closed(text: str, span: Span, closing: list[Span]) -> bool:
    return any(span[0] <= at and to <= span[1] and not text[to : span[1]].strip() for at, to in closing)


def _with_end(text: str, span: Span, closing: list[Span]) -> Span:
    """Return the span with the control token that follows it directly, or after white space: the end of the turn."""
    start, end = span
    if _is_closed(text, span, closing):
        return span
    at, to = next((place for place in closing if place[1] > end), (len(text), end))
    return span if text[min(at, end) : max(at, end)].strip() else (start, to)


def _assistant_spans(tokenizer, text: str, messages: list[dict], tools: list | None, closing: list[Span]) -> list[Span]:
    """Return (start, end) in `text` of each assistant turn, end of turn included, header excluded."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRow("no_reply", "no assistant turn to learn from")
    template = tokenizer.get_chat_template(tools=tools)
    if re.search(r"{%-?\s*generation\s*-?%}", template):
        spans = _marked_spans(tokenizer, template, text, messages, tools)
    else:
        spans = _spans_at_once(tokenizer, text, messages, tools, turns)
        spans = spans or [_span_of_turn(tokenizer, text, messages, tools, turn) for turn in turns]
        if any(text[:start].endswith(" ") for start, _ in spans):
            lead = _lead(tokenizer)
            spans = [(start - len(lead) if text[:start].endswith(lead) else start, end) for start, end in spans]
    return [_with_end(text, span, closing) for span in spans]


def _marked_spans(tokenizer, template: str, text: str, messages: list[dict], tools: list | None) -> list[Span]:
    from transformers.utils.chat_template_utils import render_jinja_template

    # The places behind `return_assistant_tokens_mask`; the mask itself knows no characters, and counts a token that
    # is half header as reply.
    options = {"chat_template": template, "return_assistant_tokens_mask": True, **tokenizer.special_tokens_map}
    rendered, spans = render_jinja_template([messages], tools=tools, **options)
    found = [(start, end) for start, end in spans[0] if end > start]
    if not found or rendered[0] != text:
        raise BadRow("template_unclear", "the template's generation markers enclose no assistant turn of this row")
    return found


def _marks(text: str, count: int) -> list[str]:
    word = "zq"
    while word in text:
        word += "q"
    return [f"{word}{number}{word}" for number in range(count)]


def _spans_at_once(tokenizer, text: str, messages: list, tools: list | None, turns: list[int]) -> list[Span] | None:
    """Find all turns with one rendering; None where the template changes contents or earlier turns, as some do."""
    if any(set(messages[turn]) - PLAIN_KEYS for turn in turns):
        return None
    marks = _marks(text, len(turns))
    contents = dict(zip(turns, marks, strict=True))
    marked = [m | {"content": contents.get(index, m["content"])} for index, m in enumerate(messages)]
    rendering = _render_or_none(tokenizer, marked, tools)
    if rendering is None or any(rendering.count(mark) != 1 for mark in marks):
        return None
    first, *following = re.split("|".join(marks), rendering)
    spans, position = [], len(first) if text.startswith(first) else len(text)
    for turn, piece in zip(turns, following, strict=True):
        content = messages[turn]["content"]
        shown = next((t for t in (content, content.strip()) if text.startswith(t + piece, position)), None)
        if shown is None:
            return None
        spans.append((position, position + len(shown)))
        position += len(shown) + len(piece)
    return spans if position == len(text) else None


def _span_of_turn(tokenizer, text: str, messages: list[dict], tools: list | None, turn: int) -> Span:
    """Find one turn by what stands before and after it when its content is replaced by a mark.

    A turn with more than content (tool calls, reasoning), or whose text the template rewrites, begins where the
    prompt for it ends, and ends where the conversation up to it does.
    """
    message = {key: messages[turn][key] for key in PLAIN_KEYS & set(messages[turn])} | {"content": _marks(text, 1)[0]}
    marked = _render_or_none(tokenizer, [*messages[:turn], message, *messages[turn + 1 :]], tools)
    pieces = (marked or "").split(message["content"])
    end = len(text) - len(pieces[-1]) if len(pieces) > 1 and text.endswith(pieces[-1]) else None
    plain = len(pieces) == 2 and not set(messages[turn]) - PLAIN_KEYS
    if plain and end is not None and text.startswith(pieces[0]) and len(pieces[0]) <= end:
        return len(pieces[0]), end

    prompt = _render_or_none(tokenizer, messages[:turn], tools, add_generation_prompt=True)
    so_far = _render_or_none(tokenizer, messages[: turn + 1], tools)
    if so_far is not None and text.startswith(so_far):
        end = len(so_far.rstrip())
    # A template that knows no prompt for a reply does not tell where, behind the header, the reply begins.
    headless = prompt == _render_or_none(tokenizer, messages[:turn], tools) and pieces[0][len(prompt or "") :].strip()
    if prompt is None or end is None or headless or not text.startswith(prompt) or len(prompt) >= end:
        raise BadRow("template_unclear", f"turn {turn + 1} (assistant) cannot be placed in what the template renders")
    return len(prompt), end


def _lead(tokenizer) -> str:
    """Return the white space that a template puts between the prompt for a reply and the reply.

    Where there is some (`[/INST] Yes`), the model writes it, mostly as one token with the first word.
    """
    mark, question = _marks("", 1)[0], [{"role": "user", "content": "a"}]
    prompt = _render_or_none(tokenizer, question, None, add_generation_prompt=True) or ""
    whole = _render_or_none(tokenizer, [*question, {"role": "assistant", "content": mark}], None) or ""
    gap = whole.partition(mark)[0].removeprefix(prompt)
    return gap if prompt and not gap.strip() else ""


def _render_or_none(tokenizer, messages: list[dict], tools: list | None, **options) -> str | None:
    try:
        return render(tokenizer, messages, tools, **options) if messages else None
    except BadRow:
        # A made-up conversation may break a rule the real one keeps; that says nothing about the row.
        return None


def _labels(tokens: list[Token], spans: list[Span]) -> list[int]:
    """Return a token's id where all its characters lie in one of the spans (in order, apart), else -100."""
    labels, current = [], 0
    for token, start, end in tokens:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        inside = current < len(spans) and spans[current][0] <= start < end <= spans[current][1]
        labels.append(token if inside else IGNORE_INDEX)
    return labels


def _cut(input_ids: list[int], labels: list[int], max_length: int, truncation: str) -> dict[str, list[int]]:
    # The first token is predicted from nothing, so a label there is no target.
    if all(label == IGNORE_INDEX for label in labels[1:]):
        raise BadRow("no_target", "no token of the row is a target")
    length = len(input_ids)
    if length > max_length and truncation == "drop":
        raise BadRow("too_long", f"{length} tokens are over max_length {max_length}, and truncation is 'drop'")
    input_ids, labels = input_ids[:max_length], labels[:max_length]
    if all(label == IGNORE_INDEX for label in labels[1:]):
        raise BadRow("no_target_left", f"of {length} tokens, none within max_length {max_length} is a target")
    return {"input_ids": input_ids, "labels": labels}
