"""Where this rank holds which part of each trained tensor: one answer a backend, behind which all training state is
saved and loaded alike.

Every backend keeps the fp32 master of a parameter, and so its moments, as one contiguous range of the flattened
parameter, inside some tensor that its torch optimizer steps on: the parameter itself, this rank's shard of it, or a
flat partition of many.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oneloop.sharding.chosen import strategy
from oneloop.sharding.whole import plain_name

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Placement:
    """Elements [start, start + length) of a parameter, held at `offset` of the flattened local part of `owner`."""

    name: str
    """The parameter's plain name in the unwrapped model."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    owner: torch.Tensor
    """The tensor that the torch optimizer steps on, and keeps its state under."""
    offset: int
    start: int
    length: int
    copy: tuple[int, int] = (0, 1)
    """(number of this copy, how many ranks hold one): ranks with equal copies share the writing."""


def state_layout(accelerator: Accelerator) -> str:
    """How the tensors that the optimizer steps on are cut: `whole` where each rank has all of every parameter."""
    name = strategy(accelerator)
    return "whole" if name in ("single", "ddp", "zero0") else f"{name}x{accelerator.num_processes}"


def placements(accelerator: Accelerator, model: torch.nn.Module, optimizer) -> list[Placement]:
    """What this rank holds of the parameters that are trained, in the order of the model. A parameter of which it
    holds nothing does not occur."""
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    name = strategy(accelerator)
    if name == "fsdp2":
        _reshard(module)
    trained = [(plain_name(n), p) for n, p in module.named_parameters() if p.requires_grad]
    if name in ("zero1", "zero2"):
        return _of_flat_partitions(trained, optimizer.optimizer)
    if name == "zero3":
        return _of_partitioned(trained, optimizer.optimizer)
    if name == "fsdp2":
        return [placement for n, p in trained for placement in _of_shard(n, p)]
    copy = (accelerator.process_index, accelerator.num_processes)
    return [Placement(n, tuple(p.shape), p, 0, 0, p.numel(), copy) for n, p in trained]


def cut(places: list[Placement]) -> str:
    """A short value of how the tensors that the optimizer steps on are cut on this rank: settings of a backend move
    the cuts, and with them the blocks that share a scale."""
    owners: dict[int, int] = {}
    lines = [(p.name, owners.setdefault(id(p.owner), len(owners)), p.offset, p.start, p.length) for p in places]
    return hashlib.sha256(repr(lines).encode()).hexdigest()[:16]


def trained_shapes(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of every parameter that is trained, also of those that this rank holds nothing of."""
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    return {
        plain_name(name): tuple(getattr(p, "ds_shape", p.shape))
        for name, p in module.named_parameters()
        if p.requires_grad
    }


def torch_optimizer(optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside whatever Accelerate and the backend have put around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def refresh(accelerator: Accelerator, model: torch.nn.Module, optimizer) -> None:
    """Bring what a backend computes with up to date, after the masters were written to. Collective."""
    name = strategy(accelerator)
    if name in ("zero1", "zero2"):
        optimizer.optimizer.update_lp_params()
    elif name == "zero3":
        # What its `step` does after each update (deepspeed 0.19.8, zero/stage3.py).
        zero = optimizer.optimizer
        zero._partition_all_parameters()
        for group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()


# --- one a backend ----------------------------------------------------------------------------------------------------


def _of_flat_partitions(trained: list[tuple[str, torch.nn.Parameter]], zero) -> list[Placement]:
    """ZeRO-1 and 2: the parameters of a group lie one after the other, cut into equal partitions wherever that falls
    (deepspeed 0.19.8, utils/mixed_precision_linkage.py). ZeRO-1 in bf16 has an optimizer of its own there
    (bf16_optimizer.py, chosen by engine.py, `_configure_bf16_optimizer`), which names the partitions otherwise."""
    found, own = [], hasattr(zero, "fp32_groups_flat_partition")
    partitions = zero.fp32_groups_flat_partition if own else zero.single_partition_of_fp32_groups
    for name, parameter in trained:
        fragment = parameter._hp_mapping
        if fragment is not None:
            flat = partitions[fragment.param_group_index]
            address, length = fragment.lp_fragment_address, fragment.lp_fragment_address.numel
            offset = fragment.hp_fragment_address.start
            found.append(Placement(name, tuple(parameter.shape), flat, offset, address.start, length))
    return found


def _of_partitioned(trained: list[tuple[str, torch.nn.Parameter]], zero) -> list[Placement]:
    """ZeRO-3: each parameter is cut into equal partitions, the last ones padded (deepspeed 0.19.8, zero/stage3.py,
    `grad_position`)."""
    found = []
    for name, parameter in trained:
        group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
        if zero._swappable_optimizer_subgroup(group):
            raise ValueError(
                "offload_optimizer_device: nvme: states cannot be saved from there. Use cpu, or save_every 0."
            )
        start = size * torch.distributed.get_rank(parameter.ds_process_group)
        length = max(0, min(size, parameter.ds_numel - start))
        if length:
            flat = zero.fp32_partitioned_groups_flat[group]
            found.append(Placement(name, tuple(parameter.ds_shape), flat, offset, start, length))
    return found


def _of_shard(name: str, parameter: torch.Tensor) -> list[Placement]:
    """FSDP2: a shard of the first dimension, on one mesh dimension or, with equal copies, on one of two."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        raise ValueError(f"{name} is not sharded by FSDP2, which the other weights are: its state cannot be saved.")
    mesh, placed = parameter.device_mesh, parameter.placements
    if any(not isinstance(one, Replicate) and not (isinstance(one, Shard) and one.dim == 0) for one in placed):
        raise ValueError(f"{name} is sharded as {placed}: only shards of the first dimension can be saved.")
    number, copies = 0, 1
    for dimension, one in enumerate(placed):
        if isinstance(one, Replicate):
            number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
            copies *= mesh.size(dimension)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placed)
    length = parameter.to_local().numel()
    if not length:
        return []
    row = parameter.numel() // parameter.shape[0]
    return [Placement(name, tuple(parameter.shape), parameter, 0, offset[0] * row, length, (number, copies))]


def _reshard(module: torch.nn.Module) -> None:
    """Free the whole weights that a forward pass without a backward leaves in the outermost module: they would be
    listed instead of the shards, and read instead of what is loaded into these."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
