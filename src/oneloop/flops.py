"""Model FLOPs of training and the peak rate of known devices, for the utilisation metric."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DENSE_BF16_PEAK = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A40": 150e12,
    "A10G?": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}
"""Words of a device's name -> dense bf16 FLOP/s without sparsity, from the makers' data sheets. First match wins. An
MI250X is two devices to torch, so it stands with half of the card's rate."""


@dataclass(frozen=True)
class Counter:
    """The numbers of a model that its FLOPs depend on."""

    matmul_parameters: int
    """Parameters that take part in matrix products: all but an untied input embedding."""
    trainable_parameters: int
    attention_width: int
    """Sum over layers of heads x (query-key head size + value head size)."""

    @classmethod
    def of(cls, model: torch.nn.Module, num_elements: Callable[[torch.Tensor], int]) -> Counter | None:
        """Read them off a causal language model (transformers or peft).

        None where this accounting does not hold: no attention heads, or experts of which a token meets only some.
        """
        config = model.config.get_text_config()
        has_experts = any(hasattr(config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        if has_experts or not hasattr(config, "num_attention_heads"):
            return None
        total = sum(num_elements(p) for p in model.parameters())
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        untied = head is None or embedding.weight is not head.weight
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            matmul_parameters=total - (num_elements(embedding.weight) if untied else 0),
            trainable_parameters=sum(num_elements(p) for p in model.parameters() if p.requires_grad),
            attention_width=config.num_hidden_layers * config.num_attention_heads * 2 * head_size,
        )

    def training(self, num_tokens: float, squared_lengths: float) -> float:
        """FLOPs of forward and backward for `num_tokens` tokens in rows whose squared lengths sum to `squared_lengths`.

        2 per parameter and token forward, 2 for the gradient of the inputs, 2 for that of the weights that are trained
        (frozen ones have none); attention 6 x width x length per token. Recomputation is not counted, nor is causal
        sparsity credited. After Narayanan et al., arXiv 2104.04473, appendix, and torchtitan's accounting.
        """
        per_token = 4 * self.matmul_parameters + 2 * min(self.trainable_parameters, self.matmul_parameters)
        return per_token * num_tokens + 6 * self.attention_width * squared_lengths


def peak_per_second(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak FLOP/s of a device, or None where it is not known or the run does not compute in 16 bits."""
    import torch

    if device.type == "cpu" or dtype == torch.float32 or not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    return next((peak for key, peak in DENSE_BF16_PEAK.items() if re.search(rf"\b{key}\b", name)), None)
