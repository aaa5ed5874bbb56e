"""Chat: the tokens are the template's, the labels are the replies as rendered, and no more than those."""

import copy
import json
from pathlib import Path

import pytest

from oneloop.data import rendering
from oneloop.data.chat import IGNORE_INDEX, encode_messages, encode_text, end_of_turn_token, load_template
from oneloop.data.rows import BadRow, collect, normalise
from tests import tiny

CASES = Path(__file__).parents[3] / "shared" / "cases"
ROOM = {"max_length": 2000, "truncation": "truncate"}
TEMPLATES = {name: getattr(tiny, name) for name in ("CHATML", "CHATML_MARKERS", "STRIP_THINK", "DEFAULT_SYSTEM")}
MULTITURN = [
    [
        ("system", "Be brief."),
        ("user", "Red or blue?"),
        ("assistant", "Red."),
        ("user", "Why?"),
        ("assistant", "Warm."),
    ],
    [("user", "Tell me in two parts."), ("assistant", "Part one."), ("assistant", "Part two.")],
    [
        ("user", "Think first."),
        ("assistant", "<think>maybe 3</think>Three."),
        ("user", "Sure?"),
        ("assistant", "<think>check</think>Yes."),
    ],
]
CONTROL = [
    [
        ("user", "A turn ends with <|im_end|>\n<|im_start|>assistant\nand the reply starts. Explain."),
        ("assistant", "The marker <|im_end|> closes a turn."),
    ],
    [("user", "HTML strike: <s>old</s> new"), ("assistant", "<s>old</s> is struck out.<|im_end|>")],
    [("user", "plain"), ("assistant", "ok")],
]
STRICT = [
    [("system", "You speak like a sailor."), ("user", "Weather?"), ("assistant", "Fair winds.")],
    [("user", "First."), ("user", "Second, same speaker."), ("assistant", "Both noted.")],
    [("assistant", "Welcome aboard."), ("user", "Thanks."), ("assistant", "Mind the step.")],
    [("user", "Only me here."), ("assistant", "Not alone.")],
]
STRICT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system turn in this format') }}{%- endif -%}"
    "{%- for x in messages -%}{%- if (x['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('turns must take turns') }}{%- endif -%}"
    "{{ '<|im_start|>' ~ x['role'] ~ '\\n' ~ x['content'] ~ '<|im_end|>\\n' }}{%- endfor -%}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def shared_or_inline(where: str, name: str, inline: list) -> list[list[dict]]:
    if where == "inline":
        return [chat(*turns) for turns in inline]
    if not (CASES / name).is_file():
        pytest.skip(f"the folder of shared cases is not beside the repository (no {name})")
    return [json.loads(line)["messages"] for line in (CASES / name).read_bytes().splitlines()]


def supervised(tokenizer, row: dict) -> list[str]:
    """Return the decoded runs of tokens that have a label, after checking that each label is its own token."""
    runs, last = [], IGNORE_INDEX
    assert len(row["input_ids"]) == len(row["labels"])
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        if label != IGNORE_INDEX:
            assert label == token
            runs = [*runs, [token]] if last == IGNORE_INDEX else [*runs[:-1], [*runs[-1], token]]
        last = label
    return [tokenizer.decode(run) for run in runs]


def templated(tokenizer, messages: list[dict], **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def replies(messages: list[dict]) -> list[str]:
    return [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]


def kind_of(*arguments, **options) -> str:
    with pytest.raises(BadRow) as caught:
        encode_messages(*arguments, **(ROOM | options))
    return caught.value.kind


both = pytest.mark.parametrize("where", ["inline", "file"])


@both
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_reply_is_supervised_as_rendered(where, name):
    tokenizer = tiny.tokenizer(TEMPLATES[name])
    for messages in shared_or_inline(where, "C14_multiturn.jsonl", MULTITURN):
        row = encode_messages(tokenizer, messages, **ROOM)
        assert row["input_ids"] == templated(tokenizer, messages)
        expected = replies(messages)
        if name == "STRIP_THINK":
            expected = [text.split("</think>")[-1] for text in expected[:-1]] + expected[-1:]
        assert supervised(tokenizer, row) == expected
        if name == "CHATML_MARKERS":
            assert row == encode_messages(tiny.tokenizer(tiny.CHATML), messages, **ROOM)
            mask = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )["assistant_masks"]
            assert [label != IGNORE_INDEX for label in row["labels"]] == [bool(part) for part in mask]


