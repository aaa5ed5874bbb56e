"""Scripts on training states and adapters: exported and merged bit for bit as a run itself does it, and inspected."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oneloop import fingerprint
from oneloop.state import format as state_format
from oneloop.state import plain
from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import UNEVEN
from tests.test_guards import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import export_checkpoint  # noqa: E402
import inspect_state  # noqa: E402
from merge_adapter import command, merging  # noqa: E402

STEPS = {"global_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "save_every": 1, "save_total_limit": 5}
ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True, "use_rslora": True, "lora_modules_to_save": ["norm"]},
    "part": {"lora_target_modules": ["q_proj", "down_proj"], "quantization": "nf4", "export_dtype": "bf16"},
    "int8": {"quantization": "int8"},
}


def call(main, *argv) -> tuple[int, str, str]:
    """Exit code, output and errors of a script."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def good(main, *argv) -> str:
    code, out, err = call(main, *argv)
    assert code == 0, err
    return out


def bad(main, *argv) -> str:
    code, _, err = call(main, *argv)
    assert code in (1, 2) and "Traceback" not in err
    return err


def same_files(live: Path, made: Path) -> int:
    """Every file of a live export is in the other folder, byte for byte; returns how many there are."""
    names = sorted(path.name for path in live.iterdir())
    for name in names:
        one, other = (live / name).read_bytes(), (made / name).read_bytes()
        if name == "adapter_config.json":  # peft writes sets, in any order
            one, other = (
                {key: sorted(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}
                for text in (one, other)
            )
        assert one == other, name
    assert {path.name for path in made.iterdir()} - set(names) <= {"export.json", "merge_report.json"}
    return len(names)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A run of a whole model stored in bf16, which is therefore exported in bf16, with states of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("full")
    tiny.save(folder / "tiny")
    weights = {name: t.bfloat16() for name, t in load_file(folder / "tiny" / "model.safetensors").items()}
    save_file(weights, folder / "tiny" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "tiny" / "config.json").read_text())
    (folder / "tiny" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return runs.train(folder, UNEVEN, **STEPS, export_dtype="auto")


@pytest.fixture(scope="module")
def qlora(tmp_path_factory):
    """A run's folder with an adapter that matters, of random values: training one takes minutes (C45)."""
    from peft import LoraConfig, get_peft_model

    run = tmp_path_factory.mktemp("qlora") / "run"
    tiny.save(run.parent / "tiny")
    model = tiny.tiny_model(len(tiny.tokenizer()))
    model.name_or_path = str(run.parent / "tiny")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(run / "model")
    tiny.tokenizer().save_pretrained(run / "model")
    (run / "recipe.yaml").write_text("quantization: nf4\n")
    return run


def newest(run: Path) -> Path:
    return inspect_state.candidates(run)[0]


def rewrite(state: Path, target: Path, cut=None, change=lambda tensors: tensors, **entries) -> Path:
    """A copy of a state whose tensors are changed, or cut into the files of several ranks as `cut(n)` says."""
    source = state_format.open_state(state)
    tensors = {
        (name, kind): source.read(name, kind).clone()
        for name, about in source.tensors.items()
        for kind in about["kinds"]
    }
    tensors = change(tensors)
    files: dict[int, list] = {}
    for (name, kind), tensor in tensors.items():
        borders = [0, *(cut(len(tensor)) if cut else []), len(tensor)]
        for rank, (start, end) in enumerate(zip(borders, borders[1:], strict=False)):
            files.setdefault(rank, []).append((state_format.Range(name, kind, start, end - start), tensor[start:end]))
    target.mkdir(parents=True)
    manifest = source.manifest | {"files": {}, "world_size": len(files)} | entries
    kept = {name for name, _ in tensors}
    manifest["tensors"] = {name: about for name, about in source.tensors.items() if name in kept}
    for rank, ranges in files.items():
        name = f"rank-{rank:05d}.safetensors"
        written = state_format.write_tensors(target / name, [(piece.key, values) for piece, values in ranges])
        manifest["files"][name] = written | {"ranges": [piece.to_json() for piece, _ in ranges]}
    state_format.write_manifest(target, manifest)
    return target


# --- export -----------------------------------------------------------------------------------------------------------


def test_state_is_exported_as_the_run_exported_it(full, tmp_path):  # C41
    out = good(export_checkpoint.main, full, tmp_path / "out")
    assert "step-00000002 (step 2, 1 files verified)" in out and "torch.bfloat16, 20 tensors" in out
    assert same_files(full / "model", tmp_path / "out") >= 5
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (record["step"], record["what"], record["dtype"]) == (2, "model", "bfloat16")
    # An earlier step is another model, in the format asked for: that of its fp32 masters.
    good(export_checkpoint.main, full / "states" / "step-00000001", tmp_path / "one", "--dtype", "fp32")
    state = state_format.open_state(full / "states" / "step-00000001")
    made = load_file(tmp_path / "one" / "model.safetensors")
    assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "float32"
    assert made.keys() == state.tensors.keys() and len(made) == 20
    for name, tensor in made.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor.flatten(), state.read(name, "param")), name
    final = load_file(tmp_path / "out" / "model.safetensors")
    assert all(not torch.equal(final[name], made[name].bfloat16()) for name in final if "proj" in name)


