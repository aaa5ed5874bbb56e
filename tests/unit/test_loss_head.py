"""The fused loss head against plain logits: the function alone, many architectures, adapters, and Liger's kernel."""

import copy
import importlib.machinery
import inspect
import sys
import time
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oneloop import loss_head, loss_kernel, losses

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
V, D, N, R = 50, 24, 21, 4


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    """Neither a wish for a kernel, nor the package of the other one, unless a test says so."""
    monkeypatch.delenv(loss_kernel.ASK, raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)


# --- the function ----------------------------------------------------------------------------------------------------

CASES = {
    "plain": {},
    "bias": {"bias": True},
    "adapter": {"low_rank": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "everything": {"bias": True, "low_rank": True, "scale": 1.7, "softcap": 3.0},
}


def tensors(bias=False, low_rank=False, seed=0, dtype=torch.float32):
    """Leaves hidden, weight, bias, reduced, up; and labels, of which every fifth is ignored and some are likely."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, times=1.0):
        return (times * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    leaves = {"hidden": draw(N, D), "weight": draw(V, D, times=0.6)}
    if bias:
        leaves["bias"] = draw(V)
    if low_rank:
        leaves |= {"reduced": draw(N, R), "up": draw(V, R)}
    labels = logits_of(leaves).argmax(1)
    labels[::2] = torch.randint(V, (len(labels[::2]),), generator=generator)
    labels[::5] = losses.IGNORE_INDEX
    return leaves, labels


def fused(leaves, labels, **treatment):
    low_rank = (leaves["reduced"], leaves["up"]) if "up" in leaves else None
    return losses.linear_cross_entropy_sum(
        leaves["hidden"], leaves["weight"], labels, leaves.get("bias"), low_rank=low_rank, **treatment
    )


def logits_of(leaves):
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    return logits + leaves["reduced"] @ leaves["up"].T if "up" in leaves else logits


def plain(leaves, labels, scale=1.0, softcap=None):
    """The same from whole logits, sharing no code with it."""
    logits = logits_of(leaves)
    if logits.dtype != torch.float64:
        logits = logits.float()
    logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    correct = ((logits.argmax(1) == labels) & (labels != -100)).sum()
    return F.cross_entropy(logits, labels, reduction="sum"), correct


def gradients(compute, leaves, labels, factor=1.0, **treatment):
    """(loss, number of right guesses, name -> gradient of factor * loss)."""
    for leaf in leaves.values():
        leaf.grad = None
    loss, correct = compute(leaves, labels, **treatment)
    (factor * loss).backward()
    return loss.item(), int(correct), {name: leaf.grad for name, leaf in leaves.items()}


def exact(leaves, labels, **settings):
    """What fp64 gives for the very values of `leaves`."""
    doubled = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    return gradients(plain, doubled, labels, **settings)


def distance(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def chunks_of(monkeypatch, num_positions, vocabulary=V):
    monkeypatch.setitem(losses.CHUNK_BYTES, "cpu", 4 * vocabulary * num_positions)


@pytest.mark.parametrize("size", [1, 4, N, 1000])
@pytest.mark.parametrize("case", CASES)
def test_equals_plain_logits(case, size, monkeypatch):
    chunks_of(monkeypatch, size)
    settings = dict(CASES[case])
    leaves, labels = tensors(settings.pop("bias", False), settings.pop("low_rank", False))
    loss, correct, grads = gradients(fused, leaves, labels, factor=0.37, **settings)
    own_loss, own_correct, own_grads = exact(leaves, labels, factor=0.37, **settings)
    assert loss == pytest.approx(own_loss, rel=1e-6)
    assert correct == own_correct and 0 < correct < N
    assert {name: distance(grad, own_grads[name]) < 1e-6 for name, grad in grads.items()} == dict.fromkeys(leaves, True)


def test_chunks_are_as_many_as_they_should_be(monkeypatch):
    chunks_of(monkeypatch, 4)
    products = []
    own = losses._logits
    monkeypatch.setattr(
        losses, "_logits", lambda hiddens, *rest: products.append(len(hiddens[0])) or own(hiddens, *rest)
    )
    fused(*tensors())
    assert products == [4, 4, 4, 4, 4, 1]


RUNS = [(seed, settings) for seed in range(4) for settings in ({}, {"scale": 0.3, "softcap": 3.0})]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
def test_16_bits_are_as_exact_as_with_plain_logits(autocast, dtype, monkeypatch):
    chunks_of(monkeypatch, 4)
    errors = {"fused": {}, "plain": {}}
    for seed, settings in RUNS:
        leaves, labels = tensors(bias=True, low_rank=True, seed=seed, dtype=torch.float32 if autocast else dtype)
        _, _, own = exact(leaves, labels, **settings)
        own_loss, _ = plain({name: leaf.double() for name, leaf in leaves.items()}, labels, **settings)
        for name, compute in (("fused", fused), ("plain", plain)):
            with torch.autocast("cpu", dtype, enabled=autocast):
                loss, _, grads = gradients(compute, leaves, labels, **settings)
            found = {"loss": abs(loss - own_loss.item())} | {
                key: distance(grad, own[key]) for key, grad in grads.items()
            }
            for key, error in found.items():
                errors[name].setdefault(key, []).append(error)
            assert all(grad.dtype == leaf.dtype for grad, leaf in zip(grads.values(), leaves.values(), strict=True))
    means = {name: {key: sum(found) / len(found) for key, found in one.items()} for name, one in errors.items()}
    assert len(errors["plain"]["weight"]) == len(RUNS)
    assert {key: mean for key, mean in means["fused"].items() if mean > 1.02 * means["plain"][key]} == {}, means
    assert means["plain"]["weight"] > 1e-4, "16 bits were not computed in"


def test_many_chunks_lose_nothing_of_the_head_gradient(monkeypatch):
    """In bf16, a gradient rounded chunk by chunk, or summed in bf16, would depend on the number of chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden = 1 + torch.randn((512, D), generator=generator)  # contributions of one sign: small ones add up to much
    leaves = {"hidden": hidden, "weight": 0.3 * torch.randn((V, D), generator=generator)}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    labels = torch.randint(V, (512,), generator=generator)
    grads = {}
    for size in (1, 2, 512):
        chunks_of(monkeypatch, size)
        with torch.autocast("cpu", torch.bfloat16):
            grads[size] = gradients(fused, leaves, labels)[2]["weight"]
    assert distance(grads[1], grads[512]) < 1e-5 and distance(grads[2], grads[512]) < 1e-5
    assert len({grad.data_ptr() for grad in grads.values()}) == 3


@pytest.mark.parametrize("labels", [torch.full((N,), -100), torch.zeros(0, dtype=torch.int64)], ids=["ignored", "none"])
def test_no_label_gives_zero_and_zero_gradients(labels):
    leaves, _ = tensors(bias=True, low_rank=True)
    leaves = {name: leaf.detach()[: len(labels)] if len(leaf) == N else leaf.detach() for name, leaf in leaves.items()}
    leaves["weight"][0, 0] = 1e30  # logits of 1e30 must not turn a zero into NaN
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    loss, correct, grads = gradients(fused, leaves, labels)
    assert (loss, correct) == (0, 0)
    assert {name: grad.abs().sum().item() for name, grad in grads.items()} == dict.fromkeys(leaves, 0)


def test_backward_runs_once():
    leaves, labels = tensors()
    loss, _ = fused(leaves, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="only once"):
        loss.backward()


# --- memory of the function ------------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Bytes of the tensors made inside the block that are alive, and the most at a time."""

    def __init__(self, *given):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in given}
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key, size):
        self.known.discard(key)
        self.live -= size


