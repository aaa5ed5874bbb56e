"""Show what is in a training state, and check that every byte of it is what was written.

    python scripts/inspect_state.py runs/demo/states/step-00000060
    python scripts/inspect_state.py runs/demo --verify          # the newest state of a run; exit code 1 if damaged
    python scripts/inspect_state.py runs/demo --json | jq .progress

Reads nothing but the state, and changes nothing. Needs no GPU and no model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneloop.state.format import State

WRONG = (KeyError, TypeError, AttributeError, IndexError, ValueError, OSError)
"""What a manifest leads to that has the right checksum and the wrong content: one of other hands."""

_OBJECTS = ("progress", "topology", "optimizer", "tensors", "quantized", "files", "model", "data", "meter", "skipped")
_OBJECTS += ("tracker", "versions", "config")


def candidates(path: Path) -> list[Path]:
    """The states that a path stands for, the newest first: itself, or those of a run's folder. Raises ValueError."""
    from oneloop.state import folders
    from oneloop.state import format as state_format

    if folders.step_of(path) is not None or (path / state_format.MANIFEST).exists():
        return [path]
    found = folders.published(path / folders.FOLDER) or folders.published(path)
    if not found:
        raise ValueError(f"{path} is no training state, nor a folder of a run that holds any")
    return found


# --- what is in it ----------------------------------------------------------------------------------------------------


def summary(state: State) -> dict[str, Any]:
    """Everything that a person or a script would ask, without the random states, which tell nobody anything.

    Raises one of WRONG for a manifest that is not as the format has it.
    """
    manifest = state.manifest
    for name in _OBJECTS:
        if not isinstance(manifest[name], dict):
            raise ValueError(f"{name} is no object")
    kinds: dict[str, Counter] = {}
    for about in state.tensors.values():
        for kind, form in about["kinds"].items():
            count = kinds.setdefault(kind, Counter())
            count["tensors"] += 1
            count["elements"] += math.prod(form["shape"])
            count[form["dtype"]] += 1
    files = {
        name: {
            "num_bytes": about["num_bytes"],
            "ranges": len(about["ranges"]),
            "sha256": about["sha256"],
        }
        for name, about in manifest["files"].items()
    }
    return {
        "state": str(state.folder),
        "created": manifest["created"],
        "progress": manifest["progress"],
        "layout": manifest["layout"],
        "world_size": manifest["world_size"],
        "topology": manifest["topology"],
        "optimizer": manifest["optimizer"],
        "tensors": len(state.tensors),
        "kinds": {
            kind: {
                "tensors": count.pop("tensors"),
                "elements": count.pop("elements"),
                "dtypes": dict(count),
                "quantized": kind in manifest["quantized"],
            }
            for kind, count in kinds.items()
        },
        "files": files,
        "num_bytes": sum(about["num_bytes"] for about in files.values()),
        "model": manifest["model"],
        "data": manifest["data"],
        "meter": manifest["meter"],
        "skipped": {name: value for name, value in manifest["skipped"].items() if not isinstance(value, list)},
        "loss_scaler": manifest["loss_scaler"],
        "tracker": manifest["tracker"],
        "versions": manifest["versions"],
        "git_commit": manifest["git_commit"],
        "config": manifest["config"],
    }


def tensor_rows(state: State) -> list[tuple[str, ...]]:
    """A row a tensor: name, shape, kinds with their dtypes, counters."""
    rows = []
    for name, about in sorted(state.tensors.items()):
        kinds = " ".join(f"{kind}:{form['dtype']}" for kind, form in about["kinds"].items())
        scalars = " ".join(f"{key}={value:g}" for key, value in about["scalars"].items())
        rows.append((name, "x".join(map(str, about["shape"])) or "scalar", kinds, scalars))
    return rows


def problems_of(folder: Path) -> list[str]:
    """What is wrong with a state, all of it, after reading every byte; empty for a good one."""
    from oneloop.state import format as state_format

    try:
        state = state_format.open_state(folder)
        found = []
    except state_format.Damaged as error:
        found = [str(error)]
        try:  # the first problem need not be the only one
            state = state_format.State(folder, state_format.read_manifest(folder))
        except state_format.Damaged:
            return found
    try:
        more = state_format.differences(state)
    except WRONG as error:
        more = [f"{folder / state_format.MANIFEST} is not as docs/state-format.md has it: {error!r}"]
    # What was found first is found again by reading that file.
    named = [folder / str(name) for name in state.manifest["files"] if found and str(folder / str(name)) in found[0]]
    return found + [problem for problem in more if not any(str(path) in problem for path in named)]


