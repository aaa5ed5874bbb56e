"""Which optimizer a name stands for, and which names a strategy or device refuses."""

from types import SimpleNamespace

import pytest
import torch

from oneloop import optim, sharding
from tests import tiny


@pytest.fixture(scope="module")
def alone():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def settings(**changes):
    values = {"optim": "adamw", "weight_decay": 0.1, "learning_rate": 1e-3, "adam_betas": [0.9, 0.999]}
    return SimpleNamespace(**values | changes)


def test_groups_follow_module_types(alone):
    model = tiny.tiny_model(400)
    decay, plain = optim.build(settings(adam_betas=[0.9, 0.95]), model, alone).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert decay["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0 and decay["betas"] == (0.9, 0.95)
    assert sorted(names[id(p)].split(".")[-2] for p in plain["params"]) == sorted(
        ["norm"] + ["input_layernorm", "post_attention_layernorm"] * 2
    )
    assert len(decay["params"]) + len(plain["params"]) == len(names)
    for parameter in model.parameters():
        parameter.requires_grad = False
    with pytest.raises(ValueError, match="no trainable parameter"):
        optim.build(settings(), model, alone)


KINDS = {  # name: class, and how far one step at rate 1e-3 moves a weight of a gradient far from 0
    "adamw": ("AdamW", 1e-3),
    "adamw_8bit": ("AdamW", 1e-3),
    "lion": ("Lion", 1e-3),
    "torch.optim.NAdam": ("NAdam", None),
    "adafactor": ("Adafactor", None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps(alone, kind):
    """Each is the class it names, takes the rate from outside, and a rate of 0 moves nothing."""
    model = tiny.tiny_model(400)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optim.build(settings(optim=kind, weight_decay=0.0), model, alone)
    class_name, moved = KINDS[kind]
    assert type(optimizer).__name__ == class_name
    for lr in (0.0, 1e-3):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.5 + index)
        optimizer.step()
        differences = [(p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters()]
        if lr == 0:
            assert max(differences) == 0
    assert min(differences) > 0
    if moved is not None:
        assert differences == pytest.approx([moved] * len(differences), rel=2e-2)


def test_state_of_adamw_8bit_is_a_quarter(alone):
    """Moments in 8 bits for every tensor of at least 4,096 elements, and nothing else is changed."""
    sizes = {}
    for kind in ("adamw", "adamw_8bit"):
        model = tiny.tiny_model(400)
        optimizer = optim.build(settings(optim=kind), model, alone)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        large = [optimizer.state[p] for p in model.parameters() if p.numel() >= 4096]
        sizes[kind] = sum(v.numel() * v.element_size() for state in large for v in state.values() if torch.is_tensor(v))
    # bitsandbytes keeps its two code books with every tensor; they are shared, but counted here.
    assert sizes["adamw_8bit"] < 0.4 * sizes["adamw"]


def test_lion_is_its_paper(alone):
    """x <- x - lr (sign(b1 m + (1 - b1) g) + wd x); m <- b2 m + (1 - b2) g (arXiv 2302.06675, algorithm 2)."""
    weight = torch.nn.Linear(64, 64, bias=False)
    optimizer = optim.build(settings(optim="lion", adam_betas=[0.9, 0.99]), weight, alone)
    x, m = weight.weight.detach().clone(), torch.zeros(64, 64)
    torch.manual_seed(0)
    for _ in range(5):
        g = torch.randn(64, 64)
        weight.weight.grad = g.clone()
        optimizer.step()
        x = x - 1e-3 * (torch.sign(0.9 * m + 0.1 * g) + 0.1 * x)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(weight.weight.detach(), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no_such_package.Optimizer", "optim: cannot import 'no_such_package.Optimizer'"),
        ("torch.optim.NoSuch", "optim: cannot import 'torch.optim.NoSuch'"),
        ("torch.nn.Linear", "is no subclass of torch.optim.Optimizer"),
        ("torch.optim.LBFGS", "LBFGS"),
        ("paged_adamw", "pages between a GPU and its host, and this run is on cpu. Use optim: adamw."),
        ("paged_adamw_8bit", "Use optim: adamw_8bit."),
    ],
)
def test_what_cannot_be_is_refused(alone, kind, message):
    with pytest.raises(ValueError) as caught:
        optim.build(settings(optim=kind), tiny.tiny_model(400), alone)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "kind", "works_instead"),
    [
        ("zero1", "adafactor", "accelerate_configs/ddp.yaml"),
        ("zero3", "adafactor", "accelerate_configs/ddp.yaml"),
        ("fsdp2", "adafactor", "accelerate_configs/ddp.yaml"),
        ("fsdp2", "adamw_8bit", "accelerate_configs/zero3.yaml"),
        ("fsdp2", "lion", "optim: adamw"),
        ("zero2_offload", "adamw_8bit", "without _offload"),
        ("zero2_offload", "torch.optim.NAdam", "without _offload"),
    ],
)
def test_strategies_refuse_what_they_would_change(monkeypatch, strategy, kind, works_instead):
    name, _, offload = strategy.partition("_")
    monkeypatch.setattr("oneloop.sharding.chosen.strategy", lambda _: name)
    zero = {"zero_optimization": {"offload_optimizer": {"device": "cpu" if offload else "none"}}}
    plugin = SimpleNamespace(deepspeed_config=zero)
    accelerator = SimpleNamespace(device=torch.device("cpu"), state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(ValueError, match="optim: ") as caught:
        sharding.check_optimizer(accelerator, kind, is_own="." in kind)
    assert works_instead in str(caught.value)
    sharding.check_optimizer(accelerator, "adamw", is_own=False)