def test_it_does_not_matter_how_many_ranks_wrote_the_state(full, tmp_path, monkeypatch):
    def cut(length):
        return [length // 7, length // 7, length // 2]  # pieces across rows, an empty one among them

    rewrite(newest(full), tmp_path / "run" / "states" / "step-00000002", cut)
    monkeypatch.setattr(plain, "BLOCK_ELEMENTS", 1000)
    assert "4 files verified" in good(export_checkpoint.main, tmp_path / "run", tmp_path / "out")
    same_files(full / "model", tmp_path / "out")


def test_large_models_are_written_as_several_files(full, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(plain, "MAX_FILE_BYTES", 40_000)
    good(export_checkpoint.main, full, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) >= 4 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(t.numel() * 2 for t in load_file(path).values()) for path in files]
    assert all(size <= 40_000 or len(load_file(path)) == 1 for size, path in zip(sizes, files, strict=True))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(sizes)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = load_file(full / "model" / "model.safetensors")
    assert {name for name, _ in loaded.named_parameters()} == set(expected)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


def test_what_was_not_trained_comes_from_the_base_model(full, tmp_path):
    frozen = "model.layers.1.mlp.up_proj.weight"

    def without(tensors):
        return {key: tensor for key, tensor in tensors.items() if key[0] != frozen}

    good(export_checkpoint.main, rewrite(newest(full), tmp_path / "step-00000002", change=without), tmp_path / "out")
    made, live = (load_file(at / "model.safetensors") for at in (tmp_path / "out", full / "model"))
    base = load_file(full.parent / "tiny" / "model.safetensors")
    assert torch.equal(made[frozen], base[frozen]) and not torch.equal(made[frozen], live[frozen])
    assert all(torch.equal(made[name], live[name]) for name in live if name != frozen) and made.keys() == live.keys()


def test_experts_and_an_untied_head_are_exported_as_their_checkpoints_store_them(tmp_path):  # C41
    from transformers import MixtralConfig, MixtralForCausalLM

    text = tiny.tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=len(text), eos_token_id=text.eos_token_id, **sizes, **heads)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "tiny")
    text.save_pretrained(tmp_path / "tiny")
    run = runs.train(tmp_path, UNEVEN, **STEPS)
    good(export_checkpoint.main, run, tmp_path / "out")
    made, live = (load_file(at / "model.safetensors") for at in (tmp_path / "out", run / "model"))
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in made and "lm_head.weight" in made
    assert made.keys() == live.keys() and all(torch.equal(made[name], live[name]) for name in live)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_states_are_exported_and_merged_as_the_run_did(tmp_path, name):  # C41, C45
    run = runs.train(tmp_path, UNEVEN, **STEPS, use_peft=True, merge_adapter=True, **ADAPTERS[name])
    assert "adapter of step 2" in good(export_checkpoint.main, run, tmp_path / "out")
    assert same_files(run / "model", tmp_path / "out") >= 4
    assert "merged" in good(export_checkpoint.main, run, tmp_path / "merged", "--merge")
    assert same_files(run / "merged", tmp_path / "merged") >= 5
    assert sorted(path.name for path in tmp_path.iterdir() if "tmp" in path.name) == []
    if name == "lora":  # whose training goes on
        again = runs.train(tmp_path / "again", UNEVEN, **STEPS, model_name_or_path=str(run / "model"))
        good(export_checkpoint.main, again, tmp_path / "continued")
        assert same_files(again / "model", tmp_path / "continued") >= 4
        first, second = (load_file(at / "adapter_model.safetensors") for at in (run / "model", tmp_path / "continued"))
        assert first.keys() == second.keys() and any(not torch.equal(first[key], second[key]) for key in first)