def peak_bytes(compute, trains_weight=True, **settings):
    """(peak, largest tensor) of a forward and backward pass over (512, 64) hidden states and a (2048, 64) weight."""
    hidden = torch.randn(512, 64).requires_grad_()
    weight = torch.randn(2048, 64).requires_grad_(trains_weight)
    labels = torch.randint(2048, (512,))
    with Memory(hidden, weight, labels) as memory:
        loss, _ = compute({"hidden": hidden, "weight": weight}, labels, **settings)
        if loss.requires_grad:
            loss.backward()
    return memory.peak, memory.largest


def test_memory_is_a_chunk_and_the_gradients(monkeypatch):
    chunks_of(monkeypatch, 16, vocabulary=2048)
    chunk, weight, hidden = 4 * 16 * 2048, 4 * 2048 * 64, 4 * 512 * 64
    peak, largest = peak_bytes(fused)
    assert weight + hidden + chunk <= peak <= 1.1 * (weight + hidden + chunk) and largest == weight
    peak, _ = peak_bytes(fused, softcap=3.0)
    assert peak <= 1.1 * (weight + hidden + 2 * chunk)
    whole, _ = peak_bytes(plain)
    assert whole >= 2 * 4 * 512 * 2048, "what is measured here does not see whole logits"


def test_frozen_head_gets_no_gradient_buffer(monkeypatch):
    chunks_of(monkeypatch, 16, vocabulary=2048)
    _, largest = peak_bytes(fused, trains_weight=False)
    assert largest == 4 * 512 * 64 < 4 * 2048 * 64