# --- showing it -------------------------------------------------------------------------------------------------------


def show(about: dict[str, Any], tensors: list[tuple[str, ...]] | None) -> None:
    """Print the tables."""
    progress, topology = about["progress"], about["topology"]
    ranks = f"{about['world_size']} rank{'s' * (about['world_size'] != 1)}"
    rows = [
        ("state", about["state"]),
        ("created", about["created"]),
        ("step", f"{progress['step']} of {progress['total_steps']}"),
        ("epoch", f"{progress['epoch']}, {progress['position']:,} rows of it used"),
        ("strategy", f"{topology.get('strategy')}, {ranks}, layout {about['layout']}"),
        *((name, str(topology[name])) for name in ("device", "precision", "offload") if name in topology),
        ("optimizer", about["optimizer"].get("name")),
        ("tokens seen", _number(about["meter"].get("tokens_seen"))),
        ("skipped", _plain(about["skipped"])),
        ("loss scaler", _plain(about["loss_scaler"])),
        ("data", _plain(about["data"])),
        *((name, _plain(value)) for name, value in _models(about["model"])),
        ("tracker", _plain(about["tracker"])),
        ("versions", " ".join(f"{name} {version}" for name, version in about["versions"].items())),
        ("git commit", about["git_commit"] or "unknown"),
    ]
    _table(None, rows)
    kinds = [
        (
            kind,
            f"{form['tensors']:,}",
            f"{form['elements']:,}",
            " ".join(f"{dtype} ({count:,})" for dtype, count in form["dtypes"].items())
            + " in blocks" * form["quantized"],
        )
        for kind, form in about["kinds"].items()
    ]
    _table(("kind", "tensors", "elements", "stored as"), kinds)
    files = [
        (name, f"{form['num_bytes']:,}", f"{form['ranges']:,}", form["sha256"]) for name, form in about["files"].items()
    ]
    total = ("together", f"{about['num_bytes']:,}", "", f"{about['num_bytes'] / (1 << 20):,.1f} MiB")
    _table(("file", "bytes", "ranges", "sha256"), [*files, total])
    _table(("config", ""), [(name, _plain(value)) for name, value in about["config"].items()])
    if tensors is not None:
        _table(("tensor", "shape", "kinds", "counters"), tensors)


def _models(record: dict) -> list[tuple[str, Any]]:
    """The base model, and the adapter continued if there is one, whether they lie side by side or alone."""
    if "model" in record:
        return [(name, value) for name, value in record.items() if value]
    return [("model", record)]


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _table(header: tuple[str, ...] | None, rows: list[tuple]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=header is not None, pad_edge=False, header_style="bold")
    for number, title in enumerate(header or ("", "")):
        right = title in ("tensors", "elements", "bytes", "ranges")
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))  # names may hold what rich takes for markup
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    console.print(table)
    console.print()


# --- command line -----------------------------------------------------------------------------------------------------


def inspect(arguments: argparse.Namespace) -> int:
    """Print what the command line asks for; returns the exit code. Raises ValueError for a state that is damaged."""
    from oneloop.state import format as state_format

    folder = candidates(arguments.state)[0]
    problems = problems_of(folder) if arguments.verify else []
    about: dict[str, Any] = {"state": str(folder)}
    try:
        state = state_format.open_state(folder)
        about = summary(state)
        tensors = tensor_rows(state) if arguments.tensors else None
        if not arguments.json:
            show(about, tensors)
        elif tensors is not None:
            about["tensors"] = state.tensors
    except state_format.Damaged as error:
        problems = problems or [str(error)]
    except WRONG as error:
        problems.append(f"{folder / state_format.MANIFEST} is not as docs/state-format.md has it: {error!r}")
    if arguments.json:
        if arguments.verify or problems:
            about["problems"] = problems
        print(json.dumps(about, indent=1))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if arguments.verify and not problems and not arguments.json:
        print(f"verified: {len(about['files'])} files, {about['num_bytes']:,} bytes, all as they were written")
    return int(bool(problems))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("state", type=Path, help="a state, or the output_dir of a run: then its newest state")
    parser.add_argument("--verify", action="store_true", help="read every byte; exit code 1 if anything is not right")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--tensors", action="store_true", help="list every tensor, too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Inspect, and answer with an exit code and a message a problem."""
    arguments = parse(argv)
    try:
        return inspect(arguments)
    except BrokenPipeError:  # of `| head`
        sys.stderr.close()
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
