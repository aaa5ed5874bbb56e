"""The live numbers of a training state as flat views: what is written out, and what is written into.

A view goes both ways, so saving and loading cannot disagree about what belongs where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oneloop.sharding.obtained import local
from oneloop.sharding.placement import Placement
from oneloop.sharding.whole import plain_name

if TYPE_CHECKING:
    from accelerate import Accelerator

KINDS = {"state1": "exp_avg", "state2": "exp_avg_sq"}
"""bitsandbytes' names of the moments, and torch's, under which they are saved."""
BLOCK_SIZE = 256
"""Elements that share a scale in moments of 8 bits (bitsandbytes 0.50, optim/optimizer.py, `init_state`)."""


@dataclass
class Held:
    """One kind of number of a parameter (its value, a moment, ...), as far as this rank holds it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    """Shape of the whole of it; another one than the parameter's for factored moments."""
    start: int
    """Where in the flattened whole this part begins."""
    view: torch.Tensor
    """(length,) view onto the live numbers; codes (uint8) where they are quantised."""
    copy: tuple[int, int]
    packed: Packed | None = None


@dataclass
class Packed:
    """How quantised numbers are to be read: value = table[code] * scale of its block. Blocks are those of the tensor
    that the optimizer steps on, so a part may begin inside one."""

    codes: torch.Tensor
    """All codes of that tensor, flat."""
    scales: torch.Tensor
    """(blocks,) float32, live."""
    table: torch.Tensor
    """(256,) float32"""
    offset: int
    """Where in `codes` this part begins."""

    @property
    def phase(self) -> int:
        return self.offset % BLOCK_SIZE


