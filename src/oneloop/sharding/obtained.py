"""What a prepared model turned out to be, looked up in the prepared objects themselves."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from oneloop.sharding.chosen import mixed_precision, strategy

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Obtained:
    """What a prepared model turned out to be; compared with what was asked for, and printed in the banner."""

    strategy: str
    world_size: int
    device: str
    precision: str
    offload: str
    """`none`, `optimizer`, or `optimizer + parameters`."""
    wrapped: dict[str, int]
    """Class name -> number of modules that the backend wraps or shards on their own."""
    parameter_fraction: float
    """Share of all parameter elements that a rank holds between steps, on average."""
    optimizer_fraction: float
    """Share of the trainable elements whose optimizer state a rank holds, on average."""
    parameter_bytes: int
    """What a rank holds of all parameters between steps, on average, with the scales of quantised ones; without fp32
    copies that a backend keeps beside them."""
    quantized_bytes: int
    """The part of it that is 4- or 8-bit weights and their scales; 0 without quantisation."""
    quantized_fraction: float
    """Share of the quantised weights that a rank holds, on average; 0 without quantisation."""


def obtained(accelerator: Accelerator, model: torch.nn.Module, optimizer) -> Obtained:
    """Look at the prepared objects themselves, not at the settings that were meant to produce them."""
    name = strategy(accelerator)
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    offload = "none"
    if name.startswith("zero"):
        wrapped = Counter([type(model).__name__, type(optimizer.optimizer).__name__])
        zero = model._config.zero_config
        parts = [
            kind
            for kind, part in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_param))
            if part is not None and part.device != "none"
        ]
        offload = " + ".join(parts) or "none"
    elif name == "fsdp2":
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

        wrapped = Counter(type(m).__name__.removeprefix("FSDP") for m in module.modules() if isinstance(m, FSDPModule))
        if isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            offload = "optimizer + parameters"
    else:
        wrapped = Counter([type(model).__name__])
    quantized = _quantized_layers(module)
    packed = [layer.weight for layer in quantized]
    packed_bytes = sum(_local_numel(w) * w.element_size() for w in packed) + sum(map(_scale_bytes, quantized))
    mine = (
        sum(map(_local_numel, parameters)) / max(sum(map(num_elements, parameters)), 1),
        _optimizer_numel(name, optimizer, trainable) / max(sum(map(num_elements, trainable)), 1),
        sum(_local_numel(p) * p.element_size() for p in parameters) + sum(map(_scale_bytes, quantized)),
        packed_bytes,
        sum(map(_local_numel, packed)) / max(sum(map(num_elements, packed)), 1),
    )
    # The mean over ranks, for all to decide alike: dimension 0 of a small tensor may leave a rank without any of it.
    everyone = gather_object([mine])
    mean = [sum(values) / len(everyone) for values in zip(*everyone, strict=True)]
    return Obtained(
        strategy=name,
        world_size=accelerator.num_processes,
        device=str(accelerator.device),
        precision=mixed_precision(accelerator),
        offload=offload,
        wrapped=dict(wrapped),
        parameter_fraction=mean[0],
        optimizer_fraction=mean[1],
        parameter_bytes=round(mean[2]),
        quantized_bytes=round(mean[3]),
        quantized_fraction=mean[4],
    )


def _quantized_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    if "bitsandbytes" not in sys.modules:  # without it nothing is quantised, and importing it takes seconds
        return []
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return [layer for layer in module.modules() if isinstance(layer, Linear4bit | Linear8bitLt)]


def _scale_bytes(layer: torch.nn.Module) -> int:
    """Bytes of what turns a layer's packed weight into numbers: held whole on every rank."""
    tensors = []
    state = getattr(layer, "quant_state", None)  # 4 bits: scales, which are quantised themselves
    while state is not None:
        tensors += [state.absmax, state.code]
        state = state.state2
    if hasattr(layer, "state"):  # 8 bits: a scale a row, first with the weight, after the first use with the layer
        tensors += [scale for scale in (layer.weight.SCB, layer.state.SCB) if scale is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def num_elements(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter, also where it is a placeholder for a partitioned one."""
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()


def weight_counter(module: torch.nn.Module) -> Callable[[torch.Tensor], int]:
    """Counts the weights of a parameter of `module` as the model has them: two for each packed byte of 4-bit ones."""
    unpacked = {id(layer.weight): layer.in_features * layer.out_features for layer in _quantized_layers(module)}
    return lambda parameter: unpacked.get(id(parameter)) or num_elements(parameter)


def _local_numel(parameter: torch.Tensor) -> int:
    if hasattr(parameter, "ds_tensor"):
        # Small parameters are kept whole between steps (stage3_param_persistence_threshold).
        return max(parameter.ds_tensor.numel(), parameter.numel())
    return local(parameter).numel()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer_numel(name: str, optimizer, trainable: list[torch.Tensor]) -> int:
    if name in ("zero1", "zero2", "zero3"):
        inner = optimizer.optimizer  # DeepSpeed's ZeRO optimizer; its torch optimizer holds the flat partitions
        return sum(p.numel() for group in inner.optimizer.param_groups for p in group["params"]) or _flat_numel(inner)
    return sum(local(p).numel() for p in trainable)


def _flat_numel(inner) -> int:
    # ZeRO-3 empties the parameter groups between steps and keeps the masters here (deepspeed 0.19.8, stage3.py).
    return sum(p.numel() for p in inner.fp32_partitioned_groups_flat)


def check_same_on_all_ranks(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Stop when ranks are about to start from different weights, which sharding would silently mix.

    Skipped for parameters that are partitioned already, and where only the first rank loads (its values are broadcast).
    Raises RuntimeError naming the first differing parameter.
    """
    only_first_loads = strategy(accelerator) == "fsdp2" and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
    if accelerator.num_processes == 1 or only_first_loads:
        return
    named = [(n, p) for n, p in model.named_parameters() if not hasattr(p, "ds_id")]
    if not named:
        return
    # Of bytes, not of values: 4-bit weights packed into floats may spell NaN.
    sums = torch.stack([p.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64) for _, p in named])
    everyone = accelerator.gather(sums[None].to(accelerator.device))
    different = (everyone != everyone[0]).any(0).nonzero()
    if len(different):
        name = named[int(different[0])][0]
        raise RuntimeError(f"The ranks hold different initial weights ({name} and {len(different) - 1} more).")
