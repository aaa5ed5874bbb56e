"""Whole tensors in and out of a backend that may have rounded or sharded them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from oneloop.sharding.chosen import compute_dtype, strategy

if TYPE_CHECKING:
    from accelerate import Accelerator

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
