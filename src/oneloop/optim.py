"""The optimizer: AdamW over two parameter groups, with its learning rate set from the outside before each step.

There is no scheduler object: a prepared one is stepped `num_processes` times an update (accelerate 1.15,
`scheduler.py`), and DeepSpeed performs the update inside `backward`, before any scheduler could be stepped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneloop import schedule

if TYPE_CHECKING:
    import torch

    from oneloop.config import RecipeConfig
    from oneloop.data.sampling import Progress


def build(config: RecipeConfig, model: torch.nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) on the trainable parameters; `fused` runs it as one kernel.

    Biases and the weights of normalisation layers are not decayed. They are told by module and name, not by shape:
    a parameter that is partitioned over ranks no longer shows its own shape.

    Raises ValueError when nothing is trainable.
    """
    import torch

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
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=tuple(config.adam_betas),
        fused=fused,
    )


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
