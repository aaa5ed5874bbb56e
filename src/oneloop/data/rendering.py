"""Renders a conversation with the tokenizer's chat template, within bounds of time and size.

A template is a program that comes with a model. Jinja's sandbox keeps it from the machine, but not from looping for
ever or from writing without end, so that one row could stop a whole preparation. Here a rendering may take
`SECONDS` and may be as long as `most_characters` says; beyond that the row is refused, and the next one has its turn.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from oneloop.data.files import BadRow

SECONDS = 2.0
"""Wall time of one rendering."""
FIXED_CHARACTERS = 65_536
"""What a template may write of its own (instructions for tools, a default system text) however short the row is."""
CHARACTERS_PER_TOKEN = 16
"""Longer than the words of any text on average: four times `max_length` tokens of this many characters are allowed."""
LARGEST_PRODUCT = 10_000_000
"""Elements of a text or list that a template may make by `*`: one such step cannot be interrupted."""

Span = tuple[int, int]


class _Runaway(BaseException):
    """Ends a rendering from within; no `except Exception` on the way may swallow it."""


def most_characters(messages: list[dict], tools: list | None, max_length: int = 0) -> int:
    """Return how long a rendering of the row may be.

    Four times what the row itself holds, since a long row is cut by `truncation` later and is no fault of the template,
    and four times `max_length` tokens beside, at least `FIXED_CHARACTERS`. Raises BadRow("nested_too_deep").
    """
    fixed = max(4 * CHARACTERS_PER_TOKEN * max_length, FIXED_CHARACTERS)
    try:
        return 4 * len(repr([messages, tools])) + fixed
    except RecursionError:
        raise too_deep() from None


def render(
    tokenizer,
    messages: list[dict],
    tools: list | None,
    add_generation_prompt: bool = False,
    *,
    limit: int | None = None,
) -> str:
    """Return the text of `apply_chat_template(messages, tokenize=False)`, of at most `limit` characters.

    Raises BadRow("template_refused") with the template's own words, BadRow("template_runaway") for a rendering out of
    bounds, and ValueError for a template that is not valid.
    """
    return _refusing(tokenizer, messages, tools, add_generation_prompt, limit, None)


def render_with_replies(
    tokenizer, messages: list[dict], tools: list | None, *, limit: int | None = None
) -> tuple[str, list[Span]]:
    """Return the rendering and the places of what stands between the template's `{% generation %}` markers."""
    places: list[Span] = []
    return _refusing(tokenizer, messages, tools, False, limit, places), places


def compile_template(template: str) -> None:
    """Compile a template without rendering anything, within the same time.

    Raises jinja2.TemplateSyntaxError, and ValueError for one that takes too long: its constants are computed here.
    """
    try:
        with _time_limit():
            _compiled(template)
    except (_Runaway, MemoryError, RecursionError) as error:
        raise ValueError(f"it cannot be compiled within bounds: {_reason(error)}") from None


