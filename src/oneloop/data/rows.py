"""Reads training rows, turns the known forms into one, and counts every row that cannot be used.

A bad row is a value here, not an exception: the reader hands it on with its place, so that one policy (`on_bad_row`)
decides for cut lines, unknown roles and rows the template refuses alike, and nothing is dropped without a count.
"""

import csv
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
SPLITS = {"train": ["train", "training"], "test": ["test", "eval"], "validation": ["validation", "valid", "val", "dev"]}
SPLIT_NAMES = {name: split for split, names in SPLITS.items() for name in names}
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAREGPT_TOOL_ROLES = ("tool", "function_call", "observation", "function", "function_response")
KNOWN_FORMS = "`messages`, `conversations`, `prompt` + `completion`, `instruction` + `output` (`input`, `system`)"
# Kinds the user asked for by `truncation: drop`: counted like the others, but never a reason to stop.
DROP_KINDS = {"too_long"}


class BadRow(ValueError):
    """A row that cannot be used; `kind` is the short word under which it is counted."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def read(source: str, split: str) -> Iterator[tuple[str, dict | BadRow]]:
    """Yield `(where, row)` for a file, a folder of files or a hub data set; `where` is `path:line`.

    Lines are read by our own reader because columnar loaders report a chunk's row number at best, and drop or merge
    rows around a byte-order mark, a cut line or two objects on one line. A Parquet file has rows for lines. A folder's
    files are taken in the order of their names; when some are named for a split (`train.jsonl`, `data/test-0.parquet`),
    only those of `split` are read, so that test rows never leak into training.

    Raises ValueError for a source that is neither there nor loadable, and for one without any row.
    """
    path = Path(source).expanduser()
    if path.exists():
        if not re.fullmatch(r"[\w.-]+", split):
            raise ValueError(f"split {split!r}: slices work for hub data sets only, and {source!r} is a local path")
        rows = chain.from_iterable(_read_file(file) for file in _files(path, split))
    else:
        rows = _read_hub(source, split)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"dataset_name {source!r} holds no row (split {split!r})")
    return chain([first], rows)


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise ValueError(
                f"dataset_name {str(path)!r}: cannot read {path.suffix!r}; known are {', '.join(FILE_TYPES)}"
            )
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in FILE_TYPES and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if any(path.rglob("*.arrow")):
        raise ValueError(
            f"dataset_name {str(path)!r} was written by `save_to_disk`; write it with `to_parquet` instead"
        )
    if not files:
        raise ValueError(f"dataset_name {str(path)!r} is a folder without a file of {', '.join(FILE_TYPES)}")
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(path)).lower())
        named = next((SPLIT_NAMES[word] for word in reversed(words) if word in SPLIT_NAMES), None)
        by_split.setdefault(named, []).append(file)
    if set(by_split) == {None}:
        return files
    wanted = SPLIT_NAMES.get(split.lower(), split)
    if wanted not in by_split:
        found = ", ".join(sorted(name for name in by_split if name))
        raise ValueError(
            f"dataset_name {str(path)!r} has no file for split {split!r}; its files are named for: {found}"
        )
    return by_split[wanted]


def _read_file(path: Path) -> Iterator[tuple[str, dict | BadRow]]:
    reader = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}[path.suffix]
    for line, row in reader(path):
        yield f"{path}:{line}", row


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    # A binary file is split at b"\n" alone; str.splitlines would also split inside text at U+2028 and its like.
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if raw.strip():
                yield line, _row_of(raw)


def _row_of(raw: bytes | str) -> dict | BadRow:
    try:
        value = _parse_json(_decode(raw) if isinstance(raw, bytes) else raw)
    except BadRow as bad:
        return bad
    if not isinstance(value, dict):
        return BadRow("not_an_object", f"a row is a JSON object, this is a {type(value).__name__}")
    return value


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
        raise BadRow("bad_utf8", f"{place} is not UTF-8: was it saved as Latin-1? Save the file as UTF-8") from None


def _parse_json(text: str) -> Any:
    """Parse one JSON value; text that no tokenizer can encode is refused here, where the line is still known."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise BadRow(
                "two_values", f"more than one value on the line (column {error.colno}): one per line"
            ) from None
        raise BadRow("bad_json", f"not valid JSON ({error.msg}, column {error.colno}): is the line cut off?") from None
    except RecursionError:
        raise BadRow("bad_json", "nested too deeply to be parsed") from None
    # A tokenizer fails on half a surrogate pair with a type error; only an escape can bring one into valid UTF-8.
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise BadRow(
                "lone_surrogate", "holds half of a surrogate pair (\\ud800 to \\udfff), not a character"
            ) from None
    return value