def test_damaged_state_is_not_exported_and_the_one_before_is_taken(full, tmp_path):
    shutil.copytree(full / "states", tmp_path / "run" / "states")
    path = tmp_path / "run" / "states" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    err = bad(export_checkpoint.main, path.parent, tmp_path / "out")
    assert "rank-00000.safetensors was changed after it was written" in err
    assert not [item for item in tmp_path.iterdir() if "out" in item.name]
    code, out, err = call(export_checkpoint.main, tmp_path / "run", tmp_path / "out")
    assert code == 0 and "taking the one before" in err and "step-00000001 (step 1" in out
    assert json.loads((tmp_path / "out" / "export.json").read_text())["step"] == 1


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(full, tmp_path):
    out = tmp_path / "out"
    assert "is no training state" in bad(export_checkpoint.main, tmp_path, out)
    assert "is a state" not in bad(export_checkpoint.main, full, full / "model")
    assert "exists already" in bad(export_checkpoint.main, full, full / "model")
    assert "Leave it out" in bad(export_checkpoint.main, full, out, "--merge")
    assert "has no effect without --merge" in bad(export_checkpoint.main, full, out, "--base", "16bit")

    def diverged(tensors):
        tensors["model.norm.weight", "param"][3] = math.nan
        return tensors

    state = rewrite(newest(full), tmp_path / "diverged" / "step-00000002", change=diverged)
    assert "model.norm.weight holds values that are not finite" in bad(export_checkpoint.main, state, out)
    assert [path.name for path in tmp_path.iterdir()] == ["diverged"]


def test_base_model_that_moved_or_changed_is_refused_unless_named(full, tmp_path):
    out, state = tmp_path / "out", newest(full)
    base = tmp_path / "base"
    shutil.copytree(full.parent / "tiny", base)
    record = {"name": str(base), **fingerprint.of_model(base)}
    config = state_format.open_state(state).manifest["config"] | {"model_name_or_path": str(base)}
    state = rewrite(state, tmp_path / "step-00000002", config=config, model={"model": record, "adapter": None})
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-5}))
    assert "has changed since it was saved. Name the model" in bad(export_checkpoint.main, state, out)
    base.rename(tmp_path / "moved")
    assert "is not there any more. Name the model" in bad(export_checkpoint.main, state, out)
    code, _, err = call(export_checkpoint.main, state, out, "--model_name_or_path", tmp_path / "moved")
    assert code == 0 and "is not the base model that the state has on record" in err
    shutil.rmtree(out)
    code, _, err = call(export_checkpoint.main, state, out, "--model_name_or_path", full.parent / "tiny")
    assert code == 0 and "warning" not in err
    same_files(full / "model", out)


PEAK = """
import re, sys
sys.path.insert(0, {scripts!r})
import peft, torch, transformers, export_checkpoint
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from oneloop.state import plain

def mib(field):  # ru_maxrss would be that of the process this one was forked from
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024

before = mib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
print("PEAK", export_checkpoint.main({argv!r}), before, mib("VmHWM") - before)
"""


def test_memory_is_bounded_whatever_the_size_of_the_model(full, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    text = tiny.tokenizer()
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=len(text), tie_word_embeddings=True, eos_token_id=1, pad_token_id=1, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = {name: torch.full(tuple(p.shape), 0.5) for name, p in model.named_parameters()}
    base, state = tmp_path / "base", tmp_path / "step-00000001"
    text.save_pretrained(base)
    config.save_pretrained(base)
    save_file({name: t.bfloat16() for name, t in weights.items()}, base / "model.safetensors", {"format": "pt"})
    manifest = state_format.open_state(newest(full)).manifest
    state.mkdir()
    written = state_format.write_tensors(
        state / "rank-00000.safetensors", [(f"param/0/{name}", t.flatten()) for name, t in weights.items()]
    )
    ranges = [[name, "param", 0, t.numel()] for name, t in weights.items()]
    form = {"kinds": {"param": {"dtype": "F32"}}, "scalars": {}}
    manifest["tensors"] = {
        name: form | {"shape": [*t.shape], "kinds": {"param": {"dtype": "F32", "shape": [*t.shape]}}}
        for name, t in weights.items()
    }
    manifest |= {"files": {"rank-00000.safetensors": written | {"ranges": ranges}}, "model": {"name": str(base)}}
    manifest["config"] |= {"model_name_or_path": str(base), "export_dtype": "fp32"}
    state_format.write_manifest(state, manifest)
    assert written["num_bytes"] > 300 << 20
    del weights
    code = PEAK.format(scripts=str(ROOT / "scripts"), argv=[str(state), str(tmp_path / "out")])
    environment = launcher.environment() | {"CUDA_VISIBLE_DEVICES": ""}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, timeout=120)
    failed, before, growth = map(int, output.split("PEAK")[1].split())
    assert failed == 0 and before > 100 and growth > 0, output
    assert growth < 100, f"{growth} MiB more for a state of {written['num_bytes'] >> 20} MiB"
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 300 << 20


