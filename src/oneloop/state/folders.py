"""The folder of a run's training states: their names, which of them is the newest good one, and what may be removed.

    states/step-00000500/           a state; it has this name only once it is complete and on the disk
    states/step-00001000.partial/   one being written, or left by a run that was killed; never read
    states/step-00000500.removing/  one being removed; never read

The number decides what is newest: times change when folders are copied, and names as text put 1000 before 900.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from pathlib import Path

from oneloop.state import format as state_format

FOLDER = "states"
PARTIAL, REMOVING = ".partial", ".removing"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The name of the state after optimizer step `step`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a state folder's name; None for anything else."""
    match = _NAME.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def published(root: Path) -> list[Path]:
    """All state folders in `root`, the newest first, good or not. Empty where there is no such folder."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path) is not None and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=step_of, reverse=True)


def publish(partial: Path) -> Path:
    """Give a completely written state its name, in one step that cannot be seen half done. Raises OSError.

    A folder of that name, which a run that was killed and went back has written before, is replaced.
    """
    target = partial.with_name(partial.name.removesuffix(PARTIAL))
    if target.exists():
        _rename_for_removal(target)
    os.rename(partial, target)
    state_format.sync_folder(target.parent)
    return target


def clean(root: Path) -> list[str]:
    """Remove what a killed run has left half written or half removed; returns the names. Nothing else is touched."""
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        stem = path.name.removesuffix(PARTIAL).removesuffix(REMOVING)
        if stem != path.name and _NAME.fullmatch(stem.split("~")[0]) and path.is_dir() and not path.is_symlink():
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
    older = [path for path in published(root) if step_of(path) < step_of(newest) and _is_ours(path)]
    removed = older[max(limit - 1, 0) :]
    for path in removed:
        _rename_for_removal(path)
    return removed


def _is_ours(path: Path) -> bool:
    """Whether a folder holds nothing but the files of a state."""
    names = {file.name for file in path.iterdir()}
    expected = {state_format.MANIFEST, state_format.CHECKSUM}
    return state_format.MANIFEST in names and all(
        name in expected or re.fullmatch(r"rank-\d{5,}\.safetensors", name) for name in names
    )


def _rename_for_removal(path: Path) -> None:
    """Remove a state so that no moment leaves half of it under its name."""
    for number in itertools.count():
        doomed = path.with_name(f"{path.name}~{number}{REMOVING}")
        if not doomed.exists():
            break
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(root: Path) -> Path | None:
    """Keep the states of an earlier run under another name, so that a new one cannot mix with them."""
    if not published(root):
        return None
    number = next(n for n in itertools.count(1) if not root.with_name(f"{root.name}.{n}").exists())
    target = root.with_name(f"{root.name}.{number}")
    os.rename(root, target)
    return target


def free_bytes(folder: Path) -> int | None:
    """Bytes that may still be written where `folder` is, or will be; None where the system does not say."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None
