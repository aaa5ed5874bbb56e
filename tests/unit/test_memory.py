"""The memory formulas against bytes that real ranks held, published arithmetic, and real tensors."""

import pytest
import torch

from oneloop import losses, memory, sharding
from tests import tiny
from tests.recipes import runs

# Bytes a parameter that the tensors of each rank held (a Llama of 40 M parameters trained over gloo; torch 2.15,
# accelerate 1.15, deepspeed 0.19.8), without the communication bucket: (after backward, after the step).
MEASURED = {
    ("ddp", 1, "no"): (16, 16),
    ("ddp", 1, "bf16"): (16, 16),
    ("ddp", 2, "no"): (16, 16),
    ("ddp", 2, "bf16"): (16, 16),
    ("zero1", 1, "no"): (20, 16),
    ("zero1", 1, "bf16"): (20, 18),
    ("zero1", 2, "no"): (12, 10),
    ("zero1", 2, "bf16"): (14, 12),
    ("zero2", 1, "no"): (20, 16),
    ("zero2", 1, "bf16"): (18, 14),
    ("zero2", 2, "no"): (12, 10),
    ("zero2", 2, "bf16"): (10, 8),
    ("zero3", 1, "no"): (20, 20),
    ("zero3", 1, "bf16"): (18, 18),
    ("zero3", 2, "no"): (10, 10),
    ("zero3", 2, "bf16"): (9, 9),
    ("zero1", 4, "no"): (9, 7),  # the second rank needs the whole gradient of the embedding, a third of the model
    ("zero1", 4, "bf16"): (11, 9),
    ("zero2", 4, "no"): (9, 7),
    ("zero2", 4, "bf16"): (6, 5),
    ("zero3", 4, "no"): (5, 5),
    ("zero3", 4, "bf16"): (4.5, 4.5),
    ("fsdp2", 1, "no"): (16, 12),
    ("fsdp2", 1, "bf16"): (16, 12),
    ("fsdp2", 2, "no"): (8, 6),
    ("fsdp2", 2, "bf16"): (8, 6),
    ("fsdp2", 4, "no"): (4, 3),
    ("fsdp2", 4, "bf16"): (4, 3),
}
LLAMA_40M = memory.Model(parameters=39_854_592, trainable=39_854_592, hidden=512, layers=8, vocabulary=24_576)
GIB = 2**30
LLAMA_8B = memory.Model(
    parameters=8_030_261_248, trainable=8_030_261_248, hidden=4096, layers=32, vocabulary=128_256, tied=False
)


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_state_is_what_ranks_held(case):
    strategy, ranks, precision = case
    state = memory.state(LLAMA_40M, sharding.layout(strategy, ranks), precision)
    totals = [state.after_backward - state.bucket, state.after_step - state.bucket]
    per_parameter = [total / LLAMA_40M.parameters for total in totals]
    assert per_parameter == pytest.approx(MEASURED[case], rel=1e-12)


def test_state_of_a_real_run(tmp_path, monkeypatch):
    """One process: what the recipe's own tensors hold after backward and after the step."""
    from accelerate import Accelerator

    held = {}
    backward = Accelerator.backward

    def measured(self, loss, **kwargs):
        backward(self, loss, **kwargs)
        parameters = list(self._models[0].parameters())
        moments = [t for s in self._optimizers[0].state.values() for t in s.values() if t.numel() > 1]
        held["gradients"] = sum(p.grad.nbytes for p in parameters)
        held["trained"] = sum(p.nbytes for p in parameters)
        held["optimizer"] = sum(t.nbytes for t in moments)
        held["parameters"] = sum(p.numel() for p in parameters)

    monkeypatch.setattr(Accelerator, "backward", measured)
    rows = [runs.turns("What is 1 plus 1?", "2.")] * 4
    runs.train(tmp_path, rows, global_batch_size=2, max_steps=2)
    number = held.pop("parameters")
    model = memory.Model(parameters=number, trainable=number, hidden=64, layers=2, vocabulary=400)
    state = memory.state(model, sharding.layout("single", 1), "no")
    assert held == {name: getattr(state, name) for name in held}
    assert number > 50_000


