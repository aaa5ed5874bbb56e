"""Turns a conversation or a raw text into token ids and labels, with the labels taken from the rendering itself.

T is the number of tokens of a row. The conversation is rendered once, as a whole, and tokenised once: rendering turn
by turn gives other tokens, doubles the start token, and breaks on templates that rewrite earlier turns. Where a turn
lies in that text is found by rendering again with the turn replaced by a word that occurs nowhere else. A row whose
turns cannot be placed is refused; it is never trained on everything or on nothing.
"""

import re
from operator import contains
from pathlib import Path
from typing import Any, NamedTuple

from oneloop.data import pieces
from oneloop.data.controls import controls_of, end_of_turn_token, mark_control_tokens
from oneloop.data.files import BadRow
from oneloop.data.pieces import IGNORE_INDEX
from oneloop.data.rendering import Span, compile_template, most_characters, render
from oneloop.data.spans import assistant_spans, is_closed, refuse_lost_parts

Token = tuple[int, int, int]  # id, start, end


class Rendered(NamedTuple):
    """A conversation as the template writes it, with what is needed to find its turns in that text."""

    text: str
    messages: list[dict]
    tools: list | None
    weights: list[int]
    """1 or 0 for each assistant turn: learnt, or context."""
    marked: str | None
    """The rendering with marks for replies, see `refuse_lost_parts`."""
    limit: int
    """Characters that any further rendering of the row may have."""


