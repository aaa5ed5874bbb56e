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
    accumulation = accelerator.gradient_accumulation_steps
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
        "batch": f"{config.per_device_batch_size} micro x {accumulation} accumulation x {got.world_size} ranks = "
        f"{config.global_batch_size} sequences, at most {config.global_batch_size * config.max_length} tokens a step",
        "loss": loss,
        "foreign": code,
        "parameters": f"{trainable:,} trainable of {total:,} ({trainable / total:.2%})",
    }
    return "\n".join(["--- run ---", *(f"{key:<11}{value}" for key, value in rows.items()), "-----------"])


def weights(config: RecipeConfig, got: sharding.Obtained) -> str:
    """What a rank holds of the parameters between steps."""
    text = f"{got.parameter_bytes / 2**20:,.1f} MiB on a rank"
    if config.quantization is None:
        return text
    whole = "all" if got.quantized_fraction > 0.999 else f"{got.quantized_fraction:.3f}"
    return f"{text}, of which {got.quantized_bytes / 2**20:,.1f} MiB {config.quantization} ({whole} of the base layers)"
