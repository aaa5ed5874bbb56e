"""Which strategy runs, and what follows from it for the parts that a run is put together from.

Strategies by name: `single`, `ddp`, `zero0` to `zero3` (DeepSpeed), `fsdp2`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def shards_weights(accelerator: Accelerator) -> bool:
    """Whether a rank holds only a part of each weight between its uses, frozen ones included."""
    return strategy(accelerator) in ("zero3", "fsdp2")


def check_quantization(accelerator: Accelerator, kind: str) -> None:
    """Refuse a kind of quantisation that the running strategy cannot train. Raises ValueError with what works."""
    if kind == "int8" and shards_weights(accelerator):
        # Its layers keep a whole copy of their own once they have run (bitsandbytes 0.50, nn/modules.py,
        # `Linear8bitLt.init_8bit_state`), and its scales are not taken along: nothing would be saved, if it ran.
        raise ValueError(
            f"quantization: int8 cannot be sharded, as {strategy(accelerator)!r} would have it. Use quantization: nf4 "
            "with this Accelerate file, or int8 with accelerate_configs/zero2.yaml or ddp.yaml, which keep the frozen "
            "weights whole on each rank."
        )


def quantized_storage_dtype(accelerator: Accelerator) -> torch.dtype:
    """The dtype that 4-bit weights are packed into.

    Sharded, it must be the compute dtype: FSDP2 leaves integers out of its shards (accelerate 1.15, fsdp_utils.py,
    `fsdp2_prepare_model`) and casts any other float, DeepSpeed gathers one dtype at a time and casts fp32 (deepspeed
    0.19.8, engine.py, `_cast_module_mixed_precision`); a cast would destroy what is packed inside.
    """
    return compute_dtype(accelerator) if shards_weights(accelerator) else torch.uint8


def loading_device(accelerator: Accelerator) -> dict:
    """The argument of `from_pretrained` that loads a quantised model onto this rank's own device.

    Under ZeRO-3 there is none to give (transformers 5.24, modeling_utils.py): the quantiser takes the current device.
    """
    device = accelerator.device
    if strategy(accelerator) == "zero3":
        return {}
    return {"device_map": {"": device.type if device.type == "cpu" or device.index is None else device.index}}


def supports_fused_adamw(accelerator: Accelerator) -> bool:
    """Whether AdamW can run as one kernel: the device has it, and no loss scale would be left to that kernel.

    Where DeepSpeed partitions nothing, the gradients are clipped right before the step (`clip_before_step`), so they
    must have been unscaled by then; a fused step does that itself, later.
    """
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    scaled = strategy(accelerator) == "zero0" and mixed_precision(accelerator) == "fp16"
    return accelerator.device.type in _get_fused_kernels_supported_devices() and not scaled


def check_optimizer(accelerator: Accelerator, kind: str, is_own: bool) -> None:
    """Refuse an optimizer that would not compute, under the running strategy or on its device, what its name says.

    kind: a value of `optim`; is_own: whether it is a class of the user's. Raises ValueError with what works instead.
    """
    name = strategy(accelerator)
    if name.startswith("zero"):
        offload = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"].get("offload_optimizer", {})
        if (offload or {}).get("device", "none") != "none" and kind != "adamw":
            # Accelerate replaces any other by DeepSpeed's Adam (accelerate 1.15, utils/deepspeed.py).
            raise ValueError(
                f"optim: {kind} cannot step on an optimizer state that DeepSpeed has offloaded, which is AdamW's. Use "
                "optim: adamw, or the Accelerate file without _offload."
            )
    if kind == "adafactor" and name in ("zero1", "zero2", "zero3", "fsdp2"):
        raise ValueError(
            f"optim: adafactor needs whole rows and columns of a weight, which {name!r} cuts apart. Use "
            "accelerate_configs/ddp.yaml or zero0.yaml, or optim: adamw."
        )
    from_bitsandbytes = kind not in ("adamw", "adafactor") and not is_own
    if from_bitsandbytes and name == "fsdp2":
        raise ValueError(
            f"optim: {kind} has no kernels for FSDP2's sharded tensors (bitsandbytes 0.50). Use "
            "accelerate_configs/zero3.yaml or zero2.yaml with it, or optim: adamw."
        )
    if kind.startswith("paged_") and accelerator.device.type in ("cpu", "mps"):
        raise ValueError(
            f"optim: {kind} pages between a GPU and its host, and this run is on {accelerator.device.type}. Use "
            f"optim: {kind.removeprefix('paged_')}."
        )


def needs_reentrant_checkpointing(accelerator: Accelerator, trains_adapter: bool) -> bool:
    """Whether gradient checkpointing must be the re-entrant kind.

    The other kind compares the metadata of what it recomputes with what it saved; under ZeRO-3 a frozen weight is a
    gathered tensor the first time and may be an empty placeholder the second (deepspeed 0.19.8).
    """
    return trains_adapter and strategy(accelerator) == "zero3"


def gather_together(accelerator: Accelerator, module: torch.nn.Module) -> None:
    """Have all weights inside `module` whole whenever it runs, for code that reads them without calling their layers.

    FSDP2 does so by itself for whatever it wraps as one unit; ZeRO-3 gathers layer by layer unless told otherwise.
    """
    if strategy(accelerator) == "zero3":
        from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

        set_z3_leaf_module(module, True)


def gradient_checkpointing_by_config(accelerator: Accelerator) -> bool:
    """Whether the Accelerate YAML itself switches activation checkpointing on."""
    return strategy(accelerator) == "fsdp2" and accelerator.state.fsdp_plugin.activation_checkpointing