def load_template(tokenizer, path: str | None) -> None:
    """Set the tokenizer's chat template from a Jinja file, `None` keeps its own; then mark the control tokens.

    Raises ValueError, naming `chat_template`, when the file cannot be read or is no valid template.
    """
    import jinja2

    if path is not None:
        file = Path(path)
        try:
            template = file.expanduser().read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"chat_template {path!r} is not UTF-8 ({error}): save the file as UTF-8") from error
        except (OSError, RuntimeError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            shown = path if len(path) < 200 else path[:200] + "..."
            raise ValueError(
                f"chat_template {shown!r} is not a file that can be read ({reason}): give the path of a Jinja template"
            ) from error
        try:
            # No conversation is rendered, since any made-up one may be against its rules.
            compile_template(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat_template {path!r}, line {error.lineno}: {error.message}") from error
        except ValueError as error:
            raise ValueError(f"chat_template {path!r}: {error}") from error
        tokenizer.chat_template = template
    mark_control_tokens(tokenizer)


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
    """Return `{"input_ids": (T,), "labels": (T,)}` of a conversation as `normalise` returns it, and `num_cut` if cut.

    The ids are those of `apply_chat_template(messages, tokenize=True)`, with two stated differences: an end token is
    added when the template closes the last assistant turn with none, and under `split_special_tokens` the text of a
    control token inside a message stays text. Labels cover each assistant turn as rendered and the special token that
    closes it, never the header; turns with `weight: 0` are context. A token is a target only if all of it is.

    Under `truncation` "split" the row is returned uncut, for `pieces.fit`.

    Raises BadRow for a row the template refuses or whose turns cannot be placed, ValueError without a template.
    """
    row = render_row(tokenizer, messages, tools, max_length)
    tokens, places = _tokenise(tokenizer, row, split_special_tokens)
    input_ids = [token for token, *_ in tokens]
    ends_unclosed = is_unclosed(row, places)
    if assistant_only_loss:
        spans = reply_spans(tokenizer, row, places)
        labels = _labels(tokens, spans)
        _refuse_unknown(tokenizer, row.text, tokens, labels)
    else:
        labels = list(input_ids)
        _refuse_unknown(tokenizer, row.text, tokens, labels)
    if ends_unclosed:
        input_ids.append(eos_id(tokenizer))
        is_learnt = row.weights[-1] or not assistant_only_loss
        labels.append(input_ids[-1] if is_learnt else IGNORE_INDEX)
    return _cut(input_ids, labels, max_length, truncation)


def render_row(tokenizer, messages: list[dict], tools: list | None, max_length: int) -> Rendered:
    """Render a conversation, and refuse one of which the template leaves out a part.

    `max_length` only bounds the rendering, see `most_characters`. Raises BadRow, ValueError without a template.
    """
    check_tokenizer(tokenizer)
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, which messages need: name a Jinja file by --chat_template"
        )
    weights = [m.get("weight", 1) for m in messages if m["role"] == "assistant"]
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
    limit = most_characters(messages, tools, max_length)
    text = render(tokenizer, messages, tools, limit=limit)
    refuse_surrogates(text)
    marked = refuse_lost_parts(tokenizer, text, messages, tools, limit)
    return Rendered(text, messages, tools, weights, marked, limit)


def is_unclosed(row: Rendered, places: list[Span]) -> bool:
    """Whether the row ends with a reply that no token ends; `places` are those of the tokens that can end a turn."""
    # An end token is the tokenizer's own only where the template writes none; never two.
    return row.messages[-1]["role"] == "assistant" and not is_closed(row.text, (0, len(row.text)), places)


def reply_spans(tokenizer, row: Rendered, places: list[Span]) -> list[Span]:
    """Return (start, end) in the text of each reply that is learnt, end of turn included.

    Raises BadRow where the turns cannot be placed.
    """
    # Behind a reply may stand the token that opens the next turn: only one known to end turns is learnt.
    names = {end_of_turn_token(tokenizer), tokenizer.eos_token}
    ends = [(start, end) for start, end in places if row.text[start:end].strip() in names]
    spans = assistant_spans(tokenizer, row.text, row.messages, row.tools, ends, row.marked, row.limit)
    if len(spans) != len(row.weights) and not all(row.weights):
        raise BadRow("template_unclear", "the template's generation markers do not match the turns that have `weight`")
    if is_unclosed(row, places):
        # Whatever the template writes after the last reply must be learnt too, or the model never gets to its end.
        spans[-1] = (spans[-1][0], len(row.text))
    if not all(row.weights):
        spans = [span for span, weight in zip(spans, row.weights, strict=True) if weight]
    return spans


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
    check_tokenizer(tokenizer)
    eos = eos_id(tokenizer)
    text = prompt + completion
    refuse_surrogates(text)
    encoding = tokenizer(text, return_offsets_mapping=True, split_special_tokens=split_special_tokens, verbose=False)
    input_ids = list(encoding["input_ids"])
    from_text = [sequence is not None for sequence in encoding.sequence_ids(0)]
    text_tokens = [token for token, inside in zip(_tokens(encoding, text), from_text, strict=True) if inside]
    text_labels = _labels(text_tokens, [(len(prompt), len(text))])
    _refuse_unknown(tokenizer, text, text_tokens, text_labels if assistant_only_loss else [t for t, *_ in text_tokens])
    text_labels = iter(text_labels)
    # Tokens that the tokenizer adds by itself have no place in the text; only an end token among them is a target.
    labels = [next(text_labels) if inside else IGNORE_INDEX for inside in from_text]
    if not input_ids or input_ids[-1] != eos:
        input_ids, labels = [*input_ids, eos], [*labels, eos]
    labels[-1] = eos
    return _cut(input_ids, labels if assistant_only_loss else list(input_ids), max_length, truncation)


def encode_document(
    tokenizer, text: str, *, split_special_tokens: bool = True, max_length: int, truncation: str
) -> dict[str, list[int]]:
    """Return `{"input_ids": (T,), "labels": (T,)}` of a text that is learnt as a whole.

    It has one start token if the tokenizer adds one, and one end token, whatever the text itself begins or ends with.

    Raises BadRow("empty_text") for nothing but white space, ValueError for a tokenizer without an end token.
    """
    check_tokenizer(tokenizer)
    refuse_unreadable(text)
    eos, bos = eos_id(tokenizer), tokenizer.bos_token_id
    encoding = tokenizer(text, return_offsets_mapping=True, split_special_tokens=split_special_tokens, verbose=False)
    input_ids = list(encoding["input_ids"])
    _refuse_unknown(tokenizer, text, _tokens(encoding, text), input_ids)
    while len(input_ids) > 1 and input_ids[0] == input_ids[1] == bos:
        del input_ids[0]
    while input_ids and input_ids[-1] == eos:
        del input_ids[-1]
    input_ids.append(eos)
    return _cut(input_ids, list(input_ids), max_length, truncation)


def refuse_unreadable(text: str) -> None:
    """Raise BadRow for a document of which nothing can be learnt."""
    if not text.strip():
        raise BadRow("empty_text", "the text is empty")
    refuse_surrogates(text)


def refuse_surrogates(text: str) -> None:
    """Raise BadRow for half of a surrogate pair, on which a tokenizer fails with a type error."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("lone_surrogate", "holds half of a surrogate pair (\\ud800 to \\udfff), not a character") from None


def check_tokenizer(tokenizer) -> None:
    """Raise ValueError for a tokenizer whose tokens have no place in the text."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets: labels need a fast tokenizer")