def held(placements: Iterable[Placement], optimizer: torch.optim.Optimizer) -> tuple[list[Held], dict[str, dict]]:
    """All ranges of masters and optimizer state on this rank, and the single numbers kept for each parameter.

    optimizer: torch's own, see `torch_optimizer`. Before its first step it has no state, and none is listed. Raises
    ValueError for state that is cut apart here and is not made of one number per weight.
    """
    ranges, scalars = [], {}
    for place in placements:
        values = flat(place.owner)[place.offset : place.offset + place.length]
        ranges.append(Held(place.name, "param", place.shape, place.start, values, place.copy))
        own = scalars.setdefault(place.name, {})
        state = optimizer.state.get(place.owner, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and not key.startswith(("absmax", "qmap")):
                ranges.append(_of_state(place, state, key, local(value)))
            elif isinstance(value, torch.Tensor) and value.dim():
                continue  # goes with the codes it belongs to
            elif isinstance(value, int | float | torch.Tensor):
                own[key] = value.item() if isinstance(value, torch.Tensor) else value
            elif value is not None:
                raise ValueError(
                    f"optim: {type(optimizer).__name__} keeps {key!r} for {place.name}, which cannot be saved"
                )
    return ranges, scalars


def buffers(accelerator: Accelerator, model: torch.nn.Module) -> list[Held]:
    """The buffers of the model that its own files hold too, such as running statistics: whole on every rank.

    Those of quantised layers are left out: they belong to the frozen base model.
    """
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    saved = set(module.state_dict().keys())
    copy = (accelerator.process_index, accelerator.num_processes)
    return [
        Held(plain_name(name), "buffer", tuple(buffer.shape), 0, flat(buffer), copy)
        for name, buffer in module.named_buffers()
        if name in saved and buffer.numel()
    ]


def _of_state(place: Placement, state: dict, key: str, value: torch.Tensor) -> Held:
    kind = KINDS.get(key, key)
    elements = local(place.owner).numel()
    if value.numel() != elements:
        if place.length != math.prod(place.shape) or place.length != elements:
            raise ValueError(
                f"optim: the state {key!r} of {place.name} has the shape {tuple(value.shape)}, and this strategy keeps "
                "the weight in parts: it cannot be saved. Use accelerate_configs/ddp.yaml, another optim, or "
                "save_every 0."
            )
        return Held(place.name, kind, tuple(value.shape), 0, flat(value), place.copy)
    end = place.offset + place.length
    packed = None
    number = key.removeprefix("state")
    if f"absmax{number}" in state:
        packed = Packed(flat(value), state[f"absmax{number}"], state[f"qmap{number}"], place.offset)
    return Held(place.name, kind, place.shape, place.start, flat(value)[place.offset : end], place.copy, packed)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as a 1-D view. Raises ValueError where it lies in memory in another order."""
    part = local(tensor.detach())
    if not part.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(part.shape)} is not contiguous in memory: its state cannot be saved"
        )
    return part.view(-1)


def set_scalars(placements: Iterable[Placement], optimizer: torch.optim.Optimizer, scalars: dict[str, dict]) -> None:
    """Write the single numbers of each parameter back into the optimizer's state.

    Where one tensor holds many parameters they must agree: it has one step counter. Raises ValueError otherwise.
    """
    first: dict[int, str] = {}
    for place in placements:
        state, wanted = optimizer.state.get(place.owner, {}), scalars[place.name]
        other = first.setdefault(id(place.owner), place.name)
        if scalars[other] != wanted:
            raise ValueError(
                f"the state was saved with other optimizer counters for {place.name} ({wanted}) than for {other} "
                f"({scalars[other]}), and this strategy keeps one for both. Resume under a strategy like the one that "
                "saved it."
            )
        for key, value in wanted.items():
            if isinstance(state.get(key), torch.Tensor):
                state[key].fill_(value)
            elif key not in state:  # made in a later step than the first
                state[key] = value
            else:
                state[key] = type(state[key])(value)  # a counter may be an int here and a float there


def create_state(placements: Iterable[Placement], optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state for everything it steps on here, with contents yet to be written.

    Optimizers make it in their first step. So each is given one, on gradients of zero at a learning rate of zero, one
    tensor at a time; what it does to the weights does not matter, they are overwritten as well.
    """
    groups, done = optimizer.param_groups, set()
    try:
        for owner in (place.owner for place in placements):
            if id(owner) in done:
                continue
            done.add(id(owner))
            gradient, owner.grad = owner.grad, torch.zeros_like(owner)
            optimizer.param_groups = [{**groups[0], "params": [owner], "lr": 0.0}]
            optimizer.step()
            owner.grad = gradient
    finally:
        optimizer.param_groups = groups


def add_state(place: Placement, optimizer: torch.optim.Optimizer, kind: str, shape: tuple[int, ...]) -> Held:
    """A place for a kind of state that the optimizer has not made yet, as it makes it in a later step than its first.

    Raises ValueError for one that is not made of one number per weight, where the weights are cut apart.
    """
    owner = local(place.owner)
    state = optimizer.state[place.owner]
    if shape == place.shape:
        state[kind] = torch.zeros_like(place.owner)
    elif place.length == math.prod(place.shape) == owner.numel():
        state[kind] = torch.zeros(shape, dtype=owner.dtype, device=owner.device)
    else:
        raise ValueError(f"the state holds {kind!r} of {place.name}, which has no place under this strategy")
    return _of_state(place, state, kind, local(state[kind]))


_NOT_KEPT = ("params", "lr")  # the one is saved as it is, the other set before every step


def group_values(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The settings of each parameter group, without parameters and learning rate."""
    return [{k: v for k, v in group.items() if k not in _NOT_KEPT} for group in optimizer.param_groups]


def changed_group_values(optimizer: torch.optim.Optimizer, built: list[dict]) -> list[dict]:
    """What the optimizer has changed in its parameter groups since it was built, as some keep counters there.

    Raises ValueError for what is neither number nor text.
    """
    changed = []
    for now, before in zip(group_values(optimizer), built, strict=True):
        mine = {}
        for key, value in now.items():
            value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if key in before and type(before[key]) is type(value) and before[key] == value:
                continue
            if not isinstance(value, bool | int | float | str):
                raise ValueError(
                    f"optim: {type(optimizer).__name__} keeps {key!r} in its parameter groups, which cannot be saved"
                )
            mine[key] = value
        changed.append(mine)
    return changed


def set_group_values(optimizer: torch.optim.Optimizer, values: list[dict]) -> None:
    """Put back what `changed_group_values` returned. Raises ValueError for another number of groups."""
    if any(values) and len(values) != len(optimizer.param_groups):
        raise ValueError(
            f"the state was saved with values for {len(values)} parameter groups of the optimizer, and there are "
            f"{len(optimizer.param_groups)}"
        )
    for group, mine in zip(optimizer.param_groups, values, strict=False):
        for key, value in mine.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def count_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Bring an optimizer's own count of steps, if it keeps one beside its state, to `num_steps`.

    DeepSpeed's CPU Adam multiplies the powers of its betas up from step to step in fp32 (0.19.8, csrc/includes/
    cpu_adam.h, `IncrementStep`); taken at once they differ in the last bit, and the run with them. So it is stepped
    that often on a single number. To go when the powers are computed from the step.
    """
    update = getattr(getattr(optimizer, "ds_opt_adam", None), "adam_update", None)
    if update is None:
        return
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    numbers = [torch.zeros(1) for _ in range(4)]
    for step in range(1, num_steps + 1):
        update(
            optimizer.opt_id, step, 0.0, beta1, beta2, group["eps"], 0.0, group["bias_correction"], *numbers
        )  # fmt: skip


def requantize(packed: Packed, values: torch.Tensor) -> None:
    """Write fp32 `values`, (elements,) of the whole tensor that `packed` is a part of, into its codes and scales."""
    from bitsandbytes import functional

    functional.quantize_blockwise(
        values.to(packed.codes.device), code=packed.table, absmax=packed.scales, out=packed.codes, blocksize=BLOCK_SIZE
    )