@pytest.mark.parametrize("ranks,gib", [(1, 120), (2, 60), (4, 30), (8, 15), (64, 1.9)])
def test_worked_example(ranks, gib):
    """Llama-3-8B with everything sharded: 16 bytes a parameter, divided by the ranks."""
    state = memory.state(LLAMA_8B, sharding.layout("fsdp2", ranks), "bf16")
    assert state.after_backward / GIB == pytest.approx(gib, rel=0.02)
    whole = memory.state(LLAMA_8B, sharding.layout("ddp", ranks), "bf16")
    assert whole.after_backward / GIB == pytest.approx(120, rel=0.01)


def test_cheaper_reduction_needs_no_fp32_sum():
    full, cheap = (
        memory.state(LLAMA_8B, sharding.layout("zero2", 4, fp32_gradients=fp32), "bf16") for fp32 in (True, False)
    )
    assert full.gradients == 2 * cheap.gradients
    # Data parallelism keeps fp32 weights, whose gradients are fp32 however they travel.
    whole = memory.state(LLAMA_8B, sharding.layout("ddp", 4, fp32_gradients=False), "bf16")
    assert whole.gradients == 4 * LLAMA_8B.parameters


def test_adapter_and_frozen_base():
    trained = memory.lora_parameters(16, [(4096, 4096), (4096, 14336)])
    assert trained == 16 * (8192 + 18432)
    model = memory.Model(
        parameters=LLAMA_8B.parameters + trained,
        trainable=trained,
        hidden=4096,
        layers=32,
        vocabulary=128_256,
        tied=False,
    )
    state = memory.state(model, sharding.layout("ddp", 2), "bf16")
    assert (state.frozen, state.after_backward - state.frozen) == (2 * LLAMA_8B.parameters, 16 * trained)
    assert memory.state(model, sharding.layout("fsdp2", 2), "bf16").frozen == state.frozen / 2
    # 1.05 billion of its parameters are embedding and head, which stay in bf16.
    quantized = memory.state(model, sharding.layout("ddp", 2), "bf16", quantization="nf4").frozen
    assert quantized == pytest.approx(2 * 1.05067e9 + 0.51587 * 6.97959e9, rel=1e-4)


def test_quantized_bytes_are_those_of_bitsandbytes():
    from bitsandbytes import functional

    weight = torch.randn(1024, 1024)
    packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    held = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert held / weight.numel() == pytest.approx(memory.QUANTIZED_BYTES["nf4"], rel=1e-6)


def test_activations_are_those_of_a_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    def saved_bytes(layers: int) -> int:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
        module = LlamaForCausalLM(config).model
        weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        kept = {}

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(torch.randint(64, (1, tokens)))
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    tokens = 256
    one_more_layer = saved_bytes(3) - saved_bytes(2)
    model = memory.Model(parameters=1000, trainable=1000, hidden=128, layers=1, vocabulary=64)
    work = memory.work(model, memory.Layout(ranks=1), "no", tokens=tokens, logits_chunk_bytes=1)
    assert work.activations == pytest.approx(one_more_layer, rel=0.1)


def test_peak_is_split_by_what_is_offloaded():
    arguments = {"tokens": 4096, "logits_chunk_bytes": losses.CHUNK_BYTES["default"]}
    device, offloaded = sharding.layout("fsdp2", 8), sharding.layout("fsdp2", 8, "optimizer + parameters")
    state = memory.state(LLAMA_8B, device, "bf16")
    work = memory.work(LLAMA_8B, device, "bf16", **arguments)
    plain, split = memory.peak(state, work, device), memory.peak(state, work, offloaded)
    assert plain.host == 0
    assert split.host == state.after_backward
    assert split.device + split.host == plain.device
    checkpointed = memory.work(LLAMA_8B, device, "bf16", **arguments, gradient_checkpointing=True)
    assert checkpointed.activations < work.activations / 10
    assert memory.peak(state, work, device, accumulates=True).device >= plain.device


def test_bucket_does_not_shrink_with_the_model():
    model = memory.Model(parameters=1000, trainable=1000, hidden=8, layers=2, vocabulary=len(tiny.tokenizer()))
    for strategy, kept in (("zero2", False), ("zero3", True)):
        layout = sharding.layout(strategy, 2)
        bucket = layout.bucket_elements * 4
        assert bucket >= 4_000_000
        state = memory.state(model, layout, "bf16")
        work = memory.work(model, layout, "bf16", tokens=8, logits_chunk_bytes=1)
        assert (state.bucket, work.bucket) == ((bucket, 0) if kept else (0, bucket))
