"""The arithmetic of a run, printed once by the first rank: what was obtained, and what a step consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop import sharding

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig


def text(
    accelerator: Accelerator,
    config: RecipeConfig,
    model: torch.nn.Module,
    got: sharding.Obtained,
    source: str,
    loss: str,
) -> str:
    """Several lines of `key  value`, for people and for `grep`."""
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    count = sharding.weight_counter(module)
    total = sum(map(count, module.parameters()))
    trainable = sum(count(p) for p in module.parameters() if p.requires_grad)
    reduce = (
        "fp32" if config.reduce_dtype == "fp32" or got.precision == "no" else f"{got.precision} (cheaper, asked for)"
    )
    code = "may run: --trust_remote_code is given" if config.trust_remote_code else "refused (code and pickled files)"
    rows = {
        "strategy": f"{got.strategy}  ({source})",
        "ranks": f"{got.world_size} on {got.device}",
        "offload": got.offload,
        "precision": f"{got.precision} compute, fp32 weights in training, gradients reduced in {reduce}",
        "wrapped": ", ".join(f"{name} x{count}" for name, count in sorted(got.wrapped.items())),
        "shares": f"{got.parameter_fraction:.3f} of the parameters and {got.optimizer_fraction:.3f} of the optimizer "
        "state on a rank",
        "weights": weights(config, got),
        "batch": batch(config, accelerator.gradient_accumulation_steps, got.world_size),
        "loss": loss,
        "foreign": code,
        "parameters": f"{trainable:,} trainable of {total:,} ({trainable / total:.2%})",
    }
    return "\n".join(["--- run ---", *(f"{key:<11}{value}" for key, value in rows.items()), "-----------"])


def batch(config: RecipeConfig, accumulation: int, world_size: int) -> str:
    """What an optimizer step consists of."""
    size, unit = config.global_batch_size, config.batch_unit
    most = f"{size} tokens" if unit == "tokens" else f"{size} sequences, at most {size * config.max_length} tokens"
    if config.packing:
        blocks = f"packed into blocks of up to {config.max_length} tokens"
        return f"{most} a step, {blocks}, {config.per_device_batch_size} micro x {world_size} ranks"
    if unit == "tokens" or config.streaming:
        return f"{most} a step, {config.per_device_batch_size} micro x {world_size} ranks, accumulated as needed"
    return f"{config.per_device_batch_size} micro x {accumulation} accumulation x {world_size} ranks = {most} a step"


def weights(config: RecipeConfig, got: sharding.Obtained) -> str:
    """What a rank holds of the parameters between steps."""
    text = f"{got.parameter_bytes / 2**20:,.1f} MiB on a rank"
    if config.quantization is None:
        return text
    whole = "all" if got.quantized_fraction > 0.999 else f"{got.quantized_fraction:.3f}"
    return f"{text}, of which {got.quantized_bytes / 2**20:,.1f} MiB {config.quantization} ({whole} of the base layers)"
