"""Secrets, taken out of whatever a run prints or writes.

Two kinds are found: the secrets this process was given (environment, command line, netrc, the hub's token file), by
their value, and those that came some other way (an address with a password, a key inside a data row), by their shape.
Both miss what looks like ordinary text: this is the last net, not a place to keep secrets.
"""

import atexit
import functools
import json
import logging
import netrc
import os
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path

MARK = "<redacted>"
"""What stands in place of a secret; without brackets, which YAML, addresses and rich give a meaning."""

# --- names ------------------------------------------------------------------------------------------------------------

_STRONG = {"token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials"}
_STRONG |= {"apikey", "accesskey", "secretkey", "privatekey"}
_WEAK = {"key", "auth", "authorization", "pass", "pat", "jwt", "cookie"}
_KINDS_OF_KEY = {"api", "access", "secret", "private", "signing", "encryption", "account", "master"}
_ABOUT_A_SECRET = {"path", "file", "dir", "sock", "socket", "url", "uri", "endpoint", "host", "type", "mode", "limit"}
_ABOUT_A_SECRET |= {"count", "accuracy", "parallelism", "timeout", "level"}
_OF_THE_VOCABULARY = {"pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "audio", "video", "special", "per"}


@functools.lru_cache(4096)
def name_strength(name: str) -> int:
    """How much a name speaks for a secret: 2 for a password or token, 1 for a mere key, 0 for anything else."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words or words[-1] in _ABOUT_A_SECRET or words in (["pwd"], ["oldpwd"]):  # the last two are folders
        return 0
    if words[-1] == "token" and len(words) > 1 and words[-2] in _OF_THE_VOCABULARY:
        return 0
    keys = any(second == "key" and first in _KINDS_OF_KEY for first, second in zip(words, words[1:], strict=False))
    if keys or any(word in _STRONG or word.endswith(("password", "passwd", "secret", "token")) for word in words):
        return 2
    return int(any(word in _WEAK for word in words))


_TRIVIAL = {"disabled", "required", "optional", "undefined", "anonymous", "changeme", "password", "secret", "token"}


def _is_secret_value(value: str, strength: int) -> bool:
    """Whether a value is one, given how much its name speaks for it."""
    value = value.strip()
    # Short, plain or repeated values would be found, and blotted out, all over ordinary output.
    if len(value) < 6 or len(set(value)) < 4 or value.lower() in _TRIVIAL or (value.isdigit() and len(value) < 12):
        return False
    if value.startswith(("/", "~", "./", "../")) and (
        strength < 2 or re.search(r"\.\w{1,5}$", value) or os.path.exists(os.path.expanduser(value))
    ):
        return False
    if strength == 2:
        return len(value) >= 8 or not value.isalpha()
    return len(value) >= 16 and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value) and " " not in value)


# --- what this process was given --------------------------------------------------------------------------------------


def known_secrets(environ: Mapping[str, str] | None = None, argv: Iterable[str] | None = None) -> tuple[str, ...]:
    """The secrets this process was given, longest first, each also as it reads in an address, in JSON and in Python."""
    environ = os.environ if environ is None else environ
    found = {value for name, value in environ.items() if _is_secret(name, value)}
    words = list(sys.argv if argv is None else argv)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("-") and _is_secret(name, value if equals else following):
            found.add(value if equals else following)
    home = environ.get("HOME") or os.path.expanduser("~")
    hub = environ.get("HF_HOME") or os.path.join(home, ".cache", "huggingface")
    found |= _in_netrc(environ.get("NETRC") or os.path.join(home, ".netrc"))
    found |= _in_token_file(environ.get("HF_TOKEN_PATH") or os.path.join(hub, "token"))
    return _spellings(frozenset(found))


def _is_secret(name: str, value: str) -> bool:
    strength = name_strength(name)
    return strength > 0 and _is_secret_value(value, strength)


@functools.lru_cache(16)
def _spellings(values: frozenset[str]) -> tuple[str, ...]:
    spelled = set()
    for value in values:
        value = value.strip()
        # A key of several lines is printed line by line.
        for part in {value, *(line.strip() for line in value.splitlines() if len(line.strip()) >= 16)}:
            spelled |= {part, urllib.parse.quote(part, safe=""), json.dumps(part)[1:-1], repr(part)[1:-1]}
    return tuple(sorted(spelled, key=lambda part: (-len(part), part)))


def _in_netrc(path: str) -> set[str]:
    def read() -> frozenset[str]:
        try:
            return frozenset(entry[2] for entry in netrc.netrc(path).hosts.values() if entry[2])
        except (netrc.NetrcParseError, UnicodeDecodeError):
            return frozenset()

    return _of_file(path, read)


def _in_token_file(path: str) -> set[str]:
    return _of_file(path, lambda: frozenset({Path(path).read_text(errors="replace")[:500].strip()}))


_files: dict[str, tuple[int, frozenset[str]]] = {}  # path: (time of change, secrets)


def _of_file(path: str, read) -> set[str]:
    """What `read` finds, anew only when the file has changed."""
    try:
        changed = os.stat(path).st_mtime_ns
        if _files.get(path, (None,))[0] != changed:
            _files[path] = changed, read()
        return {value for value in _files[path][1] if _is_secret_value(value, 2)}
    except OSError:
        return set()


# --- shapes -----------------------------------------------------------------------------------------------------------

_NAMES = (
    r"(?:pass(?:word|wd|phrase)|(?:client_)?secret(?:_access)?(?:_key)?|(?:api|access|private)[_-]?key"
    r"|(?:auth|access|api|hf|hub|session|security|refresh|bearer)[_-]?token)"
)
# Every repetition has an upper bound: a text can be a data row of ten megabytes.
_SHAPES = re.compile(
    "|".join(
        (
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)",
            r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,512}|gh[pousr]_[A-Za-z0-9]{16,512}|github_pat_\w{16,512}"
            r"|glpat-[\w-]{16,512}|sk-(?=[\w-]{0,64}\d)[\w-]{16,512}|(?:AKIA|ASIA)[0-9A-Z]{12,128}"
            r"|xox[a-z]-[\w-]{10,512}|AIza[\w-]{30,512}|wandb_v\d_\w{16,512}|local-[0-9a-f]{40})",
            r"(?<![\w-])eyJ[\w-]{8,4096}\.eyJ[\w-]{8,4096}\.[\w-]{1,4096}",
            # Only the part behind these is taken out.
            r"(?<=://)[^\s/?#@:'\"<>]{0,256}:[^\s/?#'\"<>]{1,512}(?=@)",
            r"(?<=://)(?=[^\s/?#@:]{0,512}\d)[^\s/?#@:'\"<>]{16,512}(?=@)",
        )
    )
)
_QUOTE = r"(?:\\{0,3}['\"])?"  # in the repr of a repr it stands behind backslashes
_IS = _QUOTE + r"\s{0,3}[:=]\s{0,3}" + _QUOTE
_IN_ADDRESS = r"[?&](?:token|key|sig|signature|x-amz-\w{4,20}|" + _NAMES + ")="
_BEHIND = re.compile(  # words that stay, and the secret after them
    rf"(?P<kept>(?i:\bauthorization{_IS}(?:bearer |basic |token )?|{_IN_ADDRESS}|(?<![a-z0-9]){_NAMES}{_IS})"
    r"|(?i:\bbearer\s{1,3})(?=[\w.~+/=-]{0,64}\d))"
    r"(?!(?i:bearer|basic|token)\s)[^\s'\",;&<>()\[\]{}]{6,4096}"
)
_HINT = re.compile(r"(?i)://|_|-|eyJ|akia|asia|aiza|bearer|authorization|pass|secret|key|token|sig")


def redact(text: str, known: tuple[str, ...] | None = None) -> str:
    """`text` with `<redacted>` in place of every secret found; `known` are those of `known_secrets`, read anew if
    None."""
    return _without(text, _spans(text, known_secrets() if known is None else known), 0)


def _spans(text: str, known: tuple[str, ...]) -> list[tuple[int, int]]:
    """Begin and end of every secret in `text`, in order; they may overlap."""
    found = [match.span() for match in _any_of(known).finditer(text)] if known else []
    if _HINT.search(text):  # most lines have nothing to look at more closely
        found += [match.span() for match in _SHAPES.finditer(text)]
        found += [(match.end("kept"), match.end()) for match in _BEHIND.finditer(text)]
    return sorted(found)


def _without(text: str, spans: list[tuple[int, int]], begin: int) -> str:
    """`text` from `begin` on, with the mark in place of the spans."""
    parts = []
    marked_to = -1  # spans that overlap or touch are one secret
    for start, end in spans:
        if end <= begin:
            continue
        if start > marked_to:
            parts += [text[begin:start], MARK]
        begin = max(begin, end)
        marked_to = max(marked_to, end)
    return "".join(parts) + text[begin:]


@functools.lru_cache(16)
def _any_of(secrets: tuple[str, ...]) -> re.Pattern:
    return re.compile("|".join(map(re.escape, secrets)))


def redact_value(value, known: tuple[str, ...] | None = None, strength: int = 0):
    """A nested value of dicts, lists and texts, redacted throughout.

    strength: how much the name above `value` speaks for a secret (`name_strength`); 0 at the top.
    """
    known = known_secrets() if known is None else known
    if isinstance(value, str):
        return MARK if strength and _is_secret_value(value, strength) else redact(value, known)
    if isinstance(value, Mapping):
        return {
            redact_value(name, known): redact_value(item, known, max(strength, name_strength(str(name))))
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)([redact_value(item, known, strength) for item in value])
    if isinstance(value, Path):
        return Path(redact(str(value), known))
    return value


# --- streams ----------------------------------------------------------------------------------------------------------


def guard_streams() -> None:
    """Let nothing secret pass sys.stdout and sys.stderr; calling it again does nothing.

    What is written below Python (a compiler's output, a crash of the interpreter) does not come this way.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # One whose `write` was replaced meanwhile shows whoever did it the bare text, so it gets a guard before it.
        if stream is None or (isinstance(stream, GuardedStream) and "write" not in vars(stream)):
            continue
        guarded = GuardedStream(stream)
        setattr(sys, name, guarded)
        # A handler keeps the stream it found when it was made.
        for logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(guarded)


def release_streams() -> None:
    """Write what the guards hold back; before an exit that runs no exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, GuardedStream):
            stream.release()


_UNFINISHED = re.compile(  # the beginning of something that `_SHAPES` or `_BEHIND` may find once more is written
    r"(?:(?<![A-Za-z0-9])(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|ASIA|xox[a-z]-|AIza|wandb_v\d_|eyJ)[\w.-]*"
    r"|://[^\s/?#]*"
    rf"|(?i:\b(?:authorization{_IS}|bearer\s{{1,3}})(?:bearer |basic |token )?)[^\s'\",;&]*"
    rf"|(?i:{_IN_ADDRESS}|(?<![a-z0-9]){_NAMES}{_IS})[^\s'\",;&]*)\Z"
)
_LONGEST_HELD = 1024
_LONGEST_KEY = 8192  # of several lines
_KNOWN_FOR_SECONDS = 1.0


class GuardedStream:
    """A text stream that redacts what is written to it and is the wrapped one in everything else.

    The end of a line that may be the beginning of a secret is held back until more is written. What the stream refuses
    (a full disk, a reader that has left, letters it has no code for) is lost or spelled out: a training is worth more
    than its screen.
    """

    def __init__(self, stream):
        self._stream = stream
        self._line = ""  # what of the current line has been passed on, as it was written
        self._held = ""
        self._known: tuple[str, ...] = ()
        self._known_until = 0.0
        self._lock = threading.RLock()
        atexit.register(self.release)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            return self._stream.write(text)  # says what is wrong with it
        with self._lock:
            now = time.monotonic()
            if now >= self._known_until:
                self._known, self._known_until = known_secrets(), now + _KNOWN_FOR_SECONDS
            # The line so far is read again, for a secret that began in it.
            passed, whole = len(self._line), self._line + self._held + text
            cut = max(passed, self._unfinished_from(whole))
            ready, self._held = whole[:cut], whole[cut:]
            self._line = ready[max(_line_begin(ready), len(ready) - _LONGEST_HELD) :]
            self._pass_on(_without(ready, _spans(ready, self._known), passed))
        return len(text)

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            pass

    def release(self) -> None:
        """Write what is held back, as it stands at the end of the program."""
        with self._lock:
            passed, whole = len(self._line), self._line + self._held
            self._line, self._held = whole[_line_begin(whole) :], ""
            self._pass_on(_without(whole, _spans(whole, known_secrets()), passed))
            self.flush()

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError):
            pass

    def _unfinished_from(self, text: str) -> int:
        """Where the end of `text` begins that may become a secret; its length if nowhere."""
        begin = max(_line_begin(text), len(text) - _LONGEST_HELD)
        match = _UNFINISHED.search(text, begin)
        cut = match.start() if match else len(text)
        key = text.rfind("-----BEGIN ", max(0, len(text) - _LONGEST_KEY))
        if key >= 0 and "-----END" not in text[key:] and "PRIVATE KEY-----" in text[key:]:
            cut = min(cut, key)
        for secret in self._known:
            at = text.find(secret[:4], max(begin, len(text) - len(secret) + 1))
            while 0 <= at < cut:
                if secret.startswith(text[at:]):
                    cut = at
                    break
                at = text.find(secret[:4], at + 1)
        return cut


def _line_begin(text: str) -> int:
    return max(text.rfind("\n"), text.rfind("\r")) + 1
