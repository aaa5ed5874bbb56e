"""Checkpoints of runs whose ranks each held everything: `model.safetensors` beside `optimizer.bin` (Accelerate's
`save_state`) or `optimizer.pt` (transformers' Trainer).

The optimizer's file numbers its parameters instead of naming them. The numbers follow the order in which they were
handed over, which is known for the two usual ways, and is checked against all shapes; anything else is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from import_state.pieces import Checkpoint, Later, flat, step_of
from import_state.recipe import Target
from import_state.unpickling import Foreign, load
from oneloop.state.format import DTYPES

_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_GATHERED = "pytorch_model_fsdp.bin"
"""Weights that were gathered from shards before they were saved; the optimizer's file has names then."""
_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Parts of names that transformers 5.24 does not decay (trainer.py, `get_decay_parameter_names`), in lower case."""


def is_one(folder: Path) -> bool:
    """Whether this is such a checkpoint."""
    return any((folder / name).is_file() for name in _OPTIMIZERS) and bool(_weight_files(folder))


def weights_alone(folder: Path) -> bool:
    """Whether a folder has a model in it, but nothing of a run in progress."""
    return bool(_weight_files(folder)) and not any((folder / name).is_file() for name in _OPTIMIZERS)


def _weight_files(folder: Path) -> list[Path]:
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise Foreign(f"{index} is no index of safetensors files: {error!r}") from error
            if odd := [shard for shard in shards if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", str(shard))]:
                raise Foreign(f"{index} names {odd[0]!r:.80}: expected are names of .safetensors files beside it.")
            return [folder / shard for shard in shards]
    return [folder / _GATHERED] if (folder / _GATHERED).is_file() else []


def read(folder: Path, target: Target, trust: bool) -> Checkpoint:
    """A folder with the whole weights and the whole optimizer. Raises Foreign."""
    found = Checkpoint("unsharded training", folder, None)
    if _weight_files(folder) == [folder / _GATHERED]:
        found.what = "FSDP, gathered"
        for key, value in load(folder / _GATHERED, trust).items():
            if (name := _name_of(key, found, target)) is not None:
                found.shapes[name] = tuple(value.shape)
                found.add(name, "param", 0, flat(value, f"{folder / _GATHERED}: {key}"))
    else:
        _read_safetensors(found, target)
    path = next(folder / name for name in _OPTIMIZERS if (folder / name).is_file())
    _read_optimizer(found, path, load(path, trust), target)
    return found


def _read_safetensors(found: Checkpoint, target: Target) -> None:
    from safetensors import SafetensorError, safe_open

    for file in _weight_files(found.folder):
        try:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():
                    about = opened.get_slice(key)
                    name = _name_of(key, found, target)
                    if name is None:
                        continue
                    shape, dtype = tuple(about.get_shape()), DTYPES.get(about.get_dtype())
                    if dtype is None:
                        raise Foreign(f"{file}: {key} has numbers of kind {about.get_dtype()}, which is not read.")
                    found.shapes[name] = shape
                    length = torch.Size(shape).numel()
                    found.add(name, "param", 0, Later(length, dtype, lambda file=file, key=key: _read(file, key)))
        except (OSError, SafetensorError) as error:
            raise Foreign(f"{file} cannot be read: {error}") from error


def _name_of(key: str, found: Checkpoint, target: Target) -> str | None:
    """The recipe's name for weights; None for those it does not train, and for the second name of tied ones."""
    name = target.name_of(key)
    if name is None or name not in found.shapes:
        return name
    if name in target.aliases.values():
        return None
    raise Foreign(f"{found.folder} has the weights {name} twice, the second time as {key}.")


def _read(file: Path, key: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return flat(opened.get_tensor(key), f"{file}: {key}")


def _read_optimizer(found: Checkpoint, path: Path, optimizer, target: Target) -> None:
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("state"), dict):
        raise Foreign(f"{path} is no optimizer of torch.")
    groups = optimizer.get("param_groups") or []
    if all(isinstance(key, str) for key in optimizer["state"]):  # gathered from shards: named already
        names = {key: key for key in optimizer["state"]}
    else:
        names = _names(path, optimizer["state"], groups, target)
    for key, state in optimizer["state"].items():
        name = target.name_of(names[key])
        if name is None:
            raise Foreign(f"{path} has moments of {names[key]}, which the recipe does not train.")
        for kind, value in state.items():
            place = f"{path}: {kind} of {name}"
            if kind == "step":
                found.scalars.setdefault(name, {})["step"] = step_of(value, place)
            elif isinstance(value, torch.Tensor) and value.dim() > 0:
                if tuple(value.shape) != found.shapes.setdefault(name, tuple(value.shape)):
                    raise Foreign(f"{place} has shape {list(value.shape)}, its weights {list(found.shapes[name])}.")
                found.add(name, kind, 0, flat(value, place))
    steps = {scalars["step"] for scalars in found.scalars.values()}
    if len(steps) == 1:
        found.steps["step of the optimizer"] = steps.pop()


def _names(path: Path, state: dict, groups: list, target: Target) -> dict[int, str]:
    """Number of a parameter in the optimizer -> its name."""
    if all("param_names" in group for group in groups) and groups:
        return {
            number: name
            for group in groups
            for number, name in zip(group["params"], group["param_names"], strict=False)
        }
    filled = [group["params"] for group in groups if group["params"]]
    fitting = []
    for order in _usual_orders(target):
        if [len(group) for group in order] != [len(numbers) for numbers in filled]:
            continue
        pairs = {
            number: name
            for numbers, group in zip(filled, order, strict=True)
            for number, name in zip(numbers, group, strict=True)
        }
        if set(pairs) == set(state) and _fit(state, pairs, target) and pairs not in fitting:
            fitting.append(pairs)
    if len(fitting) == 1:
        return fitting[0]
    raise Foreign(
        f"{path} numbers its parameters, and {'none' if not fitting else 'more than one'} of the usual orders fits the "
        "shapes: whose moments they are cannot be known. Save from the other tool with sharding, which keeps names."
    )


def _usual_orders(target: Target) -> list[list[list[str]]]:
    """Ways to hand parameters to an optimizer: all in the model's order, or those without weight decay apart."""
    names = list(target.shapes)
    rules = (
        lambda name: False,
        lambda name: any(re.search(part, name.lower()) for part in _NOT_DECAYED),
        lambda name: "norm" in name.lower(),
        lambda name: name.endswith("bias"),
        lambda name: len(target.shapes[name]) < 2,
    )
    orders = []
    for rule in rules:
        apart = [[name for name in names if not rule(name)], [name for name in names if rule(name)]]
        orders += [[group for group in order if group] for order in (apart, apart[::-1])]
    return orders


def _fit(state: dict, pairs: dict[int, str], target: Target) -> bool:
    return all(
        tuple(value.shape) == target.shapes[pairs[number]]
        for number, kinds in state.items()
        for kind, value in kinds.items()
        if kind != "step" and isinstance(value, torch.Tensor) and value.dim() > 0
    )
