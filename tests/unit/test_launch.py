"""What a launch asks for, read off environment and files, and what contradicts it."""

import json
from types import SimpleNamespace

import pytest

import oneloop.process
from oneloop import config, launch
from oneloop.launch import plugins
from oneloop.sharding import Obtained

SETTINGS = SimpleNamespace(
    global_batch_size=8,
    packing=False,
    batch_unit="sequences",
    streaming=False,
    per_device_batch_size=2,
    max_grad_norm=1.0,
    reduce_dtype="fp32",
    gradient_checkpointing=False,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    import os

    for name in os.environ:
        if name.startswith(("ACCELERATE_", "FSDP_")) or name in ("WORLD_SIZE", "LOCAL_RANK", "RANK"):
            monkeypatch.delenv(name)
    # This process may itself run under a launcher of some kind.
    monkeypatch.setattr(oneloop.process, "launcher_arguments", lambda: None)


def zero(monkeypatch, stage: int, **env: str):
    for name, value in {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": str(stage), **env}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    return launch.requested()


def with_json(monkeypatch, tmp_path, content: dict, **env: str):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return zero(monkeypatch, 2, DEEPSPEED_CONFIG_FILE=str(path), **env)


def settings_of(want) -> dict:
    return plugins.deepspeed_plugin(SETTINGS, want, accumulation_steps=2).deepspeed_config


def test_requests_are_read_off_the_environment(monkeypatch):
    assert launch.requested().strategy == "single"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch.requested().strategy == "ddp"
    assert zero(monkeypatch, 3, DEEPSPEED_OFFLOAD_PARAM_DEVICE="cpu") == launch.Requested(
        strategy="zero3",
        world_size=2,
        offload_optimizer=False,
        offload_parameters=True,
        use_cpu=False,
        source="environment",
    )


def test_first_generation_of_sharding_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="fsdp_version: 1 is not supported.*fsdp_version: 2"):
        launch.requested()


def test_flags_become_the_backend_settings(monkeypatch):
    got = settings_of(zero(monkeypatch, 2, MIXED_PRECISION="bf16"))
    assert got["train_batch_size"] == 8 and got["train_micro_batch_size_per_gpu"] == 2
    assert got["gradient_accumulation_steps"] == 2 and got["gradient_clipping"] == 1.0
    assert got["data_types"]["grad_accum_dtype"] == got["communication_data_type"] == "fp32"


def test_stage_0_computes_by_autocast_over_fp32_weights(monkeypatch):
    got = settings_of(zero(monkeypatch, 0, MIXED_PRECISION="bf16"))
    assert got["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert got["bf16"] == {"enabled": False} and got["gradient_clipping"] == 0.0


def test_own_json_is_filled_and_kept(monkeypatch, tmp_path):
    own = {
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": "auto"},
        "communication_data_type": "bf16",
    }
    want = with_json(monkeypatch, tmp_path, own, MIXED_PRECISION="bf16")
    assert want.strategy == "zero3"
    got = settings_of(want)
    assert got["gradient_clipping"] == 1.0 and got["zero_optimization"]["stage3_max_live_parameters"] == 7
    assert got["communication_data_type"] == "bf16", "what the user wrote overrides the generated value"
    assert got["data_types"]["grad_accum_dtype"] == "fp32"


@pytest.mark.parametrize(
    "own,expected",
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping: 0.5 in .*max_grad_norm make it 1.0"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu: 4 in .*per_device_batch_size"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4 in .*batch sizes make it 2"),
        ({"train_batch_size": 64}, "train_batch_size: 64 in .*make it 8"),
        ({"optimizer": {"type": "AdamW"}}, "'optimizer' section"),
        ({"scheduler": {"type": "WarmupLR"}}, "'scheduler' section"),
        ({"fp16": {"enabled": True}}, "fp16.enabled: True in .*mixed_precision is 'bf16'"),
    ],
)
def test_contradictions_name_both_places(monkeypatch, tmp_path, own, expected):
    want = with_json(monkeypatch, tmp_path, {"zero_optimization": {"stage": 2}, **own}, MIXED_PRECISION="bf16")
    with pytest.raises(ValueError, match=expected) as refused:
        settings_of(want)
    assert "ds.json" in str(refused.value)


@pytest.mark.parametrize(
    "content,expected",
    [
        ([], "the file is \\[\\]"),
        ({"zero_optimization": True}, "zero_optimization is True"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4: give 0 to 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer is 'cpu'"),
        ({"zero_optimization": {"stage": 2}, "bf16": True}, "bf16 is True"),
    ],
)
def test_misshapen_json_is_named(monkeypatch, tmp_path, content, expected):
    with pytest.raises(ValueError, match=f"ds.json.*{expected}"):
        with_json(monkeypatch, tmp_path, content)


def test_unreadable_json_is_named(monkeypatch, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("{not json")
    with pytest.raises(ValueError, match="deepspeed_config_file: cannot read .*ds.json"):
        zero(monkeypatch, 2, DEEPSPEED_CONFIG_FILE=str(path))


def test_accumulation_in_the_file_that_differs_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match="gradient_accumulation_steps: 4.*make it 2"):
        plugins.refuse_yaml_training_values(SETTINGS, 2)
    plugins.refuse_yaml_training_values(SETTINGS, 4)


def test_sharded_gradients_are_reduced_in_fp32(monkeypatch):
    import torch

    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }.items():
        monkeypatch.setenv(name, value)
    policy = plugins.fsdp_plugin(SETTINGS, on_cpu=True).mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(ValueError, match="recomputed twice"):
        plugins.fsdp_plugin(SimpleNamespace(**{**vars(SETTINGS), "gradient_checkpointing": True}), on_cpu=True)


def test_setting_without_effect_is_refused():
    want = launch.Requested("zero0", 2, False, False, False, "x.yaml")
    with pytest.raises(ValueError, match="reduce_dtype: compute has no effect under 'zero0'"):
        plugins.reduce_in_compute_dtype(want, SimpleNamespace())


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"strategy": "ddp"}, "'zero3' was asked for, 'ddp' was obtained"),
        ({"world_size": 1}, "2 processes were asked for, 1 take part"),
        ({"offload": "optimizer"}, "offload of optimizer: asked for False, obtained True"),
        ({"parameter_fraction": 1.0}, "100% of the parameters instead of a shard"),
        ({"optimizer_fraction": 0.9}, "90% of the optimizer state instead of a shard"),
        ({"quantized_fraction": 1.0}, "100% of the quantised weights instead of a shard"),
    ],
)
def test_another_topology_than_asked_for_stops_the_run(changes, expected):
    want = launch.Requested("zero3", 2, False, False, False, "zero3.yaml")
    good = {
        "strategy": "zero3",
        "world_size": 2,
        "device": "cpu",
        "precision": "bf16",
        "offload": "none",
        "wrapped": {"DeepSpeedEngine": 1},
        "parameter_fraction": 0.5,
        "optimizer_fraction": 0.5,
        "parameter_bytes": 1000,
        "quantized_bytes": 300,
        "quantized_fraction": 0.5,
    }
    launch.check(want, Obtained(**good))
    with pytest.raises(ValueError, match=expected):
        launch.check(want, Obtained(**good | changes))


def test_every_recipe_field_used_here_exists():
    """The stand-in for a config above has only fields that the real one has."""
    import dataclasses

    assert set(vars(SETTINGS)) <= {field.name for field in dataclasses.fields(config.RecipeConfig)}