def test_evaluation_computes_no_gradient(monkeypatch):
    chunks_of(monkeypatch, 16, vocabulary=2048)
    with torch.no_grad():
        peak, _ = peak_bytes(fused)
    assert peak <= 1.1 * 4 * 16 * 2048


# --- models ----------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
GROUPED = SMALL | {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
CONFIGS = {
    "llama": (transformers.LlamaConfig, GROUPED),
    "llama-tied": (transformers.LlamaConfig, GROUPED | {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, GROUPED),
    "gemma2": (transformers.Gemma2Config, GROUPED | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "gemma3": (transformers.Gemma3TextConfig, GROUPED | {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "granite": (transformers.GraniteConfig, GROUPED | {"logits_scaling": 3.0}),
    "cohere": (transformers.CohereConfig, GROUPED | {"logit_scale": 0.3}),
    "falcon-h1": (transformers.FalconH1Config, GROUPED | MAMBA | {"lm_head_multiplier": 0.3}),
    "gpt2": (transformers.GPT2Config, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | SMALL),
    "phi": (transformers.PhiConfig, SMALL),
    "mistral": (transformers.MistralConfig, GROUPED),
    "olmo2": (transformers.Olmo2Config, GROUPED),
    "mixtral": (transformers.MixtralConfig, GROUPED | EXPERTS | {"num_local_experts": 4}),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        GROUPED | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
}
TREATED = ["gemma2", "gemma3", "granite", "cohere", "falcon-h1"]
FUSED = "in chunks, without whole logits"


def filled(model):
    """The model with weights large enough for logits that a cap, a bias or a scale changes."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.train()


def build(name, **changes):
    kind, settings = CONFIGS[name]
    return filled(transformers.AutoModelForCausalLM.from_config(kind(**settings | changes)).float())


def causal_of(model):
    return model.get_base_model() if hasattr(model, "peft_config") else model


@pytest.fixture
def accelerator():
    yield from _accelerator("no")


@pytest.fixture
def accelerator_bf16():
    yield from _accelerator("bf16")


def _accelerator(mixed_precision):
    states = AcceleratorState._shared_state, GradientState._shared_state, PartialState._shared_state
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    yield Accelerator(cpu=True, mixed_precision=mixed_precision)
    for state, values in zip(states, before, strict=True):
        state.clear()
        state.update(values)


@pytest.fixture
def batch():
    """Two rows, the second with padding; labels in the middle of them."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(64, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = torch.full_like(ids, losses.IGNORE_INDEX)
    labels[0, 4:], labels[1, :7] = ids[0, 4:], ids[1, :7]
    positions = F.pad(labels[:, 1:] != -100, (0, 1)).flatten().nonzero()[:, 0]
    assert len(positions) == 14
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "target_positions": positions}


def from_own_logits(model, batch):
    """(loss, right guesses, name -> gradient) before the model has learnt any other way; makes some guesses right."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    guesses = logits[:, :-1].argmax(-1)
    batch["labels"][:, 1:][:, ::3] = torch.where(batch["labels"][:, 1:] == -100, -100, guesses)[:, ::3]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    loss.backward()
    return loss.item(), int((guesses == batch["labels"][:, 1:]).sum()), take_gradients(model)


def take_gradients(model):
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return grads


def check(accelerator, model, batch, wanted=None):
    """Attach, prepare and verify the model, compare it with its own logits, and return what `verify` said."""
    own_loss, own_correct, own_grads = wanted or from_own_logits(model, batch)
    loss_head.attach(model, accelerator)
    prepared = accelerator.prepare(model)
    how = loss_head.verify(accelerator, prepared, 256)
    assert prepared.training
    compare(prepared, batch, own_loss, own_correct, own_grads)
    return how


def compare(model, batch, own_loss, own_correct, own_grads, tolerance=1e-5):
    output = model(**batch)
    output["loss_sum"].backward()
    grads = take_gradients(model)
    assert output["loss_sum"].item() == pytest.approx(own_loss, rel=1e-6)
    assert output["num_correct"].item() == own_correct > 0
    assert set(grads) == set(own_grads) and len(grads) > 0
    largest = max(grad.norm() for grad in own_grads.values())  # some, as those of key biases, are nothing but rounding
    assert {name for name in grads if (grads[name] - own_grads[name]).norm() > tolerance * largest} == set()


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture(name, accelerator, batch):
    assert check(accelerator, build(name), batch) == FUSED


@pytest.mark.parametrize("name", TREATED)
def test_unknown_treatment_of_logits_is_found(name, accelerator, batch, monkeypatch):
    monkeypatch.setattr(loss_head, "_treatment", lambda causal: {"scale": 1.0, "softcap": None})
    how = check(accelerator, build(name), batch)
    assert how.startswith("from whole logits (") and "treats logits in a way of its own" in how


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "phi", "qwen2-moe"])
def test_bf16_passes_the_same_proof(name, accelerator_bf16, batch, monkeypatch):
    model = build(name)
    loss_head.attach(model, accelerator_bf16)
    prepared = accelerator_bf16.prepare(model)
    assert loss_head.verify(accelerator_bf16, prepared) == FUSED
    got = prepared(**batch)["loss_sum"].item()
    causal_of(model).loss_head_fuses = False
    assert got == pytest.approx(prepared(**batch)["loss_sum"].item(), rel=5e-3)
    if name in TREATED:
        model.loss_head_fuses = True
        monkeypatch.setattr(loss_head, "_treatment", lambda causal: {"scale": 1.0, "softcap": None})
        assert "treats logits in a way of its own" in loss_head.verify(accelerator_bf16, prepared)


class Own(transformers.LlamaForCausalLM):
    """A Llama whose logits are made in a way of its own."""

    how = None

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return transformers.modeling_outputs.CausalLMOutput(logits=type(self).how(self, hidden))


def shifted(model, hidden):
    return model.lm_head(hidden) + 0.3 * F.one_hot(torch.tensor(7), 64)


def masked(model, hidden):
    logits = model.lm_head(hidden)
    logits[..., 60:] -= 1e4
    return logits


OWN = {
    "hidden states": (lambda model, hidden: model.lm_head(hidden * 1.05), "treats hidden states in a way of its own"),
    "shifted": (shifted, "treats logits in a way of its own"),
    "masked": (masked, "treats logits in a way of its own"),
    "squared": (lambda model, hidden: model.lm_head(hidden).square(), "treats logits in a way of its own"),
    "two calls": (lambda model, h: model.lm_head(h) - model.lm_head(h / 2), "calls its head in a way of its own"),
    "keyword": (lambda model, hidden: model.lm_head(input=hidden), "calls its head in a way of its own"),
    "no head": (lambda model, hidden: hidden @ model.lm_head.weight.T * 2, "calls its head in a way of its own"),
}


@pytest.mark.parametrize("name", OWN)
def test_model_with_a_way_of_its_own_keeps_its_logits(name, accelerator, batch, monkeypatch):
    how, words = OWN[name]
    monkeypatch.setattr(Own, "how", how)
    said = check(accelerator, filled(Own(transformers.LlamaConfig(**GROUPED))), batch)
    assert said == f"from whole logits (Own {words})"


def test_model_without_known_parts_keeps_its_logits(accelerator, batch, monkeypatch):
    monkeypatch.setattr(Own, "how", lambda model, hidden: model.lm_head(hidden))
    monkeypatch.setattr(Own, "base_model", property(lambda model: lambda *args, **kwargs: (model.model,)))
    said = check(accelerator, filled(Own(transformers.LlamaConfig(**GROUPED))), batch)
    assert said.startswith("from whole logits (Own is built in a way of its own: ")


class OwnHead(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).tanh()


def test_head_of_another_class_keeps_its_logits(accelerator, batch):
    model = build("llama")
    model.lm_head = OwnHead(32, 64, bias=False)
    assert check(accelerator, model, batch) == "from whole logits (the head is no plain linear layer)"


def test_head_with_a_forward_of_its_own_keeps_its_logits(accelerator, batch):
    model = build("llama")
    model.lm_head.forward = lambda hidden: F.linear(hidden, model.lm_head.weight).tanh()
    said = check(accelerator, model, batch)
    assert said == "from whole logits (the head of LlamaForCausalLM computes in a way of its own)"


def test_auxiliary_loss_is_left_out_with_a_word(accelerator, batch, capsys):
    check(accelerator, build("mixtral"), batch)
    assert "output_router_logits" not in capsys.readouterr().out
    assert check(accelerator, build("mixtral", output_router_logits=True), batch) == FUSED
    assert "output_router_logits" in capsys.readouterr().out


def test_batch_without_any_label(accelerator, batch):
    model = build("llama")
    loss_head.attach(model, accelerator)
    batch |= {"labels": torch.full_like(batch["labels"], -100), "target_positions": torch.zeros(0, dtype=torch.int64)}
    output = model(**batch)
    output["loss_sum"].backward()
    grads = take_gradients(model)
    assert output["loss_sum"].item() == 0 == output["num_correct"].item()
    assert len(grads) == len(list(model.parameters())) and all(not grad.any() for grad in grads.values())


def test_otherwise_the_model_is_as_before(accelerator, batch):
    model = build("llama")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    before = model(**inputs).logits
    loss = model(**inputs, labels=batch["labels"]).loss
    answer = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    signature = inspect.signature(model.forward)
    assert "input_ids" in signature.parameters
    loss_head.attach(model, accelerator)
    loss_head.verify(accelerator, model)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model(**inputs).logits, before)
    assert torch.equal(model(**inputs, labels=batch["labels"]).loss, loss)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), answer)


def test_copy_computes_with_its_own_weights(accelerator, batch):
    model = build("llama")
    loss_head.attach(model, accelerator)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not copied(input_ids=batch["input_ids"]).logits.any()
    assert copied(**batch)["loss_sum"].item() == pytest.approx(14 * torch.tensor(64.0).log().item(), rel=1e-6)
    assert model(input_ids=batch["input_ids"]).logits.any()


# --- adapters --------------------------------------------------------------------------------------------------------


def with_adapter(name, targets, **settings):
    model = build(name)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=targets, **settings)
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:  # zero, or a copy, at the start
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.train()


ADAPTERS = {
    "off the head": ("llama", ["q_proj"], {}, FUSED),
    "on the head": ("llama", ["q_proj", "lm_head"], {}, FUSED),
    "on a head with bias": ("phi", ["q_proj", "lm_head"], {}, FUSED),
    "on a capped head": ("gemma2", ["q_proj", "lm_head"], {}, FUSED),
    "on a scaled head, rslora": ("granite", ["lm_head"], {"use_rslora": True}, FUSED),
    "saved head": ("llama", ["q_proj"], {"modules_to_save": ["lm_head"]}, FUSED),
    "saved head with bias": ("phi", ["q_proj"], {"modules_to_save": ["lm_head", "embed_tokens"]}, FUSED),
    "DoRA off the head": ("llama", ["q_proj"], {"use_dora": True}, FUSED),
    "DoRA on the head": ("llama", ["q_proj", "lm_head"], {"use_dora": True}, None),
    "LoRA with a bias": ("phi", ["q_proj", "lm_head"], {"lora_bias": True}, None),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter(name, accelerator, batch):
    base, targets, settings, wanted = ADAPTERS[name]
    model = with_adapter(base, targets, **settings)
    with_it = from_own_logits(model, batch)
    assert any("lm_head" in name for name in with_it[2]) == (
        "head" in " ".join(targets) or "modules_to_save" in settings
    )
    with model.disable_adapter(), torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        without_it = losses.cross_entropy_sum(logits, batch["labels"]).item()
    assert abs(without_it - with_it[0]) > 0.01
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    answer = model.generate(**inputs, max_new_tokens=5, do_sample=False)

    said = check(accelerator, model, batch, with_it)
    assert said == (wanted or "from whole logits (the head is no plain linear layer)")
    with model.disable_adapter(), torch.no_grad():
        assert model(**batch)["loss_sum"].item() == pytest.approx(without_it, rel=1e-6)
    compare(model, batch, *with_it)  # and is back
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), answer)


def test_merged_adapter_counts_once(accelerator, batch):
    model = with_adapter("llama", ["lm_head"])
    wanted = from_own_logits(model, batch)
    check(accelerator, model, batch, wanted)
    model.merge_adapter()
    with torch.no_grad():
        assert model(**batch)["loss_sum"].item() == pytest.approx(wanted[0], rel=1e-5)


# --- Liger's kernel --------------------------------------------------------------------------------------------------


class FakeLiger:
    """A `liger_kernel` of plain torch with the interface of 0.8.5: no triton, so it runs here."""

    def __init__(self, monkeypatch):
        self.calls, self.gradient, self.guess, self.error = 0, 1.0, 0, None
        for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        self.functional = sys.modules["liger_kernel.transformers.functional"]
        self.functional.liger_fused_linear_cross_entropy = self.compute
        monkeypatch.setattr(loss_kernel, "WITHOUT_TRITON", ())

    def compute(
        self,
        input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
        chunk_mem_const=1,
    ):
        self.calls += 1
        if self.error:
            raise self.error
        assert len(target) and reduction == "sum" and accum_dtype == torch.float32 and return_predicted_tokens
        assert not torch.is_autocast_enabled("cpu") and input.dtype == weight.dtype
        if not input.requires_grad:
            weight = weight.detach()  # as it does
        logits = F.linear(input, weight, bias).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
        loss = self.gradient * loss + (1 - self.gradient) * loss.detach()
        guesses = torch.where(target == ignore_index, -1, logits.argmax(1) + self.guess)
        return types.SimpleNamespace(loss=loss, z_loss=None, token_accuracy=None, predicted_tokens=guesses)


@pytest.fixture
def liger(monkeypatch):
    return FakeLiger(monkeypatch)


def slowed(compute):
    def slow(*args, return_predicted_tokens=False, **kwargs):
        time.sleep(0.05)
        given = {"return_predicted_tokens": True} if return_predicted_tokens else {}
        return compute(*args, **kwargs, **given)

    return slow


def slow_chunks(monkeypatch):
    monkeypatch.setattr(losses, "_walk_chunks", slowed(losses._walk_chunks))


def slow_liger(monkeypatch, liger):
    monkeypatch.setattr(liger.functional, "liger_fused_linear_cross_entropy", slowed(liger.compute))


def verified(accelerator, name="llama"):
    model = build(name)
    loss_head.attach(model, accelerator)
    return model, loss_head.verify(accelerator, model, 256)


@pytest.mark.parametrize("case", ["plain", "bias", "scale", "softcap", "frozen head", "frozen body", "autocast"])
def test_liger_is_called_for_the_same_numbers(case, liger):
    settings = dict(CASES.get(case, {}))
    leaves, labels = tensors(settings.pop("bias", False))
    if case == "frozen head":
        leaves["weight"].requires_grad_(False)
    if case == "frozen body":
        leaves["hidden"].requires_grad_(False)
    found = []
    for compute in (losses.linear_cross_entropy_sum, loss_kernel.liger_cross_entropy_sum):
        for leaf in leaves.values():
            leaf.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            loss, correct = compute(leaves["hidden"], leaves["weight"], labels, leaves.get("bias"), **settings)
        (0.37 * loss).backward()
        found.append((loss.item(), correct.item(), {name: leaf.grad for name, leaf in leaves.items()}))
    (loss, correct, grads), (ligers_loss, ligers_correct, ligers_grads) = found
    assert liger.calls == 1
    assert ligers_loss == pytest.approx(loss, rel=1e-6) and ligers_correct == correct > 0
    for name, grad in grads.items():
        assert (grad is None) == (ligers_grads[name] is None) == (not leaves[name].requires_grad), name
        assert grad is None or distance(ligers_grads[name], grad) < (0.01 if case == "autocast" else 1e-6), name


def test_liger_is_not_asked_for_nothing(liger):
    leaves, labels = tensors()
    loss, correct = loss_kernel.liger_cross_entropy_sum(leaves["hidden"][:0], leaves["weight"], labels[:0])
    loss.backward()
    assert (loss.item(), correct.item(), liger.calls) == (0, 0, 0)
    assert not leaves["weight"].grad.any()
    with torch.no_grad():
        loss_kernel.liger_cross_entropy_sum(leaves["hidden"], leaves["weight"], labels)
    assert liger.calls == 1


def test_liger_is_used_where_it_is_faster(accelerator, batch, liger, monkeypatch):
    slow_chunks(monkeypatch)
    model = build("gemma2")
    wanted = from_own_logits(model, batch)
    said = check(accelerator, model, batch, wanted)
    assert said.startswith("by Liger's kernel, without whole logits (") and said.endswith("ms in chunks)")
    assert liger.calls == 5 and model.loss_kernel is loss_kernel.liger_cross_entropy_sum


def test_chunks_are_used_where_they_are_faster(accelerator, batch, liger, monkeypatch):
    slow_liger(monkeypatch, liger)
    model, said = verified(accelerator)
    assert said.startswith(f"{FUSED} (") and "ms by Liger's kernel" in said
    assert liger.calls == 4
    model(**batch)
    assert liger.calls == 4


def test_a_kernel_can_be_asked_for(accelerator, batch, liger, monkeypatch):
    slow_liger(monkeypatch, liger)
    monkeypatch.setenv(loss_kernel.ASK, "liger")
    model, said = verified(accelerator)
    assert said.startswith("by Liger's kernel") and model.loss_kernel is loss_kernel.liger_cross_entropy_sum
    slow_chunks(monkeypatch)
    liger.calls = 0
    monkeypatch.setenv(loss_kernel.ASK, "chunks")
    model, said = verified(accelerator)
    model(**batch)
    assert said == f"{FUSED} (ONELOOP_LOSS_KERNEL)" and liger.calls == 0
    monkeypatch.setenv(loss_kernel.ASK, "triton")
    with pytest.raises(ValueError, match="ONELOOP_LOSS_KERNEL is 'triton': give liger or chunks"):
        verified(accelerator)
    monkeypatch.setenv(loss_kernel.ASK, "")
    assert "ms by Liger's kernel" in verified(accelerator)[1]


def unfit(monkeypatch, liger, obstacle):
    """Make Liger's kernel impossible, and return (what is said of it, the model)."""
    if obstacle == "not installed":
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
        return "liger-kernel is not installed", build("llama")
    if obstacle == "device":
        monkeypatch.setattr(loss_kernel, "WITHOUT_TRITON", ("cpu",))
        return "liger-kernel does not run on cpu", build("llama")
    if obstacle == "adapter":
        return "liger-kernel knows no adapter on the head", with_adapter("llama", ["lm_head"])
    if obstacle == "import":
        monkeypatch.delattr(liger.functional, "liger_fused_linear_cross_entropy")
        return "liger-kernel cannot be imported: ", build("llama")
    if obstacle == "old":
        monkeypatch.setattr(liger.functional, "liger_fused_linear_cross_entropy", lambda input, weight, target: None)
        return "liger-kernel is older than 0.8", build("llama")
    if obstacle == "error":
        liger.error = RuntimeError("no such instruction\nin a long listing")
        return "liger-kernel fails: RuntimeError: no such instruction", build("llama")
    if obstacle == "gradient":
        liger.gradient = 0.9
    if obstacle == "guess":
        liger.guess = 1
    return "liger-kernel gives other numbers than the chunks", build("llama")


@pytest.mark.parametrize(
    "obstacle", ["not installed", "device", "adapter", "import", "old", "error", "gradient", "guess"]
)
def test_liger_is_refused_where_it_cannot_be_used(obstacle, accelerator, batch, liger, monkeypatch):
    slow_chunks(monkeypatch)
    words, model = unfit(monkeypatch, liger, obstacle)
    loss_head.attach(model, accelerator)
    said = loss_head.verify(accelerator, model, 256)
    assert causal_of(model).loss_kernel is losses.linear_cross_entropy_sum
    assert said == FUSED if obstacle == "not installed" else said.startswith(f"{FUSED} ({words}")
    monkeypatch.setenv(loss_kernel.ASK, "liger")
    with pytest.raises(ValueError, match=f"ONELOOP_LOSS_KERNEL is liger, but {words}"):
        loss_head.verify(accelerator, model, 256)


def test_no_kernel_can_be_asked_for_where_logits_are_needed(accelerator, monkeypatch):
    monkeypatch.setattr(loss_head, "_treatment", lambda causal: {"scale": 1.0, "softcap": None})
    for kernel in ("liger", "chunks"):
        monkeypatch.setenv(loss_kernel.ASK, kernel)
        with pytest.raises(ValueError, match=f"ONELOOP_LOSS_KERNEL is '{kernel}', but .* whole logits"):
            verified(accelerator, "gemma2")


@pytest.mark.parametrize("seconds, chosen", [((2.0, 1.0), "liger"), ((1.0, 2.0), "chunks")])
def test_all_ranks_use_what_the_first_one_found(seconds, chosen, accelerator, liger, monkeypatch):
    """A rank that is not the first times nothing, and takes over what it is told."""
    monkeypatch.setattr(loss_kernel, "_trial", lambda *_: pytest.fail("only the first rank tries"))
    other = types.SimpleNamespace(is_main_process=False, device=accelerator.device)
    case = loss_kernel.Case.of(torch.zeros(1, D), torch.zeros(V, D), None)
    kernels = {"liger": loss_kernel.liger_cross_entropy_sum, "chunks": losses.linear_cross_entropy_sum}

    def told(values):
        assert values == [None]
        return [(None, seconds)]

    monkeypatch.setattr("accelerate.utils.broadcast_object_list", told)
    assert loss_kernel.choose(other, case, 64, None)[0] is kernels[chosen]
    # Another rank cannot: nobody tries.
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda _: pytest.fail("there is nothing to tell"))
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, "liger-kernel is not installed"])
    assert loss_kernel.choose(other, case, 64, None) == (losses.linear_cross_entropy_sum, FUSED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_liger_itself(softcap, monkeypatch):
    monkeypatch.undo()  # the package may be seen
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    device = torch.accelerator.current_accelerator()
    hidden, weight = torch.zeros(1, 512, dtype=torch.bfloat16, device=device), torch.zeros(8000, 512, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        case = loss_kernel.Case.of(hidden, weight.requires_grad_(), None, softcap=softcap)
    assert loss_kernel._obstacle(device, case) is None
    obstacle, seconds = loss_kernel._trial(device, case, 1000)
    assert obstacle is None and all(0 < one < 60 for one in seconds), obstacle
