"""Knows a tokenizer's control tokens: what structures a conversation, and must not be taken for what somebody says."""

import re
from functools import lru_cache
from typing import Any, NamedTuple

from oneloop.data.spans import marks_for, render_toy, toy_conversations

LOOKS_LIKE_CONTROL = re.compile(r"<\|.+\|>|<\uff5c.+\uff5c>")


class Controls(NamedTuple):
    """A tokenizer's control tokens."""

    pattern: re.Pattern
    """Finds the text of any of them."""
    names: dict[int, str]
    closing: set[int]
    """Ids of those that can end a turn."""


def mark_control_tokens(tokenizer) -> None:
    """Make the added tokens that structure a conversation special, where the tokenizer's author forgot to.

    Only a special token can be told from the same words in a message. Such tokens are those that look like one
    (`<|...|>`), and those the template itself writes around plain turns. Paired tags (`<think>`, `</think>`) are left:
    they are part of what the model says, and would disappear from decoded replies.
    """
    from tokenizers import AddedToken

    added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
    chats = [[*turns, turns[-2]] for turns in toy_conversations("a")] if tokenizer.chat_template else []
    shown = next(filter(None, (render_toy(tokenizer, turns) for turns in chats)), "")
    found = []
    for text, token in added.items():
        paired = {text.replace("<", "</", 1), text.replace("</", "<", 1)} - {text} & set(added)
        written = re.fullmatch(r"<.+>|\[.+\]", text) and text in shown and not paired
        if not token.special and (LOOKS_LIKE_CONTROL.fullmatch(text) or written):
            rules = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            found.append(AddedToken(text, special=True, normalized=False, **rules))
    if found:
        tokenizer.add_tokens(found, special_tokens=True)
        _end_of_turn.cache_clear()


def _control_tokens(tokenizer) -> dict[str, int]:
    """Return text and id of the control tokens, longest first, since a regular expression takes the first that fits."""
    added = {str(token): (id_, token.special) for id_, token in tokenizer.added_tokens_decoder.items()}
    found = {text: id_ for text, (id_, special) in added.items() if special or LOOKS_LIKE_CONTROL.fullmatch(text)}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def controls_of(tokenizer) -> Controls:
    """Return the control tokens; with hundreds of added tokens it takes milliseconds, so ask once for many rows."""
    controls = _control_tokens(tokenizer)
    pattern = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
    names = {id_: name for name, id_ in controls.items()}
    return Controls(pattern, names, set(_closing_tokens(tokenizer, controls).values()))


def spells(pattern: re.Pattern, value: Any) -> bool:
    """Whether any text of the value, keys included, has what the pattern finds."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(spells(pattern, key) or spells(pattern, item) for key, item in value.items())
    return isinstance(value, list | tuple) and any(spells(pattern, item) for item in value)


def end_of_turn_token(tokenizer) -> str | None:
    """Return the special token with which the template closes an assistant turn, or None if it writes none.

    None as well where the template refuses each conversation made up to find out.

    It is where generation must stop; it often differs from `tokenizer.eos_token`.
    """
    return _end_of_turn(tokenizer, str(tokenizer.chat_template), tokenizer.eos_token, tokenizer.bos_token)


@lru_cache(maxsize=8)
def _end_of_turn(tokenizer, template: str, eos: str | None, bos: str | None) -> str | None:
    # Asked for each row; all but the tokenizer are here for the cache.
    if not tokenizer.chat_template:
        return None
    mark = marks_for("", 1)[0]
    for turns in toy_conversations(mark):
        rendering = render_toy(tokenizer, turns)
        if rendering is not None:
            rest, controls = rendering.partition(mark)[2].lstrip(), _control_tokens(tokenizer)
            return next((token for token in _closing_tokens(tokenizer, controls) if rest.startswith(token)), None)
    return None


def _closing_tokens(tokenizer, controls: dict[str, int]) -> dict[str, int]:
    """Return the control tokens that can end a turn; a start token opens the next one, unless both are the same."""
    opening = {tokenizer.bos_token, tokenizer.unk_token} - {tokenizer.eos_token}
    return {token: id_ for token, id_ in controls.items() if token not in opening}
