"""Writing a state beside the training: a short copy of this rank's numbers, then files, checksums and publication in a
thread of its own.

The ranks' threads agree over a process group of their own, so that they never meet a collective of the training. Each
step of the writing is one all of them take or none: what fails on one rank is known to all, the half-written folder
is removed, and the state before it is untouched.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oneloop.sharding.ranges import BLOCK_SIZE, Held
from oneloop.state import folders
from oneloop.state import format as state_format
from oneloop.state.format import ABSMAX, Range

RESERVE_BYTES = 16 << 20
"""Room left for manifests, metrics and logs when free space is checked."""


@dataclass
class Group:
    """The ranks that write together; without a process group, one."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def new(cls, rank: int, size: int) -> Group:
        """A group of all ranks over gloo, which moves host memory, beside whatever moves the gradients. Collective."""
        if size == 1:
            return cls()
        from oneloop import watchdog

        made = torch.distributed.new_group(backend="gloo", timeout=watchdog.backend_timeout())
        return cls(rank, size, made)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, on all ranks."""
        if self.size == 1:
            return [value]
        everyone = [None] * self.size
        torch.distributed.all_gather_object(everyone, value, group=self.group)
        return everyone

    def to_first(self, value: Any) -> list[Any]:
        """Everybody's value, on the first rank; nothing elsewhere."""
        if self.size == 1:
            return [value]
        everyone = [None] * self.size if self.rank == 0 else None
        torch.distributed.gather_object(value, everyone, group=self.group, group_dst=0)
        return everyone or []

    def first(self, value: Any) -> Any:
        """The first rank's value, on all ranks."""
        return self.gather(value if self.rank == 0 else None)[0]

    def maximum(self, numbers: list[int]) -> list[int]:
        """The largest of each number over all ranks."""
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self.group)
        return tensor.tolist()


# --- what is copied ---------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What this rank writes of a state: live views, and how each is to be found again."""

    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """Key in the file: (n,) live view."""
    ranges: list[Range] = field(default_factory=list)
    tensors: dict[str, dict] = field(default_factory=dict)
    """The manifest's entry of each tensor this rank holds a part of, also where another rank writes it."""
    quantized: dict[str, dict] = field(default_factory=dict)

    def num_bytes(self) -> int:
        return sum(view.numel() * view.element_size() for view in self.views.values())


def share_of(ranges: list[Held], scalars: dict[str, dict]) -> Share:
    """This rank's share: all it holds, or of what others hold as well an equal part."""
    share = Share()
    for one in ranges:
        about = share.tensors.setdefault(one.name, {"shape": list(one.shape), "kinds": {}, "scalars": {}})
        if one.kind == "param" or one.kind == "buffer":
            about["shape"] = list(one.shape)
        about["kinds"][one.kind] = {
            "dtype": state_format.NAMES_OF_DTYPES[one.view.dtype],
            "shape": list(one.shape),
        }
        about["scalars"] = scalars.get(one.name, {})
        if one.packed is not None:
            share.quantized.setdefault(one.kind, {"block_size": BLOCK_SIZE, "code": one.packed.table.tolist()})
        low, high = _part_of(one.view.numel(), *one.copy)
        if low < high:
            _add(share, one, low, high)
    return share