def eos_id(tokenizer) -> int:
    """Return the id of the token that ends a row. Raises ValueError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, so a row cannot be ended: set one in its configuration")
    return tokenizer.eos_token_id


def _tokens(encoding, text: str) -> list[Token]:
    """Return (id, start, end) of each token, without holes between neighbours.

    Some byte-level tokenizers trim white space off the offsets they report; the space before a word belongs to it.
    """
    tokens, last = [], 0
    for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        tokens.append((token, last if text[last:start].isspace() else start, end))
        last = max(last, end)
    return tokens


def _tokenise(tokenizer, row: Rendered, split: bool) -> tuple[list[Token], list[Span]]:
    """Return the tokens of `text`, and the places of the control tokens the template itself wrote.

    To tell those from the same words inside a message, the row is rendered again with each such word in its data
    replaced by as many characters of a kind that occurs nowhere. All else is in the same place then, and whatever
    control token is left is the template's.
    """
    text, messages, tools = row.text, row.messages, row.tools
    pattern, names, closing = controls_of(tokenizer)

    def encode(piece: str, as_text: bool = False) -> list[Token]:
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return _tokens(tokenizer(piece, split_special_tokens=as_text, **options), piece)

    blank = text
    filler = next(character for character in map(chr, range(0xE000, 0xF8FF)) if character not in text)
    blank_messages, blank_tools = _replace(pattern, filler, [messages, tools])
    if (blank_messages, blank_tools) != (messages, tools):
        blank = render(tokenizer, blank_messages, blank_tools, limit=row.limit)
        # What has changed must be control text, and nothing else may have moved.
        expected = zip(text, _replace(pattern, filler, text), strict=True)
        if len(blank) != len(text) or not all(map(contains, expected, blank)):
            raise BadRow("template_unclear", "the template treats text that spells a control token in a way of its own")
    tokens = encode(blank)
    # A token for unknown text has an id of this kind, and is no control token unless its own name stands there.
    is_control = [blank[start:end].strip() == names.get(token) for token, start, end in tokens]
    places = [
        (start, end) for (token, start, end), is_ in zip(tokens, is_control, strict=True) if is_ and token in closing
    ]
    if blank == text or not split:
        return (tokens if blank == text else encode(text)), places

    # Only the stretches that spell a control token are encoded anew: all others keep the tokens they always have.
    parts: list[Token] = []
    last = None
    for index in [*(at for at, is_ in enumerate(is_control) if is_), len(tokens)]:
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


def _labels(tokens: list[Token], spans: list[Span]) -> list[int]:
    """Return a token's id where all its characters lie in one of the spans (in order, apart), else -100."""
    labels, current = [], 0
    for token, start, end in tokens:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        inside = current < len(spans) and spans[current][0] <= start < end <= spans[current][1]
        labels.append(token if inside else IGNORE_INDEX)
    return labels


def _refuse_unknown(tokenizer, text: str, tokens: list[Token], labels: list[int]) -> None:
    unknown = tokenizer.unk_token_id
    for (token, start, end), label in zip(tokens, labels, strict=True):
        if label == unknown == token and text[start:end].strip() not in (tokenizer.eos_token, tokenizer.bos_token):
            shown = f"{text[start:end]!r} in the text to be learnt"
            raise BadRow(
                "unknown_token",
                f"the tokenizer has no token for {shown}: it would be learnt as {tokenizer.unk_token!r}",
            )


def _cut(input_ids: list[int], labels: list[int], max_length: int, truncation: str) -> dict[str, list[int]]:
    row = {"input_ids": input_ids, "labels": labels}
    if truncation != "split":
        return pieces.fit(row, max_length, truncation)[0]
    pieces.refuse_without_target(row)
    return row
