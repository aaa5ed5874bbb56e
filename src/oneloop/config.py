"""What a run is asked to do: one flat dataclass a recipe, composed by inheritance from one dataclass a concern.

The sentence beneath a field is its help text. Every field is a flag and a key of the config file under the same name;
`arguments.py` reads both. Values that cannot be meant, and settings that would have no effect, are refused when a
config is built.
"""

import dataclasses
import difflib
import json
import math
import os
from dataclasses import dataclass
from typing import Literal

from oneloop import arguments
from oneloop.arguments import parse, relaunch_with_config_file

__all__ = [
    "DataConfig",
    "LoraFields",
    "ModelConfig",
    "RecipeConfig",
    "RunConfig",
    "StateConfig",
    "TrainConfig",
    "adapter_settings",
    "check",
    "is_adapter_folder",
    "num_flags",
    "parse",
    "relaunch_with_config_file",
    "save_yaml",
    "to_dict",
]


@dataclass(kw_only=True)
class ModelConfig:
    """Which model is trained and how its forward pass runs."""

    model_name_or_path: str
    """Model to train: hub id, local folder, or a LoRA adapter folder, whose training then continues."""
    model_revision: str | None = None
    """Branch, tag or commit of a hub model; None takes the hub's default branch."""
    trust_remote_code: bool = False
    """Run Python code, and read pickled weights, that come with the model. Command line only: a config file passed
    around must not be able to switch it on."""
    attn_implementation: str | None = None
    """Attention kernel as transformers names it (eager, sdpa, flash_attention_2, ...); None lets transformers
    choose."""
    chat_template: str | None = None
    """Path of a jinja chat template that replaces the tokenizer's own; None keeps that one."""
    quantization: Literal["nf4", "int8"] | None = None
    """Hold the frozen base model under the adapters in 4 bits (nf4 with double quantisation, QLoRA) or in int8; None
    holds it in the compute precision. Needs use_peft."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, roughly a third more compute, the same numbers."""
    torch_compile: bool = False
    """Compile the model with torch.compile: a slow first step, faster ones after it."""


@dataclass(kw_only=True)
class LoraFields:
    """Low-rank adapters; everything here needs use_peft."""

    use_peft: bool = False
    """Train LoRA adapters instead of all weights."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: int = 32
    """Adapter scale: the update is multiplied by lora_alpha / lora_r (by lora_alpha / sqrt(lora_r) with use_rslora)."""
    lora_dropout: float = 0.0
    """Dropout probability on the adapters' input."""
    lora_target_modules: list[str] | None = None
    """Names of the layers that get adapters; None takes all linear layers but the head."""
    lora_modules_to_save: list[str] | None = None
    """Names of modules trained in full and saved beside the adapters (for example embed_tokens lm_head); None for
    none."""
    use_rslora: bool = False
    """Rank-stabilised scaling of the adapters."""
    use_dora: bool = False
    """Weight-decomposed adapters (DoRA)."""


@dataclass(kw_only=True)
class DataConfig:
    """Which rows are trained on and evaluated."""

    dataset_name: str
    """Training data: file, folder or hub id."""
    dataset_train_split: str = "train"
    """Split trained on, where the data set has splits."""
    eval_dataset_name: str | None = None
    """Evaluation data: file, folder or hub id; None evaluates on nothing."""
    dataset_test_split: str = "test"
    """Split evaluated, where the evaluation data has splits."""
    max_length: int = 1024
    """Longest sequence in tokens."""
    truncation: Literal["truncate", "drop"] = "truncate"
    """What happens to a row longer than max_length: cut it, or leave it out. Both are counted and reported."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What happens at a row that cannot be used: stop with its place, or skip and count it."""
    split_special_tokens: bool = True
    """Read control-token text inside the data as plain text. False lets data insert real control tokens."""
    shuffle: bool = True
    """Shuffle the rows anew each epoch; false keeps the file's order."""


