"""The optimizer over two parameter groups, with its learning rate set from the outside before each step.

There is no scheduler object: a prepared one is stepped `num_processes` times an update (accelerate 1.15,
`scheduler.py`), and DeepSpeed performs the update inside `backward`, before any scheduler could be stepped.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from oneloop import schedule, sharding

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig
    from oneloop.data.sampling import Progress

DEFAULT_BETAS = [0.9, 0.999]


def build(config: RecipeConfig, model: torch.nn.Module, accelerator: Accelerator) -> torch.optim.Optimizer:
    """The optimizer that `config.optim` names, on the trainable parameters.

    adamw (Loshchilov & Hutter, arXiv 1711.05101) is torch's, one fused kernel where the device has it; adamw_8bit,
    paged_adamw, paged_adamw_8bit (Dettmers et al., arXiv 2110.02861) and lion (Chen et al., arXiv 2302.06675) are
    bitsandbytes'; adafactor (Shazeer & Stern, arXiv 1804.04235) is transformers', with the learning rate as given. An
    import path is called with the parameter groups and `lr`, and with `betas` if these are not the default ones.

    Biases and the weights of normalisation layers are not decayed. They are told by module and name, not by shape:
    a parameter that is partitioned over ranks no longer shows its own shape.

    Raises ValueError when nothing is trainable, for an optimizer that does not exist, or that the running strategy
    or device would not give the right numbers.
    """
    kind = config.optim
    sharding.check_optimizer(accelerator, kind, is_own="." in kind)
    groups = _groups(config, model)
    betas = tuple(config.adam_betas)
    if kind == "adamw":
        import torch

        fused = sharding.supports_fused_adamw(accelerator)
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)
    if kind == "adafactor":
        from transformers import Adafactor

        return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    if "." in kind:
        return _own(kind, groups, config)
    import bitsandbytes.optim

    if kind == "lion":
        return bitsandbytes.optim.Lion(groups, lr=config.learning_rate, betas=betas)
    return bitsandbytes.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=betas,
        optim_bits=8 if kind.endswith("_8bit") else 32,
        is_paged=kind.startswith("paged_"),
    )


def _groups(config: RecipeConfig, model: torch.nn.Module) -> list[dict]:
    undecayed = {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if name.endswith("bias") or "Norm" in type(module).__name__
    }
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (no_decay if name in undecayed else decay).append(parameter)
    if not decay and not no_decay:
        raise ValueError("The model has no trainable parameter; check lora_target_modules and lora_modules_to_save.")
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _own(path: str, groups: list[dict], config: RecipeConfig) -> torch.optim.Optimizer:
    import torch

    module_name, _, class_name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optim: cannot import {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"optim: {path!r} is no subclass of torch.optim.Optimizer")
    betas = {} if config.adam_betas == DEFAULT_BETAS else {"betas": tuple(config.adam_betas)}
    try:
        return found(groups, lr=config.learning_rate, **betas)
    except TypeError as error:
        raise ValueError(f"optim: {path!r} does not take these arguments: {error}") from error


def set_lr(optimizer: torch.optim.Optimizer, config: RecipeConfig, progress: Progress) -> float:
    """Write the learning rate of the step about to be done into every parameter group and return it."""
    lr = schedule.lr_at(
        progress.step,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        warmup_steps=schedule.warmup_steps(config, progress.total_steps),
        total_steps=progress.total_steps,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
