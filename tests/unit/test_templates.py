"""Chat templates of the kinds in use: whatever is said, the labels are the replies, and a batch has the rows' tokens.

The templates in tests/templates/ were written for these tests, each with what its kind is known for; each has a
tokenizer of the kind that comes with it.
"""

import json
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from oneloop.data import chunks, encode
from oneloop.data.chat import IGNORE_INDEX, load_template
from oneloop.data.files import BadRow
from tests import tiny

TEMPLATES = Path(__file__).parents[1] / "templates"
ROOM = {"max_length": 100_000, "truncation": "truncate"}
PATTERNS = sorted(chunks.PATTERNS, key=len)
QWEN, LLAMA = PATTERNS[0], PATTERNS[1]

KINDS = {  # template -> control tokens, end of turn, start and end token, style of the tokenizer
    "chatml": (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "<|im_end|>", None, "<|im_end|>", "gpt2"),
    "llama3": (
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "llama3",
    ),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]"], "</s>", "<s>", "</s>", "spaces"),
    "gemma": (
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<end_of_turn>",
        "<bos>",
        "<eos>",
        "spaces",
    ),
    "qwen": (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "<|im_end|>", None, "<|im_end|>", "qwen"),
    "phi": (
        ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "<|end|>",
        None,
        "<|endoftext|>",
        "gpt4o",
    ),
}
every_template = pytest.mark.parametrize("name", KINDS)
SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


@lru_cache
def tokenizer_for(name: str):
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    controls, _, bos, eos, style = KINDS[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend(style, tuple(controls), bos), bos_token=bos, eos_token=eos, unk_token=None
    )
    if name == "qwen":
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    load_template(tokenizer, str(TEMPLATES / f"{name}.jinja"))
    return tokenizer


