"""Bytes that a training run holds on each rank, part by part, as arithmetic: nothing is loaded and nothing measured.

Two kinds of bytes. The *state* (weights, gradients, optimizer) follows exactly from how a strategy lays it over the
ranks; `scripts/benchmark.py memory` compares it with the tensors of real ranks. The *work* of a step (gathered weights,
activations, the loss head, communication buckets) comes on top while a step runs and is an estimate.

A layout says what is sharded, not who shards it: `sharding.layout` knows that of each strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4
COMPUTE_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
"""Mixed precision -> bytes of a number in forward and backward."""

ADAMW = 8.0
"""Bytes of optimizer state a trained parameter: two fp32 moments."""
ADAMW_8BIT = 2 + 2 * 4 / 256
"""Two moments of a byte, each with an fp32 scale a block of 256 (bitsandbytes 0.50, optim/optimizer.py)."""

QUANTIZED_BYTES = {
    # Half a byte, a byte of scale for 64 of them, and of those scales an fp32 one for 256.
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
    # A byte; the fp32 scale of each row is less than a thousandth of that.
    "int8": 1.0,
}
"""Kind of quantisation -> bytes of a weight of a linear layer (bitsandbytes 0.50, measured 0.5159 and 1.00)."""

ACTIVATIONS_PER_HIDDEN = 47 / 2
"""Numbers kept for backward per token, layer and hidden unit by a Llama of transformers: 47 bytes in bf16, by torch's
FSDPMemTracker on 8B parameters, 2,048 tokens."""


@dataclass(frozen=True)
class Model:
    """The numbers of a model that its memory depends on; all counts are of the whole model."""

    parameters: int
    """All of them, adapters included; a tied weight counts once."""
    trainable: int
    hidden: int
    layers: int
    vocabulary: int
    tied: bool = True
    """Input embedding and head are one weight."""

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head, which no quantisation touches."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Layout:
    """How a strategy lays the training state over the ranks."""

    ranks: int
    shards_weights: bool = False
    """A rank holds its part of each weight, frozen ones too, and gathers the rest when a layer runs."""
    shards_gradients: bool = False
    """A rank keeps the gradients of its own part alone, from each backward pass on."""
    shards_optimizer: bool = False
    """A rank updates its own part alone."""
    has_masters: bool = False
    """Trained weights are held in the compute dtype for forward and backward, with fp32 masters beside the optimizer's
    state (under fp32 computation too: a second copy then). False: the weights themselves are fp32."""
    splits_end_to_end: bool = False
    """A rank's part is a stretch of all trained weights laid end to end, not a part of each."""
    keeps_gradients: bool = False
    """The memory of gradients stays allocated between steps."""
    fp32_gradients: bool = True
    """Gradients are summed in fp32, whatever dtype they are computed in."""
    bucket_elements: int = 0
    """Size of the buffer in which gradients wait to be reduced; allocated whole, however small the model."""
    keeps_bucket: bool = False
    """That buffer stays allocated between steps."""
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    """What lies in host memory instead of on the device."""


@dataclass(frozen=True)
class State:
    """Bytes of one rank that are there between steps or from backward to the step."""

    trained: float
    """Weights that are trained, as forward and backward use them."""
    frozen: float
    gradients: float
    """From the end of backward to the step."""
    kept_gradients: float
    """What of them is left after the step."""
    optimizer: float
    """Moments, and fp32 masters where the layout has some."""
    bucket: float

    @property
    def after_backward(self) -> float:
        return self.trained + self.frozen + self.gradients + self.optimizer + self.bucket

    @property
    def after_step(self) -> float:
        return self.trained + self.frozen + self.kept_gradients + self.optimizer + self.bucket


def state(
    model: Model,
    layout: Layout,
    mixed_precision: str,
    *,
    quantization: str | None = None,
    optimizer_bytes: float = ADAMW,
) -> State:
    """Bytes of the training state on one rank; padding, and small weights that are kept whole, are left out.

    Gradients, as deepspeed 0.19.8 keeps them: where they are summed in the dtype they are computed in, a rank is left
    at the end of backward with those of its own part, but each tensor whole that reaches into it
    (zero/stage_1_and_2.py, `get_flat_partition`). Where 16-bit gradients are summed in fp32, that sum is whole and
    stays if only the optimizer is sharded (`use_grad_accum_attribute`), else it is a rank's own part exactly
    (`_build_compact_grad_partition_buffer`; zero/stage3.py, `grad_partitions_flat_buffer`). Masters are a copy also
    where the weights are fp32 (both files, `.clone()`).
    """
    compute = COMPUTE_BYTES[mixed_precision]
    summed = FP32 if layout.fp32_gradients or not layout.has_masters else compute
    shards = layout.ranks
    weight_shards = shards if layout.shards_weights else 1
    kept = 0.0
    if layout.splits_end_to_end and summed == compute:
        gradients = summed * _share_of_tensors_touched(model, shards)
    elif layout.splits_end_to_end and not layout.shards_gradients:
        gradients, kept = compute + summed, summed
    else:
        gradients = summed / (shards if layout.shards_gradients else 1)
        kept = gradients if layout.keeps_gradients else 0.0
    per_optimizer = (optimizer_bytes + (FP32 if layout.has_masters else 0)) / (shards if layout.shards_optimizer else 1)
    per_weight = compute if layout.has_masters else FP32
    return State(
        trained=model.trainable * per_weight / weight_shards,
        frozen=frozen_bytes(model, mixed_precision, quantization) / weight_shards,
        gradients=model.trainable * gradients,
        kept_gradients=model.trainable * kept,
        optimizer=model.trainable * per_optimizer,
        bucket=layout.bucket_elements * summed if layout.keeps_bucket else 0.0,
    )


