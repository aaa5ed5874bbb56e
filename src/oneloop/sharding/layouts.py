"""How each strategy lays the training state over its ranks: the facts that `oneloop.memory` computes with."""

from __future__ import annotations

from oneloop import memory

BUCKET_ELEMENTS = 10_000_000
"""Gradients that DeepSpeed collects before it reduces them; its own default takes 2 GB on every rank in fp32."""


def layout(name: str, world_size: int, offload: str = "none", fp32_gradients: bool = True) -> memory.Layout:
    """The layout of the strategy `name`; `offload` as `Obtained.offload` has it.

    DeepSpeed's optimizers hold fp32 masters beside weights in the compute dtype (0.19.8, zero/stage_1_and_2.py and
    zero/stage3.py); under the other strategies the weights are the fp32 masters. Gradients outlive a step as views of
    DDP's buckets, and in ZeRO-3's flat buffer.
    """
    zero = name in ("zero1", "zero2", "zero3")
    return memory.Layout(
        ranks=world_size,
        shards_weights=name in ("zero3", "fsdp2"),
        shards_gradients=name in ("zero2", "zero3", "fsdp2"),
        shards_optimizer=zero or name == "fsdp2",
        has_masters=zero,
        splits_end_to_end=name in ("zero1", "zero2"),
        keeps_gradients=name in ("ddp", "zero3"),
        fp32_gradients=fp32_gradients,
        bucket_elements=BUCKET_ELEMENTS if zero else 0,
        keeps_bucket=name == "zero3",
        offloads_optimizer="optimizer" in offload,
        offloads_weights="parameters" in offload,
    )
