"""Secrets of many kinds in many places, none of which may come out; and ordinary output, all of which must."""

import contextlib
import dataclasses
import io
import json
import logging
import random
import string
import sys
import time
from pathlib import Path

import pytest

from oneloop import arguments, config, redaction
from oneloop.redaction import MARK, redact


def letters(length: int, alphabet: str = string.ascii_letters + string.digits, seed: int = 0) -> str:
    """Letters of a made-up secret, drawn here so that none stands in this file for a scanner to find."""
    drawn = "".join(random.Random(f"{length} {alphabet} {seed}").choices(alphabet, k=length - 2))
    return drawn[: length // 2] + "q7" + drawn[length // 2 :]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    """No secrets of whoever runs the tests."""
    for name in list(redaction.os.environ):
        if redaction.name_strength(name) or name in ("NETRC", "HF_HOME"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", ["sft.py"])


# --- names and values -------------------------------------------------------------------------------------------------


def test_names_of_secrets():
    strong = "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN"
    strong += (
        " PGPASSWORD DB_PWD apiKey client_secret OPENAI_APIKEY GITHUBTOKEN credentials token my.password --api-key"
    )
    weak = "GPG_KEY HTTP_AUTH SMTP_PASS GITHUB_PAT COOKIE"
    none = "PWD OLDPWD TOKENIZERS_PARALLELISM HF_TOKEN_PATH SSH_AUTH_SOCK TOKEN_URL KEYBOARD MONKEY PATH HOME pad_token"
    none += " eos_token image_token eval/token_accuracy train/tokens_per_second split_special_tokens tokens author 7"
    for names, strength in ((strong, 2), (weak, 1), (none, 0)):
        for name in names.split():
            assert redaction.name_strength(name) == strength, name


def test_no_field_takes_a_secret_by_value():
    from tests import test_guards

    names = {
        field.name for path in test_guards.RECIPES for field in dataclasses.fields(test_guards.config_class(path.stem))
    }
    assert len(names) >= 30
    assert [name for name in sorted(names) if redaction.name_strength(name)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", letters(20)),
        ("WANDB_API_KEY", letters(40, "0123456789abcdef")),
        ("AWS_SECRET_ACCESS_KEY", letters(20) + "/" + letters(19)),
        ("DB_PASSWORD", "correct horse battery"),
        ("DB_PASSWORD", "p4ss!!"),
        ("SERVICE_TOKEN", "/" + letters(30)),
        ("GPG_KEY", letters(40, "0123456789ABCDEF")),
    ],
)
def test_value_of_a_variable_is_found_wherever_it_stands(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact(f"before {value} after{value}") == f"before {MARK} after{MARK}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "true"),
        ("HF_TOKEN", ""),
        ("API_KEY", "1"),
        ("API_KEY", "xxxxxxxxxxxx"),
        ("API_KEY", "12345678"),
        ("API_KEY", "disabled"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/keys/service.json"),
        ("SECRETS", "/usr"),
        ("SSH_KEY", "~/.ssh/" + letters(20)),
        ("SORT_KEY", "last_name_and_date"),
        ("TOKENIZERS_PARALLELISM", "parallelism"),
        ("USER", letters(20)),
    ],
)
def test_value_of_no_secret_stays(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact(f"before {value} after") == f"before {value} after"


def test_secret_in_other_spelling(monkeypatch):
    value = 'p@ss/w"rd ' + letters(8) + "\\n"
    monkeypatch.setenv("DB_PASSWORD", value)
    for spelled in (json.dumps({"a": value}), repr([value]), "https://h/?q=" + redaction.urllib.parse.quote(value, "")):
        assert MARK in redact(spelled) and letters(8) not in redact(spelled)


def test_secret_of_several_lines(monkeypatch):
    lines = [letters(30, seed=seed) for seed in range(4)]
    monkeypatch.setenv("SIGNING_KEY", "\n".join(lines))
    for line in lines:
        assert redact(f"> {line}") == f"> {MARK}"


def test_secret_of_the_command_line(monkeypatch):
    first, second = letters(12), letters(12, seed=1)
    monkeypatch.setattr(sys, "argv", ["sft.py", "--hub-token", first, f"--db_password={second}", "--max_steps", "12"])
    assert redact(f"{first} {second} 12") == f"{MARK} {MARK} 12"


def test_secrets_of_netrc_and_token_file(monkeypatch, tmp_path):
    (tmp_path / "home" / ".cache" / "huggingface").mkdir(parents=True)
    machine = letters(40, "0123456789abcdef")
    (tmp_path / "home" / ".netrc").write_text(f"machine api.example.com\n  login user\n  password {machine}\n")
    hub = tmp_path / "home" / ".cache" / "huggingface" / "token"
    hub.write_text(letters(34) + "\n")
    assert redact(f"a {machine} b {letters(34)} user") == f"a {MARK} b {MARK} user"
    hub.write_text(letters(35) + "\n")  # somebody logs in anew during the run
    redaction.os.utime(hub, ns=(1, 1))
    assert redact(letters(35)) == MARK
    (tmp_path / "home" / ".netrc").write_bytes(b"\xff\xfe machine without sense")
    assert redact("unreadable") == "unreadable"


# --- shapes -----------------------------------------------------------------------------------------------------------

WORD = letters(36)
HEX = letters(40, "0123456789abcdef")
UPPER = letters(16, string.ascii_uppercase + string.digits).upper()
BLOCK = "\n".join(letters(60, seed=seed) for seed in range(3))
PLANTED = {  # name: (text, the secret in it)
    "hub": (f"token hf_{WORD} was refused", WORD),
    "github": (f"ghp_{WORD}", WORD),
    "github, new": (f"x github_pat_{WORD}_{WORD} y", WORD),
    "gitlab": (f"[glpat-{letters(20)}]", letters(20)),
    "openai": (f"'sk-proj-{WORD}'", WORD),
    "aws id": (f"AKIA{UPPER} signs", UPPER),
    "slack": (f"xoxb-{letters(12, string.digits)}-{WORD}", WORD),
    "google": (f"AIza{letters(35)}", letters(35)),
    "wandb": (f"wandb_v1_{WORD}", WORD),
    "jwt": (f"eyJ{WORD}.eyJ{WORD}.{WORD}", WORD),
    "bearer": (f"Authorization: Bearer {WORD}", WORD),
    "bearer alone": (f"sent bearer {WORD} to it", WORD),
    "basic": (f"{{'Authorization': 'Basic {WORD}=='}}", WORD),
    "url": (f"see https://me:{letters(9)}@host.example/x?y", letters(9)),
    "url, odd": (f"git+https://me:{letters(9)}@x@host/", letters(9)),
    "url, no name": (f"redis://:{letters(9)}@host:6379", letters(9)),
    "url, token": (f"https://{WORD}@github.example/a.git", WORD),
    "query": (f"https://h/x?id=3&access_token={WORD}&n=1", WORD),
    "signed": (f"https://h/x?X-Amz-Signature={HEX}&X-Amz-Expires=60", HEX),
    "assignment": (f"password={letters(9)}", letters(9)),
    "yaml": (f"db_password: {letters(9)}", letters(9)),
    "json": (f'{{"api_key": "{WORD}", "n": 1}}', WORD),
    "repr of repr": (repr(repr({"it's": 1, "password": WORD})), WORD),
    "python": (f"dict(wandb_api_key='{WORD}')", WORD),
    "aws secret": (f"AWS_SECRET_ACCESS_KEY={WORD}", WORD),
    "private key": (f"-----BEGIN RSA PRIVATE KEY-----\n{BLOCK}\n-----END RSA PRIVATE KEY-----\nafter", BLOCK[:60]),
    "cut private key": (f"-----BEGIN PRIVATE KEY-----\n{BLOCK}", BLOCK[61:121]),
}


def pieces(secret: str, size: int = 6) -> set[str]:
    return {secret[i : i + size] for i in range(len(secret) - size + 1)}


@pytest.mark.parametrize("name", PLANTED)
def test_shape_is_found(name):
    text, secret = PLANTED[name]
    assert secret in text
    redacted = redact(text)
    assert MARK in redacted
    assert [piece for piece in pieces(secret) if piece in redacted] == []
    assert redact(redacted) == redacted


def test_what_stands_around_a_secret_stays():
    url, _ = PLANTED["query"]
    assert redact(url) == f"https://h/x?id=3&access_token={MARK}&n=1"
    assert redact(PLANTED["url"][0]) == f"see https://{MARK}@host.example/x?y"
    assert redact(PLANTED["json"][0]) == f'{{"api_key": "{MARK}", "n": 1}}'
    assert redact(PLANTED["bearer"][0]) == f"Authorization: Bearer {MARK}"
    assert redact(PLANTED["private key"][0]) == f"{MARK}\nafter"


ORDINARY = [
    "step    10  train/loss 3.123  train/grad_norm 1.2  train/tokens_per_second 1,234  eval/token_accuracy 0.5",
    "pad_token: <pad>, eos_token='<|im_end|>', split_special_tokens: true, max_new_tokens=128",
    "no API key: run wandb login, or set WANDB_API_KEY",
    "meta-llama/Llama-3.1-8B-Instruct at 0e9e39f249a16976918f6564b8830bc894c89659",
    "https://api.wandb.ai does not answer; see http://localhost:6006/#scalars and git@github.com:me/it.git",
    "ssh://git@github.com/me/it.git, s3://bucket/a:b/c, a://b:c/d@e",
    "/home/me/sk-learn-pipelines-for-everyone/task-1-of-20/data.jsonl:12: row left out",
    "sha256: " + "a1" * 32,
    "a bearer bond; the basic understanding of tokens; a key: value; password; secret = 1; api_key=None",
    "class Tokenizer(pad_token_id=2, key=lambda row: row.length, hidden_size=64)",
    "WARNING: torch_dtype is deprecated [auto] (see -----BEGIN CERTIFICATE-----)",
    "{'loss': 0.1, 'text': 'naïve — 漢字 🙂'}",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text):
    assert redact(text) == text


def test_config_of_a_run_stays():
    asked = config.RecipeConfig(model_name_or_path="org/model-7B", dataset_name="~/rows.jsonl", output_dir="runs/sk-1")
    values = config.to_dict(asked)
    assert redaction.redact_value(values) == values
    assert redact(arguments.to_yaml(values)) == arguments.to_yaml(values)


def test_nested_values():
    secret = letters(12)
    value = {
        "api_key": secret,
        "optim_args": {"betas": [0.9, 0.999], "password": [secret, 7, None], "key": "short"},
        "headers": ({"Authorization": f"Bearer {secret}"}, True),
        "path": Path(f"/x/hf_{WORD}/y"),
        f"metric/ghp_{WORD}": 1.5,
        "pad_token": "<|endoftext|>",
    }
    assert redaction.redact_value(value) == {
        "api_key": MARK,
        "optim_args": {"betas": [0.9, 0.999], "password": [MARK, 7, None], "key": "short"},
        "headers": ({"Authorization": f"Bearer {MARK}"}, True),
        "path": Path(f"/x/{MARK}/y"),
        f"metric/{MARK}": 1.5,
        "pad_token": "<|endoftext|>",
    }


@pytest.mark.parametrize(
    "text", ["://:", "sk-", "-----BEGIN PRIVATE KEY-----", "http://x:y", "password=", "a@b:c@", "_"]
)
def test_long_texts_take_linear_time(text):
    text = text * (300_000 // len(text))
    began = time.process_time()
    redact(text)
    guarded = redaction.GuardedStream(io.StringIO())
    guarded.write(text)
    guarded.write(text)
    assert time.process_time() - began < 10  # a second or less; quadratic would be hours


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTED)
def test_secret_in_two_writes(name):
    text, secret = PLANTED[name]
    whole = f"begin {text} end\n"
    expected = redact(whole)
    for cut in range(1, len(whole)):
        plain = io.StringIO()
        guarded = redaction.GuardedStream(plain)
        assert guarded.write(whole[:cut]) == cut
        guarded.flush()
        shown = plain.getvalue()
        assert [piece for piece in pieces(secret) if piece in shown] == [], cut
        guarded.write(whole[cut:])
        guarded.release()
        assert [piece for piece in pieces(secret) if piece in plain.getvalue()] == [], cut
        # Of a beginning that says nothing yet (`htt`, `gith`), some may stand there.
        assert plain.getvalue().startswith("begin "), cut
        assert plain.getvalue().endswith(expected[expected.rindex(MARK) + len(MARK) :]), cut


def test_known_secret_letter_by_letter(monkeypatch):
    secret = "plain words then " + letters(10)
    monkeypatch.setenv("MY_PASSWORD", secret)
    plain = io.StringIO()
    guarded = redaction.GuardedStream(plain)
    for letter in f"first {secret}, plain words, plai":
        guarded.write(letter)
        guarded.flush()
    assert plain.getvalue() == f"first pla{MARK}, plain words, pla"  # three letters are no trace
    guarded.release()
    assert plain.getvalue() == f"first pla{MARK}, plain words, plai"


def test_lines_are_independent():
    plain = io.StringIO()
    guarded = redaction.GuardedStream(plain)
    print("a", 1, "b", file=guarded)
    print("password:", file=guarded)
    print("harmless words", "and more", sep="\r", file=guarded)
    guarded.writelines(["x\n", "y\n"])
    assert plain.getvalue() == "a 1 b\npassword:\nharmless words\rand more\nx\ny\n"


@contextlib.contextmanager
def guarded_streams():
    """Yields what is behind stdout. No fixture: pytest puts its own streams in place between the phases of a test."""
    plain, streams = io.StringIO(), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = plain, io.StringIO()
    try:
        redaction.guard_streams()
        yield plain
    finally:
        sys.stdout, sys.stderr = streams


def test_streams_are_guarded_once_and_handlers_follow():
    logger = logging.getLogger("oneloop.test")
    plain = io.StringIO()
    logger.addHandler(logging.StreamHandler(plain))
    try:
        with guarded_streams() as behind_stdout, contextlib.redirect_stderr(plain):
            redaction.guard_streams()
            out, err = sys.stdout, sys.stderr
            redaction.guard_streams()
            assert (sys.stdout, sys.stderr) == (out, err)
            print(f"see hf_{WORD}")
            logger.error("see %s", f"hf_{WORD}")
    finally:
        logger.handlers.clear()
    assert behind_stdout.getvalue() == plain.getvalue() == f"see {MARK}\n"


def test_stream_whose_write_was_replaced_is_guarded_again():
    seen = []
    with guarded_streams() as behind:
        original = sys.stdout.write

        def spy(text):  # what wandb does to capture the console
            seen.append(text)
            return original(text)

        sys.stdout.write = spy
        redaction.guard_streams()
        print(f"see hf_{WORD}")
    assert "".join(seen) == behind.getvalue() == f"see {MARK}\n"


def test_bars_and_tables_still_work():
    from rich.console import Console
    from tqdm import tqdm

    with guarded_streams() as behind:
        for _ in tqdm(range(3), file=sys.stdout, mininterval=0):
            tqdm.write(f"see hf_{WORD}", file=sys.stdout)
        Console(file=sys.stdout, width=200).print("a [bold]b[/bold]", f"ghp_{WORD}")
    assert "3/3" in behind.getvalue() and behind.getvalue().count(f"see {MARK}\n") == 3
    assert f"a b {MARK}" in behind.getvalue()
    assert WORD not in behind.getvalue()


def test_guard_is_the_stream_in_everything_else(tmp_path):
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        guarded = redaction.GuardedStream(file)
        assert (guarded.fileno(), guarded.isatty(), guarded.encoding) == (file.fileno(), False, "ascii")
        assert guarded.buffer is file.buffer and guarded.writable()
        print("naïve 🙂", file=guarded, flush=True)
        with pytest.raises(TypeError):
            guarded.write(b"bytes")
    print("after the end", file=guarded, flush=True)
    assert (tmp_path / "log").read_text() == "na\\xefve \\U0001f642\n"


def test_full_disk_behind_the_stream_ends_nothing():
    file = open("/dev/full", "w", buffering=1)
    guarded = redaction.GuardedStream(file)
    print("lost", file=guarded, flush=True)
    with pytest.raises(OSError):
        file.close()
