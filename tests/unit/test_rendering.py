"""Rendering: the library's own text, within bounds of time and size, and nothing that a template could break out by."""

import copy
import signal
import threading
import time
from pathlib import Path

import pytest

from oneloop.data import chat, encode, rendering
from oneloop.data.files import BadRow
from tests import tiny

TEMPLATES = Path(__file__).parents[1] / "templates"
CHAT = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Here."}]
HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
WRITES = "{% for i in range(99999) %}{% for j in range(99999) %}some words {% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(s='x') %}{% for i in range(24) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
LONG_STEPS = "{{ range(99999) | map('string') | join | length }}" * 400
LONG_CONSTANTS = "{{ 'x' | center(50000000) | length }}" * 400
CALLS_ITSELF = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
RULES = {"max_length": 64, "truncation": "truncate"}


def with_template(template: str):
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def kind_of(template: str, messages=CHAT, **options) -> str:
    with pytest.raises(BadRow) as caught:
        rendering.render(with_template(template), messages, None, **options)
    return caught.value.kind


# --- what is written --------------------------------------------------------------------------------------------------


def conversations():
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC", "n": 1, "ok": True}}}
    yield CHAT, None
    yield [{"role": "system", "content": " Be kind. \n"}, *CHAT, CHAT[0]], None
    yield [CHAT[0], {"role": "assistant", "content": "b", "reasoning": "why"}], None
    yield [CHAT[0], {"role": "assistant", "content": "b", "thinking": None, "reasoning_content": "why"}], None
    yield [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}], [{"type": "function", "function": {}}]
    yield [CHAT[0] | {"name": "Ann"}, {"role": "assistant", "content": "b", "odd": [1.5, None, ("a", {1: 2})]}], None


def test_text_is_that_of_the_library():
    templates = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]
    templates += [tiny.CHATML_MARKERS, "{{ messages | tojson(indent=2) }}{{ tools }}{{ documents }}{{ pad_token }}"]
    compared = refused = 0
    for template in templates:
        tokenizer = with_template(template)
        for messages, tools in conversations():
            for prompt in (False, True):
                try:
                    text = rendering.render(tokenizer, messages, tools, prompt)
                except BadRow:
                    with pytest.raises(Exception, match="turn"):
                        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
                    refused += 1
                    continue
                options = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
                assert text == tokenizer.apply_chat_template(messages, **options)
                compared += 1
    assert compared >= 80 and refused >= 4


def test_objects_that_are_no_data_are_hidden_as_the_library_does():
    import datetime

    import numpy as np

    class Text(str):
        pass

    tokenizer = with_template("{% for m in messages %}{{ m | string }}{% endfor %}")
    odd = {"date": datetime.date(2026, 1, 1), "raw": b"x", "text": Text("y"), "number": np.float64(1.5)}
    messages = [CHAT[0] | {"odd": odd}]
    text = rendering.render(tokenizer, messages, None)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False) and "<date>" in text and "1.5" in text


def test_places_between_the_markers():
    tokenizer = with_template(tiny.CHATML_MARKERS)
    text, places = rendering.render_with_replies(tokenizer, [*CHAT, *CHAT], None)
    assert text == rendering.render(tokenizer, [*CHAT, *CHAT], None)
    assert [text[start:end] for start, end in places] == ["Here.<|im_end|>"] * 2


def test_tokenizer_with_its_own_way_is_asked_and_bounded():
    class Own(type(tiny.tokenizer())):
        def apply_chat_template(self, messages, tools=None, tokenize=True, add_generation_prompt=False):
            return "own " * len(messages)

    tokenizer = with_template(tiny.CHATML)
    tokenizer.__class__ = Own
    assert rendering.render(tokenizer, CHAT, None) == "own own "
    with pytest.raises(BadRow, match="7 characters"):
        rendering.render(tokenizer, CHAT, None, limit=7)


def test_words_of_a_refusal_are_kept_short():
    assert kind_of("{{ raise_exception('no') }}") == "template_refused"
    assert kind_of(tiny.CHATML, []) == "template_refused"
    assert kind_of("{{ 1 // 0 }}") == kind_of("{{ messages.x.y }}") == "template_refused"
    with pytest.raises(BadRow) as caught:
        rendering.render(with_template("{{ raise_exception(messages[0].content) }}"), [{"content": "a" * 9000}], None)
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="line 1") as caught:
        rendering.render(with_template("{% for %}"), CHAT, None)
    assert not isinstance(caught.value, BadRow)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [HANGS, HANGS.replace("99999", "2000 * 40"), LONG_STEPS])
def test_rendering_that_does_not_end_is_stopped(template):
    started = time.monotonic()
    assert kind_of(template) == "template_runaway"
    assert time.monotonic() - started < rendering.SECONDS + 2


@pytest.mark.parametrize(
    "template", [WRITES, DOUBLES, CALLS_ITSELF, "{{ messages[0].content * 99999999999 }}", "{{ 'ab' * 10**9 }}",
                 "{{ ([0] * 10**9) | length }}", "{{ 10**9 * 'ab' }}"]
)  # fmt: skip
def test_rendering_that_grows_is_stopped_at_once(template):
    started = time.monotonic()
    assert kind_of(template, limit=100_000) == "template_runaway"
    assert time.monotonic() - started < 2


def test_products_that_are_small_are_left_alone():
    template = "{{ 'ab' * 3 }}{{ 4 * 5 }}{{ [1] * 2 }}{{ 2.5 * 2 }}{{ True * 3 }}"
    assert rendering.render(with_template(template), CHAT, None) == "ababab20[1, 1]5.03"


