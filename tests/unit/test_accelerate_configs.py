"""Each shipped Accelerate file loads through Accelerate's own launcher and keeps to the rules of its folder.

The launcher's parser copies any key of a `*_config` section onto its arguments, known or not, so a misspelt key starts
the default strategy in silence. The tests therefore hold every key against the launcher's real options.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

FOLDER = Path(__file__).resolve().parents[2] / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))

# name: (type, processes, what the launcher must hand to the strategy)
EXPECTED = {
    "cpu": (DistributedType.MULTI_GPU, 2, {"use_cpu": True}),
    "single": (DistributedType.NO, 1, {}),
    "ddp": (DistributedType.MULTI_GPU, 8, {}),
    "zero0": (DistributedType.DEEPSPEED, 8, {"zero_stage": 0}),
    "zero1": (DistributedType.DEEPSPEED, 8, {"zero_stage": 1}),
    "zero2": (DistributedType.DEEPSPEED, 8, {"zero_stage": 2, "offload_optimizer_device": None}),
    "zero2_offload": (DistributedType.DEEPSPEED, 8, {"zero_stage": 2, "offload_optimizer_device": "cpu"}),
    "zero3": (
        DistributedType.DEEPSPEED,
        8,
        {"zero_stage": 3, "offload_param_device": None, "zero3_save_16bit_model": True},
    ),
    "zero3_offload": (
        DistributedType.DEEPSPEED,
        8,
        {
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "cpu",
            "zero3_save_16bit_model": True,
        },
    ),
    "fsdp2": (DistributedType.FSDP, 8, {"fsdp_reshard_after_forward": "true", "fsdp_offload_params": "false"}),
    "fsdp2_grad_op": (DistributedType.FSDP, 8, {"fsdp_reshard_after_forward": False, "fsdp_offload_params": "false"}),
    "fsdp2_offload": (DistributedType.FSDP, 8, {"fsdp_reshard_after_forward": "true", "fsdp_offload_params": True}),
}

# What belongs to the recipe. `gradient` covers accumulation and clipping under any of their names.
TRAINING_KEY = re.compile(r"gradient|accumulation|clip|learning_rate|\blr\b|batch|warmup|weight_decay|epoch|steps|seed")


def flat_keys(content: dict) -> list[str]:
    """Return the keys of a file and of its sections."""
    keys = list(content)
    for value in content.values():
        if isinstance(value, dict):
            keys += flat_keys(value)
    return keys


def launch_arguments(path: Path):
    """Return the arguments `accelerate launch --config_file path` would start with."""
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "recipe.py"])
    return _validate_launch_command(arguments)[0]


def test_the_twelve_files_are_there():
    assert len(FILES) == 12
    assert {path.stem for path in FILES} == set(EXPECTED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_the_intended_strategy(path):
    distributed_type, num_processes, values = EXPECTED[path.stem]
    config = load_config_from_file(str(path))
    assert config.distributed_type == distributed_type
    assert config.num_processes == num_processes
    arguments = launch_arguments(path)
    assert arguments.use_deepspeed == (distributed_type == DistributedType.DEEPSPEED)
    assert arguments.use_fsdp == (distributed_type == DistributedType.FSDP)
    assert arguments.multi_gpu == (distributed_type == DistributedType.MULTI_GPU)
    assert arguments.mixed_precision == ("no" if path.stem == "cpu" else "bf16")
    assert {name: vars(arguments)[name] for name in values} == values
    if arguments.use_fsdp:
        assert str(arguments.fsdp_version) == "2"
        assert arguments.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
        # Names no layer class, so the file fits every model.
        assert arguments.fsdp_transformer_layer_cls_to_wrap is None
        # The launcher refuses the one without the other; both are its defaults, so no file needs to say them.
        assert arguments.fsdp_cpu_ram_efficient_loading == "true"
        assert arguments.fsdp_sync_module_states == "true"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_is_known_and_none_belongs_to_the_recipe(path):
    options = vars(launch_command_parser().parse_args(["recipe.py"])).keys() | {
        "distributed_type",
        "deepspeed_config",
        "fsdp_config",
        "use_cpu",
    }
    keys = flat_keys(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert len(keys) >= 2
    assert [key for key in keys if key not in options] == []
    assert [key for key in keys if TRAINING_KEY.search(key)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_keys_that_differ_from_the_default(path):
    defaults = vars(launch_command_parser().parse_args(["recipe.py"]))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    sections = content.get("deepspeed_config", {}) | content.get("fsdp_config", {})
    same = [key for key, value in sections.items() if str(value).lower() == str(defaults[key]).lower()]
    # `num_processes` names the hardware even where it is the default.
    fields = {field.name: field.default for field in dataclasses.fields(ClusterConfig)}
    same += [key for key, value in content.items() if key != "num_processes" and value == fields[key]]
    assert same == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_header_and_reasons(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 120
    header = "\n".join(line for line in lines if line.startswith("#"))
    for word in ("Hardware:", "Sharded:", "Offloaded:", "Pick it when:", "Launch: accelerate launch"):
        assert word in header
    assert f"accelerate_configs/{path.name} " in header
    for line in lines:
        if not line.startswith("#") and not line.endswith("_config:"):
            assert " # " in line, f"no reason given: {line}"


def test_readme_lists_every_file():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", readme, flags=re.MULTILINE)
    assert sorted(listed) == sorted(EXPECTED)
