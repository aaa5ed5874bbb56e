"""Faults that show only between ranks, and launches that do not give what was asked for (C.. are reported faults)."""

import functools
import json
import os

import pytest
import torch

from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import ANSWERS, UNEVEN

CONFIGS = ("cpu", "zero0", "zero2", "zero3", "fsdp2")
# Ordered so that one rank gets the short replies of a step and the other one the long reply.
SPLIT = [UNEVEN[0], UNEVEN[2], UNEVEN[3], UNEVEN[1]]
LINEAR = [0, 5e-4, 1e-3, 8.75e-4, 7.5e-4, 6.25e-4, 5e-4, 3.75e-4, 2.5e-4, 1.25e-4]
CASES = {  # name: (rows, settings); each is trained on two ranks under every config, and on one in this process
    "one micro-batch": (SPLIT, {"global_batch_size": 4, "per_device_batch_size": 2, "max_steps": 2}),  # C02
    "two micro-batches": (SPLIT, {"global_batch_size": 4, "per_device_batch_size": 1, "max_steps": 2}),  # C02
    "tight clipping": (UNEVEN, {"global_batch_size": 4, "max_steps": 2, "max_grad_norm": 1e-3}),  # C05
    "no clipping": (UNEVEN, {"global_batch_size": 4, "max_steps": 2, "max_grad_norm": 0.0}),  # C05
    "linear": (  # C06
        ANSWERS,
        {"global_batch_size": 4, "max_steps": 10, "lr_scheduler_type": "linear", "warmup_ratio": 0.2},
    ),
    "five rows by two": (ANSWERS[:5], {"global_batch_size": 2, "num_train_epochs": 2.0}),  # C28
    "three rows by four": (ANSWERS[:3], {"global_batch_size": 4, "num_train_epochs": 2.0}),  # C28
    "every third step": (UNEVEN * 2, {"global_batch_size": 4, "max_steps": 4, "logging_steps": 3}),  # C49
    "another architecture": (UNEVEN, {"global_batch_size": 4, "max_steps": 2, "model_name_or_path": "gpt2"}),  # C53
    "dora": (UNEVEN, {"global_batch_size": 4, "max_steps": 2, "use_peft": True, "use_dora": True, "use_rslora": True}),
    "modules to save": (
        UNEVEN,
        {
            "global_batch_size": 4,
            "max_steps": 2,
            "use_peft": True,
            "lora_modules_to_save": ["norm", "embed_tokens", "lm_head"],
            "model_name_or_path": "untied",
        },
    ),
    "eager attention": (UNEVEN, {"global_batch_size": 4, "max_steps": 2, "attn_implementation": "eager"}),
}


