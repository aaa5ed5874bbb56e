"""What one part found: figures, bars and verdicts, written after every addition, so that a killed part leaves what it
has."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

HOLDS, MISSED, INCONCLUSIVE, TOY = "holds", "missed", "inconclusive", "toy"
SKIPPED_TIME = "skipped: time"
STOPPED_TIME = "stopped: time"
SKIPPED_MEMORY = "skipped: memory"
NOT_BUILT = "not built yet"
NOT_MEASURED = "not measured"
FAILED = "failed"


class OutOfTime(Exception):
    """What is left of the budget is not enough for a measurement that would mean something."""


class TooSmall(Exception):
    """The device has too little memory for a measurement."""


@dataclass
class Bar:
    """A figure against its limit."""

    name: str
    verdict: str
    value: float | None = None
    sense: str = "at most"
    limit: float | None = None
    unit: str = ""
    why: str = ""
    """Why it was not judged, or what weakens it."""


@dataclass
class Report:
    """The record of one part, and the file it lies in."""

    part: str
    title: str
    path: Path
    toy: bool
    status: str = "running"
    seconds: float = 0.0
    machine: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    measurements: dict = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    def judge(self, name: str, value: float | None, *, unit: str = "", doubt: str = "", **limit: float) -> None:
        """Compare a figure with `at_most=` or `at_least=`; `doubt` is a reason why the figure would say nothing."""
        [(sense, bound)] = limit.items()
        if value is not None and not math.isfinite(value):
            value, doubt, verdict = None, "not a finite number", TOY if self.toy else MISSED
        elif self.toy:
            verdict = TOY
        elif value is None:
            verdict = NOT_MEASURED
        elif doubt:
            verdict = INCONCLUSIVE
        else:
            verdict = HOLDS if (value <= bound if sense == "at_most" else value >= bound) else MISSED
        self.bars.append(Bar(name, verdict, value, sense.replace("_", " "), bound, unit, doubt))
        self.save()

    def leave_out(self, name: str, verdict: str, why: str = "") -> None:
        """A bar that was not measured, and why."""
        self.bars.append(Bar(name, verdict, why=why))
        self.save()

    def record(self, **measurements) -> None:
        self.measurements |= measurements
        self.save()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.save()

    def finish(self, status: str | None = None) -> None:
        """Close the part with a status, or with what its bars come to."""
        verdicts = {bar.verdict for bar in self.bars}
        ranked = [verdict for verdict in (MISSED, INCONCLUSIVE, HOLDS) if verdict in verdicts]
        self.status = status or (TOY if self.toy else ranked[0] if ranked else NOT_MEASURED)
        self.save()

    def save(self) -> None:
        write_json(self.path, dataclasses.asdict(self) | {"path": None})


def write_json(path: Path, content: dict) -> None:
    """Whole or not at all: a reader, or a kill, may come at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
