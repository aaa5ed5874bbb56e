"""The only package (with `launch`) that asks which backend runs: what it did to the model, and how to get whole
tensors, gradient norms and generation out of it.
"""

from oneloop.sharding.chosen import (
    check_optimizer,
    check_quantization,
    compute_dtype,
    gather_together,
    gradient_checkpointing_by_config,
    loading_device,
    mixed_precision,
    needs_reentrant_checkpointing,
    quantized_storage_dtype,
    shards_weights,
    strategy,
    supports_fused_adamw,
)
from oneloop.sharding.layouts import layout
from oneloop.sharding.loss_scale import loss_scaler, restore_loss_scaler
from oneloop.sharding.obtained import Obtained, check_same_on_all_ranks, local, num_elements, obtained, weight_counter
from oneloop.sharding.placement import cut, placements, refresh, state_layout, torch_optimizer, trained_shapes
from oneloop.sharding.ranges import buffers
from oneloop.sharding.step import clip_before_step, clip_grad_norm, generation, set_accumulation
from oneloop.sharding.whole import full_tensors, plain_loading, plain_name, restore_masters, take_masters

__all__ = [
    "Obtained",
    "buffers",
    "check_optimizer",
    "check_quantization",
    "check_same_on_all_ranks",
    "clip_before_step",
    "clip_grad_norm",
    "compute_dtype",
    "cut",
    "full_tensors",
    "gather_together",
    "generation",
    "gradient_checkpointing_by_config",
    "layout",
    "loading_device",
    "local",
    "loss_scaler",
    "mixed_precision",
    "needs_reentrant_checkpointing",
    "num_elements",
    "obtained",
    "placements",
    "plain_loading",
    "plain_name",
    "quantized_storage_dtype",
    "refresh",
    "restore_loss_scaler",
    "restore_masters",
    "set_accumulation",
    "shards_weights",
    "state_layout",
    "strategy",
    "supports_fused_adamw",
    "take_masters",
    "torch_optimizer",
    "trained_shapes",
    "weight_counter",
]
