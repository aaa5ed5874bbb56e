"""Whether two finished trainings are the same one, bit for bit."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from chaos.processes import newest_step

MEASURES = re.compile(r"(_seconds|_per_second|_wait_share|_gib|_bytes|mfu)$")
"""Metrics that no two runs share."""
SET_ASIDE = re.compile(r".+\.\d+")
"""What a run that was killed after its export has kept of it when it exported again."""


def differences(whole: Path, killed: Path) -> list[str]:
    """What two finished runs do not have in common, as sentences; empty where every bit is the same."""
    problems = []
    first, second = weight_files(whole), weight_files(killed)
    if not first:
        problems.append("the undisturbed run has exported no weights")
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            lacks = [folder.name for folder, files in ((whole, first), (killed, second)) if name not in files]
            problems.append(f"{name}: " + (f"{lacks[0]} lacks it" if lacks else "other content"))
    (one, one_problems), (other, other_problems) = metrics(whole), metrics(killed)
    problems += one_problems + other_problems
    if not one:
        problems.append("the undisturbed run has logged nothing")
    for key in sorted(one.keys() | other.keys()):
        if repr(one.get(key)) != repr(other.get(key)):  # repr: NaN is equal to itself
            problems.append(f"metrics: step {key[0]}, {key[1]}: {one.get(key)} and {other.get(key)}")
    return problems


def weight_files(folder: Path) -> dict[str, str]:
    """{path: sha256} of the exported weights and of the last state's tensors."""
    newest = newest_step(folder / "states")
    last = f"step-{newest:08d}" if newest is not None else ""
    found = {}
    for path in sorted(folder.rglob("*.safetensors")):
        parts = path.relative_to(folder).parts
        if SET_ASIDE.fullmatch(parts[0]) or (parts[0] == "states" and parts[1] != last):
            continue
        found["/".join(parts)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def metrics(folder: Path) -> tuple[dict[tuple[int, str], float], list[str]]:
    """{(step, name): value} of metrics.jsonl without what measures time and memory; and what is wrong with the file."""
    values, problems, path = {}, [], folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            entries = json.loads(line)
            step = entries.pop("step")
        except (ValueError, KeyError, AttributeError):
            problems.append(f"metrics of {folder.name}: line {number} is no entry: {line[:60]!r}")
            continue
        for name, value in entries.items():
            if (step, name) in values:
                problems.append(f"metrics of {folder.name}: step {step} has {name} twice")
            if not MEASURES.search(name):
                values[step, name] = value
    return values, list(dict.fromkeys(problems))
