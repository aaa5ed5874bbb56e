"""Which rank the others wait for when none goes on: judged by what each of them reports of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import FrameType

_STANDARD_LIBRARY = os.path.dirname(os.__file__).replace(os.sep, "/")


@dataclass(frozen=True)
class Report:
    """What a rank tells the others about itself."""

    beats: int
    """Its progress so far."""
    idle_seconds: float
    """For how long that has not grown."""
    standing_seconds: float
    """For how long, moreover, its main thread has been seen at one and the same place of one and the same call."""
    in_collective: bool
    """Whether that is in a collective operation, as far as its stack shows: not while it waits for a device."""
    place: str
    """The innermost line of that thread that is not a library's."""
    pid: int
    machine: str
    """The same text: the same machine, on which process ids mean the same."""
    state: str = "runs"
    """Or, told before the process does so: `hangs`, `failed`, `ended`."""
    number: int = 0
    """Grows with every report: one that stays the same comes from a process that does not run."""


def blame(reports: dict[int, Report], silent: set[int], timeout: float) -> list[int]:
    """The ranks that others wait for in vain; none where that is not certain.

    reports: of all ranks; silent: those whose reports have stopped. A rank waits when it stands in a collective
    operation, or has got further than another and stands; in vain, when it has done so for `timeout` seconds and
    nobody has got any further. Waited for is who has left, or is silent, else who is behind, and of these whoever does
    not wait himself. Ranks that are all busy, as when each of them tokenises the same rows, wait for nobody, however
    long it takes.
    """
    limit = 0.75 * timeout  # ranks do not begin to wait in the same moment
    left = [rank for rank, report in reports.items() if report.state in ("ended", "failed")]
    active = {rank: report for rank, report in reports.items() if rank not in (*left, *silent)}
    lowest = min(report.beats for rank, report in reports.items() if rank not in left or len(left) == len(reports))
    standing = [rank for rank, report in active.items() if report.standing_seconds >= limit]
    waiting = [rank for rank in standing if active[rank].in_collective or active[rank].beats > lowest]
    if max((active[rank].standing_seconds for rank in waiting or standing), default=0.0) < timeout:
        return []
    if any(report.idle_seconds < limit for report in active.values()):
        return []
    if waiting and (left or silent):
        return left or sorted(silent)
    # Where all stand and none can be seen to wait, they wait for a device, which waits for another one.
    if not waiting and (left or len(standing) + len(silent) < len(reports)):
        return []
    behind = [rank for rank, report in reports.items() if report.beats == lowest]
    return [rank for rank in behind if rank not in waiting] or behind


def stands(frame: FrameType | None) -> tuple[bool, str]:
    """Whether a thread stands in a collective operation, and its place in code that is not a library's.

    Only the innermost frames count: wrappers of a whole forward pass lie in torch.distributed, too. Of a backward pass
    that reduces gradients, the engine's call is the last thing in Python.
    """
    waits, depth = False, 0
    while frame is not None:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        waits = waits or (depth < 3 and "/torch/distributed/" in path and "/distributed/elastic/" not in path)
        waits = waits or (depth == 0 and path.endswith("/torch/autograd/graph.py"))
        if "/site-packages/" not in path and not path.startswith((_STANDARD_LIBRARY, "<")):
            return waits, f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame, depth = frame.f_back, depth + 1
    return waits, ""


def signature(frame: FrameType | None) -> list[tuple[int, int]]:
    """Tells one place of one call from another: each frame and its instruction."""
    frames = []
    while frame is not None:
        frames.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return frames