def _share_of_tensors_touched(model: Model, shards: int) -> float:
    """Share of the trained weights that belong to tensors which the fullest of `shards` equal stretches reaches into.

    Only the embedding, or head, at an end is large enough to count: the stretch in which it ends needs all of it.
    """
    embedding = model.vocabulary * model.hidden if model.trainable == model.parameters else 0
    return (embedding * shards // model.trainable + 1) / shards


def frozen_bytes(model: Model, mixed_precision: str, quantization: str | None = None) -> float:
    """Bytes of the whole model's frozen weights: in the compute dtype, the linear layers quantised where asked for."""
    frozen = model.parameters - model.trainable
    compute = COMPUTE_BYTES[mixed_precision]
    if quantization is None or not frozen:
        return frozen * compute
    plain = min(frozen, model.embeddings)
    return plain * compute + (frozen - plain) * QUANTIZED_BYTES[quantization]


@dataclass(frozen=True)
class Work:
    """Bytes that come and go on one rank while a step runs."""

    copies: float
    """Weights in the compute dtype beside those of the state: gathered ones of the layers at work where weights are
    sharded, autocast's where fp32 weights compute in 16 bits."""
    activations: float
    head: float
    """Logits of a chunk of positions, and the fp32 gradient of the head's weight."""
    bucket: float


def work(
    model: Model,
    layout: Layout,
    mixed_precision: str,
    *,
    tokens: int,
    logits_chunk_bytes: int,
    gradient_checkpointing: bool = False,
    quantization: str | None = None,
) -> Work:
    """Estimate of a step's transient bytes; `tokens` are those of one micro-batch, padding included.

    Weights are gathered a layer ahead, embedding and head throughout. With checkpointing a layer's input is kept, and
    the rest of one layer at a time. `logits_chunk_bytes` is `losses.CHUNK_BYTES` of the device.
    """
    compute = COMPUTE_BYTES[mixed_precision]
    is_cast = compute != FP32 and not layout.has_masters
    copies = model.trainable * compute if is_cast else 0.0
    if layout.shards_weights:
        layer = (model.parameters - model.embeddings) / model.layers
        copies = 2 * layer * QUANTIZED_BYTES.get(quantization, compute) + model.embeddings * compute
    per_layer = tokens * model.hidden * ACTIVATIONS_PER_HIDDEN * compute
    activations = per_layer * model.layers
    if gradient_checkpointing:
        activations = tokens * model.hidden * compute * model.layers + per_layer
    # The product of two 16-bit matrices, and the gradient of it, stand beside the fp32 logits.
    logits = min(tokens * model.vocabulary * FP32, logits_chunk_bytes) * (1 if compute == FP32 else 2)
    head_is_trained = model.trainable == model.parameters
    bucket_bytes = FP32 if layout.fp32_gradients else compute
    return Work(
        copies=copies,
        activations=activations,
        head=logits + (model.vocabulary * model.hidden * FP32 if head_is_trained else 0),
        bucket=0.0 if layout.keeps_bucket else layout.bucket_elements * bucket_bytes,
    )


@dataclass(frozen=True)
class Rank:
    """Where one rank's bytes lie at the highest point of a step."""

    device: float
    host: float


def peak(state: State, work: Work, layout: Layout, *, accumulates: bool = False) -> Rank:
    """State and work together, split by what the layout offloads: the higher of the end of forward and the end of
    backward, in between which gradients take the place of activations. `accumulates`: a step has several micro-batches,
    so gradients are there in forward already.

    Gradients go where their optimizer is. Buffers that the backend pins on the host, up to half as much again, are not
    counted, nor the device's context and fragmentation.
    """
    forward = (state.after_backward if accumulates else state.after_step) + work.copies + work.activations + work.head
    backward = state.after_backward + work.bucket + (work.copies if layout.shards_weights else 0.0)
    host = state.gradients + state.optimizer if layout.offloads_optimizer else 0.0
    host += state.trained + state.frozen if layout.offloads_weights else 0.0
    return Rank(device=max(forward, backward) - host, host=host)


def lora_parameters(rank: int, layers: list[tuple[int, int]]) -> int:
    """Parameters of LoRA adapters of `rank` on linear layers of (inputs, outputs) features."""
    return sum(rank * (inputs + outputs) for inputs, outputs in layers)
