"""The only module (with `launch.py`) that asks which backend runs: what it did to the model, and how to get whole
tensors, gradient norms and generation out of it.

Strategies by name: `single`, `ddp`, `zero0` to `zero3` (DeepSpeed), `fsdp2`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType, gather_object

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def strategy(accelerator: Accelerator) -> str:
    """The name of the strategy that Accelerate selected."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return f"fsdp{accelerator.state.fsdp_plugin.fsdp_version}"
    return "single" if kind == DistributedType.NO else "ddp"


def mixed_precision(accelerator: Accelerator) -> str:
    """`no`, `bf16` or `fp16`: the dtype that matrix products run in, whoever casts."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        autocast = accelerator.state.deepspeed_plugin.deepspeed_config.get("torch_autocast", {})
        if autocast.get("enabled"):
            return {"bfloat16": "bf16", "float16": "fp16"}[autocast["dtype"]]
    return accelerator.mixed_precision


def compute_dtype(accelerator: Accelerator) -> torch.dtype:
    """The dtype that matrix products run in, and that frozen weights are held in."""
    return DTYPES[mixed_precision(accelerator)]


def supports_fused_adamw(accelerator: Accelerator) -> bool:
    """Whether AdamW can run as one kernel: the device has it, and no loss scale would be left to that kernel.

    Where DeepSpeed partitions nothing, the gradients are clipped right before the step (`clip_before_step`), so they
    must have been unscaled by then; a fused step does that itself, later.
    """
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    scaled = strategy(accelerator) == "zero0" and mixed_precision(accelerator) == "fp16"
    return accelerator.device.type in _get_fused_kernels_supported_devices() and not scaled


def needs_reentrant_checkpointing(accelerator: Accelerator, trains_adapter: bool) -> bool:
    """Whether gradient checkpointing must be the re-entrant kind.

    The other kind compares the metadata of what it recomputes with what it saved; under ZeRO-3 a frozen weight is a
    gathered tensor the first time and may be an empty placeholder the second (deepspeed 0.19.8).
    """
    return trains_adapter and strategy(accelerator) == "zero3"


def gradient_checkpointing_by_config(accelerator: Accelerator) -> bool:
    """Whether the Accelerate YAML itself switches activation checkpointing on."""
    return strategy(accelerator) == "fsdp2" and accelerator.state.fsdp_plugin.activation_checkpointing


# --- fp32 masters ----------------------------------------------------------------------------------------------------

Masters = list[tuple[torch.nn.Parameter, torch.Tensor]]


def take_masters(accelerator: Accelerator, model: torch.nn.Module) -> Masters:
    """Keep the fp32 values of what is trained, where the backend is about to round them to 16 bits.

    DeepSpeed casts the model first and makes its masters from the result (deepspeed 0.19.8, engine.py,
    `_cast_module_mixed_precision`), so a run would start elsewhere than under the other strategies. Under ZeRO-3 the
    adapter is cast here: next to a 16-bit base it gathers parameters of one dtype only. What ZeRO-3 partitions while
    it loads has been rounded already; a checkpoint stored in 16 bits loses nothing by that.
    """
    dtype = compute_dtype(accelerator)
    if strategy(accelerator) not in ("zero1", "zero2", "zero3") or dtype == torch.float32:
        return []
    kept = [(p, p.data) for p in model.parameters() if p.requires_grad and not hasattr(p, "ds_id")]
    if strategy(accelerator) == "zero3":
        for parameter, value in kept:
            parameter.data = value.to(dtype)
    return kept


def restore_masters(masters: Masters) -> None:
    """Write the kept values into the backend's fp32 masters; its 16-bit copies are the rounded values already."""
    for parameter, value in masters:
        if not hasattr(parameter, "ds_id"):
            from deepspeed.utils import safe_set_full_fp32_param

            safe_set_full_fp32_param(parameter, value)
            continue
        from deepspeed.utils import safe_set_local_fp32_param

        size = parameter.ds_tensor.numel()  # the last partition is padded
        padded = torch.nn.functional.pad(
            value.flatten(), (0, size * torch.distributed.get_world_size() - value.numel())
        )
        safe_set_local_fp32_param(parameter, padded.narrow(0, size * torch.distributed.get_rank(), size))


