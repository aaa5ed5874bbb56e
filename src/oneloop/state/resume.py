"""Which state a run continues from, and its numbers back into a live model and optimizer."""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oneloop import sharding, sources, tracking, watchdog
from oneloop.sharding import ranges as sharding_ranges
from oneloop.state import folders, record
from oneloop.state import format as state_format
from oneloop.state.format import Damaged, State
from oneloop.state.writer import Group

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig

_WAIT_FOR_OTHER_SECONDS = 30.0

_PIECE_ELEMENTS = 16 << 20
"""Numbers read at a time: what loading needs beside the live tensors."""


# --- choosing ---------------------------------------------------------------------------------------------------------


def find(accelerator: Accelerator, config: RecipeConfig) -> State | None:
    """The state that `config.resume` stands for, read to the last byte and found unchanged; None to begin anew.

    Collective, and to be called before anything is loaded: what is wrong with a state or with settings that differ
    from the saved ones must not be found after an hour. `auto` passes over damaged states to the newest good one,
    with a warning; a path stands for the newest state in `output_dir` that went on from it, where there is one. Raises
    ValueError, on every rank, for a named state that is damaged, when all are, or when the settings at hand would not
    continue its run.
    """
    group = Group.new(accelerator.process_index, accelerator.num_processes)
    root = Path(config.output_dir) / folders.FOLDER
    if config.save_every:
        _be_the_only_one(root, group)
    if group.rank == 0:
        leftovers = folders.clean(root)
        if leftovers:
            print(f"resume: removed {', '.join(leftovers)}, left half written by a run that was killed", flush=True)
    if config.resume == "none":
        return None
    named = None if config.resume == "auto" else Path(config.resume).expanduser()
    candidates = group.first(_candidates(root if named is None else named))
    if named is not None and not candidates:
        raise ValueError(
            f"resume: there is no training state at {named}: name a step-... folder, or a run's output_dir"
        )
    if named is not None:
        candidates = group.first(_descendants(root, named) + candidates)
    state = _newest_good(candidates, group)
    if state is None:
        aside = sorted(root.resolve().parent.glob(f"{root.resolve().name}.*")) if group.rank == 0 else []
        if aside:
            print(
                f"resume: no state in {root}; there are earlier ones in {aside[-1]} (--resume {aside[-1]})", flush=True
            )
        return None
    sources.check(config)  # which commits the hub's names stand for
    for change in record.check_settings(state, config, sharding.mixed_precision(accelerator)):
        accelerator.print(f"resume: changed, as allow_changes has it: {change}")
    if group.rank == 0:
        progress = state.manifest["progress"]
        saved = state.manifest["topology"] or {"strategy": "another tool", "world_size": "?"}
        print(
            f"resume: {state.folder}, step {state.step} of {progress['total_steps']}, saved under {saved['strategy']} "
            f"on {saved['world_size']} rank(s); {state.num_bytes():,} bytes verified",
            flush=True,
        )
        changed = record.version_changes(state)
        if changed:
            print(f"resume: not as when it was saved: {', '.join(changed)}", flush=True)
    group.first(None)
    return state


def _descendants(root: Path, named: Path) -> list[Path]:
    """States in `root` of a run that went on from the named one, before it was interrupted itself."""
    found = []
    for path in folders.published(root):
        with contextlib.suppress(Damaged):
            if state_format.read_manifest(path).get("continued_from") == str(named.resolve()):
                found.append(path)
    return found


def _be_the_only_one(root: Path, group: Group) -> None:
    """Raises ValueError, on every rank, while another run writes its states to the same folder.

    One that has just been killed may take some seconds to be gone.
    """
    other, error, mode = "", "", 0o777 & ~tracking.file_mask()
    deadline = time.monotonic() + _WAIT_FOR_OTHER_SECONDS
    try:
        while group.rank == 0 and (other := folders.lock(root, mode)) and time.monotonic() < deadline:
            watchdog.beat()
            time.sleep(0.5)
    except OSError as failure:
        error = (
            f"save_every: {root} cannot be written: {failure.strerror}. Name another output_dir, or set save_every 0"
        )
    other, error = group.first((other, error))
    if error:
        raise ValueError(error)
    if other:
        raise ValueError(
            f"output_dir: {root} is being written to by another run ({other}): wait until it has ended, or end it, or "
            "give this run an output_dir of its own."
        )


