"""DeepSpeed's checkpoint folders: flat fp32 partitions of the optimizer, one file a rank.

Stage 1 and 2: the parameters of a group, in the order of `param_shapes` (which is the shuffled one under round-robin
gradients), are laid end to end, with the gaps of `param_alignment_paddings` behind them where the file has such; this
is cut into equal parts, one a rank, and the last ones lack what was padded. Stage 3: every parameter is cut into equal
parts, one a rank, the last ones padded; a rank's parts of a group are laid end to end. (deepspeed 0.19.8:
runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py, engine.py `_get_zero_param_shapes`.)
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from import_state.pieces import Checkpoint, flat, step_of
from import_state.unpickling import Foreign, load

_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STAGE_1_2, _STAGE_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"


def tag_folder(folder: Path) -> Path | None:
    """The folder with the shards: `folder` itself, or what its file `latest` names; None if this is no such checkpoint.

    Raises Foreign for a `latest` that does not name a folder beside it.
    """
    if _is_tag_folder(folder):
        return folder
    latest = folder / "latest"
    if not latest.is_file():
        inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and _is_tag_folder(path)]
        if len(inside) > 1:
            raise Foreign(
                f"{folder} holds {', '.join(path.name for path in inside)} and no `latest`: name one of them."
            )
        return inside[0] if inside else None
    text = latest.read_bytes()[:300]
    tag = text.decode("utf-8", "replace").strip()
    if not re.fullmatch(r"[\w.-]+", tag, re.ASCII) or tag.strip(".") == "":
        raise Foreign(f"{latest} holds {text[:60]!r}, which is no name of a folder beside it. Name the folder itself.")
    if not (folder / tag).is_dir():
        raise Foreign(f"{latest} names {tag!r}, but there is no such folder beside it.")
    return folder / tag


def _is_tag_folder(folder: Path) -> bool:
    return any(folder.glob("*_optim_states.pt")) or any(folder.glob("*mp_rank_*_model_states.pt"))


def read(folder: Path, trust: bool) -> Checkpoint:
    """A folder with the shards of all ranks. Raises Foreign."""
    shards = _shards(folder)
    model = _model_states(folder, trust)
    found = Checkpoint("", folder, len(shards))
    states = []
    for path in shards:
        outer = load(path, trust)
        state = outer.get("optimizer_state_dict") if isinstance(outer, dict) else None
        if not isinstance(state, dict) or not {_STAGE_1_2, _STAGE_3} & set(state):
            raise Foreign(f"{path} holds no fp32 partitions of a ZeRO optimizer (stages 1 to 3).")
        states.append(state)
    stage_3 = _STAGE_3 in states[0]
    for path, state in zip(shards, states, strict=True):
        if (_STAGE_3 in state) != stage_3:
            raise Foreign(f"{path} is of another ZeRO stage than {shards[0].name}: the folder mixes checkpoints.")
        count = state.get("partition_count", len(shards))
        if (max(count) if isinstance(count, list | tuple) else int(count)) != len(shards):
            raise Foreign(
                f"{path} was written by {count} ranks, but the folder has {len(shards)} shards: some are missing, or "
                "left from another checkpoint."
            )
        if state.get("ds_zero_partition_groups"):
            raise Foreign(f"{path} has experts spread over ranks, which cannot be imported.")
    stage = 3 if stage_3 else int(states[0].get("zero_stage", 1))
    found.what = f"DeepSpeed ZeRO-{stage}"
    if isinstance(model.get("ds_version"), str):
        found.versions["deepspeed"] = model["ds_version"]
    groups = _shapes(model["param_shapes"], folder)
    found.shapes = {name: shape for group in groups for name, shape in group.items()}
    if "global_steps" in model:
        found.steps["global_steps of the model states"] = step_of(model["global_steps"], f"{folder}: global_steps")
    if skipped := step_of(model.get("skipped_steps") or 0, f"{folder}: skipped_steps"):
        found.notes.append(f"{skipped} of the steps were left out by the loss scaler, and count as done.")
    (_read_stage_3 if stage_3 else _read_stage_1_2)(found, groups, states, shards)
    for name in model.get("buffer_names") or []:  # whole on every rank
        buffer = model["module"][name]
        found.shapes[name] = tuple(buffer.shape)
        found.add(name, "param", 0, flat(buffer, f"{folder}: {name}"))
    return found


def _shards(folder: Path) -> list[Path]:
    names = {path.name: _SHARD.fullmatch(path.name) for path in folder.glob("*_optim_states.pt")}
    if odd := sorted(name for name, match in names.items() if match is None or int(match[2]) != 0):
        raise Foreign(
            f"{folder / odd[0]}: a checkpoint of a model that is itself spread over ranks (tensor, pipeline or expert "
            "parallel) cannot be imported."
        )
    by_rank = {int(match[1]): folder / name for name, match in names.items()}
    if not by_rank:
        raise Foreign(f"{folder} lacks zero_pp_rank_*_optim_states.pt: without, there are no fp32 weights or moments.")
    if len(by_rank) != len(names):
        raise Foreign(f"{folder} holds the shards of two checkpoints ({', '.join(sorted(names)[:3])}, ...).")
    if missing := sorted(set(range(max(by_rank) + 1)) - set(by_rank)):
        raise Foreign(
            f"{folder} lacks the optimizer shard of rank(s) {', '.join(map(str, missing[:8]))}. Copy the checkpoint "
            "from all nodes that wrote it."
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _model_states(folder: Path, trust: bool) -> dict[str, Any]:
    # Under stage 3 every rank has one, with the same shapes in it.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        path = folder / name
        if path.is_file():
            model = load(path, trust)
            if not isinstance(model, dict) or not isinstance(model.get("param_shapes"), list):
                raise Foreign(f"{path} has no param_shapes, which tell what the flat partitions are made of.")
            if int(model.get("mp_world_size") or 1) != 1:
                raise Foreign(f"{path}: a model that is itself spread over ranks cannot be imported.")
            return model
    raise Foreign(f"{folder} lacks mp_rank_00_model_states.pt, which tells what the flat partitions are made of.")


def _shapes(groups: list, folder: Path) -> list[dict[str, tuple[int, ...]]]:
    try:
        return [{str(name): tuple(map(int, shape)) for name, shape in group.items()} for group in groups]
    except (AttributeError, TypeError, ValueError) as error:
        raise Foreign(f"{folder}: param_shapes of the model states are not names and shapes: {error}") from error


def _read_stage_1_2(found: Checkpoint, groups: list, states: list[dict], shards: list[Path]) -> None:
    mappings = {path: state.get("param_slice_mappings") for path, state in zip(shards, states, strict=True)}
    for number, shapes in enumerate(groups):
        paddings = states[0].get("param_alignment_paddings") or []
        paddings = paddings[number] if number < len(paddings) else [0] * len(shapes)
        if len(paddings) != len(shapes):
            raise Foreign(f"{shards[0]}: {len(paddings)} paddings for the {len(shapes)} parameters of group {number}.")
        parts = []  # (where the rank's part begins, its tensors by kind)
        position = 0
        for path, state in zip(shards, states, strict=True):
            master = _group(state[_STAGE_1_2], number, path)
            moments, step = _moments(state.get("base_optimizer_state"), number, state, path)
            parts.append((position, path, {"param": master} | moments))
            position += master.numel()
            _note_step(found, shapes, step, path)
        offset = 0
        for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
            numel = math.prod(shape)
            for begin, path, tensors in parts:
                length = tensors["param"].numel()
                low, high = max(offset, begin), min(offset + numel, begin + length)
                if low < high:
                    _check_mapping(mappings[path], number, name, low - begin, high - low, path)
                    for kind, tensor in tensors.items():
                        if tensor.numel() < length:
                            raise Foreign(f"{path}: {kind} of group {number} is shorter than its weights.")
                        found.add(name, kind, low - offset, tensor[low - begin : high - begin])
            offset += numel + int(padding)
        # What is padded at the end, where it is kept at all, is less than one unit of alignment a rank.
        if not offset <= position <= offset + 16 * len(shards):
            raise Foreign(
                f"{found.folder}: the shards have {position} elements in group {number}, its parameters {offset}: the "
                "shards are not of one checkpoint, or not complete."
            )


def _check_mapping(mappings: Any, number: int, name: str, start: int, length: int, path: Path) -> None:
    """The file says a second time where a parameter lies, which proves the order of `param_shapes`; older ones do
    not."""
    if not isinstance(mappings, list) or number >= len(mappings):
        return
    address = mappings[number].get(name)
    said = (getattr(address, "start", None), getattr(address, "numel", None))
    if said != (start, length):
        raise Foreign(f"{path}: {name} lies at {said} by param_slice_mappings, at {(start, length)} by param_shapes.")


def _read_stage_3(found: Checkpoint, groups: list, states: list[dict], shards: list[Path]) -> None:
    num_ranks = len(shards)
    for number, shapes in enumerate(groups):
        for rank, (path, state) in enumerate(zip(shards, states, strict=True)):
            master = _group(state[_STAGE_3], number, path)
            moments, step = _moments(state.get("optimizer_state_dict"), number, state, path)
            _note_step(found, shapes, step, path)
            tensors = {"param": master} | moments
            offset = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                part = -(-numel // num_ranks)
                length = max(0, min(part, numel - rank * part))
                for kind, tensor in tensors.items():
                    if tensor.numel() < offset + length:
                        raise Foreign(f"{path}: {kind} of group {number} ends before {name}: it is of another model.")
                    found.add(name, kind, rank * part, tensor[offset : offset + length])
                offset += part
            if master.numel() < offset:
                raise Foreign(f"{path}: group {number} has {master.numel()} elements, its parameters {offset}.")


def _group(groups: Any, number: int, path: Path) -> torch.Tensor:
    if not isinstance(groups, list | tuple) or number >= len(groups):
        raise Foreign(f"{path} lacks the weights of parameter group {number}.")
    return flat(groups[number], f"{path}: the weights of parameter group {number}")


def _moments(base: Any, number: int, state: dict, path: Path) -> tuple[dict[str, torch.Tensor], int | None]:
    """The moments of one group on one rank, and the optimizer's step."""
    if isinstance(base, list | tuple):  # an elastic checkpoint: without the padding, one entry a group
        inner, param_groups = dict(enumerate(base)), []
    elif isinstance(base, dict) and isinstance(base.get("state"), dict):
        inner, param_groups = base["state"], base.get("param_groups") or []
    else:
        raise Foreign(f"{path} has no state of an optimizer: only weights were saved.")
    own = inner.get(number)
    if not isinstance(own, dict):
        raise Foreign(f"{path} has no moments of parameter group {number}: was it saved before the first step?")
    step = own.get("step", state.get("base_optimizer_state_step"))
    if step is None:  # some of DeepSpeed's own optimizers keep it beside the learning rate
        step = next((group["step"] for group in param_groups if isinstance(group, dict) and "step" in group), None)
    moments = {
        str(kind): flat(value, f"{path}: {kind} of parameter group {number}")
        for kind, value in own.items()
        if kind != "step" and isinstance(value, torch.Tensor) and value.dim() > 0
    }
    return moments, None if step is None else step_of(step, f"{path}: step")


def _note_step(found: Checkpoint, names, step: int | None, path: Path) -> None:
    if step is None:
        return
    for name in names:
        known = found.scalars.setdefault(name, {}).setdefault("step", step)
        if known != step:
            raise Foreign(f"{path} is of step {step}, other shards are of step {known}: the folder mixes checkpoints.")
    found.steps.setdefault("step of the optimizer", step)