IN_BF16 = {
    "bf16": {"global_batch_size": 4, "max_steps": 20, "learning_rate": 1e-3},
    "bf16 start": {"global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-15},
    "bf16 start of adapter": {"global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-15, "use_peft": True},
}


def tiny_gpt2(folder) -> str:
    """A model of another family: other layer class, other norms, linear layers of a class of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    text = tiny.tokenizer()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(text), n_positions=256, n_embd=32, n_layer=2, n_head=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    )
    config.eos_token_id = config.bos_token_id = text.eos_token_id
    GPT2LMHeadModel(config).save_pretrained(folder)
    text.save_pretrained(folder)
    return str(folder)


def case_settings(folder, name: str) -> dict:
    rows, changes = CASES[name]
    if changes.get("model_name_or_path") == "gpt2":
        changes = changes | {"model_name_or_path": tiny_gpt2(folder / "gpt2")}
    if changes.get("model_name_or_path") == "untied":
        changes = changes | {"model_name_or_path": tiny.save(folder / "untied", tie=False)}
    return runs.settings(folder, rows, **changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """name -> output folder of the case on one rank."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run(name: str):
        recipe = runs.load_recipe(runs.ROOT / "recipes" / "sft.py")
        config = recipe.SFTConfig(**case_settings(folder / name, name))
        recipe.main(config)
        return folder / name / "run"

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """config -> folder with the output of every case on two ranks."""

    @functools.cache
    def run(config: str):
        folder = tmp_path_factory.mktemp(config)
        cases = [
            {"name": name, "recipe": "sft", "mixed_precision": "no", "config": case_settings(folder / name, name)}
            for name in CASES
        ]
        cases += [
            {
                "name": name,
                "recipe": "sft",
                "mixed_precision": "bf16",
                "config": runs.settings(folder / name, UNEVEN, **c),
            }
            for name, c in IN_BF16.items()
        ]
        launcher.run_cases(config, 2, cases, folder)
        return folder

    return run


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_do_what_one_does(config, name, alone, together):
    got, want = (launcher.read_metrics(folder) for folder in (together(config) / name / "run", alone(name)))
    assert [line["step"] for line in got] == [line["step"] for line in want]
    for metric, tolerance in (("loss", 1e-6), ("grad_norm", 1e-5), ("lr", 0), ("tokens_seen", 0)):
        values = launcher.column(got, f"train/{metric}")
        assert values == pytest.approx(launcher.column(want, f"train/{metric}"), rel=tolerance, abs=0), metric
    if name == "linear":
        assert launcher.column(got, "train/lr") == pytest.approx(LINEAR)
    weights = launcher.read_tensors(together(config) / name / "run" / "model")
    expected = launcher.read_tensors(alone(name) / "model")
    assert set(weights) == set(expected)
    for key, tensor in weights.items():
        difference = (tensor - expected[key]).abs().max() / expected[key].abs().max()
        # AdamW makes steps of full size from whatever gradient there is: the bias of attention's keys has none but
        # rounding errors, and an adapter's B, which starts at 0, consists of two such steps.
        assert difference < (1e-2 if "c_attn.bias" in key else 1e-3 if "lora_B" in key else 1e-4), key


def test_clipping_did_something(alone):
    """The case of tight clipping is one: the norms logged are those before it, and the updates differ."""
    norms = launcher.column(launcher.read_metrics(alone("tight clipping")), "train/grad_norm")
    assert min(norms) > 1e-2


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_keep_small_updates_in_bf16(config, together):  # C07
    """Norm weights start at 1; twenty steps of 1e-3 stay below the step of a 16-bit weight at a time."""
    tensors = launcher.read_tensors(together(config) / "bf16" / "run" / "model")
    norms = torch.cat([tensor for name, tensor in tensors.items() if "norm" in name])
    assert norms.dtype == torch.float32
    assert (norms != 1.0).float().mean() > 0.9
    as_16_bit = norms.bfloat16().float()
    assert (norms != as_16_bit).float().mean() > 0.5, "these are 16-bit values: the fp32 masters were not exported"


@pytest.mark.parametrize("config", CONFIGS)
def test_start_is_not_rounded_in_bf16(config, together):
    """A step of nearly nothing: what is exported is the fp32 start, under every config.

    Except of a whole model under ZeRO-3, which is partitioned, and rounded, while it is loaded.
    """
    original = {name: p.detach() for name, p in tiny.tiny_model(len(tiny.tokenizer())).named_parameters()}
    assert any((tensor != tensor.bfloat16()).any() for tensor in original.values())
    exported = launcher.read_tensors(together(config) / "bf16 start" / "run" / "model")
    for name, tensor in original.items():
        start = tensor.bfloat16().float() if config == "zero3" else tensor
        torch.testing.assert_close(exported[name], start, rtol=0, atol=1e-9)
    adapter = launcher.read_tensors(together(config) / "bf16 start of adapter" / "run" / "model")
    same = launcher.read_tensors(together("cpu") / "bf16 start of adapter" / "run" / "model")
    assert any((tensor != tensor.bfloat16()).any() for tensor in adapter.values())
    for name, tensor in adapter.items():
        torch.testing.assert_close(tensor, same[name], rtol=0, atol=1e-9)


# --- launches ---------------------------------------------------------------------------------------------------------


def flags(folder, **changes) -> list[str]:
    values = runs.settings(folder, UNEVEN, global_batch_size=4, max_steps=1, **changes)
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


RECIPE = runs.ROOT / "recipes" / "sft.py"


def test_one_tracker_run_for_all_ranks(tmp_path):  # C51
    """No key, no network, no terminal: exactly one offline run with all settings, and nobody is asked."""
    home = tmp_path / "home"
    home.mkdir()
    options = flags(tmp_path, report_to="wandb")
    result = launcher.launch("cpu", 2, RECIPE, *options, WANDB_MODE=None, WANDB_API_KEY=None, HOME=str(home))
    found = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(found) == 1, result.stdout
    assert list((tmp_path / "run").rglob("*run-*.wandb")) == list(found[0].glob("*.wandb"))
    assert not list(runs.ROOT.glob("wandb/*run-*"))


def test_multi_cpu_file_that_starts_one_process_is_refused(tmp_path):  # C53
    path = tmp_path / "multi_cpu.yaml"
    path.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n")
    result = launcher.launch(str(path), 2, RECIPE, *flags(tmp_path), check=False)
    assert result.returncode != 0
    assert "asks for 2 processes (MULTI_CPU)" in result.stdout and "accelerate_configs/cpu.yaml" in result.stdout
    assert not (tmp_path / "run").exists()


def test_fsdp_file_with_use_cpu_is_really_sharded(tmp_path):  # C53
    path = tmp_path / "fsdp2_cpu.yaml"
    path.write_text(
        "distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\nmixed_precision: 'no'\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_cpu_ram_efficient_loading: false\n"
    )
    launcher.launch(str(path), 2, RECIPE, *flags(tmp_path))
    topology = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert topology["strategy"] == "fsdp2" and topology["world_size"] == 2
    assert topology["parameter_fraction"] == pytest.approx(0.5, abs=0.05)


def test_launcher_flag_that_overrides_the_file_is_refused(tmp_path):  # C53
    result = launcher.launch("zero3", 2, RECIPE, *flags(tmp_path), extra=["--multi_gpu"], check=False)
    assert result.returncode != 0 and "asks for distributed_type DEEPSPEED" in result.stdout, result.stdout


def test_more_ranks_than_the_machine_has_is_refused(tmp_path):
    ranks = (os.cpu_count() or 1) + 1
    options = flags(tmp_path) + ["--global_batch_size", str(4 * ranks)]
    result = launcher.launch("cpu", ranks, RECIPE, *options, check=False)
    assert result.returncode != 0 and f"asks for {ranks} processes on this machine" in result.stdout, result.stdout
    assert result.stdout.count("\nerror:") == 1, result.stdout


def test_mistake_is_one_message_and_a_failed_launch(tmp_path):
    options = flags(tmp_path, model_name_or_path=str(tmp_path / "nowhere"))
    result = launcher.launch("cpu", 2, RECIPE, *options, check=False)
    assert result.returncode != 0
    assert result.stdout.count("model_name_or_path: there is no folder") == 1, result.stdout


def test_batch_that_does_not_divide_is_refused(tmp_path):
    options = [*flags(tmp_path), "--global_batch_size", "3"]
    result = launcher.launch("cpu", 2, RECIPE, *options, check=False)
    assert result.returncode != 0 and "global_batch_size" in result.stdout
    assert "per_device_batch_size" in result.stdout


def test_config_file_after_the_script_starts_it_again(tmp_path):
    """`accelerate launch recipes/sft.py --config_file X` trains under X."""
    options = ["--config_file", "accelerate_configs/fsdp2.yaml", "--num_processes", "1", *flags(tmp_path)]
    launcher.launch("single", 1, RECIPE, *options)
    assert json.loads((tmp_path / "run" / "topology.json").read_text())["strategy"] == "fsdp2"
