"""The folder of a run's training states: their names, which of them is the newest good one, and what may be removed.

    states/step-00000500/           a state; it has this name only once it is complete and on the disk
    states/step-00001000.partial/   one being written, or left by a run that was killed; never read
    states/step-00000500~0.removing/  one being removed; never read
    states/step-00000500~0.replaced/  one of which a new version is just taking the name

The number decides what is newest: times change when folders are copied, and names as text put 1000 before 900.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
from pathlib import Path
from typing import IO

from oneloop.state import durable
from oneloop.state import format as state_format

FOLDER = "states"
PARTIAL, REMOVING, REPLACED = ".partial", ".removing", ".replaced"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"(step-\d{8,})(\.partial|~\d+\.removing|~\d+\.replaced)")


def name_of(step: int) -> str:
    """The name of the state after optimizer step `step`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a state folder's name; None for anything else."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def published(root: Path) -> list[Path]:
    """All state folders in `root`, the newest first, good or not; links to such folders count. Empty where there is no
    such folder."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def publish(partial: Path) -> Path:
    """Give a completely written state its name, in one step that cannot be seen half done. Raises OSError.

    A folder of that name, which a run that went back has written before, is replaced: it is out of the way for one
    moment, and `clean` puts it back where a run is killed in it.
    """
    target = partial.with_name(partial.name.removesuffix(PARTIAL))
    replaced = _rename_away(target, REPLACED) if target.exists() else None
    os.rename(partial, target)
    durable.sync_folder(target.parent)
    if replaced is not None and replaced.is_symlink():
        replaced.unlink()  # what it leads to is somebody else's
    elif replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def clean(root: Path) -> list[str]:
    """Remove what a killed run has left half written or half removed; returns the names. Nothing else is touched."""
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not path.is_dir() or path.is_symlink():
            continue
        if path.suffix == REPLACED and not (root / match.group(1)).exists():
            os.rename(path, root / match.group(1))
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name)
    return removed


def rotate(root: Path, limit: int | None, newest: Path) -> list[Path]:
    """Remove states older than `newest` until `limit` remain with it; call it once `newest` is published.

    States of later steps (of a run that went back) are left alone, as is everything that is no state of this format.
    Returns what was removed. Raises OSError.
    """
    if limit is None:
        return []
    older = [p for p in published(root) if step_of(p) < step_of(newest) and _is_ours(p) and not p.is_symlink()]
    removed = older[max(limit - 1, 0) :]
    for path in removed:  # under another name first, so that no moment leaves half of one under its own
        shutil.rmtree(_rename_away(path, REMOVING), ignore_errors=True)
    return removed


def _is_ours(path: Path) -> bool:
    """Whether a folder holds nothing but the files of a state."""
    names = {file.name for file in path.iterdir()}
    expected = {state_format.MANIFEST, state_format.CHECKSUM}
    return state_format.MANIFEST in names and all(
        name in expected or re.fullmatch(r"rank-\d{5,}\.safetensors", name) for name in names
    )


def _rename_away(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}~{number}{suffix}") for number in itertools.count())
    away = next(name for name in names if not name.exists())
    os.rename(path, away)
    return away


def set_aside(root: Path) -> Path | None:
    """Keep the states of an earlier run under another name, so that a new one cannot mix with them."""
    states = published(root)
    return move_aside(root, states) if states else None


def move_aside(root: Path, states: list[Path]) -> Path:
    """The same for some states only: a run that goes back leaves those after it behind. Returns their new folder."""
    target = _free_name(root.resolve())  # beside the folder itself, so that nothing has to cross to another disk
    target.mkdir(mode=0o700)
    for path in sorted(states, key=step_of):  # the newest last: a run killed here still has it
        os.rename(path, target / path.name)
    return target


def _free_name(root: Path) -> Path:
    number = next(n for n in itertools.count(1) if not root.with_name(f"{root.name}.{n}").exists())
    return root.with_name(f"{root.name}.{number}")


_LOCK = ".lock"
_held: dict[Path, IO[str]] = {}


def lock(root: Path, mode: int = 0o700) -> str:
    """Make this process the only one that writes to `root`; '' if it is, else who does.

    mode: that of the folder, where it is made. Held until `unlock`, or until the process ends, however it ends. A disk
    without locks lets everybody in. Raises OSError.
    """
    try:
        import fcntl
    except ImportError:  # not on this system
        return ""
    root.mkdir(mode=mode, parents=True, exist_ok=True)
    name = root.resolve()
    if name in _held and name.joinpath(_LOCK).exists():
        return ""
    file = os.fdopen(os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, mode & 0o666), "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    except OSError:
        return ""
    with contextlib.suppress(OSError):  # a full disk: whether a state has room is looked at elsewhere
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    _held[name] = file
    return ""


def unlock(root: Path) -> None:
    """Let another process write to `root`."""
    file = _held.pop(root.resolve(), None)
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()


def free_bytes(folder: Path) -> int | None:
    """Bytes that may still be written where `folder` is, or will be; None where the system does not say."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None
