"""The demo's sentences: right answers, the same files everywhere, no leak into the evaluation, short enough rows."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "make_demo_data.py"
MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct"
MAX_TOKENS = 96


def load_script():
    spec = importlib.util.spec_from_file_location("make_demo_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_script()


@pytest.fixture(scope="module")
def splits():
    return demo.make_rows(800, 64, seed=7)


def parts(row):
    system, user, assistant = row["messages"]
    assert [system["role"], user["role"], assistant["role"]] == ["system", "user", "assistant"]
    return user["content"], assistant["content"]


def read_number(words: str) -> int:
    """Read a number from 0 to 99 in words, by lists of this test's own."""
    small = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen"
    ).split()
    tens = {
        "twenty": 20,
        "thirty": 30,
        "forty": 40,
        "fifty": 50,
        "sixty": 60,
        "seventy": 70,
        "eighty": 80,
        "ninety": 90,
    }
    total = 0
    for word in words.split():
        total += tens[word] if word in tens else small.index(word)
    return total


def test_numbers_in_words():
    assert [read_number(demo.number_words(number)) for number in range(100)] == list(range(100))


@pytest.mark.parametrize(
    "hour, minute, spoken",
    [
        (6, 0, "six o'clock"),
        (6, 15, "quarter past six"),
        (6, 15, "six fifteen"),
        (9, 30, "half past nine"),
        (10, 45, "quarter to eleven"),
        (10, 45, "ten forty five"),
        (4, 20, "twenty past four"),
    ],
)
def test_times_in_words(hour, minute, spoken):
    assert spoken in demo.time_phrases(hour, minute)


def test_no_two_times_share_a_phrase():
    times = [(hour, minute) for hour in range(4, 11) for minute in (0, 10, 15, 20, 30, 45)]
    phrases = [phrase for time in times for phrase in demo.time_phrases(*time)]
    assert len(phrases) == 84
    assert len(set(phrases)) == len(phrases)


def read_time(sentence: str) -> str:
    """Read the time out of an alarm sentence, by rules of this test's own."""
    spoken = re.search(r"(?: at | for )(.*?)(?: today| tomorrow| on \w+)?\.$", sentence).group(1)
    if match := re.fullmatch(r"(\w+) (?:o'clock|sharp)", spoken):
        hour, minute = read_number(match[1]), 0
    elif match := re.fullmatch(r"(quarter|half|ten|twenty) past (\w+)", spoken):
        hour, minute = read_number(match[2]), {"quarter": 15, "half": 30, "ten": 10, "twenty": 20}[match[1]]
    elif match := re.fullmatch(r"quarter to (\w+)", spoken):
        hour, minute = read_number(match[1]) - 1, 45
    else:
        first, rest = spoken.split(" ", 1)
        hour, minute = read_number(first), read_number(rest)
    return f"{hour:02d}:{minute:02d}"


def read_count(sentence: str) -> int:
    """Read the one number in a sentence, by rules of this test's own."""
    for words, value in (("half an hour", 30), ("two hours", 120), ("an hour", 60), ("two dozen", 24), ("a dozen", 12)):
        if words in sentence:
            return value
    words = [word for word in re.findall(r"[a-z]+", sentence.lower()) if word in NUMBER_WORDS]
    return read_number(" ".join(words))


NUMBER_WORDS = {word for number in range(2, 100) for word in demo.number_words(number).split()}


