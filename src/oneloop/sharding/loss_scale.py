"""The dynamic loss scale of fp16 (Micikevicius et al., arXiv 1710.03740), wherever a backend keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop.sharding.chosen import mixed_precision, strategy

if TYPE_CHECKING:
    from accelerate import Accelerator

_ATTRIBUTES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What DeepSpeed's dynamic scaler counts with (deepspeed 0.19.8, runtime/fp16/loss_scaler.py)."""


def loss_scaler(accelerator: Accelerator, model: torch.nn.Module) -> dict | None:
    """The scale and for how many steps it has held, to be kept with a training state; None where nothing is scaled."""
    if mixed_precision(accelerator) != "fp16":
        return None
    scaler = _scaler(accelerator, model)
    if isinstance(scaler, torch.amp.GradScaler):
        state = scaler.state_dict()
        return {"scale": state["scale"], "good_steps": state["_growth_tracker"]}
    kept = {name: getattr(scaler, name) for name in _ATTRIBUTES if hasattr(scaler, name)}
    good_steps = kept.get("cur_iter", 0) - kept.get("last_overflow_iter", -1) - 1
    return {"scale": kept["cur_scale"], "good_steps": good_steps, "counters": kept}


def restore_loss_scaler(accelerator: Accelerator, model: torch.nn.Module, saved: dict | None) -> None:
    """Go on with a saved scale, whichever kind of scaler it is of; without one, with the one a run begins with."""
    if saved is None or mixed_precision(accelerator) != "fp16":
        return
    scaler = _scaler(accelerator, model)
    if isinstance(scaler, torch.amp.GradScaler):
        scaler.load_state_dict(scaler.state_dict() | {"scale": saved["scale"], "_growth_tracker": saved["good_steps"]})
        return
    counters = {"cur_scale": saved["scale"], "cur_iter": saved["good_steps"], "last_overflow_iter": -1}
    for name, value in (counters | saved.get("counters", {})).items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _scaler(accelerator: Accelerator, model: torch.nn.Module):
    name = strategy(accelerator)
    if name == "zero0":
        return model.torch_autocast_z0_gradscaler
    return model.optimizer.loss_scaler if name.startswith("zero") else accelerator.scaler