def _candidates(path: Path) -> list[Path]:
    """States at a path: itself, those in it, or those of the run in it; the newest first."""
    if folders.step_of(path) is not None or (path / state_format.MANIFEST).exists():
        return [path] if path.is_dir() else []
    return folders.published(path) or folders.published(path / folders.FOLDER)


def _newest_good(candidates: list[Path], group: Group) -> State | None:
    problems = []
    for folder in candidates:
        state, problem = _opened(folder, group)
        if not problem:
            if problems and group.rank == 0:
                warnings.warn(
                    f"resume: passing over damaged states: {'; '.join(problems)}. Continuing from {folder}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return state
        problems.append(problem)
    if problems:
        raise ValueError(
            f"resume: no state can be continued from: {'; '.join(problems)}. Name another one with --resume PATH, or "
            "begin anew with --resume none, which keeps these aside."
        )
    return None


def _opened(folder: Path, group: Group) -> tuple[State | None, str]:
    """Open and verify a state, each rank a part of its files; the state, or the same problem on all ranks."""
    state, mine = None, ""
    try:
        state = state_format.open_state(folder)
        record.check_complete(state)
        files = sorted(state.manifest["files"])[group.rank :: group.size]
        mine = "; ".join(state_format.differences(state, files, watchdog.beat))
    except Damaged as error:
        mine = str(error)
    problems = dict.fromkeys(text for text in group.gather(mine) if text)
    return state, "; ".join(problems)


def keep_others_aside(config: RecipeConfig, state: State | None, group: Group) -> None:
    """Move what belongs to another history out of the way of `auto`: all older states when a run begins anew or goes on
    from another run's, later ones when it goes back in its own. Call it when nothing can refuse the run any more.

    Collective. Raises ValueError, on every rank, where the folder cannot be changed.
    """
    root = Path(config.output_dir) / folders.FOLDER
    error = ""
    if group.rank == 0:
        is_own = state is not None and state.folder.parent.resolve() == root.resolve()
        others = [path for path in folders.published(root) if not is_own or folders.step_of(path) > state.step]
        if others and (state is not None or config.resume == "none"):
            try:
                aside = folders.move_aside(root, others)
                print(f"resume: {len(others)} {'later ' * is_own}state(s) are kept as {aside}", flush=True)
            except OSError as failure:
                error = f"output_dir: the states in {root} cannot be moved aside: {failure.strerror}"
    error = group.first(error)
    if error:
        raise ValueError(error)


# --- loading ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(accelerator: Accelerator, model: torch.nn.Module, optimizer, state: State, is_same_optimizer: bool) -> None:
    """Put a state's masters, moments and counters into the live objects, whatever saved them. Collective.

    Each rank reads the ranges it holds, in pieces of 64 MiB. Raises ValueError where the state does not have just the
    tensors that are trained here, or lacks what the optimizer needs.
    """
    inner = sharding.torch_optimizer(optimizer)
    places = sharding.placements(accelerator, model, optimizer)
    buffers = sharding.buffers(accelerator, model)
    _check_tensors(state, accelerator, model, buffers)
    # A parameter that no gradient has reached so far has no state yet.
    untouched = {name for name, about in state.tensors.items() if set(about["kinds"]) == {"param"}}
    untouched -= {name for name, about in state.tensors.items() if about["scalars"]}
    sharding_ranges.create_state([place for place in places if place.name not in untouched], inner)
    held, _ = sharding_ranges.held(places, inner)
    held += _not_made_yet(accelerator, state, places, held, inner, is_same_optimizer)
    same_cuts = _has_same_cuts(accelerator, state, places)
    whole: dict[int, tuple] = {}  # quantised tensors that are cut into other blocks than they were
    for one in held + buffers:
        if one.kind not in state.tensors[one.name]["kinds"]:
            raise ValueError(
                f"resume: {state.folder} has no {one.kind} of {one.name}, which optim {type(inner).__name__} needs"
            )
        if one.packed is None:
            _read_into(one.view, state, one.name, one.kind, one.start)
        elif same_cuts and one.kind in state.manifest["quantized"] and _is_packed(state, one.name, one.kind):
            begin = one.packed.offset // sharding_ranges.BLOCK_SIZE
            codes, scales = state.read_packed(one.name, one.kind, one.start, one.view.numel())
            one.view.copy_(codes)
            one.packed.scales[begin : begin + len(scales)].copy_(scales)
        else:
            packed = one.packed
            _, values = whole.setdefault(packed.codes.data_ptr(), (packed, torch.zeros(packed.codes.numel())))
            _read_into(values[packed.offset : packed.offset + one.view.numel()], state, one.name, one.kind, one.start)
        watchdog.beat()
    for packed, values in whole.values():
        sharding_ranges.requantize(packed, values)
    scalars = {name: about["scalars"] for name, about in state.tensors.items()}
    sharding_ranges.set_scalars(places, inner, scalars)
    if is_same_optimizer:
        sharding_ranges.set_group_values(inner, state.manifest["optimizer"].get("groups", []))
    steps = [own["step"] for own in scalars.values() if "step" in own]
    sharding_ranges.count_steps(inner, int(max(steps, default=0)))
    sharding.refresh(accelerator, model, optimizer)


def _not_made_yet(accelerator, state: State, places, held, inner, is_same_optimizer: bool) -> list:
    """Live places for what the state has and the optimizer has not made in its first step."""
    live = {(one.name, one.kind) for one in held}
    added, dropped = [], set()
    for place in places:
        for kind, about in state.tensors[place.name]["kinds"].items():
            if kind == "buffer" or (place.name, kind) in live:
                continue
            if is_same_optimizer:
                added.append(sharding_ranges.add_state(place, inner, kind, tuple(about["shape"])))
            else:
                dropped.add(kind)
    if dropped:
        accelerator.print(f"resume: {type(inner).__name__} has no use for {', '.join(sorted(dropped))}: left behind")
    return added


def _has_same_cuts(accelerator: Accelerator, state: State, places) -> bool:
    """Whether this rank's tensors are cut just as those of the rank that saved, so that blocks are the same, too."""
    layout, ranks = sharding.state_layout(accelerator), state.manifest["ranks"]
    if state.manifest["layout"] != layout:
        return False
    if layout == "whole":
        return True
    rank = accelerator.process_index
    return len(ranks) == accelerator.num_processes and ranks[rank].get("cut") == sharding.cut(places)


def _is_packed(state: State, name: str, kind: str) -> bool:
    return state.tensors[name]["kinds"][kind]["dtype"] == "U8"


def _read_into(view: torch.Tensor, state: State, name: str, kind: str, start: int) -> None:
    for low in range(0, view.numel(), _PIECE_ELEMENTS):
        high = min(low + _PIECE_ELEMENTS, view.numel())
        view[low:high].copy_(state.read(name, kind, start + low, high - low))


def _check_tensors(state: State, accelerator: Accelerator, model: torch.nn.Module, buffers) -> None:
    live = sharding.trained_shapes(accelerator, model) | {one.name: tuple(one.shape) for one in buffers}
    saved = {name: tuple(about["shape"]) for name, about in state.tensors.items()}
    missing, unknown = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
    other = [name for name in live.keys() & saved.keys() if live[name] != saved[name]]
    for names, what in (
        (missing, "lacks"),
        (unknown, "holds, beside what is trained here,"),
        (other, "has in another shape"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"resume: {state.folder} {what} {', '.join(names[:3])}{more}: it was saved by the training of another "
                "model or adapter. Check model_name_or_path and the lora_ settings."
            )