def test_answers_follow_from_the_sentences_alone(splits):
    checked = Counter()
    for row in splits[0] + splits[1]:
        sentence, answer = parts(row)
        call = json.loads(answer)
        tool = call["tool"]
        checked[tool] += 1
        if tool == "set_alarm":
            assert call["time"] == read_time(sentence), sentence
        for key in ("minutes", "amount", "degrees", "count"):
            if key in call:
                assert call[key] == read_count(sentence), sentence
        if "day" in call:
            named = re.search(r"(today|tomorrow|\w+day)[.?]$", sentence)
            assert call["day"] == (named[1] if named else "today"), sentence
        for key in ("city", "person", "room", "item", "from", "to"):
            if key in call:
                assert re.search(rf"\b{call[key]}\b", sentence), sentence
        if tool == "train":
            assert call["from"] != call["to"]
            assert bool(re.search(rf"(from|in) {call['from']}\b", sentence)), sentence
        if tool == "light":
            on = ("switch on", "lamp on", "too dark", "can't see", "light up", "is reading")
            assert call["state"] == ("on" if any(words in sentence.lower() for words in on) else "off"), sentence
    assert checked == dict.fromkeys((tool.__name__ for tool in demo.TOOLS), 108)


def test_system_turn_names_every_tool_and_argument(splits):
    listed = {}
    for entry in demo.SYSTEM.split(": ", 1)[1].split("; "):
        tool, *arguments = entry.split()
        listed[tool] = arguments
    seen = {}
    for row in splits[0]:
        call = json.loads(parts(row)[1])
        seen[call["tool"]] = [key for key in call if key != "tool"]
    assert seen == listed


def test_no_sentence_twice_and_both_splits_balanced(splits):
    train_rows, eval_rows = splits
    assert (len(train_rows), len(eval_rows)) == (800, 64)
    sentences = [parts(row)[0] for row in train_rows + eval_rows]
    assert len(set(sentences)) == 864
    for rows, share in ((train_rows, 100), (eval_rows, 8)):
        tools = Counter(json.loads(parts(row)[1])["tool"] for row in rows)
        assert set(tools.values()) == {share}


def test_files_are_the_same_on_every_python_version(tmp_path):
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "data")], check=True, capture_output=True)
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tmp_path / "data").iterdir())
    }
    # Recorded under Python 3.11; a change of sentences re-records them, a change of Python must not.
    assert digests == {
        "eval.jsonl": "ee8fecfd50200ee952816f49f0c4171da66ac43470c6f312316d164c88f1c36e",
        "train.jsonl": "22c51e036ba30d296364770985d9c79a1bc63812293d1f8e25bb98448e1f340a",
    }


def test_another_seed_gives_other_sentences(splits):
    assert demo.make_rows(800, 64, seed=8)[1] != splits[1]


def test_too_many_rows_is_a_clear_error(tmp_path):
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "data"), "--train", "50000"], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "--train 50000" in result.stderr and "ask for fewer" in result.stderr
    assert not (tmp_path / "data").exists()


def test_check_judges_meaning_not_spelling(splits):
    row = demo.make_row("Pay twelve euros to Anna.", {"tool": "pay", "person": "Anna", "amount": 12})
    right = '{"tool": "pay", "person": "Anna", "amount": 12}'
    assert demo.check(row, right)
    assert demo.check(row, ' {"amount":12,"person":"Anna","tool":"pay"}\n')
    wrong = [
        "",
        "Sure! " + right,
        right + " Done.",
        right[:-1],
        right.replace("12", '"12"'),
        right.replace("12", "12.0"),
        right.replace("12", "13"),
        right.replace("Anna", "anna"),
        right.replace("}", ', "day": "today"}'),
        "[" + right + "]",
        "null",
    ]
    assert [answer for answer in wrong if demo.check(row, answer)] == []
    assert all(demo.check(row, parts(row)[1]) for row in splits[1])
    # Two phrasings may ask for the same call; every other pair of rows must be told apart.
    for row in splits[1]:
        for other in splits[1]:
            assert demo.check(row, parts(other)[1]) == (parts(other)[1] == parts(row)[1])


def test_rows_fit_the_demo_length(splits):
    from transformers import AutoTokenizer

    assert MODEL.is_dir(), f"{MODEL} is missing: run `make setup`, which exports the demo's model"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lengths = [
        len(tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"])
        for row in splits[0] + splits[1]
    ]
    assert len(lengths) == 864
    assert max(lengths) <= MAX_TOKENS