def _part_of(length: int, number: int, copies: int) -> tuple[int, int]:
    """The part of `length` elements that copy `number` writes: whole blocks, so that scales stay with their codes."""
    size = -(-length // (copies * BLOCK_SIZE)) * BLOCK_SIZE
    return min(number * size, length), min((number + 1) * size, length)


def _add(share: Share, one: Held, low: int, high: int) -> None:
    phase = 0
    if one.packed is not None:
        begin = one.packed.offset + low
        end = one.packed.offset + high
        phase = begin % BLOCK_SIZE
        scales = one.packed.scales[begin // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        place = Range(one.name, one.kind + ABSMAX, one.start + low, scales.numel())
        share.views[place.key] = scales
        share.ranges.append(place)
    place = Range(one.name, one.kind, one.start + low, high - low, phase)
    share.views[place.key] = one.view[low:high]
    share.ranges.append(place)


class HostCopy:
    """Host memory for one share, used again for every state: (n,) tensors on the CPU, pinned beside a GPU."""

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Copy the live numbers; what is returned holds until the next call. None where there is no memory for it."""
        import psutil

        missing = sum(v.numel() * v.element_size() for key, v in views.items() if key not in self.tensors)
        try:
            if missing > psutil.virtual_memory().available:
                raise MemoryError
            return self._copies(views)
        except (MemoryError, RuntimeError):  # torch's own, of its allocator for the CPU
            self.release()
            return None

    def release(self) -> None:
        """Give the memory back."""
        self.tensors = {}

    def _copies(self, views: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        on_device = next((view.device for view in views.values() if view.device.type != "cpu"), None)
        self.tensors = {key: self.tensors[key] for key in views if key in self.tensors}
        for key, view in views.items():
            kept = self.tensors.get(key)
            if kept is None or kept.shape != view.shape or kept.dtype != view.dtype:
                kept = self.tensors[key] = _host_memory(view, pinned=view.device.type != "cpu")
            kept.copy_(view, non_blocking=True)
        if on_device is not None:
            torch.get_device_module(on_device).synchronize()
        return dict(self.tensors)


def _host_memory(like: torch.Tensor, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)
    except RuntimeError:  # the system allows no more pinned memory: the copy is slower
        return torch.empty(like.shape, dtype=like.dtype)


# --- what is written --------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One state to be written; the same on all ranks but for what is this rank's own."""

    root: Path
    step: int
    limit: int | None
    previous: Path | None
    """The state that this process saved last, which is always kept."""
    share: Share
    data: dict[str, torch.Tensor]
    rank_entry: dict[str, Any]
    """What the manifest says of this rank: random states, open metrics."""
    manifest: dict[str, Any]
    """The rest of it."""


def write(job: Job, group: Group, beat: Callable[[], None] = lambda: None) -> str:
    """Write and publish a state; '' when it is complete and on the disk, else why it is not, on every rank alike.

    Collective. The steps: room is checked, every rank writes its file, the first one writes the manifest, gives the
    folder its name, and removes states beyond the limit.
    """
    name = folders.name_of(job.step)
    partial = job.root / (name + folders.PARTIAL)
    error = _agreed(group, _attempt(lambda: _make_room(job, partial, group), partial))
    if error:
        return error
    file_name = f"rank-{group.rank:05d}.safetensors"
    entry: dict[str, Any] = {}

    def write_file():
        if not partial.is_dir():
            raise OSError(errno.ENOENT, "the folder that rank 0 made is not there: is it on a disk all nodes share?")
        entry.update(state_format.write_tensors(partial / file_name, job.data.items(), beat))

    error = _agreed(group, _attempt(write_file, partial))
    if error:
        _remove(partial, group)
        return error
    mine = (entry, [one.to_json() for one in job.share.ranges], job.share.tensors, job.share.quantized, job.rank_entry)
    everyone = group.to_first(mine)
    error = _agreed(group, _attempt(lambda: _publish(job, partial, everyone), partial) if group.rank == 0 else "")
    if error:
        _remove(partial, group)
    return error


def _agreed(group: Group, error: str) -> str:
    """All ranks' errors as one text, the same on each."""
    errors = group.gather(error)
    return "; ".join(f"rank {rank}: {text}" if group.size > 1 else text for rank, text in enumerate(errors) if text)


def _attempt(action: Callable[[], Any], partial: Path) -> str:
    try:
        action()
    except OSError as error:
        free = folders.free_bytes(partial.parent)
        room = "" if free is None else f" ({free / 2**20:,.0f} MiB are free there)"
        return f"{error.strerror or error}: {error.filename or partial}{room}"
    except Exception as error:  # whatever it is, the other ranks wait for word of it
        return f"{type(error).__name__}: {error}"
    return ""


def _make_room(job: Job, partial: Path, group: Group) -> None:
    needed = sum(group.gather(job.share.num_bytes()))
    if group.rank != 0:
        return
    if job.previous is not None and not job.previous.is_dir():
        raise OSError(errno.ENOENT, f"{job.previous} has vanished: is the disk still mounted?")
    job.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    check_room(job.root, needed)
    partial.mkdir()


def check_room(folder: Path, needed: int) -> None:
    """Raises OSError where a state of `needed` bytes does not fit."""
    free = folders.free_bytes(folder)
    if free is not None and free < needed + RESERVE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"a training state needs {needed / 2**20:,.0f} MiB, and there are {free / 2**20:,.0f} MiB free",
            str(folder),
        )


def _publish(job: Job, partial: Path, everyone: list) -> None:
    tensors: dict[str, dict] = {}
    quantized: dict[str, dict] = {}
    files = {}
    for rank, (entry, ranges, theirs, their_quantized, _) in enumerate(everyone):
        files[f"rank-{rank:05d}.safetensors"] = {**entry, "ranges": ranges}
        quantized |= their_quantized
        for name, about in theirs.items():
            known = tensors.setdefault(name, about)
            known["kinds"] |= about["kinds"]
            known["scalars"] = about["scalars"] or known["scalars"]
    manifest = {
        "format": state_format.FORMAT,
        "format_version": state_format.FORMAT_VERSION,
        **job.manifest,
        "tensors": dict(sorted(tensors.items())),
        "quantized": quantized,
        "files": files,
        "ranks": [entry for *_, entry in everyone],
    }
    state_format.write_manifest(partial, manifest)
    state_format.open_state(partial).close()  # else older ones would make room for what nobody can open
    published = folders.publish(partial)
    try:
        folders.rotate(job.root, job.limit, published)
    except OSError as error:  # the new state is there; too many old ones are no reason to stop
        warnings.warn(f"older training states could not be removed: {error}", RuntimeWarning, stacklevel=2)


def _remove(partial: Path, group: Group) -> None:
    if group.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)