def _read_json(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not raw.lstrip().startswith(b"["):
        # Either one object, perhaps over many lines, or JSON lines under another name.
        whole = _row_of(raw) if raw.strip() else None
        yield from [(1, whole)] if isinstance(whole, dict) else _read_jsonl(path)
        return
    text = raw.decode("utf-8", errors="surrogateescape")
    # Elements are parsed one by one, because a list parsed in one piece no longer knows its lines.
    decoder, space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")
    position, line, counted = space.match(text, text.index("[") + 1).end(), 1, 0
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            end = decoder.raw_decode(text, position)[1]
        except json.JSONDecodeError as error:
            # What follows a broken element cannot be told apart from it, so the rest of the file goes with it.
            yield line, BadRow("bad_json", f"not valid JSON ({error.msg}): the file cannot be read beyond this element")
            return
        yield line, _row_of(text[position:end].encode("utf-8", errors="surrogateescape"))
        position = space.match(text, end).end()
        if text[position : position + 1] == ",":
            position = space.match(text, position + 1).end()
        elif text[position : position + 1] != "]":
            yield line, BadRow("bad_json", "no comma or bracket after this element: is the file cut off?")
            return
    if text[position + 1 :].strip():
        yield line, BadRow("two_values", "more text follows the closing bracket: a .json file holds one list")


def _read_parquet(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for line, row in enumerate(rows, start=1):
                yield line, without_nulls(row)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from error


def _read_csv(path: Path) -> Iterator[tuple[int, dict | BadRow]]:
    # Python's own reader: it keeps "4" a text, where a columnar reader makes a number of it, and knows the line.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        names = next(reader, [])
        last = reader.line_num
        while True:
            line = last + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield line, BadRow("bad_csv", f"not valid CSV ({error}): is a quote missing?")
                return
            last = reader.line_num
            if cells is None:
                return
            if cells and len(cells) != len(names):
                yield line, BadRow("bad_csv", f"{len(cells)} cells under {len(names)} column names")
            elif any("\udc80" <= character <= "\udcff" for character in "".join(cells)):
                yield line, BadRow("bad_utf8", "not UTF-8: save the file as UTF-8")
            elif cells:
                # A cell cannot be absent, so an empty one stands for a missing key.
                yield line, {name: cell for name, cell in zip(names, cells, strict=True) if cell}


def _read_hub(source: str, split: str) -> Iterator[tuple[str, dict | BadRow]]:
    path = Path(source).expanduser()
    near = _near_names(path)
    if path.suffix in FILE_TYPES or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"dataset_name {source!r} does not exist{near}")
    import datasets

    try:
        rows = datasets.load_dataset(source, split=split)
    except (OSError, ValueError) as error:
        reason = f"as a hub data set, split {split!r}: {error}"
        raise ValueError(f"dataset_name {source!r} is no existing path{near}, and {reason}") from error
    for index, row in enumerate(rows):
        yield f"{source}[{split}]:{index}", without_nulls(row)


def _near_names(path: Path) -> str:
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:5]
    return f" ({parent} has: {', '.join(near)})" if near else f" ({parent} is empty)"