def test_markers_around_the_content_alone_still_get_the_end_of_turn():
    narrow = tiny.CHATML_MARKERS.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert narrow != tiny.CHATML_MARKERS
    for turns in [*MULTITURN, *CONTROL]:
        row = encode_messages(tiny.tokenizer(narrow), chat(*turns), **ROOM)
        assert row == encode_messages(tiny.tokenizer(tiny.CHATML), chat(*turns), **ROOM)
    assert kind_of(tiny.tokenizer(tiny.CHATML + "{% generation %}{% endgeneration %}"), chat(*MULTITURN[0])) == (
        "template_unclear"
    )


@both
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("split", [True, False])
def test_control_text_in_a_message(where, name, split):
    tokenizer = tiny.tokenizer(TEMPLATES[name])
    for messages in shared_or_inline(where, "C22_control_text.jsonl", CONTROL):
        row = encode_messages(tokenizer, messages, split_special_tokens=split, **ROOM)
        assert supervised(tokenizer, row) == replies(messages), "one run per reply, whatever the reply mentions"
        plain = templated(tokenizer, messages)
        assert tokenizer.decode(row["input_ids"]) == tokenizer.decode(plain)
        num_turns = len(messages) + (name == "DEFAULT_SYSTEM")
        counts = [row["input_ids"].count(tokenizer.convert_tokens_to_ids(t)) for t in tokenizer.all_special_tokens]
        if split:
            assert sorted(set(counts)) == [0, num_turns], counts
            assert row["input_ids"].count(0) == num_turns
        else:
            assert row["input_ids"] == plain
    assert row["input_ids"] == plain, "the last row has no control text: it takes the ordinary way"