# --- merging ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits(model, input_ids: torch.Tensor) -> torch.Tensor:
    return model.train()(input_ids=input_ids).logits[0]  # in evaluation, some CPUs compute 4-bit layers in bf16


def test_merging_over_4_bits_states_what_either_base_costs(qlora, tmp_path):  # C45
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    (tmp_path / "texts.txt").write_text("\n\n".join(tiny.CORPUS[1:4]))
    arguments = ("--dtype", "fp32", "--eval_file", tmp_path / "texts.txt")
    out = good(command.main, qlora / "model", tmp_path / "own", *arguments)
    assert "base as nf4 rounds it" in out and "recipe.yaml" in out and "of what the adapter does" in out
    report = json.loads((tmp_path / "own" / "merge_report.json").read_text())
    assert (report["merged_into"], report["quantization"], report["num_texts"]) == ("dequantized", "nf4", 3)
    found, perplexity = report["difference"], report["perplexity"]
    assert found["dequantized"]["max_share"] < 1e-5 and found["16bit"]["mean_share"] < 0.1
    assert found["16bit"]["max"] > 100 * found["dequantized"]["max"]
    assert perplexity["dequantized"] == pytest.approx(perplexity["adapter"], rel=1e-5)
    assert abs(perplexity["16bit"] / perplexity["adapter"] - 1) > 1e-4

    good(command.main, qlora / "model", tmp_path / "16bit", "--base", "16bit", "--dtype", "bf16", "--no_report")
    tiny_model = qlora.parent / "tiny"
    for name, dtype in (("own", "float32"), ("16bit", "bfloat16")):
        settings = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in settings and settings["dtype"] == dtype
        tensors, base = (load_file(at / "model.safetensors") for at in (tmp_path / name, tiny_model))
        assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
        moved = [key for key in base if not torch.equal(tensors[key].float(), base[key].to(tensors[key].dtype).float())]
        assert len(moved) == 14 and all("proj" in key for key in moved)
    # Measured once more, without any of our code.
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    packed = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, quantization_config=nf4)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32)
    texts = [torch.tensor(tiny.tokenizer()(text)["input_ids"])[None] for text in tiny.CORPUS[1:4]]
    bare = [logits(packed, text) for text in texts]
    live = PeftModel.from_pretrained(packed, qlora / "model")
    live, merged = [logits(live, text) for text in texts], [logits(other, text) for text in texts]
    effect = max((one - two).abs().max() for one, two in zip(live, bare, strict=True))
    assert effect > 1 and report["adapter_effect"]["max"] == pytest.approx(float(effect), rel=1e-4)
    assert max((one - two).abs().max() for one, two in zip(merged, live, strict=True)) < 1e-5 * effect
    losses = [torch.log_softmax(o, -1)[:-1].gather(1, t[0, 1:, None]) for o, t in zip(live, texts, strict=True)]
    assert perplexity["adapter"] == pytest.approx(float(torch.cat(losses).mean().neg().exp()), rel=1e-4)


def test_merging_over_a_plain_base(full, tmp_path):
    run = runs.train(tmp_path, UNEVEN, **STEPS, use_peft=True)
    good(export_checkpoint.main, run, tmp_path / "adapter")
    out = good(command.main, tmp_path / "adapter", tmp_path / "out")
    assert "none (says" in out and "export.json" in out
    report = json.loads((tmp_path / "out" / "merge_report.json").read_text())
    assert set(report["difference"]) == {"16bit"} and report["difference"]["16bit"]["max_share"] < 1e-5
    assert report["num_texts"] == 8 and report["adapter_effect"]["max"] > 0
    err = bad(command.main, tmp_path / "adapter", tmp_path / "no", "--base", "dequantized")
    assert "was not trained over a quantised base" in err
    (tmp_path / "adapter" / "export.json").unlink()
    assert "give --quantization none, nf4 or int8" in bad(command.main, tmp_path / "adapter", tmp_path / "no")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    weights.pop(sorted(weights)[0])
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    arguments = (tmp_path / "adapter", tmp_path / "no", "--quantization", "none", "--no_report")
    assert "does not fit its base model" in bad(command.main, *arguments)
    assert "is no adapter folder" in bad(command.main, full / "model", tmp_path / "no")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("no")]