def _refusing(tokenizer, messages, tools, add_generation_prompt, limit, places) -> str:
    import jinja2

    if limit is None:
        limit = most_characters(messages, tools)
    try:
        return _rendered(tokenizer, messages, tools, add_generation_prompt, limit, places)
    except BadRow:
        raise
    except (_Runaway, MemoryError, RecursionError) as error:
        raise BadRow("template_runaway", f"the chat template was stopped: {_reason(error)}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # Its own exception, or a Python fault in an expression that was not written for such a row.
        raise BadRow("template_refused", f"the chat template refuses the row: {str(error)[:300]}") from error


def _rendered(tokenizer, messages, tools, add_generation_prompt, limit: int, places: list[Span] | None) -> str:
    from transformers import PreTrainedTokenizerBase

    if not messages:
        raise ValueError("there is no message")
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template and places is None:
        # A tokenizer with a way of its own (that of mistral-common writes no template at all): bounded from outside.
        with _time_limit():
            options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
            text = tokenizer.apply_chat_template(messages, tools=tools, **options)
        _refuse_longer(len(text), limit)
        return text
    template = tokenizer.get_chat_template(tools=tools)
    # What transformers 5.24 hands to a template (utils/chat_template_utils.py, `render_jinja_template`).
    values = tokenizer.special_tokens_map | {"documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        values |= {"messages": [_message(message) for message in messages], "tools": _plain(tools)}
    except RecursionError:
        raise too_deep() from None
    blocks: list[str] = []
    num_characters, deadline = 0, time.monotonic() + SECONDS
    with _time_limit() as is_timed:
        compiled = _compiled(template)
        tracking = nullcontext() if places is None else compiled.environment.activate_tracker(blocks, places)
        with tracking:
            for block in compiled.generate(values):
                num_characters += len(block)
                _refuse_longer(num_characters, limit)
                if not is_timed and time.monotonic() > deadline:
                    raise _Runaway(f"it ran for over {SECONDS:g} s")
                blocks.append(block)
    return "".join(blocks)


def too_deep() -> BadRow:
    """Return what is said of a row whose values are nested beyond what Python can follow."""
    return BadRow("nested_too_deep", "values are nested too deeply")


def _refuse_longer(num_characters: int, limit: int) -> None:
    if num_characters > limit:
        raise _Runaway(f"it wrote more than the {limit} characters that a row of this size may need")


def _reason(error: BaseException) -> str:
    if isinstance(error, _Runaway):
        return str(error)
    return "it called itself too often" if isinstance(error, RecursionError) else "it used up the memory"


@lru_cache(maxsize=8)
def _compiled(template: str):
    """Compile in transformers' sandbox, made stricter in two ways.

    Jinja 3.1 (sandbox.py, `unsafe_undefined`) renders an attribute that is out of bounds as nothing unless it is used
    further; here the attempt alone refuses the row. And a product of a text is looked at before it is made.
    """
    # transformers 5.24, utils/chat_template_utils.py: an ImmutableSandboxedEnvironment with the filters, globals and
    # tags that chat templates are written for. Its compiled templates are shared with the library, hence the overlay.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment.overlay()
    environment.unsafe_undefined = _refuse_unsafe
    environment.intercepted_binops = frozenset("*")
    environment.call_binop = _product
    return environment.from_string(template)


def _refuse_unsafe(value: Any, attribute: str) -> None:
    from jinja2.exceptions import SecurityError

    raise SecurityError(f"access to attribute {attribute!r} of a {type(value).__name__} is unsafe")


def _product(context, operator: str, left: Any, right: Any) -> Any:
    for sequence, times in ((left, right), (right, left)):
        # The mass is refused before it exists; `times` may be a number of thousands of digits.
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            if len(sequence) * times > LARGEST_PRODUCT:
                raise _Runaway(f"it multiplied a {type(sequence).__name__} to over {LARGEST_PRODUCT} elements")
    return left * right


class _Alarm:
    is_ours = False
    is_armed = False


@contextmanager
def taken_alarm() -> Iterator[None]:
    """Take the alarm of the process for all renderings within, which each of them would have to do by itself else.

    Somebody else's alarm (pytest-timeout's, for one) goes off when it would have, or at the end of the block.
    """
    if _Alarm.is_ours or not _in_main_thread():
        yield
        return
    handler, started = signal.signal(signal.SIGALRM, _interrupt), time.monotonic()
    delay, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    _Alarm.is_ours = True
    try:
        yield
    finally:
        _Alarm.is_ours = False
        signal.signal(signal.SIGALRM, handler)
        if delay:
            signal.setitimer(signal.ITIMER_REAL, max(delay - (time.monotonic() - started), 1e-3), interval)


@contextmanager
def _time_limit() -> Iterator[bool]:
    """Raise _Runaway in the block after `SECONDS`; yields whether it can.

    A signal reaches a loop that writes nothing, but only in the main thread of a process, which is where preparation
    runs. In another thread the caller has to look at the clock himself, between the pieces of the rendering.
    """
    if not _in_main_thread():
        yield False
        return
    with taken_alarm():
        # Again and again, in case that the first one is lost in a place that cannot pass it on (a destructor).
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS / 4)
        try:
            _Alarm.is_armed = True
            try:
                yield True
            finally:
                _Alarm.is_armed = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(number, frame) -> None:
    if _Alarm.is_armed:
        raise _Runaway(f"it ran for over {SECONDS:g} s")


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _message(message: Any) -> dict:
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is an object, this is a {type(message).__name__}")
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    # transformers 5.24 (`_alias_reasoning_fields`) passes reasoning under each name that templates know it by.
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((plain[name] for name in names if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning} | plain | {"reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return the value in types of JSON: the methods of any other object are beyond what the sandbox knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"