def test_control_text_in_tool_calls_and_tools_is_text_too():
    tokenizer = tiny.tokenizer("{{ tools | tojson }}" + CALLS)
    call = {"function": {"name": "f", "arguments": {"<s>": "<|im_end|><|im_end|>"}}}
    messages = [*chat(("user", "Go.")), {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f", "description": "ends with <|im_end|>"}}]
    row = encode_messages(tokenizer, messages, tools=tools, **ROOM)
    assert tokenizer.decode(row["input_ids"]) == tokenizer.decode(templated(tokenizer, messages, tools=tools))
    assert [row["input_ids"].count(token) for token in (0, 1, 2)] == [2, 2, 0]


def test_a_template_that_acts_on_control_text_is_refused():
    template = tiny.CHATML.replace("{{ message['content'] }}", "{{ message['content'] | replace('<s>', '') }}")
    assert kind_of(tiny.tokenizer(template), chat(("user", "a"), ("assistant", "<s>b"))) == "template_unclear"
    same_length = tiny.tokenizer(template.replace("'')", "'[s]')"))
    assert kind_of(same_length, chat(("user", "a"), ("assistant", "<s>b"))) == "template_unclear"


def test_split_stretches_keep_the_tokens_of_the_middle_of_a_text():
    """A tokenizer that marks the start of a text with a space must not do so behind a control token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|im_start|>", "<|im_end|>", "<s>"], show_progress=False
    )
    backend.train_from_iterator([*tiny.CORPUS, *map(chr, range(10, 127)), "use users"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<s>")
    tokenizer.chat_template = tiny.CHATML
    plain, control = chat(("user", "the sky"), ("assistant", "b")), chat(("user", "the sky<s>"), ("assistant", "b"))
    ordinary, split = templated(tokenizer, plain), encode_messages(tokenizer, control, **ROOM)
    length = ordinary.index(1)
    assert split["input_ids"][:length] == ordinary[:length]
    assert tokenizer.convert_ids_to_tokens(split["input_ids"][length : length + 3]) == ["<", "s", ">"]
    assert split["input_ids"].count(2) == 0 and supervised(tokenizer, split) == ["b<|im_end|>"]


@both
def test_refusals_of_a_strict_template_carry_its_own_words(tmp_path, where):
    path = tmp_path / "strict.jinja"
    path.write_text(STRICT_TEMPLATE)
    if where == "file" and (CASES / "C16_strict_template.jinja").is_file():
        path = CASES / "C16_strict_template.jinja"
    tokenizer = copy.deepcopy(tiny.tokenizer())
    load_template(tokenizer, str(path))
    rows = tmp_path / "rows.jsonl"
    if where == "file":
        shared_or_inline(where, "C16_roles_for_strict_template.jsonl", STRICT)
        rows = CASES / "C16_roles_for_strict_template.jsonl"
    else:
        rows.write_text("".join(json.dumps({"messages": chat(*turns)}) + "\n" for turns in STRICT))

    def encode(row):
        return encode_messages(tokenizer, row["messages"], **ROOM)

    with pytest.raises(ValueError) as error:
        collect(str(rows), "train", encode, "skip" if where == "file" else "stop")
    message = str(error.value)
    assert "template_refused 3" in message and ":1: " in message
    assert "no system turn in this format" in message and "turns must take turns" in message


def test_no_system_turn_is_invented_or_lost():
    messages = chat(("user", "a"), ("assistant", "b"))
    for template in (tiny.CHATML, tiny.CHATML_MARKERS, tiny.STRIP_THINK):
        row = encode_messages(tiny.tokenizer(template), messages, **ROOM)
        assert "system" not in tiny.tokenizer(template).decode(row["input_ids"])
    deaf = tiny.CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    with_system = chat(("system", "Be kind."), ("user", "a"), ("assistant", "b"))
    assert kind_of(tiny.tokenizer(deaf), with_system) == "turn_lost"
    assert kind_of(tiny.tokenizer(deaf), with_system, assistant_only_loss=False) == "turn_lost"


def test_tool_calls_and_reasoning_are_part_of_the_reply():
    tokenizer = tiny.tokenizer(CALLS)
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "09:00"},
        {"role": "assistant", "content": "Nine.", "reasoning_content": "It says 9."},
    ]
    row = encode_messages(tokenizer, messages, **ROOM)
    assert row["input_ids"] == templated(tokenizer, messages)
    assert supervised(tokenizer, row) == [
        '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call><|im_end|>',
        "<think>\nIt says 9.\n</think>\n\nNine.<|im_end|>",
    ]
    silent = CALLS.split("{% if add_generation_prompt")[0]
    assert kind_of(tiny.tokenizer(silent), messages[:2]) == "template_unclear"


def test_a_call_is_placed_in_a_template_with_rules_for_its_answer():
    rule = "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    tokenizer = tiny.tokenizer(
        rule + "{{ raise_exception('an answer without a call') }}{% endif %}{% endfor %}" + CALLS
    )
    call = {"function": {"name": "clock", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "content": "09:00"},
        {"role": "assistant", "content": "Nine."},
    ]
    row = encode_messages(tokenizer, messages, **ROOM)
    called = 'Wait.<tool_call>{"name": "clock", "arguments": {}}</tool_call><|im_end|>'
    assert supervised(tokenizer, row) == [called, "Nine.<|im_end|>"]


def test_a_template_that_rewrites_the_last_turn_is_followed():
    """As in reasoning models: the last turn gets a think block before its content, empty when there is none."""
    template = (
        "{% for m in messages %}{% set parts = m.content.split('</think>') %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ parts[0].replace('<think>', '') if parts | length > 1 }}\n</think>\n\n{% endif %}"
        "{{ parts[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = tiny.tokenizer(template)
    row = encode_messages(tokenizer, chat(*MULTITURN[2]), **ROOM)
    assert supervised(tokenizer, row) == ["Three.<|im_end|>", "<think>\ncheck\n</think>\n\nYes.<|im_end|>"]
    doubled = tiny.CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{{ message['content'] }}")
    row = encode_messages(tiny.tokenizer(doubled), chat(*MULTITURN[0]), **ROOM)
    assert supervised(tokenizer, row) == ["Red.Red.<|im_end|>", "Warm.Warm.<|im_end|>"]
    without_prompt = tiny.tokenizer(doubled.split("{% if add_generation_prompt")[0])
    assert kind_of(without_prompt, chat(*MULTITURN[0])) == "template_unclear", "a header would be taken for the reply"


def test_templates_that_trim_keep_their_spans():
    template = tiny.CHATML.replace("{{ message['content'] }}", "{{ message['content'] | trim }}")
    row = encode_messages(
        tiny.tokenizer(template), chat(("user", " a "), ("assistant", " b \n"), ("user", "c")), **ROOM
    )
    assert supervised(tiny.tokenizer(template), row) == ["b<|im_end|>"]


def test_headers_and_straddling_tokens_are_context():
    tokenizer = tiny.tokenizer(tiny.CHATML)
    row = encode_messages(tokenizer, chat(("user", "a"), ("assistant", "\nTeal.")), **ROOM)
    assert row["input_ids"] == templated(tokenizer, chat(("user", "a"), ("assistant", "\nTeal.")))
    assert supervised(tokenizer, row)[0].endswith("Teal.<|im_end|>")
    assert "assistant" not in supervised(tokenizer, row)[0]
    # "sky" is one token, whichever of its letters the template wrote.
    around = tiny.tokenizer(
        "{% for m in messages %}{% if m.role == 'assistant' %}The s{{ m.content }}ky\n<|im_end|>"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    assert len(around(" sky")["input_ids"]) == 1
    row = encode_messages(around, chat(("user", "a"), ("assistant", "ky is blue, the s")), **ROOM)
    assert supervised(around, row) == [" is blue, the"]


@pytest.mark.parametrize("eos", ["<|im_end|>", "</s>"])
def test_the_end_of_turn_is_learnt_once_whatever_pads(eos):
    tokenizer = tiny.tokenizer(tiny.CHATML, eos=eos)
    row = encode_messages(tokenizer, chat(("user", "What is 1 plus 1?"), ("assistant", "2")), **ROOM)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [label for label in row["labels"] if label != IGNORE_INDEX][-1] == end
    assert row["input_ids"].count(end) == 2 and end_of_turn_token(tokenizer) == "<|im_end|>"
    assert row["input_ids"] == templated(tokenizer, chat(("user", "What is 1 plus 1?"), ("assistant", "2")))


def test_a_template_without_an_end_token_gets_the_tokenizers():
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
    tokenizer = tiny.tokenizer(template, eos="</s>")
    assert end_of_turn_token(tokenizer) is None
    messages = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d</s>"))
    row = encode_messages(tokenizer, messages, **ROOM)
    assert supervised(tokenizer, row) == ["b", "d</s>\n</s>"]
    assert row["input_ids"].count(tokenizer.eos_token_id) == 1 == row["input_ids"][-1:].count(tokenizer.eos_token_id)
    everything = encode_messages(tokenizer, messages, assistant_only_loss=False, **ROOM)
    assert everything["labels"] == everything["input_ids"] == row["input_ids"]
    ends_with_user = encode_messages(tokenizer, messages[:3], **ROOM)
    assert tokenizer.eos_token_id not in ends_with_user["input_ids"]


def test_white_space_that_the_model_writes_is_learnt_with_the_first_word():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{% endif %}{% endfor %}"
    )
    llama = tiny.tokenizer(template, eos="</s>")
    messages = chat(("user", "a"), ("assistant", "The sky."), ("user", "c"), ("assistant", "is blue"))
    # A start token opens the next turn: it does not end this one.
    assert supervised(llama, encode_messages(llama, messages, **ROOM)) == [" The sky.", " is blue</s>"]
    header = tiny.tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = encode_messages(header, chat(("user", "a"), ("assistant", "Teal. sky")), **ROOM)
    assert not supervised(header, row)[0].startswith(" "), "here the prompt holds the space"


def test_weight_zero_is_context():
    for template in (tiny.CHATML, tiny.CHATML_MARKERS):
        tokenizer = tiny.tokenizer(template)
        row = normalise({"prompt": chat(("user", "a"), ("assistant", "b"), ("user", "c")),
                         "completion": chat(("assistant", "d"))})  # fmt: skip
        assert supervised(tokenizer, encode_messages(tokenizer, row["messages"], **ROOM)) == ["d<|im_end|>"]


@pytest.mark.parametrize("inner", [False, True])
def test_start_tokens_are_never_doubled(inner):
    template = ("{{ bos_token }}" if inner else "") + tiny.CHATML
    tokenizer = tiny.tokenizer(template, bos=True)
    messages = chat(("user", "a"), ("assistant", "b"))
    row = encode_messages(tokenizer, messages, **ROOM)
    assert row["input_ids"] == templated(tokenizer, messages)
    assert row["input_ids"].count(tokenizer.bos_token_id) == int(inner)
    text = encode_text(tokenizer, "Name a colour.", " Teal.", **ROOM)
    assert text["input_ids"].count(tokenizer.bos_token_id) == 1 == text["input_ids"][:1].count(tokenizer.bos_token_id)


def test_raw_text_is_one_piece_with_one_end():
    from tokenizers import processors

    both_ends = copy.deepcopy(tiny.tokenizer(eos="</s>"))
    both_ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    for tokenizer in (tiny.tokenizer(eos="</s>"), tiny.tokenizer(bos=True, eos="</s>"), both_ends):
        for prompt in ("Name a colour.", ""):
            row = encode_text(tokenizer, prompt, " Teal.", **ROOM)
            assert row["input_ids"].count(3) == 1 and row["input_ids"][-1] == 3
            assert supervised(tokenizer, row) == [" Teal.</s>"]
            whole = tokenizer(prompt + " Teal.", add_special_tokens=False)["input_ids"]
            assert [token for token in row["input_ids"] if token not in (2, 3)] == whole
        everything = encode_text(tokenizer, "a", "b", assistant_only_loss=False, **ROOM)
        assert everything["labels"] == everything["input_ids"]
    tokenizer = tiny.tokenizer(eos="</s>")
    html = encode_text(tokenizer, "<s>", "b</s>", **ROOM)["input_ids"]
    assert html.count(2) == 0 and html.count(3) == 1
    html = encode_text(tokenizer, "<s>", "b</s>", split_special_tokens=False, **ROOM)["input_ids"]
    assert html.count(2) == 1 and html.count(3) == 1
    # "sky is" and "sky" + " is" are the same characters; a token over the border is context.
    row = encode_text(tokenizer, "What is the colour of the s", "ky is", **ROOM)
    assert row["input_ids"][:-1] == tokenizer("What is the colour of the sky is")["input_ids"]
    assert supervised(tokenizer, row)[0] in ("ky is</s>", "y is</s>", " is</s>", "</s>")


def test_trimmed_offsets_do_not_move_the_border():
    from tokenizers import processors

    trimming = copy.deepcopy(tiny.tokenizer(eos="</s>"))
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    starts = [start for start, _ in trimming("the sky", return_offsets_mapping=True)["offset_mapping"]]
    assert 3 not in starts and 4 in starts, "the space must be cut off the offsets, or this tests nothing"
    for prompt, completion in [("The colour of the ", "sky is blue."), ("The colour of the", " sky is blue.")]:
        plain = encode_text(tiny.tokenizer(eos="</s>"), prompt, completion, **ROOM)
        assert encode_text(trimming, prompt, completion, **ROOM) == plain
    for turns in MULTITURN:
        assert encode_messages(trimming, chat(*turns), **ROOM) == encode_messages(
            tiny.tokenizer(eos="</s>"), chat(*turns), **ROOM
        )


def test_odd_unicode_comes_back_whole():
    tokenizer = tiny.tokenizer()
    text = "family: \U0001f469\u200d\U0001f469, e\u0301, \u05e9\u05dc, line\u2028sep, nul:\x00."
    row = encode_messages(tokenizer, chat(("user", text), ("assistant", text)), **ROOM)
    assert supervised(tokenizer, row) == [text + "<|im_end|>"]
    assert tokenizer.decode(row["input_ids"]).count(text) == 2


@both
def test_truncation_that_leaves_no_target_is_counted(tmp_path, where):
    long = " ".join(f"clause {number} of the agreement" for number in range(80))
    inline = [[("user", long), ("assistant", "Yes.")]] * 2 + [
        [("user", f"Say {n}."), ("assistant", str(n))] for n in range(6)
    ]
    rows = shared_or_inline(where, "C13_long_prompt_mix.jsonl", inline)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    tokenizer = tiny.tokenizer()

    def encode(truncation):
        return lambda row: encode_messages(tokenizer, row["messages"], max_length=64, truncation=truncation)

    kept, report = collect(str(path), "train", encode("truncate"), "skip")
    assert len(kept) == 6 and report.reasons == {"no_target_left": 2}
    assert all(len(row["input_ids"]) <= 64 and supervised(tokenizer, row) for row in kept)
    dropped, report = collect(str(path), "train", encode("drop"), "stop")
    assert dropped == kept and report.reasons == {"too_long": 2}
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in sorted(rows, key=lambda m: -len(str(m)))[:2]))
    with pytest.raises(ValueError, match="max_length 64"):
        collect(str(path), "train", encode("truncate"), "skip")


def test_truncation_keeps_what_fits():
    tokenizer = tiny.tokenizer()
    messages = chat(("user", "a"), ("assistant", "The sky is blue. " * 20))
    whole = encode_messages(tokenizer, messages, **ROOM)
    cut = encode_messages(tokenizer, messages, max_length=20, truncation="truncate")
    assert cut.pop("num_cut") == len(whole["input_ids"]) - 20 > 0 and "num_cut" not in whole
    assert cut == {key: value[:20] for key, value in whole.items()}
    exact = len(whole["input_ids"])
    assert encode_messages(tokenizer, messages, max_length=exact, truncation="drop") == whole
    assert kind_of(tokenizer, messages, max_length=exact - 1, truncation="drop") == "too_long"
    with pytest.raises(BadRow) as caught:
        encode_text(tokenizer, "The sky is blue. " * 20, "Yes.", max_length=8, truncation="truncate")
    assert caught.value.kind == "no_target_left" and "max_length 8" in str(caught.value)
    assert kind_of(tokenizer, chat(("user", "a"))) == "no_reply"


def test_templates_are_loaded_or_missed_by_name(tmp_path):
    bare = copy.deepcopy(tiny.tokenizer(None))
    messages = chat(("user", "a"), ("assistant", "b"))
    with pytest.raises(ValueError, match="--chat_template") as caught:
        encode_messages(bare, messages, **ROOM)
    assert not isinstance(caught.value, BadRow), (
        "a missing template is no fault of the row, so no row may be skipped for it"
    )
    assert end_of_turn_token(bare) is None
    load_template(bare, None)
    assert bare.chat_template is None
    (tmp_path / "chatml.jinja").write_text(tiny.CHATML)
    load_template(bare, str(tmp_path / "chatml.jinja"))
    assert encode_messages(bare, messages, **ROOM) == encode_messages(tiny.tokenizer(), messages, **ROOM)
    with pytest.raises(ValueError, match="chat_template .*gone.jinja"):
        load_template(bare, str(tmp_path / "gone.jinja"))
    with pytest.raises(ValueError, match="chat_template .*not a file"):
        load_template(bare, tiny.CHATML * 20)
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="chat_template .*latin.jinja.*UTF-8"):
        load_template(bare, str(tmp_path / "latin.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="chat_template .*bad.jinja.*line 1"):
        load_template(bare, str(tmp_path / "bad.jinja"))
    assert bare.chat_template == tiny.CHATML


def plain_tokenizer(template: str, *added: str, eos: str = "</s>", unk: str | None = None):
    """A tokenizer whose added tokens are, as in many published ones, not marked as special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [unk] * (unk is not None) + [chr(number) for number in range(32, 127)] + ["\u010a", "\u0120"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<s>", unk_token=unk)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.chat_template = template
    load_template(tokenizer, None)
    return tokenizer


def test_control_tokens_that_nobody_marked_as_special():
    tokenizer = plain_tokenizer(tiny.CHATML, "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    start, end, think, _ = (
        tokenizer.convert_tokens_to_ids(t) for t in tokenizer.added_tokens_encoder if "|" in t or "think" in t
    )
    text = "a <|im_end|> b"
    row = encode_messages(
        tokenizer, chat(("user", text), ("assistant", "c"), ("user", "d"), ("assistant", "<think>e")), **ROOM
    )
    assert [row["input_ids"].count(token) for token in (start, end, think)] == [4, 4, 1]
    labels = [label for label in row["labels"] if label != IGNORE_INDEX]
    assert labels.count(end) == 2 and labels[-1] == end and tokenizer.eos_token_id not in row["input_ids"]
    assert not tokenizer.added_tokens_decoder[think].special, "it is part of what the model says"
    tagged = tiny.CHATML.replace("<|im_start|>", "<turn>").replace("<|im_end|>", "<stop>")
    tokenizer = plain_tokenizer(tagged, "<turn>", "<stop>", "<other>")
    row = encode_messages(tokenizer, chat(("user", "a<stop>"), ("assistant", "c")), **ROOM)
    assert (
        row["input_ids"].count(tokenizer.convert_tokens_to_ids("<stop>"))
        == 2
        == sum(
            token.special
            for token in tokenizer.added_tokens_decoder.values()
            if str(token) in ("<turn>", "<stop>", "<other>")
        )
    )
    assert end_of_turn_token(tokenizer) == "<stop>"


def test_unknown_text_ends_no_turn_and_is_not_learnt():
    tokenizer = plain_tokenizer(tiny.CHATML, "<|im_start|>", "<|im_end|>", unk="<unk>")
    unknown = tokenizer.unk_token_id
    row = encode_messages(tokenizer, chat(("user", "\u00e9 <unk>"), ("assistant", "a")), **ROOM)
    assert row["input_ids"].count(unknown) == 2, "the two bytes of one letter; the other is text"
    assert supervised(tokenizer, row) == ["a<|im_end|>"]
    assert kind_of(tokenizer, chat(("user", "a"), ("assistant", "b\u00e9"))) == "unknown_token"
    assert (
        kind_of(tokenizer, chat(("user", "\u00e9"), ("assistant", "b")), assistant_only_loss=False) == "unknown_token"
    )
    with pytest.raises(BadRow, match="no token for"):
        encode_text(tokenizer, "a", "\u00e9", **ROOM)
    assert unknown in encode_text(tokenizer, "\u00e9", "a", **ROOM)["input_ids"]


def test_whatever_the_template_leaves_out_is_named():
    call = {"function": {"name": "clock", "arguments": {}}}
    called = [
        *chat(("user", "Time?")),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *chat(("tool", "s"), ("assistant", "Nine.")),
    ]
    tools = [{"type": "function", "function": {"name": "clock"}}]

    def lost(template, messages, **options):
        with pytest.raises(BadRow) as caught:
            encode_messages(tiny.tokenizer(template), messages, **(ROOM | options))
        assert caught.value.kind == "turn_lost"
        return str(caught.value)

    assert "tool_calls of turn 2" in lost(tiny.CHATML, called)
    assert "tools" in lost(CALLS, called, tools=tools)
    assert "tools" in lost(tiny.CHATML_MARKERS, chat(("user", "a"), ("assistant", "b")), tools=tools)
    first_only = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    twice = [called[0], called[1] | {"tool_calls": [call, call]}, *called[2:]]
    assert "a tool call of turn 2" in lost(first_only, twice)
    # Each of these texts is found in the rendering all the same, as a part of something else.
    for role, number in (("system", 1), ("tool", 4), ("user", 2)):
        shown = "{% if m.role != '" + role + "' %}{{ m.content }}{% endif %}"
        messages = [*chat(("system", "s")), *called[:1], *called[1:]]
        messages[1] = {"role": "user", "content": "s"}
        text = lost(CALLS.replace("{{ m.content }}", shown), messages)
        assert f"turn {number} ({role})" in text
    dropped = CALLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    assert "turn 2 (assistant)" in lost(dropped, [called[0], called[1] | {"content": "Wait."}, *called[2:]])
    reasoned = [*chat(("user", "a")), {"role": "assistant", "content": "b", "reasoning_content": "why"}]
    assert "reasoning_content of turn 2" in lost(tiny.CHATML, reasoned)
    for key in ("thinking", "reasoning"):
        other = [reasoned[0], {"role": "assistant", "content": "b", key: "why"}]
        assert key in lost(tiny.CHATML, other)
        shown = ["<think>\nwhy\n</think>\n\nb<|im_end|>"]
        for messages in (other, [other[0], reasoned[1] | other[1]]):
            row = encode_messages(tiny.tokenizer(CALLS), messages, **ROOM)
            assert supervised(tiny.tokenizer(CALLS), row) == shown, "all names of reasoning mean the same"
    row = encode_messages(tiny.tokenizer(CALLS), [*reasoned, *chat(("user", "c"), ("assistant", "d"))], **ROOM)
    assert supervised(tiny.tokenizer(CALLS), row) == ["b<|im_end|>", "d<|im_end|>"], "earlier reasoning may go"


def test_an_ordinary_row_costs_one_more_rendering(monkeypatch):
    tokenizer, calls = tiny.tokenizer(), []
    original = rendering._rendered
    monkeypatch.setattr(rendering, "_rendered", lambda *a, **k: calls.append(a) or original(*a, **k))
    for _ in range(3):
        calls.clear()
        encode_messages(tokenizer, chat(*MULTITURN[0]), **ROOM)
    assert len(calls) == 2


def test_the_opener_of_the_next_turn_is_not_learnt():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = plain_tokenizer(template, "<|user|>", "<|assistant|>", "<|system|>")
    assert end_of_turn_token(tokenizer) is None
    row = encode_messages(
        tokenizer, chat(("user", "a"), ("assistant", "A1."), ("user", "b"), ("assistant", "A2.")), **ROOM
    )
    assert supervised(tokenizer, row) == ["A1.", "A2.\n</s>"]


def test_the_end_of_a_turn_is_found_for_templates_with_rules():
    rule = "{% if messages[0].role != 'system' %}{{ raise_exception('a system turn is needed') }}{% endif %}"
    assert end_of_turn_token(tiny.tokenizer(rule + tiny.CHATML)) == "<|im_end|>"
    assert end_of_turn_token(tiny.tokenizer("{{ raise_exception('never') }}")) is None
    named = copy.deepcopy(tiny.tokenizer())
    named.chat_template = {"rag": tiny.CHATML}
    assert end_of_turn_token(named) is None


def test_what_the_template_writes_between_prompt_and_reply_is_learnt():
    """As in models with optional reasoning: the last turn gets an empty block, which generation has to write."""
    block = "<think>\n\n</think>\n\n"
    template = tiny.CHATML.replace(
        "{{ message['content'] }}",
        "{% if loop.last and message['role'] == 'assistant' %}" + block + "{% endif %}{{ message['content'] }}",
    )
    tokenizer = tiny.tokenizer(template)
    row = encode_messages(tokenizer, chat(*MULTITURN[0]), **ROOM)
    assert row["input_ids"] == templated(tokenizer, chat(*MULTITURN[0]))
    assert supervised(tokenizer, row) == ["Red.<|im_end|>", block + "Warm.<|im_end|>"]
    prompted = tiny.tokenizer(template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + block))
    row = encode_messages(prompted, chat(*MULTITURN[0]), **ROOM)
    assert supervised(prompted, row) == ["Red.<|im_end|>", "Warm.<|im_end|>"], "here the prompt holds the block"


def test_tiny_model_and_folder_are_the_same_each_time(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny.save(tmp_path / "tiny")
    loaded, model = AutoModelForCausalLM.from_pretrained(folder), tiny.tiny_model(len(tiny.tokenizer()))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    messages = chat(*MULTITURN[0])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert encode_messages(tokenizer, messages, **ROOM) == encode_messages(tiny.tokenizer(), messages, **ROOM)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
