"""Adapters over a base model in 4 or 8 bits, in this process: what is saved, merged and refused (C45, C39)."""

import json

import pytest
import torch

from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import UNEVEN

QLORA = {"use_peft": True, "quantization": "nf4", "global_batch_size": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an adapter that matters: 50 steps at a high rate."""
    folder = tmp_path_factory.mktemp("qlora")
    return folder, runs.train(folder, UNEVEN, **QLORA, max_steps=50, learning_rate=1e-2, merge_adapter=True)


def base_in_4_bits(folder, **kwargs):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    rounding = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(
        folder / "tiny", dtype=torch.float32, quantization_config=rounding, **kwargs
    )


@torch.no_grad()
def logits(model):
    # In evaluation mode a 4-bit layer computes in bf16 on some CPUs (bitsandbytes 0.50); there is no dropout here.
    return model.train()(input_ids=torch.arange(4, 64)[None]).logits


def test_adapter_and_merged_model_answer_as_trained(trained):
    """Plain peft on the 4-bit base, and the merged model alone: the same logits, up to fp32 rounding."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, output = trained
    bare = logits(base_in_4_bits(folder))
    adapted = logits(PeftModel.from_pretrained(base_in_4_bits(folder), output / "model"))
    merged_model = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32)
    effect = (adapted - bare).abs().max()
    assert effect > 1, "the adapter has not learnt enough to tell anything"
    difference = (logits(merged_model) - adapted).abs().max()
    assert difference < 1e-4 * effect
    original = AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    other = logits(PeftModel.from_pretrained(original, output / "model").merge_and_unload())
    assert (other - adapted).abs().max() > 100 * difference, "merging into the original weights is another model"


def test_merged_model_is_a_plain_one(trained):
    folder, output = trained
    settings = json.loads((output / "merged" / "config.json").read_text())
    assert "quantization_config" not in settings and settings["dtype"] == "float32"
    merged, start = (launcher.read_tensors(at) for at in (output / "merged", folder / "tiny"))
    assert set(merged) == set(start)
    assert all(tensor.shape == start[name].shape and tensor.dtype == torch.float32 for name, tensor in merged.items())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], start[name])
    assert torch.equal(merged["model.norm.weight"], start["model.norm.weight"])


def test_run_states_what_a_rank_holds(trained, capfd):
    _, output = trained
    topology = json.loads((output / "topology.json").read_text())
    # 2 layers with 64 x 64, 2 x 64 x 32, 64 x 64 of attention and 3 x 64 x 128 of MLP, half a byte each; scales on top.
    packed = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) / 2
    assert packed < topology["quantized_bytes"] < 1.8 * packed, "mostly the code books of such small layers"
    assert topology["quantized_fraction"] == 1


def test_adapter_is_continued_over_the_same_rounding(trained, tmp_path):
    folder, output = trained
    again = runs.train(
        tmp_path, UNEVEN, model_name_or_path=str(output / "model"), quantization="nf4", global_batch_size=4, max_steps=1
    )
    first, last = (launcher.column(launcher.read_metrics(at), "train/loss") for at in (again, output))
    assert first[0] < last[0] - 0.5 and first[0] == pytest.approx(last[-1], rel=0.05)


def test_int8_trains(tmp_path):
    output = runs.train(tmp_path, UNEVEN, **QLORA | {"quantization": "int8"}, max_steps=20, learning_rate=1e-2)
    losses = launcher.column(launcher.read_metrics(output), "train/loss")
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.isfinite(tensor).all() for tensor in launcher.read_tensors(output / "model").values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_peft": False}, "quantization is nf4 but whole weights cannot be trained"),
        ({"lora_modules_to_save": ["q_proj"]}, "'q_proj' is held in nf4, which cannot be trained in full"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        runs.train(tmp_path, UNEVEN, **QLORA | changes, max_steps=1)


def test_model_that_is_quantised_already_is_refused(tmp_path):
    tiny.save(tmp_path / "tiny")
    base_in_4_bits(tmp_path).save_pretrained(tmp_path / "packed")
    tiny.tokenizer().save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match="is quantised already.*Name the original model"):
        runs.train(tmp_path, UNEVEN, **QLORA, max_steps=1, model_name_or_path=str(tmp_path / "packed"))


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_int8_is_refused_where_weights_are_sharded(monkeypatch, strategy):
    from oneloop import sharding

    monkeypatch.setattr("oneloop.sharding.chosen.strategy", lambda _: strategy)
    sharding.check_quantization(None, "nf4")
    with pytest.raises(
        ValueError, match=f"int8 cannot be sharded, as '{strategy}' would have it. Use quantization: nf4"
    ):
        sharding.check_quantization(None, "int8")


def test_whole_copy_where_a_shard_was_promised_is_refused():
    from types import SimpleNamespace

    from oneloop import launch
    from oneloop.sharding import Obtained

    asked = SimpleNamespace(
        strategy="fsdp2", world_size=2, offload_optimizer=False, offload_parameters=False, source="fsdp2.yaml"
    )
    shares = {"parameter_fraction": 0.55, "optimizer_fraction": 0.5, "parameter_bytes": 1, "quantized_bytes": 1}
    got = Obtained("fsdp2", 2, "cpu", "no", "none", {"A": 2, "B": 1}, **shares, quantized_fraction=0.5)
    launch.check(asked, got)
    got = Obtained("fsdp2", 2, "cpu", "no", "none", {"A": 2, "B": 1}, **shares, quantized_fraction=1.0)
    with pytest.raises(ValueError, match="a rank holds 100% of the quantised weights instead of a shard"):
        launch.check(asked, got)
