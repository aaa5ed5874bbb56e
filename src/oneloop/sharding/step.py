"""The gradient norm of a step and its clipping, and generation, on whatever a backend has made of the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from accelerate.utils import DistributedType

from oneloop.sharding.chosen import compute_dtype, mixed_precision, strategy

if TYPE_CHECKING:
    from accelerate import Accelerator


def set_accumulation(accelerator: Accelerator, num_micro_batches: int) -> None:
    """Let the optimizer step that begins now consist of so many micro-batches; the same number on every rank."""
    # Counted from the start of the run, and compared modulo the number (accelerate 1.15, accelerator.py, `_do_sync`).
    accelerator.step = 0
    if accelerator.gradient_accumulation_steps == num_micro_batches:
        return
    accelerator.gradient_accumulation_steps = num_micro_batches
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Where a step ends is told to the engine by accelerate at each backward pass; it divides the loss by this
        # number, and the offloaded optimizer looks here for where it has kept gradients (deepspeed 0.19.8, engine.py
        # `_scale_loss_by_gas`, zero/stage_1_and_2.py `set_norm_for_param_grad`).
        engine = accelerator.deepspeed_engine_wrapped.engine
        engine._config.gradient_accumulation_steps = num_micro_batches
        for optimizer in (engine.optimizer, getattr(engine.optimizer, "optimizer", None)):
            if hasattr(optimizer, "gradient_accumulation_steps"):
                optimizer.gradient_accumulation_steps = num_micro_batches


def clip_grad_norm(accelerator: Accelerator, model: torch.nn.Module, max_grad_norm: float) -> float | None:
    """Clip the gradients of a finished step to `max_grad_norm` (0: do not) and return their norm *before* clipping.

    The norm is the same number under every strategy: the 2-norm over all trainable parameters of the whole model.
    Under DeepSpeed the step, clipping included, has happened inside `backward`. Returns None between the
    micro-batches of a step.

    A norm that is not finite is returned as NaN, and the step then changes nothing, on no rank: DeepSpeed leaves it out
    by itself (0.19.8, `is_invalid_grad_norm`), elsewhere the gradients are dropped, and optimizers pass over parameters
    that have none. To know this before the step, the host waits for the device here, once per optimizer step.
    """
    if not accelerator.sync_gradients:
        return None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        norm = float(model.get_global_grad_norm())
        if math.isfinite(norm):
            return norm
        _forget_offloaded_gradients(model.optimizer)
        return math.nan
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm if max_grad_norm > 0 else float("inf"))
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # an intended synchronisation
    if math.isfinite(norm):
        return norm
    if mixed_precision(accelerator) != "fp16":  # else the loss scaler leaves the step out, and must see why
        _drop_gradients(model)
    return math.nan


def _forget_offloaded_gradients(optimizer) -> None:
    """Clear what ZeRO-1/2 keep of a step that they have left out, where the optimizer is offloaded.

    They clear it themselves only where nothing is offloaded; here the next gradients are added to those that are not
    finite, and every later step is left out as well (deepspeed 0.19.8, zero/stage_1_and_2.py, `step`, in bf16).
    """
    if getattr(optimizer, "cpu_offload", False):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def _drop_gradients(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def clip_before_step(engine, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
    """Own the clipping where DeepSpeed partitions nothing: its fp32 path clips but forgets the norm, and does neither
    when clipping is off (deepspeed 0.19.8, engine.py, `_take_model_step`)."""

    def clip(*_):
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        limit = max_grad_norm if max_grad_norm > 0 else float("inf")
        engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if not math.isfinite(engine._global_grad_norm):
            _drop_gradients(engine.module)

    optimizer.register_step_pre_hook(clip)


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
