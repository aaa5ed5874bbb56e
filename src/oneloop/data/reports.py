"""What became of a source's rows: counted where they are prepared, printed at every start."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from oneloop.data.files import printable
from oneloop.data.rows import DROP_KINDS, describe
from oneloop.mixture import Source

REJECTED_FILE = "rejected.jsonl"
"""In output_dir: the rows that were skipped, and why."""
_SHOWN = 10


@dataclass
class Report:
    """Counts over the rows of a source; every row read is kept or refused."""

    num_read: int = 0
    num_kept: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Kind of fault -> rows refused for it."""
    first: list[list] = field(default_factory=list)
    """Of the first ten rows refused, those that were too long by the user's own rule left out: [number of the file,
    line, kind, reason]."""
    num_cut: int = 0
    """Rows cut to max_length."""
    tokens_cut: int = 0
    num_pieces: int = 0
    """Rows that came of splitting, beyond one for each row kept."""
    num_left_out: int = 0
    """Pieces without anything to learn, which are no rows."""
    tokens_left_out: int = 0
    forms: dict[str, int] = field(default_factory=dict)
    """Form of the rows kept -> their number."""
    ignored: list[str] = field(default_factory=list)
    """Columns of rows kept that no use is made of."""
    num_tokens: int = 0
    num_targets: int = 0
    """Tokens that carry a loss."""
    highest_id: int = 0
    longest: int = 0
    """Tokens of the longest row."""

    def add(self, other: Report) -> None:
        """Count what `other` has counted of the rows that follow."""
        for name in ("reasons", "forms"):
            setattr(self, name, dict(Counter(getattr(self, name)) + Counter(getattr(other, name))))
        self.first = (self.first + other.first)[:_SHOWN]
        self.ignored = sorted({*self.ignored, *other.ignored})
        for name in ("highest_id", "longest"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def refuse(self, file: int, line: int, kind: str, reason: str) -> None:
        """Count a row that cannot be used, or that the user's own rule leaves out."""
        self.reasons[kind] = self.reasons.get(kind, 0) + 1
        if kind not in DROP_KINDS and len(self.first) < _SHOWN:
            self.first.append([file, line, kind, reason])

    @property
    def num_refused(self) -> int:
        """Rows that cannot be used; not those that the user asked to leave out."""
        return sum(count for kind, count in self.reasons.items() if kind not in DROP_KINDS)

    def __str__(self) -> str:
        text = f"read {self.num_read}, kept {self.num_kept}"
        if self.reasons:
            text += "; refused: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.reasons.items()))
        if self.num_cut:
            text += f"; cut to max_length: {_rows(self.num_cut)} ({self.tokens_cut} tokens)"
        if self.num_pieces:
            text += f"; split at max_length: {_rows(self.num_pieces)} more"
        if self.num_left_out:
            text += f", {self.num_left_out} pieces ({self.tokens_left_out} tokens) without a target left out"
        if self.ignored:
            text += f"; ignored columns: {', '.join(map(printable, self.ignored))}"
        return text

    def line(self) -> str:
        """The same with form and tokens, for the start of a run."""
        tokens = f"{self.num_tokens:,} tokens, {self.num_targets:,} learnt"
        return f"{self}; form: {describe(self.forms)}; {tokens}"


_SUMS = [
    about.name
    for about in dataclasses.fields(Report)
    if about.type == "int" and about.name not in ("highest_id", "longest")
]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def check(source: Source, report: Report, files: Sequence[str], on_bad_row: str) -> None:
    """Raises ValueError for bad rows under "stop", naming the first ten, and always when no row is left."""
    shown = "".join(f"\n  {files[file]}:{line}: {reason}" for file, line, _, reason in report.first)
    if report.num_refused and on_bad_row == "stop":
        raise ValueError(
            f"{source.field} {source.path!r} has rows that cannot be used ({report}):{shown}\n"
            "Correct them, or set `on_bad_row: skip` to train without them."
        )
    if not report.num_kept:
        hint = "" if shown else "\nmax_length: all rows are longer; raise it, or let truncation cut or split them"
        if not report.num_read:
            raise ValueError(f"{source.field} {source.path!r} holds no row (split {source.split!r})")
        raise ValueError(f"{source.field} {source.path!r} leaves no row to use ({report}):{shown}{hint}")
