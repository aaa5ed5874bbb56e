"""What becomes of the rows of a stream: checked and tokenised some at a time, by whichever process, and then counted.

What the ranks tell each other of a row is `Seen`; its tokens stay where they were made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from oneloop.data import readers, rows
from oneloop.data.files import BadRow
from oneloop.data.preparing import Job, shown
from oneloop.data.reports import Report
from oneloop.data.windows import Row
from oneloop.mixture import Source


class Seen(NamedTuple):
    """What all ranks know of a row that one of them has read."""

    number: int
    """Place in the epoch's order, from 0."""
    file: int
    line: int
    lengths: tuple[int, ...] = ()
    """Tokens of the rows it became: several when split, none when refused."""
    num_targets: int = 0
    highest_id: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    tokens_left_out: int = 0
    form: str = ""
    ignored: tuple[str, ...] = ()
    kind: str = ""
    """Why it is refused, as one word."""
    reason: str = ""
    data: Any = None
    """The row itself, if it is refused."""

    @property
    def is_bad(self) -> bool:
        """Whether it cannot be used; not when the user's own rule leaves it out."""
        return bool(self.kind) and self.kind not in rows.DROP_KINDS


def encode(sources: list[Source], job: Job, chunk: list[Row]) -> list[tuple[Seen, list[dict]]]:
    """Check and tokenise rows; sources: of each file, by number. Returns for each what it became, and its tokens.

    Raises what is wrong with all rows, such as a missing template.
    """
    found: list[Any] = []
    examples, origins = [], []
    for _, file, raw in chunk:
        row = readers.parse(raw.data)
        try:
            if isinstance(row, BadRow):
                raise row
            examples.append(job.normalise(row, sources[file]))
            origins.append((len(found), row))
            found.append(None)
        except BadRow as bad:
            found.append(bad)
    encoded = job.encode(job.settings, job.tokenizer, examples, False)
    assert len(encoded) == len(examples), "encode gave another number of results than it got examples"
    for (place, row), result in zip(origins, encoded, strict=True):
        found[place] = result if isinstance(result, BadRow) else (row, result)
    results = []
    for (number, file, raw), one in zip(chunk, found, strict=True):
        seen = Seen(number, file, raw.line)
        if isinstance(one, BadRow):
            results.append((seen._replace(kind=one.kind, reason=str(one), data=shown(raw.data)), []))
        else:
            results.append(_kept(seen, *one, sources[file], job))
    return results


def _kept(seen: Seen, row: dict, pieces: list[dict], source: Source, job: Job) -> tuple[Seen, list[dict]]:
    counts = {name: 0 for name in ("num_cut", "num_left_out", "tokens_left_out")}
    for piece in pieces:
        for name in counts:
            counts[name] += int(piece.pop(name, 0))
    ids = [np.asarray(piece["input_ids"]) for piece in pieces]
    targets = sum(int(np.count_nonzero(np.asarray(piece["labels"])[1:] != -100)) for piece in pieces)
    seen = seen._replace(
        lengths=tuple(len(one) for one in ids),
        num_targets=targets,
        highest_id=max(int(one.max()) for one in ids),
        form=job.form_of(row, source),
        ignored=tuple(sorted(job.ignored_columns(row, source))),
        **counts,
    )
    return seen, pieces


def count(report: Report, seen: Seen) -> None:
    """Add a row to what is known of its source."""
    report.num_read += 1
    if [seen.file, seen.line] in (one[:2] for one in report.first):  # it comes in each epoch
        report.reasons[seen.kind] += 1
        return
    if seen.kind:
        report.refuse(seen.file, seen.line, seen.kind, seen.reason)
        return
    report.num_kept += 1
    report.num_pieces += len(seen.lengths) - 1
    report.num_cut += seen.num_cut > 0
    report.tokens_cut += seen.num_cut
    report.num_left_out += seen.num_left_out
    report.tokens_left_out += seen.tokens_left_out
    report.forms[seen.form] = report.forms.get(seen.form, 0) + 1
    report.num_tokens += sum(seen.lengths)
    report.num_targets += seen.num_targets
    report.highest_id = max(report.highest_id, seen.highest_id)
    report.longest = max(report.longest, *seen.lengths)
    if not set(seen.ignored) <= set(report.ignored):
        report.ignored = sorted({*report.ignored, *seen.ignored})