def test_never_merges_into_quantised_storage(qlora, tmp_path):  # C45
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    assert "never merged into 4-bit" in bad(command.main, qlora / "model", tmp_path / "out", "--dtype", "nf4")
    shutil.copytree(qlora.parent / "tiny", tmp_path / "packed")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(tmp_path / "packed", quantization_config=nf4).save_pretrained(
        tmp_path / "packed"
    )
    arguments = (qlora / "model", tmp_path / "out", "--model_name_or_path", tmp_path / "packed")
    assert "would round the result once more. Name the original" in bad(command.main, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_rounding_is_what_quantised_layers_compute_with():
    from bitsandbytes.nn import Linear4bit

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    layer = Linear4bit(128, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": weight})
    layer.support_avx512bf16_for_cpu = False
    rounded = merging.round_weight(weight, "nf4")
    torch.testing.assert_close(layer.to("cpu")(torch.eye(128)).T, rounded, rtol=0, atol=1e-6)
    assert 0.01 < (rounded - weight).abs().max() < 1
    turned = merging.round_weight(weight.T.contiguous(), "nf4", transposed=True)
    assert torch.equal(turned.T, rounded)
    assert 0 < (merging.round_weight(weight, "int8") - weight).abs().max() < 0.05


# --- inspecting -------------------------------------------------------------------------------------------------------


def test_inspect_shows_what_is_in_a_state(full):
    out = good(inspect_state.main, full, "--tensors", "--verify")
    state = newest(full)
    manifest = json.loads((state / "manifest.json").read_text())
    for text in (
        *(str(state), "2 of 2", "single, 1 rank", "adamw", "exp_avg_sq", "F32 (20)", "learning_rate", "0.01"),
        *(manifest["data"]["sha256"], manifest["model"]["model"]["sha256"], manifest["files"].popitem()[1]["sha256"]),
        *("torch " + torch.__version__.split("+")[0], "model.layers.1.mlp.up_proj.weight", "128x64", "step=2"),
        "verified: 1 files",
    ):
        assert text in out, text
    about = json.loads(good(inspect_state.main, state, "--json"))
    assert about["progress"] == manifest["progress"] and about["kinds"]["param"]["tensors"] == 20
    assert about["num_bytes"] == (state / "rank-00000.safetensors").stat().st_size and "problems" not in about
    assert json.loads(good(inspect_state.main, state, "--json", "--verify"))["problems"] == []


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
        return
    if how == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if how == "truncated" else data)


@pytest.mark.parametrize("how", ["flipped", "truncated", "removed"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "manifest.sha256", "rank-00000.safetensors", "rank-00001.safetensors"]
)
def test_every_damage_is_named(full, tmp_path, how, name):
    state = rewrite(newest(full), tmp_path / "step-00000002", lambda length: [length // 3])
    assert call(inspect_state.main, state, "--verify")[0] == 0
    spoil(state / name, how)
    code, _, err = call(inspect_state.main, state, "--verify")
    assert code == 1 and err.count("error: ") == 1 and "Traceback" not in err
    assert name in err or "manifest" in name
    code, out, _ = call(inspect_state.main, state, "--verify", "--json")
    assert code == 1 and len(json.loads(out)["problems"]) == 1
    assert bad(export_checkpoint.main, state, tmp_path / "out") and not (tmp_path / "out").exists()


def test_all_problems_are_listed(full, tmp_path):
    state = rewrite(newest(full), tmp_path / "step-00000002", lambda length: [length // 3, length // 2])
    for number, how in enumerate(("truncated", "flipped", "removed")):
        spoil(state / f"rank-{number:05d}.safetensors", how)
    code, _, err = call(inspect_state.main, state, "--verify")
    assert code == 1 and err.count("error: ") == 3
    assert all(err.count(f"rank-{number:05d}") == 1 for number in range(3))


@pytest.mark.parametrize("key", ["topology", "tensors", "files", "config", "model", "meter", "versions", "skipped"])
def test_manifest_of_other_hands_is_no_traceback(full, tmp_path, key):
    state = rewrite(newest(full), tmp_path / "step-00000002")
    manifest = json.loads((state / "manifest.json").read_text())
    state_format.write_manifest(state, manifest | {key: [7]})
    for arguments in ((state,), (state, "--verify"), (state, "--json", "--tensors")):
        code, _, err = call(inspect_state.main, *arguments)
        assert code == 1 and "manifest.json" in err and "Traceback" not in err, arguments
    assert "is not as docs/state-format.md has it" in bad(export_checkpoint.main, state, tmp_path / "out")


@pytest.mark.parametrize("script", ["export_checkpoint", "merge_adapter", "inspect_state"])
def test_help_answers_at_once(script):
    path = ROOT / "scripts" / f"{script}.py"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", path, "--help"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0 and f"python scripts/{script}.py" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert len(imported) > 20 and not imported & {"torch", "numpy", "transformers", "peft", "safetensors", "rich"}
