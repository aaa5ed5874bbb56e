"""Configs from files and flags: every way a value can be written, and every way it can be wrong."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
import yaml

from oneloop import arguments, config

SRC = Path(__file__).parents[2] / "src"
REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
NAMED = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"}

RECIPE = '''
"""Objective in one line.

    accelerate launch recipes/sample.py
"""
import os, json
from dataclasses import dataclass
from oneloop import config

@dataclass(kw_only=True)
class SampleConfig(config.RecipeConfig):
    """Only for the sample."""
    beta: float = 0.1
    """Strength, at most 100% of it."""

if __name__ == "__main__":
    parsed = config.parse(SampleConfig)
    kept = {k: v for k, v in os.environ.items() if k.startswith(("ACCELERATE_", "FSDP_", "ONELOOP_"))}
    print(json.dumps({"max_steps": parsed.max_steps, "env": kept}))
'''


@dataclass(kw_only=True)
class SampleConfig(config.RecipeConfig):
    """Only for the sample."""

    stop_words: list[str] | None = None
    """Words."""
    threshold: int | float | None = None
    """A number."""
    kind: Literal["sigmoid", "hinge"] = "sigmoid"
    """Which loss."""


def parse(*argv):
    return config.parse(SampleConfig, [*REQUIRED, *argv])


def refused(capsys, *argv, required=True):
    """The one message with which these arguments are refused."""
    with pytest.raises(SystemExit) as stop:
        config.parse(SampleConfig, [*(REQUIRED if required else []), *argv])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("error:") == 1 and "Traceback" not in captured.err
    return captured.err


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def run(script, *argv, launcher=(), **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    environment |= {"PYTHONPATH": str(SRC)} | env
    return subprocess.run(
        [sys.executable, *launcher, str(script), *argv], capture_output=True, text=True, timeout=120, env=environment
    )


# --- what is accepted -------------------------------------------------------------------------------------------------


def test_values_as_people_type_them_in_a_file(tmp_path):
    text = "learning_rate: 1e-5\nwarmup_ratio: 3e-2\nmax_steps: 1e1\ngradient_checkpointing: 'False'\n"
    text += "shuffle: no\nseed: '42'\n"
    parsed = parse("--config", written(tmp_path, text))
    values = (parsed.learning_rate, parsed.warmup_ratio, parsed.max_steps, parsed.gradient_checkpointing, parsed.seed)
    assert values == (1e-05, 0.03, 10, False, 42)
    assert parsed.shuffle is False
    assert [type(value) for value in values] == [float, float, int, bool, int]


def test_the_same_values_as_flags():
    parsed = parse(*shlex.split("--learning_rate 1e-5 --max_steps=1e1 --shuffle No --seed 0042 --weight_decay 1"))
    assert (parsed.learning_rate, parsed.max_steps, parsed.shuffle, parsed.seed) == (1e-05, 10, False, 42)
    assert type(parsed.max_steps) is int and type(parsed.weight_decay) is float


def test_text_that_looks_like_a_number_stays_text(tmp_path):
    parsed = parse("--config", written(tmp_path, "model_revision: 0123456\neval_dataset_name: 1e5\n"))
    assert (parsed.model_revision, parsed.eval_dataset_name) == ("0123456", "1e5")


def test_a_flag_alone_is_true_and_negative_numbers_are_values():
    parsed = parse("--use_peft", "--max_steps", "-1", "--torch_compile")
    assert parsed.use_peft and parsed.torch_compile and parsed.max_steps == -1


@pytest.mark.parametrize("words", [["q_proj", "v_proj"], ["[q_proj, v_proj]"], ["[q_proj,", "v_proj]"]])
def test_lists_as_flags(words):
    assert parse("--use_peft", "--lora_target_modules", *words).lora_target_modules == ["q_proj", "v_proj"]


def test_lists_unions_and_null_in_a_file(tmp_path):
    text = "use_peft: true\nlora_target_modules: [q_proj]\nstop_words:\n- 'no'\n- 12\nthreshold: 5\nreport_to: null\n"
    parsed = parse("--config", written(tmp_path, text))
    assert (parsed.lora_target_modules, parsed.stop_words, parsed.threshold) == (["q_proj"], ["no", "12"], 5)
    assert parsed.report_to is None
    assert parse("--threshold", "0.5").threshold == 0.5
    assert parse("--threshold", "None", "--stop_words", "null").threshold is None
    assert parse("--report_to", "none").report_to == "none"


def test_precedence_is_flag_then_later_file_then_file_then_default(tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_LENGTH", "4")
    monkeypatch.setenv("ONELOOP_MAX_LENGTH", "4")
    first = written(tmp_path, "max_length: 8\nseed: 1\nlogging_steps: 2\n", "a.yaml")
    second = written(tmp_path, "seed: 2\nlogging_steps: 3\n", "b.yaml")
    parsed = parse("--logging_steps", "5", "--config", first, f"--config={second}")
    assert (parsed.max_length, parsed.seed, parsed.logging_steps, parsed.eval_steps) == (8, 2, 5, -1)
    assert parse().max_length == 1024


def test_home_and_spaces_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my runs").mkdir()
    written(tmp_path / "my runs", "output_dir: ~/my runs/out\nmax_length: 9\n", "a b.yaml")
    parsed = config.parse(SampleConfig, [*REQUIRED[:4], "--config=~/my runs/a b.yaml"])
    assert parsed.output_dir == f"{tmp_path}/my runs/out" and parsed.max_length == 9
    assert config.RecipeConfig(**NAMED | {"output_dir": tmp_path / "x"}).output_dir == f"{tmp_path}/x"


def test_saved_config_gives_the_same_config(tmp_path):
    argv = shlex.split("--use_peft --lora_target_modules no 12 --learning_rate 1e-5 --model_revision 0123")
    argv += ["--eval_dataset_name", "é #"]
    parsed = parse(*argv)
    config.save_yaml(parsed, tmp_path / "saved.yaml")
    again = config.parse(SampleConfig, ["--config", str(tmp_path / "saved.yaml")])
    assert again == parsed
    assert config.to_dict(again)["lora_target_modules"] == ["no", "12"]


def test_printed_config_is_a_config_file_even_before_the_required_values_are_known(capsys):
    with pytest.raises(SystemExit) as stop:
        config.parse(SampleConfig, ["--print_config", "--max_length", "7"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert stop.value.code == 0
    assert list(printed) == [field.name for field in fields(SampleConfig)]
    assert printed["max_length"] == 7 and printed["output_dir"] is None


def test_number_of_flags():
    assert config.num_flags(config.RunConfig) == 6
    assert config.num_flags(SampleConfig) == config.num_flags(config.RecipeConfig) + 3


# --- what is refused --------------------------------------------------------------------------------------------------


def test_misspelt_keys_are_named_with_line_and_nearest_name(tmp_path, capsys):
    path = written(tmp_path, "learning_rate: 2.0e-5\nmax_lenght: 64\nnum_epoch: 3\n")
    message = refused(capsys, "--config", path, "--sed", "1")
    assert f"{path}:2: unknown key max_lenght; did you mean max_length?" in message
    assert f"{path}:3: unknown key num_epoch; did you mean num_train_epochs?" in message
    assert "the command line: unknown flag --sed; did you mean seed?" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seed: 1.5", "seed is '1.5': a whole number is expected"),
        ("seed: true", "seed is 'true': a whole number is expected"),
        ("seed: null", "seed is null: a whole number is expected"),
        ("seed: [1]", "seed is ['1']: a whole number is expected"),
        ("learning_rate: fast", "learning_rate is 'fast': a number is expected"),
        ("shuffle: 2", "shuffle is '2': true or false is expected"),
        ("output_dir: ~", "output_dir is null: text is expected"),
        ("output_dir: {a: b}", "output_dir is {'a': 'b'}: text is expected"),
        ("lora_target_modules: q_proj", "lora_target_modules is 'q_proj': a list is expected, as in [q_proj] or null"),
        ("stop_words: [a, [b]]", "text is expected"),
        ("kind: sigmod", "kind is 'sigmod': one of sigmoid, hinge is expected; did you mean sigmoid?"),
        ("report_to: wandbb", "one of wandb, tensorboard, trackio, none is expected; did you mean wandb? or null"),
    ],
)
def test_wrong_types_are_named_with_their_line(tmp_path, capsys, line, expected):
    path = written(tmp_path, f"# a comment\n\n{line}\n")
    message = refused(capsys, "--config", path)
    assert f"{path}:3: " in message and expected in message


def test_wrong_types_on_the_command_line(capsys):
    assert "the command line: seed is 'x': a whole number is expected" in refused(capsys, "--seed", "x")
    assert "--seed needs a value" in refused(capsys, "--seed", "--use_peft")
    assert "'stray' belongs to no flag" in refused(capsys, "--seed", "1", "stray")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", ":2: seed stands in the file twice"),
        ("seed: 1\n  bad: [\n", ":2: not valid YAML"),
        ("- seed\n", ":1: `name: value` lines are expected"),
        ("compute_environment: LOCAL_MACHINE\n", "is an Accelerate file"),
        ("gradient_accumulation_steps: 4\n", "derived from global_batch_size"),
    ],
)
def test_files_that_are_no_configs(tmp_path, capsys, text, expected):
    assert expected in refused(capsys, "--config", written(tmp_path, text))


def test_a_missing_file_and_missing_values(capsys):
    assert "--config nowhere.yaml: cannot be read" in refused(capsys, "--config", "nowhere.yaml")
    message = refused(capsys, "--dataset_name", "d", required=False)
    assert "model_name_or_path, output_dir must be given" in message


def test_foreign_code_is_allowed_on_the_command_line_only(tmp_path, capsys):
    path = written(tmp_path, "trust_remote_code: true\n")
    assert f"{path}:1: trust_remote_code is true: files are passed around" in refused(capsys, "--config", path)
    trusting = parse("--trust_remote_code")
    assert trusting.trust_remote_code
    config.save_yaml(trusting, tmp_path / "saved.yaml")
    again = ["--config", str(tmp_path / "saved.yaml")]
    assert not config.parse(SampleConfig, again).trust_remote_code
    assert config.parse(SampleConfig, [*again, "--trust_remote_code"]) == trusting


def test_only_rank_zero_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        parse("--seed", "x")
    assert stop.value.code == 2 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"global_batch_size": 0}, "global_batch_size is 0: give 1 or more"),
        ({"max_length": -5}, "max_length is -5: give 1 or more"),
        ({"max_steps": 0}, "max_steps is 0: give 1 or more, or -1"),
        ({"eval_steps": -2}, "eval_steps is -2: give 1 or more, or -1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, which trains nothing"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: give a finite number"),
        ({"adam_betas": [0.9, 1.0]}, "adam_betas is [0.9, 1.0]: give numbers from 0"),
        ({"adam_betas": [0.9]}, "adam_betas is [0.9]: give two numbers"),
        ({"lora_dropout": 1.0, "use_peft": True}, "lora_dropout is 1.0: give numbers from 0"),
        ({"warmup_ratio": 1.5}, "warmup_ratio is 1.5: give a share from 0 to 1"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "warmup_steps is 5 and warmup_ratio is 0.1: only one can count"),
        ({"global_batch_size": 4, "per_device_batch_size": 8}, "smaller than per_device_batch_size 8"),
        ({"lora_r": 8}, "lora_r is 8 but has no effect while use_peft is false"),
        ({"lora_target_modules": ["q"]}, "lora_target_modules is ['q'] but has no effect"),
        ({"merge_adapter": True}, "merge_adapter is true but has no effect while use_peft is false"),
        ({"output_dir": ""}, "output_dir is empty"),
    ],
)
def test_values_that_cannot_be_meant(changes, expected):
    with pytest.raises(ValueError) as error:
        config.RecipeConfig(**NAMED | changes)
    assert expected in str(error.value)


def test_a_refused_value_is_traced_to_its_place(tmp_path, capsys):
    path = written(tmp_path, "shuffle: false\nwarmup_ratio: 0.1\n")
    message = refused(capsys, "--config", path, "--warmup_steps", "5")
    assert f"(warmup_ratio: {path}:2, warmup_steps: the command line)" in message


def test_an_adapter_folder_brings_its_own_settings(tmp_path):
    adapter = {
        "base_model_name_or_path": "b",
        "r": 8,
        "lora_alpha": 32,
        "target_modules": ["v_proj", "q_proj"],
        "modules_to_save": None,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    named = NAMED | {"model_name_or_path": str(tmp_path)}
    config.RecipeConfig(**named, merge_adapter=True, lora_r=8, lora_target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match="lora_r is 4 but has no effect: training continues the adapter in .* has 8"):
        config.RecipeConfig(**named, lora_r=4, use_peft=True)


# --- start-up ---------------------------------------------------------------------------------------------------------


def test_nothing_heavy_is_imported_before_it_is_used():
    code = (
        "import sys, types\n"
        "from oneloop import config, data, launch, losses, models, optim, schedule, tracking\n"
        f"parsed = config.parse(config.RecipeConfig, {REQUIRED!r})\n"
        "assert parsed.max_length == 1024\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'wandb', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert schedule.accumulation_steps(8, 1, 2) == 4\n"
        "import oneloop.schedule as real\n"
        "from oneloop.schedule import lr_at\n"
        "assert real is sys.modules['oneloop.schedule'] and real.lr_at is lr_at is schedule.lr_at\n"
        "schedule.WSD_DECAY_SHARE = 0.5\n"
        "assert real.WSD_DECAY_SHARE == 0.5 and 'lr_at' in dir(schedule)\n"
        "try: schedule.nothing\n"
        "except AttributeError as error: assert 'oneloop.schedule' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    names = {path.stem for path in (SRC / "oneloop").iterdir()}
    wanted = {"config", "data", "launch", "losses", "models", "optim", "schedule", "tracking"}
    assert wanted <= names, f"missing modules: {wanted - names}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(SRC)}
    )
    assert result.returncode == 0, result.stderr


def test_help_shows_the_recipe_and_every_fields_sentence(tmp_path):
    script = written(tmp_path, RECIPE, "sample.py")
    result = run(script, "--help", COLUMNS="400")
    assert result.returncode == 0, result.stderr
    # Python 3.13 takes the indentation off a docstring by itself.
    assert re.search(r"Objective in one line\.\n\n *accelerate launch recipes/sample\.py", result.stdout)
    assert "Strength, at most 100% of it. (type: float, default: 0.1)" in result.stdout
    documents = arguments.field_documents(config.RecipeConfig)
    assert set(documents) == {field.name for field in fields(config.RecipeConfig)}
    assert len(documents) >= 40 and all(text in result.stdout for text in documents.values())


ACCELERATE_FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_processes: 1
use_cpu: true
"""


