"""A frozen base model in 4 or 8 bits under trained adapters (QLoRA, Dettmers et al., arXiv 2305.14314).

The 4-bit form is NF4 with double quantisation: half a byte a weight, and about 0.127 bits a weight for its scales.
Where weights stay whole on a rank they are packed into uint8; where they are sharded, into the compute dtype, which
the sharding neither casts nor leaves out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oneloop import sharding

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig


def settings(config: RecipeConfig, accelerator: Accelerator) -> dict:
    """Keyword arguments of `from_pretrained` that load the model quantised, each rank its own copy on its own device;
    empty without `quantization`.

    Raises ValueError for a kind that the running strategy cannot train.
    """
    if config.quantization is None:
        return {}
    sharding.check_quantization(accelerator, config.quantization)
    return rounding(
        config,
        compute_dtype=sharding.compute_dtype(accelerator),
        storage_dtype=sharding.quantized_storage_dtype(accelerator),
    ) | sharding.loading_device(accelerator)


def rounding(config: RecipeConfig, compute_dtype=torch.float32, storage_dtype=torch.uint8) -> dict:
    """The `quantization_config` of transformers for `config.quantization`, as a keyword argument, if there is any."""
    from transformers import BitsAndBytesConfig

    if config.quantization is None:
        return {}
    if config.quantization == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=storage_dtype,
    )
    return {"quantization_config": nf4}


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether this layer's weight is held in 4 or 8 bits."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    return isinstance(module, Linear4bit | Linear8bitLt)


def make_trainable_around(model: torch.nn.Module) -> int:
    """Ready a quantised model for training; returns the number of quantised layers.

    In evaluation mode on a CPU with AVX-512 a 4-bit layer repacks its weight during the forward pass (bitsandbytes
    0.50, nn/modules.py, `Linear4bit.forward`). A sharded weight is gathered anew for the next pass, still in the old
    packing, and read in the new one: an evaluation would silently ruin the rest of the run. The repacking is switched
    off for good, which costs evaluation on CPU some speed and nothing else.
    """
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in model.modules() if is_quantized(module)]
    for layer in layers:
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    if not layers:
        raise ValueError("quantization: the model has no linear layer that could be quantised; leave it out.")
    return len(layers)
