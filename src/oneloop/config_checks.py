"""Refuses configs that cannot be meant: values out of range, and settings that would have no effect."""

from __future__ import annotations

import dataclasses
import difflib
import glob
import json
import math
import os
from pathlib import Path

from oneloop import mixture

_AT_LEAST = {  # field: smallest value that means something
    **dict.fromkeys(
        ("lora_r", "lora_alpha", "max_length", "global_batch_size", "per_device_batch_size", "logging_steps"), 1
    ),
    "shuffle_buffer_size": 1,
    **dict.fromkeys(("warmup_steps", "seed", "weight_decay", "max_grad_norm", "show_examples"), 0),
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


def check(config) -> None:
    """Refuse values that cannot be meant, and settings that would have no effect.

    Raises ValueError naming field, value and remedy. Run by the constructor, so no config exists unchecked.
    """
    values = dataclasses.asdict(config)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}: give a finite number")
    for name in ("model_name_or_path", "output_dir"):
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
    if values.get("eval_match", "text") != "text" and not generations:
        raise ValueError(f"eval_match is {values['eval_match']} but has no effect without eval_generations: set it")
    if generations < 0:
        raise ValueError(f"eval_generations is {generations}: give 0 or more")
    _check_optimizer(config)
    _check_saving(config)
    _check_data(config)
    if not (config.eval_dataset_name or config.test_split_size) and (generations or config.eval_steps != -1):
        name = "eval_generations" if generations else "eval_steps"
        raise ValueError(
            f"{name} is {values[name]} but has no effect without evaluation data: set eval_dataset_name or "
            f"test_split_size, or drop {name}"
        )
    if config.model_revision and os.path.isdir(config.model_name_or_path):
        raise ValueError(
            f"model_revision is {config.model_revision} but has no effect on a local folder: drop it, or name a hub id"
        )
    if config.global_batch_size < config.per_device_batch_size and not config.packing:
        raise ValueError(
            f"global_batch_size is {config.global_batch_size}, smaller than per_device_batch_size "
            f"{config.per_device_batch_size}: raise global_batch_size or lower per_device_batch_size"
        )
    _check_adapter(config, values)


def _is_read(folder: str, source: str) -> bool:
    """Whether files in `folder` belong to a local source: it lies in a folder of data, not hidden, or a glob takes it
    in."""
    written, data = (Path(os.path.realpath(os.path.expanduser(path))) for path in (folder, source))
    if "**" in source:
        data = Path(os.path.realpath(os.path.expanduser(source.partition("**")[0].rpartition("/")[0] or ".")))
    elif glob.has_magic(source):
        return any(path.match(str(data)) for path in (written, *written.parents))
    if not data.is_dir() or not written.is_relative_to(data):
        return False
    return not any(part.startswith(".") for part in written.relative_to(data).parts)


def _check_data(config) -> None:
    mixture.check(config)
    if not config.data_cache_dir:
        raise ValueError("data_cache_dir is empty: give a folder, or leave it out")
    for source in (*mixture.for_training(config), *mixture.for_evaluation(config)):
        for name in ("output_dir", "data_cache_dir"):
            if _is_read(getattr(config, name), source.path):
                raise ValueError(
                    f"{name} is {getattr(config, name)}, inside the data of {source.field} ({source.path}): what is "
                    "written there would be read as rows. Give another folder"
                )
    if not 0 <= config.test_split_size < 1:
        raise ValueError(
            f"test_split_size is {config.test_split_size}: give a share of the rows below 1, or 0 for none"
        )
    if config.test_split_size and config.eval_dataset_name:
        raise ValueError(
            f"test_split_size is {config.test_split_size} and eval_dataset_name is {config.eval_dataset_name!r}: only "
            "one can be evaluated, drop the other"
        )
    if config.dataset_num_proc is not None and config.dataset_num_proc < 1:
        raise ValueError(
            f"dataset_num_proc is {config.dataset_num_proc}: give 1 or more, or leave it out for all cores"
        )
    if config.batch_unit == "tokens" and config.global_batch_size < config.max_length:
        raise ValueError(
            f"global_batch_size is {config.global_batch_size} tokens (batch_unit: tokens), less than one row of "
            "max_length "
            f"{config.max_length}: raise global_batch_size, or count sequences"
        )
    mixes = config.datasets is not None and any(entry.get("weight") is not None for entry in config.datasets)
    if config.mixture_stopping_strategy != "all_exhausted" and not mixes:
        raise ValueError(
            f"mixture_stopping_strategy is {config.mixture_stopping_strategy} but has no effect without a "
            "`datasets` list "
            "with weights: leave it out"
        )
    if not config.streaming:
        if config.shuffle_buffer_size != 10_000:
            raise ValueError(
                f"shuffle_buffer_size is {config.shuffle_buffer_size} but has no effect without streaming: all "
                "rows are "
                "shuffled. Leave it out"
            )
        return
    if config.max_steps == -1:
        raise ValueError(
            "streaming: true needs max_steps: the number of rows of a stream is not known before it ends. Set "
            "max_steps "
            "(the data begin anew when they end), or prepare the data without streaming"
        )
    refused = {"test_split_size": 0, "show_examples": 0}
    for name, without in refused.items():
        if getattr(config, name) != without:
            raise ValueError(
                f"{name} is {getattr(config, name)}, which needs all rows before the first step, and streaming is "
                "true: "
                "leave one of them out"
            )
    if mixes:
        raise ValueError(
            "datasets: weights need the number of rows of each source, and streaming is true: leave the weights out "
            "(the sources are read one after the other), or prepare the data without streaming"
        )


_OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "lion")


def _check_optimizer(config) -> None:
    if "." not in config.optim and config.optim not in _OPTIMIZERS:
        near = difflib.get_close_matches(config.optim, _OPTIMIZERS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"optim is {config.optim!r}: give one of {', '.join(_OPTIMIZERS)}, or the import path of a class{hint}"
        )
    if config.optim == "adafactor" and config.adam_betas != [0.9, 0.999]:
        raise ValueError(f"adam_betas is {config.adam_betas} but has no effect with optim adafactor: leave it out")


def _check_saving(config) -> None:
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


def _check_adapter(config, values: dict) -> None:
    """An adapter setting counts with use_peft; an adapter folder brings its own, which a setting may repeat but not
    contradict."""
    asked = {
        field.name: values[field.name]
        for field in dataclasses.fields(config)
        if field.name in _PEFT_NAMES and values[field.name] != field.default
    }
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