_newest: Background | None = None


def linger(seconds: float) -> None:
    """Let this process's writing, if any, come to its end before the process does, which has failed otherwise: what was
    asked for before is a good state."""
    if _newest is not None and _newest._thread is not None:
        _newest._thread.join(seconds)


class Background:
    """At most one writing at a time, in a thread; its outcome is asked for at step boundaries."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._outcome = ""
        self._blocks = 0
        self.seconds = 0.0
        """How long the newest writing took."""

    def start(self, job: Job, group: Group) -> None:
        self.seconds = 0.0

        def work():
            began = time.perf_counter()
            try:
                self._outcome = write(job, group, self._count)
            except Exception as error:  # contact to another rank is lost
                self._outcome = f"{type(error).__name__}: {error}"
            self.seconds = time.perf_counter() - began

        global _newest
        _newest = self
        self._thread = threading.Thread(target=work, name="training state", daemon=True)
        self._thread.start()

    def _count(self) -> None:
        self._blocks += 1

    @property
    def is_busy(self) -> bool:
        """Whether a writing was begun whose outcome has not been taken."""
        return self._thread is not None

    @property
    def is_done(self) -> bool:
        """Whether there is an outcome to be taken."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, beat: Callable[[], None] = lambda: None) -> str:
        """Wait for the writing under way, if any; returns its error, or ''. `beat` is called while blocks go out."""
        if self._thread is None:
            return ""
        seen = -1
        while self._thread.is_alive():
            if self._blocks != seen:
                seen = self._blocks
                beat()
            self._thread.join(0.2)
        self._thread = None
        outcome, self._outcome = self._outcome, ""
        return outcome