def test_a_row_may_be_as_long_as_its_contents_need():
    tokenizer, long = tiny.tokenizer(), [CHAT[0], CHAT[1] | {"content": "The sky is blue. " * 200_000}]
    assert len(rendering.render(tokenizer, long, None)) > 3_000_000
    assert rendering.most_characters(CHAT, None) < 70_000 < rendering.most_characters(CHAT, None, 2048) < 140_000
    assert rendering.most_characters(long, None, 64) > 4 * 3_000_000
    system = tiny.CHATML.replace("{% for", "{{ 'instructions ' * 4000 }}{% for", 1)
    assert len(rendering.render(with_template(system), CHAT, None)) > 50_000, "a long text of the template's own"
    assert kind_of(system.replace("4000", "40000")) == "template_runaway"


def test_rows_are_refused_one_by_one():
    """Only rows that the template goes wrong on are lost, and a batch with some of them goes on."""
    template = "{% if 'forever' in messages[0].content %}" + HANGS + "{% endif %}" + tiny.CHATML
    template = "{% if 'endless' in messages[0].content %}" + WRITES + "{% endif %}" + template
    tokenizer = with_template(template)
    rows = [
        CHAT,
        [{"role": "user", "content": "forever"}, CHAT[1]],
        [{"role": "user", "content": "endless"}, CHAT[1]],
        CHAT,
    ]
    found = encode.encode_batch(tokenizer, [{"messages": row} for row in rows], **RULES)
    assert [getattr(one, "kind", "kept") for one in found] == ["kept", "template_runaway", "template_runaway", "kept"]
    assert "2 s" in str(found[1]) and "characters" in str(found[2])


def test_further_renderings_of_a_row_are_bounded_too():
    # Marks are put into the contents: a template may run away on those alone.
    template = "{% if 'zq' in messages[0].content %}" + HANGS + "{% endif %}" + tiny.CHATML
    started = time.monotonic()
    with pytest.raises(BadRow) as caught:
        chat.encode_messages(with_template(template), CHAT, **RULES)
    assert caught.value.kind == "template_runaway" and time.monotonic() - started < rendering.SECONDS + 2


def test_template_that_hangs_is_no_reason_to_stop_before_the_rows(tmp_path):
    (tmp_path / "hangs.jinja").write_text(HANGS + tiny.CHATML)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    chat.load_template(tokenizer, str(tmp_path / "hangs.jinja"))
    (tmp_path / "constant.jinja").write_text(LONG_CONSTANTS)
    with pytest.raises(ValueError, match="chat_template .*constant.jinja.*compiled"):
        chat.load_template(tokenizer, str(tmp_path / "constant.jinja"))


def test_another_alarm_is_kept():
    rang = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
    before = signal.setitimer(signal.ITIMER_REAL, 0.4)
    try:
        started = time.monotonic()
        rendering.render(tiny.tokenizer(), CHAT, None)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.4 and not rang
        kind_of(HANGS)
        while not rang and time.monotonic() < started + 5:
            time.sleep(0.01)
        assert rang and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_in_another_thread_the_clock_is_looked_at_between_pieces(monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 0.2)
    slow = "{% for i in range(99999) %}x{% for j in range(999) %}{% endfor %}{% endfor %}"
    kinds = []
    for template in (slow, tiny.CHATML):
        thread = threading.Thread(target=lambda t=template: kinds.append(one_kind(t)))
        thread.start()
        thread.join(20)
    assert kinds == ["template_runaway", "kept"]


def one_kind(template: str) -> str:
    try:
        rendering.render(with_template(template), CHAT, None)
        return "kept"
    except BadRow as bad:
        return bad.kind


# --- the sandbox ------------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '' | attr('__cl' ~ 'ass__') | attr('__mro__') }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ [messages]|groupby('__class__') }}",
    "{{ [messages]|sort(attribute='__class__.__name__') }}",
    "{{ cycler.__init__.__globals__.os.popen('true') }}",
    "{{ cycler('a').__class__ }}",
    "{{ joiner.__init__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__dict__ = {} %}{{ ns }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ lipsum['__globals__'] }}",
    "{{ range.__globals__ }}",
    "{{ dict.__class__ }}",
    "{{ dict.mro() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__init__ }}{% for i in [1] %}{{ loop.__init__ }}{% endfor %}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__.__mro__}' | format(1) }}{{ '{0.__init__}'.format(cycler) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "{{ (['{0.__class__}'] | map(attribute='format') | first)(1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}",
    "{% do messages.clear() %}",
    "{% import 'os' as os %}",
    "{% include '/etc/hostname' %}",
    "{% extends '/etc/hostname' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_attempt_to_leave_the_sandbox_refuses_the_row(template):
    row = copy.deepcopy(CHAT)
    tokenizer = with_template(tiny.CHATML + template)
    with pytest.raises(ValueError):
        chat.encode_messages(tokenizer, row, **RULES)
    assert row == CHAT


def test_there_are_enough_of_them_and_what_is_allowed_still_works():
    assert len(set(ESCAPES)) == len(ESCAPES) >= 20
    allowed = (
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ '%s'|format('a') }}{{ '{}'.format(1) }}"
    )
    allowed += "{{ messages[0].get('x', 'y') }}{{ messages[0].items() | list | length }}{{ cycler('a').next() }}"
    allowed += "{{ messages | map(attribute='role') | join(',') }}{{ ('a' | attr('upper'))() }}"
    assert rendering.render(with_template(allowed), CHAT, None) == "2a1y2auser,assistantA"