@pytest.mark.parametrize("outer", [(), ("-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu")])
def test_an_accelerate_file_after_the_script_is_used_all_the_same(tmp_path, outer):
    script = written(tmp_path, RECIPE, "sample.py")
    accelerate_file = written(tmp_path, ACCELERATE_FILE, "one.yaml")
    argv = ["--max_steps", "3", "--config_file", accelerate_file, "--num_processes=1", *REQUIRED]
    result = run(script, *argv, launcher=outer, ACCELERATE_TEST_LEFTOVER="1")
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["max_steps"] == 3 and seen["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    # Only what an outer launcher left is removed; without one the variable is the user's own.
    assert ("ACCELERATE_TEST_LEFTOVER" in seen["env"]) == (not outer)
    assert "ONELOOP_RELAUNCHED" not in seen["env"]


@pytest.mark.parametrize("env", [{"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, {"ONELOOP_RELAUNCHED": "1"}])
def test_a_started_process_prints_the_right_command_instead(tmp_path, env):
    script = written(tmp_path, RECIPE, "sample.py")
    accelerate_file = written(tmp_path, ACCELERATE_FILE, "one.yaml")
    argv = ["--max_steps", "3", "--config_file", accelerate_file]
    result = run(script, *argv, **env)
    assert result.returncode == 2 and result.stdout == ""
    assert f"accelerate launch --config_file {accelerate_file} {script} --max_steps 3" in result.stderr
    if "RANK" in env:
        assert run(script, *argv, **env | {"RANK": "1", "LOCAL_RANK": "1"}).stderr == ""


def test_launcher_arguments_that_cannot_be_passed_on_are_refused(tmp_path, capsys):
    result = run(written(tmp_path, RECIPE, "sample.py"), "--config_file", "nowhere.yaml")
    assert result.returncode == 2 and "--config_file nowhere.yaml: no such file" in result.stderr
    assert "it belongs to accelerate launch" in refused(capsys, "--num_processes", "2")