@dataclass(kw_only=True)
class TrainConfig:
    """The optimisation, independent of hardware and strategy."""

    global_batch_size: int = 32
    """Sequences per optimizer step over all devices; accumulation is derived from it."""
    per_device_batch_size: int = 1
    """Sequences per forward pass on one device: memory and speed only, never the result."""
    learning_rate: float = 2e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = "cosine"
    """Shape of the learning rate after warm-up; warmup_stable_decay falls to 0 over the last 10 % of the steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up; 0 for none. Not together with warmup_ratio."""
    warmup_ratio: float = 0.0
    """Warm-up as a share of all optimizer steps, rounded up; 0 for none."""
    optim: str = "adamw"
    """Optimizer: adamw, adamw_8bit, paged_adamw, paged_adamw_8bit, adafactor, lion, or the import path of a class of
    your own, such as my_package.MyOptimizer."""
    weight_decay: float = 0.0
    """The optimizer's weight decay; not on biases and normalisation weights."""
    adam_betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the first and the second moment, for optimizers that have two."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 does not clip. The norm is logged either way."""
    max_steps: int = -1
    """Optimizer steps to train; -1 trains num_train_epochs. When given it wins over num_train_epochs."""
    num_train_epochs: float = 1.0
    """Passes over the training data, fractions allowed; used when max_steps is -1."""
    seed: int = 42
    """Seed of sample order, dropout and new weights."""
    reduce_dtype: Literal["fp32", "compute"] = "fp32"
    """Precision in which gradients are summed over devices: fp32, or the compute precision (half the traffic, other
    numbers)."""


@dataclass(kw_only=True)
class RunConfig:
    """Where results go and how often something is reported."""

    output_dir: str
    """Folder of everything the run writes."""
    logging_steps: int = 10
    """Optimizer steps between logged lines."""
    eval_steps: int = -1
    """Optimizer steps between evaluations; -1 evaluates only before the first step and at the end."""
    report_to: Literal["wandb", "tensorboard", "trackio", "none"] | None = None
    """Experiment tracker beside metrics.jsonl, which is always written; None takes wandb when it is installed."""
    export_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of the exported weights; auto takes the checkpoint's for a model, fp32 for an adapter."""
    merge_adapter: bool = False
    """Export the whole model with the adapter merged in, too, beside the adapter."""


@dataclass(kw_only=True)
class StateConfig:
    """How a run is saved while it goes on, and what it goes on from."""

    save_every: int = 500
    """Optimizer steps between saved training states (and one at the end); -1 saves at the end and when stopped, 0
    never."""
    save_total_limit: int = 2
    """Newest training states kept; -1 keeps all."""
    async_save: bool = True
    """Write states in the background while training goes on; needs host memory for a rank's share of one."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What happens when a state cannot be written (disk full): stop the run, or warn and go on with the older ones."""
    resume: str = "auto"
    """State to continue from: auto takes the newest good one in output_dir, if any; none starts anew and keeps older
    ones aside; else the path of a state, or of another run's output_dir."""
    allow_changes: list[str] | None = None
    """Names of settings that may differ from the saved ones although they change the training; None for none."""
    max_hours: float | None = None
    """Hours after which the run saves and stops by itself, with exit code 75; None for no limit."""


