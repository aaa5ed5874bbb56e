"""Accelerate's plugins filled from the recipe's flags, and refusals where a file says otherwise."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from oneloop import schedule
from oneloop.launch.request import Requested, read_deepspeed_json

if TYPE_CHECKING:
    from oneloop.config import RecipeConfig


def reduce_in_compute_dtype(want: Requested, data_parallel) -> None:
    from accelerate.utils import DDPCommunicationHookType

    if want.strategy in ("single", "zero0"):
        raise ValueError(
            f"reduce_dtype: compute has no effect under {want.strategy!r}, which reduces in fp32. Remove it."
        )
    hooks = {"bf16": DDPCommunicationHookType.BF16, "fp16": DDPCommunicationHookType.FP16}
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "no":
        raise ValueError("reduce_dtype: compute has no effect without mixed precision: the run computes in fp32.")
    if want.strategy == "ddp":
        data_parallel.comm_hook = hooks[precision]


def refuse_yaml_training_values(config: RecipeConfig, accumulation_steps: int) -> None:
    from_yaml = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if from_yaml is not None and int(from_yaml) != accumulation_steps:
        raise ValueError(
            f"gradient_accumulation_steps: {from_yaml} in the Accelerate configuration, but global_batch_size "
            f"{config.global_batch_size} and per_device_batch_size {config.per_device_batch_size} make it "
            f"{accumulation_steps}. Remove it there: accumulation follows from the batch sizes."
        )


def deepspeed_plugin(config: RecipeConfig, want: Requested, accumulation_steps: int):
    """DeepSpeed's configuration from the recipe's flags, laid under what the user's own JSON says."""
    from accelerate import DeepSpeedPlugin

    from oneloop.sharding.layouts import BUCKET_ELEMENTS

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    json_path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    own = read_deepspeed_json(json_path) if json_path != "none" else {}
    where = json_path if own else want.source
    if not own:
        # The YAML's deepspeed_config section reaches this process as environment variables.
        for key, name, cast in (
            ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int),
            ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", float),
        ):
            if os.environ.get(name, "auto") != "auto":
                own[key] = cast(os.environ[name])
    for section, owner in (("optimizer", "learning_rate, weight_decay, ..."), ("scheduler", "lr_scheduler_type")):
        if section in own:
            raise ValueError(f"{where} has a {section!r} section, but the recipe builds its own ({owner}). Remove it.")
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    _refuse_other_precision(own, where, mixed_precision)
    # Where steps differ, as packed ones do, the engine learns at each how many micro-batches it has
    # (`sharding.set_accumulation`); it refuses to begin with numbers whose product is another one.
    product = config.per_device_batch_size * accumulation_steps * want.world_size
    from_flags = {
        "train_batch_size": config.global_batch_size if schedule.is_even(config) else product,
        "train_micro_batch_size_per_gpu": config.per_device_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": float(config.max_grad_norm),
    }
    flags = {"gradient_clipping": "max_grad_norm", "train_micro_batch_size_per_gpu": "per_device_batch_size"}
    for key, value in from_flags.items():
        if own.get(key, "auto") not in ("auto", value):
            raise ValueError(
                f"{key}: {own[key]} in {where}, but the recipe's {flags.get(key, 'batch sizes')} make it {value}. "
                f'Write "auto" there or remove it, or change the flag.'
            )
    plugin = DeepSpeedPlugin()
    settings = plugin.deepspeed_config
    settings.update(from_flags)
    if json_path == "none":  # of its own zero_optimization, a user's JSON decides everything
        settings.setdefault("zero_optimization", {}).setdefault("reduce_bucket_size", BUCKET_ELEMENTS)
    if want.strategy == "zero0":
        settings["gradient_clipping"] = 0.0  # sharding.clip_before_step clips, and remembers the norm
        if mixed_precision != "no":
            # Stage 0 has no 16-bit mode with fp32 gradients (deepspeed 0.19.8, `_do_optimizer_sanity_check`);
            # autocast over fp32 weights is what data parallelism without DeepSpeed does, too.
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[mixed_precision]
            settings.setdefault("torch_autocast", {"enabled": True, "dtype": dtype})
            settings["bf16"], settings["fp16"] = {"enabled": False}, {"enabled": False}
    elif mixed_precision != "no" and config.reduce_dtype == "fp32":
        settings.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        settings.setdefault("communication_data_type", "fp32")
    return plugin


def _refuse_other_precision(own: dict, where: str, mixed_precision: str) -> None:
    for kind in ("bf16", "fp16"):
        enabled = own.get(kind, {}).get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != (mixed_precision == kind):
            raise ValueError(
                f"{kind}.enabled: {enabled} in {where}, but the launcher's mixed_precision is {mixed_precision!r}. "
                f'Write "auto" there and pass --mixed_precision {kind if enabled else "no"} to accelerate launch (its '
                "YAML may not hold that key beside a DeepSpeed JSON)."
            )


def fsdp_plugin(config: RecipeConfig, on_cpu: bool):
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    if dtype is not None:
        # Accelerate would reduce in the compute dtype (accelerate 1.15, dataclasses.py, `set_mixed_precision`).
        # It would round what the model returns, too; a loss is fp32 whatever it was computed from.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32 if config.reduce_dtype == "fp32" else dtype
        )
    if on_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # there is nothing to pin for
    if plugin.activation_checkpointing and config.gradient_checkpointing:
        raise ValueError(
            "gradient_checkpointing: true, and fsdp_activation_checkpointing: true in the Accelerate YAML: activations "
            "would be recomputed twice. Keep the recipe's flag; it works under every strategy."
        )
    return plugin
