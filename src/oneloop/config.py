"""What a run is asked to do: one flat dataclass a recipe, composed by inheritance from one dataclass a concern.

The sentence beneath a field is its help text. Every field is a flag and a key of the config file under the same name;
`arguments.py` reads both. Values that cannot be meant, and settings that would have no effect, are refused when a
config is built.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Literal

from oneloop import arguments, mixture
from oneloop.arguments import parse, relaunch_with_config_file
from oneloop.config_checks import adapter_settings, check, is_adapter_folder

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

    dataset_name: str | None = None
    """Training data: file, folder, glob or hub id."""
    datasets: list[dict] | None = None
    """Several sources instead of dataset_name, or one in need of settings of its own: a list of entries with path
    and, as needed, name (hub configuration), revision, split, weight (share of an epoch's samples), columns (our
    names -> the file's) and format."""
    mixture_stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """Where an epoch of weighted sources ends: when every row was used, with rows of the smaller sources repeated, or
    when the first source runs out of new rows."""
    dataset_train_split: str = "train"
    """Split trained on, where the data set has splits."""
    eval_dataset_name: str | None = None
    """Evaluation data: file, folder, glob or hub id, read like the entry of a `datasets` list of one; None evaluates on
    nothing."""
    dataset_test_split: str = "test"
    """Split evaluated, where the evaluation data has splits."""
    test_split_size: float = 0.0
    """Share of the training rows set apart for evaluation, instead of eval_dataset_name; drawn from the seed, equal
    rows always on the same side."""
    max_length: int = 1024
    """Longest sequence in tokens."""
    truncation: Literal["truncate", "drop", "split"] = "truncate"
    """What happens to a row longer than max_length: cut it, leave it out, or split it into rows that follow each other.
    Counted and reported."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What happens at a row that cannot be used: stop with its place, or skip it, count it, and keep it with its
    place and the reason in rejected.jsonl."""
    split_special_tokens: bool = True
    """Read control-token text inside the data as plain text. False lets data insert real control tokens."""
    shuffle: bool = True
    """Shuffle the rows anew each epoch; false keeps the file's order."""
    packing: bool = False
    """Put the rows of a step side by side into blocks of up to max_length tokens instead of padding them; each sees
    itself alone. Memory and speed only, never the result."""
    batch_unit: Literal["sequences", "tokens"] = "sequences"
    """What global_batch_size counts: rows, or their tokens (an optimizer step then takes the rows that fit)."""
    streaming: bool = False
    """Read, check and tokenise the rows while training goes on, with nothing prepared on disk; needs max_steps."""
    shuffle_buffer_size: int = 10_000
    """Rows that a stream shuffles at a time."""
    data_cache_dir: str = "~/.cache/oneloop"
    """Folder of prepared data, shared by all runs; safe to delete when none is running."""
    dataset_num_proc: int | None = None
    """Processes that tokenise; None takes all cores of the machine to prepare data, and one per rank for a stream."""
    show_examples: int = 0
    """Print so many rows as the model will see them, what is learnt in colour, and stop; 0 trains."""


@dataclass(kw_only=True)
class TrainConfig:
    """The optimisation, independent of hardware and strategy."""

    global_batch_size: int = 32
    """Sequences (or tokens, see batch_unit) per optimizer step over all devices; accumulation is derived from it."""
    per_device_batch_size: int = 1
    """Sequences, or packed blocks, per forward pass on one device: memory and speed only, never the result."""
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
        self.datasets = mixture.read(self.datasets)
        check(self)


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