# --- what was obtained -----------------------------------------------------------------------------------------------


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
    fractions = (
        sum(map(_local_numel, parameters)) / max(sum(map(num_elements, parameters)), 1),
        _optimizer_numel(name, optimizer, trainable) / max(sum(map(num_elements, trainable)), 1),
    )
    # The mean over ranks, for all to decide alike: dimension 0 of a small tensor may leave a rank without any of it.
    everyone = gather_object([fractions])
    return Obtained(
        strategy=name,
        world_size=accelerator.num_processes,
        device=str(accelerator.device),
        precision=mixed_precision(accelerator),
        offload=offload,
        wrapped=dict(wrapped),
        parameter_fraction=sum(one[0] for one in everyone) / len(everyone),
        optimizer_fraction=sum(one[1] for one in everyone) / len(everyone),
    )


def num_elements(parameter: torch.Tensor) -> int:
    """Elements of the whole parameter, also where it is a placeholder for a partitioned one."""
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()


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
    sums = torch.stack([p.detach().double().abs().sum() for _, p in named]).to(accelerator.device, torch.float32)
    everyone = accelerator.gather(sums[None])
    different = (everyone != everyone[0]).any(0).nonzero()
    if len(different):
        name = named[int(different[0])][0]
        raise RuntimeError(f"The ranks hold different initial weights ({name} and {len(different) - 1} more).")


# --- the step --------------------------------------------------------------------------------------------------------


def clip_grad_norm(
    accelerator: Accelerator, model: torch.nn.Module, max_grad_norm: float
) -> torch.Tensor | float | None:
    """Clip the gradients of a finished step to `max_grad_norm` (0: do not) and return their norm *before* clipping.

    The norm is the same number under every strategy: the 2-norm over all trainable parameters of the whole model.
    Under DeepSpeed the step, clipping included, has happened inside `backward`. Returns None between the
    micro-batches of a step. The result may live on the device: reading it is a synchronisation.
    """
    if not accelerator.sync_gradients:
        return None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return model.get_global_grad_norm()
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm if max_grad_norm > 0 else float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_before_step(engine, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
    """Own the clipping where DeepSpeed partitions nothing: its fp32 path clips but forgets the norm, and does neither
    when clipping is off (deepspeed 0.19.8, engine.py, `_take_model_step`)."""

    def clip(*_):
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        limit = max_grad_norm if max_grad_norm > 0 else float("inf")
        engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(parameters, limit)

    optimizer.register_step_pre_hook(clip)


# --- whole tensors ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def full_tensors(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and saved buffer of the model, whole, one after the other; fp32 masters for what is trained.

    Collective: every rank must run through to the end, and each gets every tensor, so nothing larger than one tensor
    is assembled. Names are those of the unwrapped model; a tied weight comes once, under its first name.
    """
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    for name, parameter in module.named_parameters():
        yield plain_name(name), _full(accelerator, parameter)
    saved = set(module.state_dict().keys())
    for name, buffer in module.named_buffers():
        if name in saved:
            yield plain_name(name), _full(accelerator, buffer)


def plain_name(name: str) -> str:
    """A parameter's name without what compilation and activation checkpointing put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _full(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor.detach().to(accelerator.device).full_tensor()  # an offloaded shard is gathered on the device
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        if tensor.requires_grad:
            return safe_get_full_fp32_param(tensor).view(getattr(tensor, "ds_shape", tensor.shape))
        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach()


@contextlib.contextmanager
def plain_loading() -> Iterator[None]:
    """Load an ordinary, whole model inside a sharded run: transformers otherwise partitions whatever it loads."""
    from transformers.integrations import deepspeed as integration

    weak_config = integration._hf_deepspeed_config_weak_ref
    use_fsdp = os.environ.pop("ACCELERATE_USE_FSDP", None)
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = weak_config
        if use_fsdp is not None:
            os.environ["ACCELERATE_USE_FSDP"] = use_fsdp


# --- generation ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def generation(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, dict]]:
    """Yield (module with a working `generate`, keyword arguments it needs) in evaluation mode, without gradients.

    Weights stay sharded and are gathered layer by layer. Collective where they are: all ranks must call `generate`
    equally often; `synced_gpus` keeps a rank whose answers are finished in step with the others.
    """
    from transformers import GenerationMixin

    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    name = strategy(accelerator)
    if name == "fsdp2" and not isinstance(module, GenerationMixin) and "generate" not in vars(module):
        from torch.distributed.fsdp import register_fsdp_forward_method

        # A PeftModel passes `generate` on to the model inside, past the hooks of the outermost module.
        register_fsdp_forward_method(module, "generate")
    dtype = compute_dtype(accelerator)
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.autocast(accelerator.device.type, dtype, enabled=dtype != torch.float32):
        yield module, {"synced_gpus": name in ("zero3", "fsdp2") and accelerator.num_processes > 1}
    model.train(was_training)