@dataclass(kw_only=True)
class RecipeConfig(StateConfig, RunConfig, TrainConfig, DataConfig, LoraFields, ModelConfig):
    """What every recipe's own config inherits."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, os.PathLike) or (isinstance(value, str) and (value == "~" or value.startswith("~/"))):
                setattr(self, field.name, os.path.expanduser(os.fspath(value)))
        check(self)


# --- checks on values -------------------------------------------------------------------------------------------------

_AT_LEAST = {  # field: smallest value that means something
    **dict.fromkeys(
        ("lora_r", "lora_alpha", "max_length", "global_batch_size", "per_device_batch_size", "logging_steps"), 1
    ),
    **dict.fromkeys(("warmup_steps", "seed", "weight_decay", "max_grad_norm"), 0),
}
_LARGEST_SEED = 4_000_000_000  # numpy takes 2**32 - 1; each rank adds its number
_FRACTIONS = ("lora_dropout", "adam_betas")  # each value: 0 <= value < 1
_MEANING_OF_MINUS_ONE = {  # field that is -1 or at least 1: what -1 does
    "max_steps": "train num_train_epochs",
    "eval_steps": "only before the first step and at the end",
    "save_total_limit": "keep all",
}
_PEFT_NAMES = {  # our field: PEFT's name in adapter_config.json
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


def is_adapter_folder(path: str) -> bool:
    """Whether `path` is a local folder that PEFT saved an adapter to."""
    return os.path.isfile(os.path.join(os.path.expanduser(path), "adapter_config.json"))


def adapter_settings(folder: str) -> dict:
    """What an adapter folder says of itself, `base_model_name_or_path` among it.

    Raises ValueError, naming the file, where it is damaged or names no base model.
    """
    path = os.path.join(os.path.expanduser(folder), "adapter_config.json")
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"model_name_or_path: {path} is no adapter configuration: {error}") from error
    name = saved.get("base_model_name_or_path") if isinstance(saved, dict) else None
    if not name or not isinstance(name, str):
        raise ValueError(
            f"model_name_or_path: {path} names no base_model_name_or_path; write the base model's id there"
        )
    return saved


def check(config: RecipeConfig) -> None:
    """Refuse values that cannot be meant, and settings that would have no effect.

    Raises ValueError naming field, value and remedy. Run by the constructor, so no config exists unchecked.
    """
    values = to_dict(config)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}: give a finite number")
    for name in ("model_name_or_path", "dataset_name", "output_dir"):
        if not values[name]:
            raise ValueError(f"{name} is empty: give a name or a path")
    for name, smallest in _AT_LEAST.items():
        if values[name] < smallest:
            raise ValueError(f"{name} is {values[name]}: give {smallest} or more")
    if len(config.adam_betas) != 2:
        raise ValueError(f"adam_betas is {config.adam_betas}: give two numbers, as in [0.9, 0.999]")
    for name in _FRACTIONS:
        numbers = values[name] if isinstance(values[name], list) else [values[name]]
        if not all(0 <= number < 1 for number in numbers):
            raise ValueError(f"{name} is {values[name]}: give numbers from 0 up to, but not including, 1")
    for name, meaning in _MEANING_OF_MINUS_ONE.items():
        if values[name] != -1 and values[name] < 1:
            raise ValueError(f"{name} is {values[name]}: give 1 or more, or -1 ({meaning})")
    for name in ("learning_rate", "num_train_epochs"):
        if values[name] <= 0:
            raise ValueError(f"{name} is {values[name]}, which trains nothing: give a number above 0")
    if not 0 <= config.warmup_ratio <= 1:
        raise ValueError(f"warmup_ratio is {config.warmup_ratio}: give a share from 0 to 1, or use warmup_steps")
    if config.warmup_steps and config.warmup_ratio:
        raise ValueError(
            f"warmup_steps is {config.warmup_steps} and warmup_ratio is {config.warmup_ratio}: only one can count, "
            f"set the other to 0"
        )
    if config.seed > _LARGEST_SEED:
        raise ValueError(f"seed is {config.seed}: give {_LARGEST_SEED} or less")
    if config.lora_target_modules == []:
        raise ValueError("lora_target_modules is []: name modules, or leave it out for all linear layers but the head")
    generations = values.get("eval_generations", 0)  # not every recipe has it
    if generations < 0:
        raise ValueError(f"eval_generations is {generations}: give 0 or more")
    _check_optimizer(config)
    _check_saving(config)
    if not config.eval_dataset_name and (generations or config.eval_steps != -1):
        name = "eval_generations" if generations else "eval_steps"
        raise ValueError(
            f"{name} is {values[name]} but has no effect without eval_dataset_name: set it, or drop {name}"
        )
    if config.model_revision and os.path.isdir(config.model_name_or_path):
        raise ValueError(
            f"model_revision is {config.model_revision} but has no effect on a local folder: drop it, or name a hub id"
        )
    if config.global_batch_size < config.per_device_batch_size:
        raise ValueError(
            f"global_batch_size is {config.global_batch_size}, smaller than per_device_batch_size "
            f"{config.per_device_batch_size}: raise global_batch_size or lower per_device_batch_size"
        )
    _check_adapter(config, values)


_OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "lion")


def _check_optimizer(config: RecipeConfig) -> None:
    if "." not in config.optim and config.optim not in _OPTIMIZERS:
        near = difflib.get_close_matches(config.optim, _OPTIMIZERS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"optim is {config.optim!r}: give one of {', '.join(_OPTIMIZERS)}, or the import path of a class{hint}"
        )
    if config.optim == "adafactor" and config.adam_betas != [0.9, 0.999]:
        raise ValueError(f"adam_betas is {config.adam_betas} but has no effect with optim adafactor: leave it out")


def _check_saving(config: RecipeConfig) -> None:
    if config.save_every < -1:
        raise ValueError(
            f"save_every is {config.save_every}: give a number of steps, -1 (at the end and when stopped), or 0 (never)"
        )
    if config.max_hours is not None:
        if config.max_hours <= 0:
            raise ValueError(f"max_hours is {config.max_hours}: give hours above 0, or leave it out")
        if config.save_every == 0:
            raise ValueError(
                f"max_hours is {config.max_hours} and save_every is 0, so stopping would lose the run: set save_every "
                "to -1 to save only then"
            )
    if not config.resume:
        raise ValueError("resume is empty: give auto, none, or the path of a state")
    known = {field.name for field in dataclasses.fields(config)} | {"mixed_precision"}
    for name in config.allow_changes or ():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise ValueError(
                f"allow_changes names {name!r}, which is no setting" + (f"; did you mean {near[0]}?" if near else "")
            )


def _check_adapter(config: RecipeConfig, values: dict) -> None:
    """An adapter setting counts with use_peft; an adapter folder brings its own, which a setting may repeat but not
    contradict."""
    asked = {f.name: values[f.name] for f in dataclasses.fields(LoraFields) if values[f.name] != f.default}
    asked.pop("use_peft", None)
    if config.quantization and not (config.use_peft or is_adapter_folder(config.model_name_or_path)):
        raise ValueError(
            f"quantization is {config.quantization} but whole weights cannot be trained in that form: set use_peft to "
            "true to train adapters over them, or leave quantization out"
        )
    if is_adapter_folder(config.model_name_or_path):
        saved = adapter_settings(config.model_name_or_path)
        for name, value in asked.items():
            own = saved.get(_PEFT_NAMES[name])
            same = set(own or ()) == set(value) if isinstance(value, list) else own == value
            if not same:
                raise ValueError(
                    f"{name} is {value} but has no effect: training continues the adapter in "
                    f"{config.model_name_or_path}, which has {own}. Leave {name} out, or name the "
                    f"base model to start a new adapter"
                )
        return
    if config.use_peft:
        return
    for name, value in asked.items():
        raise ValueError(
            f"{name} is {value} but has no effect while use_peft is false: set use_peft to true, or leave {name} out"
        )
    if config.merge_adapter:
        raise ValueError(
            "merge_adapter is true but has no effect while use_peft is false: set use_peft "
            "to true, leave merge_adapter out, or let model_name_or_path name an adapter folder"
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def num_flags(cls: type) -> int:
    """Number of flags a user of this config has to know."""
    return len(dataclasses.fields(cls))


def to_dict(config) -> dict:
    """The config as plain values, in the order of its fields."""
    return dataclasses.asdict(config)


def save_yaml(config, path: str | os.PathLike) -> None:
    """Write the config as a file that `--config` accepts and that gives the same config again."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(arguments.to_yaml(to_dict(config)))