def without_nulls(value: Any) -> Any:
    """Return `value` without null keys at any depth: columnar storage pads absent keys with null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def normalise(row: dict) -> dict:
    """Return `{"messages": [...], "tools"?: [...]}` or, for raw text, `{"prompt": str, "completion": str}`.

    The form is told by the columns that hold a value: a mixed file has all columns in each row. Other columns are
    ignored. A message with `weight: 0` is context, not a target; the turns of a `prompt` list get it here.

    Raises BadRow for a row of no known form, a role it cannot place, and a row without a reply.
    """
    row = {name: value for name, value in row.items() if value is not None}
    if "messages" in row or "conversations" in row:
        messages = _messages(row.get("messages", row.get("conversations")))
    elif "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            if row.get("system"):
                raise BadRow("system_on_raw_text", "`system` has no place in a raw prompt: put it into the prompt")
            if not row["completion"].strip():
                raise BadRow("empty_reply", "the completion is empty")
            return {"prompt": row["prompt"], "completion": row["completion"]}
        if not isinstance(row["prompt"], list) or not isinstance(row["completion"], list):
            raise BadRow("mixed_forms", "prompt and completion must both be texts or both be lists of messages")
        context = [m | {"weight": 0} if m["role"] == "assistant" else m for m in _messages(row["prompt"])]
        messages = context + _messages(row["completion"])
    elif "instruction" in row and "output" in row:
        question = "\n\n".join(_text(row[name], name) for name in ("instruction", "input") if row.get(name))
        messages = _messages([{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}])
    else:
        raise BadRow("unknown_columns", f"columns found: {', '.join(sorted(row))}; known forms are {KNOWN_FORMS}")

    if row.get("system"):
        system = {"role": "system", "content": _text(row["system"], "system")}
        if messages[0]["role"] != "system":
            messages = [system, *messages]
        elif messages[0]["content"] != system["content"]:
            raise BadRow("two_systems", "the `system` column and the first turn give two different system texts")
    if not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
        raise BadRow("no_reply", "no assistant turn to learn from")
    tools = _parse_json(row["tools"]) if isinstance(row.get("tools"), str) and row["tools"] else row.get("tools")
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _messages(turns: Any) -> list[dict]:
    if isinstance(turns, str):
        turns = _parse_json(turns)
    if not isinstance(turns, list):
        raise BadRow("not_a_list", f"messages must be a list, this is a {type(turns).__name__}")
    if not turns:
        raise BadRow("empty", "the list of messages is empty")
    return [_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int) -> dict:
    if not isinstance(turn, dict):
        raise BadRow("not_a_turn", f"turn {number} is a {type(turn).__name__}, not an object with role and content")
    # An empty list of calls is how columnar storage writes "no calls".
    turn = {key: value for key, value in turn.items() if value is not None and (key != "tool_calls" or value != [])}
    if "role" not in turn and "from" in turn:
        turn = _from_sharegpt(turn, number)
    role = turn.get("role")
    if role not in ROLES:
        raise BadRow("unknown_role", f"turn {number} has role {role!r}; known are {', '.join(ROLES)}")
    # A tool call may come without content; templates print an absent key as nothing or as "None", so it is set.
    if "content" not in turn and "tool_calls" not in turn:
        raise BadRow("empty_reply" if role == "assistant" else "no_content", f"turn {number} ({role}) has no content")
    turn["content"] = _text(turn.get("content", ""), f"turn {number} ({role})")
    if role == "assistant" and "tool_calls" not in turn and not turn["content"].strip():
        raise BadRow("empty_reply", f"turn {number} (assistant) is empty")
    if "tool_calls" in turn:
        if not isinstance(turn["tool_calls"], list):
            raise BadRow("bad_tool_call", f"turn {number}: tool_calls is not a list")
        turn["tool_calls"] = [_with_parsed_arguments(call, number) for call in turn["tool_calls"]]
    return turn


def _from_sharegpt(turn: dict, number: int) -> dict:
    name = str(turn["from"])
    if name in SHAREGPT_TOOL_ROLES:
        remedy = "ShareGPT has no exact form for tools; write `messages` with tool_calls"
        raise BadRow("tool_roles_in_sharegpt", f"turn {number} is from {name!r}: {remedy}")
    if name not in SHAREGPT_ROLES:
        raise BadRow("unknown_role", f"turn {number} is from {name!r}; known are {', '.join(SHAREGPT_ROLES)}")
    kept = {"role": SHAREGPT_ROLES[name], "content": turn.get("value"), "weight": turn.get("weight")}
    return without_nulls(kept)


def _text(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BadRow("not_text", f"{name}: content must be text or a list of text parts")
    return "".join(texts)


def _with_parsed_arguments(call: Any, number: int) -> dict:
    """Return the call with its arguments as an object: templates write them as JSON, and would quote a string twice."""
    if not isinstance(call, dict):
        raise BadRow("bad_tool_call", f"turn {number}: a tool call is a {type(call).__name__}, not an object")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return call | {"function": function | {"arguments": _parse_json(function["arguments"] or "{}")}}


@dataclass
class Report:
    """What became of a source's rows; printed once, and the same on every rank because every rank reads all rows."""

    num_read: int = 0
    num_kept: int = 0
    reasons: dict[str, int] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        refused = ", ".join(f"{kind} {count}" for kind, count in sorted(self.reasons.items()))
        return f"read {self.num_read}, kept {self.num_kept}" + (f"; refused: {refused}" if refused else "")


def collect(source: str, split: str, encode: Callable[[dict], Any], on_bad_row: str) -> tuple[list, Report]:
    """Read, normalise and encode all rows of a source; return the results in order, and the report.

    With `on_bad_row="stop"` the error comes after the last row, so that it names the kinds and numbers of the whole
    source instead of one row at a time. Rows of `DROP_KINDS` are counted and never stop a run.

    Raises ValueError for bad rows under "stop", and always when no row is left.
    """
    if on_bad_row not in ("stop", "skip"):
        raise ValueError(f"on_bad_row must be 'stop' or 'skip', not {on_bad_row!r}")
    kept, report, stopping = [], Report(), []
    for where, row in read(source, split):
        report.num_read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            kept.append(encode(normalise(row)))
        except BadRow as bad:
            report.reasons[bad.kind] += 1
            report.first.append(f"{where}: {bad}")
            if bad.kind not in DROP_KINDS:
                stopping.append(report.first[-1])
            del report.first[10:], stopping[10:]
    report.num_kept = len(kept)
    if stopping and on_bad_row == "stop":
        raise ValueError(
            f"dataset_name {source!r} has rows that cannot be used ({report}):\n  " + "\n  ".join(stopping) + "\n"
            "Correct them, or set `on_bad_row: skip` to train without them."
        )
    if not kept:
        raise ValueError(f"dataset_name {source!r} leaves no row to use ({report}):\n  " + "\n  ".join(report.first))
    return kept, report