def backend(style: str, controls: tuple[str, ...], bos: str | None):
    """Return a BPE tokenizer that splits, normalises and starts a text as its kind does, or splits by a pattern."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    built = Tokenizer(models.BPE())
    if style == "spaces":
        # As converted from SentencePiece: spaces are letters, and bytes stand for what is not in the vocabulary.
        built.normalizer = normalizers.Replace(" ", "\u2581")
        built.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
        trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
        # No token of such a tokenizer holds a line break and a word.
        corpus = [text.replace("\n", " ") for text in tiny.CORPUS]
        built.train_from_iterator([*corpus, "\n", *map(chr, range(33, 127))], trainer)
        state = json.loads(built.to_str())["model"]
        vocabulary = dict(state["vocab"])
        for token in [f"<0x{number:02X}>" for number in range(256)]:
            vocabulary[token] = len(vocabulary)
        merges = [tuple(merge) for merge in state["merges"]]
        built.model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True)
        built.pre_tokenizer = None
        built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        split = {"llama3": LLAMA, "qwen": QWEN, "gpt4o": PATTERNS[-1], "gpt2": None}.get(style, style)
        if split is None:
            built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            built.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(split), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        if style == "qwen":
            built.normalizer = normalizers.NFC()
        built.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        # Tokens that cross an apostrophe come about where the pattern allows it.
        built.train_from_iterator(tiny.CORPUS * 4 + ["don't we'll it's I've you're"] * 40, trainer)
    built.add_special_tokens(list(controls))
    if bos is not None:
        start = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, built.token_to_id(bos))])
        trimming = processors.ByteLevel(trim_offsets=True)
        built.post_processor = processors.Sequence([trimming, start]) if style == "llama3" else start
    return built


# --- what may be said -------------------------------------------------------------------------------------------------

WORDS = (
    "The harbour lamp sky is blue don't It's we'LL 3 1234 x+1 (a, b) caf\u00e9 _x_ -- % zq ' o' 'tis e\u0301".split()
)
WORDS += "A\u030a \u212a \u05e9\u05dc \u4f60\u597d \u043c\u0438\u0440 \u2019s \u00b2 \U0001f469\u200d\U0001f469".split()
WORDS += ["\u3000", "\x00"]
GAPS = [" ", " ", " ", " ", "", "  ", "\n", "\n\n", "\t", ". ", ", ", ".\n", "\r\n", "   \n  ", "\x85", "\u00a0"]


@st.composite
def texts(draw, controls: tuple[str, ...] = ()):
    """Words and gaps of all kinds, and any other text."""
    words = st.sampled_from([*WORDS, *controls]) | st.text(max_size=4)
    parts = draw(st.lists(st.tuples(words, st.sampled_from(GAPS)), min_size=1, max_size=8))
    text = "".join(part for pair in parts for part in pair)
    return text.encode("utf-8", "ignore").decode()


def replies(controls: tuple[str, ...] = ()):
    return texts(controls).map(lambda text: text.strip() or "Yes")


@st.composite
def conversations(draw, name: str, controls: tuple[str, ...] = ()):
    """Turns in an order that the template allows, and that ends with a reply."""
    turns = []
    if name not in ("mistral", "gemma") and draw(st.booleans()):
        turns.append({"role": "system", "content": draw(replies(controls))})
    for _ in range(draw(st.integers(1, 3))):
        turns.append({"role": "user", "content": draw(replies(controls))})
        turns.append({"role": "assistant", "content": draw(replies(controls))})
    return turns


def supervised(tokenizer, row: dict) -> list[str]:
    """Decode each run of labels, after checking that each label is its own token."""
    ids, labels = row["input_ids"], row["labels"]
    assert ids.dtype == labels.dtype == np.int32 and len(ids) == len(labels)
    learnt = labels != IGNORE_INDEX
    assert (ids[learnt] == labels[learnt]).all()
    borders = np.flatnonzero(np.diff(np.concatenate([[0], learnt, [0]]).astype(int)))
    return [tokenizer.decode(ids[start:end]) for start, end in zip(borders[::2], borders[1::2], strict=True)]


def encoded(tokenizer, conversation: list[dict], **options) -> dict:
    found = encode.encode_batch(tokenizer, [{"messages": conversation}], **(ROOM | options))[0]
    if isinstance(found, BadRow):
        raise found
    (row,) = found
    return row


def plain(text: str) -> str:
    return text.replace("\u2581", " ")  # which tokenizers of the kind cannot tell from a space


# --- the labels -------------------------------------------------------------------------------------------------------


@every_template
def test_labels_are_the_replies_and_ids_are_the_template(name):
    tokenizer, seen = tokenizer_for(name), []
    end, before = KINDS[name][1], {"mistral": " ", "qwen": "<think>\n\n</think>\n\n"}.get(name, "")

    @SETTINGS
    @given(conversations(name))
    def check(conversation):
        row = encoded(tokenizer, conversation)
        ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
        assert row["input_ids"].tolist() == ids
        told = [turn["content"] for turn in conversation if turn["role"] == "assistant"]
        starts = ["" if name == "qwen" else before] * (len(told) - 1) + [before]
        expected = [start + reply + end for start, reply in zip(starts, told, strict=True)]
        assert [plain(text) for text in supervised(tokenizer, row)] == [
            plain(unicodedata.normalize("NFC", text) if name == "qwen" else text) for text in expected
        ]
        seen.append(len(conversation))

    check()
    assert len(seen) >= 50 and max(seen) >= 6


def test_thoughts_are_learnt_in_the_last_turn_and_gone_from_earlier_ones():
    tokenizer, seen = tokenizer_for("qwen"), []

    @SETTINGS
    @given(conversations("qwen"), replies(), st.booleans())
    def check(conversation, thought, is_field):
        conversation = [dict(turn) for turn in conversation]
        for turn in conversation[1::2] if conversation[0]["role"] == "user" else conversation[2::2]:
            if is_field:
                turn["reasoning_content"] = thought
            else:
                turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
        row = encoded(tokenizer, conversation)
        assert row["input_ids"].tolist() == tokenizer.apply_chat_template(conversation, return_dict=False)
        told = [turn["content"].split("</think>\n\n")[-1] for turn in conversation if turn["role"] == "assistant"]
        told[-1] = f"<think>\n{thought}\n</think>\n\n{told[-1]}"
        assert supervised(tokenizer, row) == [unicodedata.normalize("NFC", text + "<|im_end|>") for text in told]
        seen.append(len(conversation))

    check()
    assert len(seen) >= 50


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_system_turns_are_refused_in_the_template_s_words(name):
    roles = ["system user assistant", "user user assistant", "user assistant"]
    rows = [[{"role": role, "content": role[0]} for role in line.split()] for line in roles]
    found = encode.encode_batch(tokenizer_for(name), [{"messages": row} for row in rows], **ROOM)
    assert [getattr(one, "kind", "kept") for one in found] == ["template_refused", "template_refused", "kept"]
    assert "turn" in str(found[0]) and "turn" in str(found[1])


# --- a batch and its rows ---------------------------------------------------------------------------------------------


@st.composite
def examples(draw, name: str):
    controls = tuple(KINDS[name][0][:3]) + (("<think>", "</think>") if name == "qwen" else ())
    said = texts(controls)
    kind = draw(st.sampled_from(["text", "pair", "messages", "messages", "messages", "tools"]))
    if kind == "text":
        return {"text": draw(said | st.just(" \n"))}
    if kind == "pair":
        return {"prompt": draw(said | st.just("")), "completion": draw(said | st.just(" "))}
    turns = draw(conversations(name, controls))
    for turn in turns:
        if draw(st.integers(0, 4)) == 2:
            turn["content"] = draw(said)
        if turn["role"] == "assistant" and draw(st.integers(0, 5)) == 2:
            turn["weight"] = draw(st.sampled_from([0, 1]))
        if turn["role"] == "assistant" and draw(st.integers(0, 8)) == 5:
            turn["reasoning_content"] = draw(said)
    if draw(st.integers(0, 5)) == 2:
        turns.append({"role": "user", "content": draw(said)})
    if kind == "tools" and draw(st.booleans()):
        turns[-1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"a": draw(said)}}}]
    row = {"messages": turns}
    return row | ({"tools": [{"type": "function", "function": {"name": "f"}}]} if kind == "tools" else {})


def outcome(rows) -> object:
    if isinstance(rows, BadRow):
        return rows.kind, str(rows)
    return [
        {key: value.tolist() if key in ("input_ids", "labels") else value for key, value in row.items()} for row in rows
    ]


@every_template
def test_batch_is_the_rows_one_by_one(name):
    tokenizer, kept, kinds = tokenizer_for(name), [], set()

    @SETTINGS
    @given(
        st.lists(examples(name), min_size=1, max_size=6),
        st.booleans(),
        st.booleans(),
        st.sampled_from([(100_000, "truncate"), (24, "truncate"), (24, "drop"), (16, "split")]),
    )
    @example([{"text": "\u00a0 a\n"}, {"prompt": "", "completion": "  a"}], True, True, (100_000, "truncate"))
    def check(rows, assistant_only_loss, split_special_tokens, room):
        rules = encode.Rules(
            assistant_only_loss=assistant_only_loss,
            split_special_tokens=split_special_tokens,
            max_length=room[0],
            truncation=room[1],
        )
        batch = encode.encode_batch(tokenizer, rows, **vars(rules))
        assert len(batch) == len(rows)
        for row, found in zip(rows, batch, strict=True):
            try:
                expected = encode.encode_row(tokenizer, row, rules)
            except BadRow as bad:
                expected = bad
                kinds.add(bad.kind)
            else:
                kept.append(row)
            assert outcome(found) == outcome(expected), row

    check()
    assert len(kept) >= 60 and kinds
    memory = chunks.memory_for(tokenizer)
    assert (memory is not None) == (KINDS[name][4] != "spaces")
    assert memory is None or (memory.is_sound and len(memory.parts) > 100)


# --- the memory of chunks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [None, "digits", *PATTERNS])
@pytest.mark.parametrize("normal", [None, "NFC"])
@pytest.mark.parametrize("trims", [False, True])
def test_chunks_have_the_tokens_and_places_of_the_text(split, normal, trims):
    from tokenizers import normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    built = backend("gpt2" if split in (None, "digits") else split, ("<|a|>", "<|b|>"), None)
    if split == "digits":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        built.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if normal:
        built.normalizer = normalizers.NFC()
    if trims:
        built.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<|a|>")
    memory, known = chunks.memory_for(tokenizer), []

    @SETTINGS
    @given(st.lists(texts(("<|a|>", "<|b|>", "<|", "|>")), min_size=1, max_size=8))
    @example(["don't it'll o'<|a|>'s", "x   \n  <|a|>b", "'s<|b|>'ll it", "\u3000a<|a|>\u3000b", "  a"])
    def check(batch):
        found = memory.encode(batch)
        for text, tokens, short in zip(batch, found, memory.encode(batch, needs_places=False), strict=True):
            whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            assert short is None or short[0].tolist() == whole.ids
            if tokens is not None:
                starts, ends = chunks.without_holes(whole.offsets, text)
                expected = [whole.ids, starts.tolist(), ends.tolist()]
                assert [array.tolist() for array in tokens] == expected, text
                known.append(text)

    check()
    assert memory.is_sound and len(known) > 60, "the memory gave up"


def test_patterns_are_those_of_the_library():
    import re
    from importlib.util import find_spec

    folder = Path(find_spec("transformers").origin).parent
    files = [
        "models/qwen2/tokenization_qwen2.py",
        "models/qwen3_5/tokenization_qwen3_5.py",
        "convert_slow_tokenizer.py",
    ]
    written = [found for name in files for found in re.findall(r'r?"""(.*?)"""', (folder / name).read_text())]
    assert len(set(written) & chunks.PATTERNS) >= 3


def test_letters_that_words_are_made_of_are_letters():
    import re

    letters = [chr(n) for n in range(0x80, 0x110000) if re.match(f"[{chunks.WORD}]", chr(n))]
    assert len(letters) > 300 and {unicodedata.category(letter)[0] for letter in letters} == {"L"}
    spaces = {chr(number) for number in chunks.WHITE_SPACE}
    assert spaces == {chr(number) for number in range(0x110000) if chr(number).isspace()}
