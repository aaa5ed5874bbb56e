"""A finished model as a folder that plain transformers or peft loads, checked against the live parameters.

Under every strategy the same files come out: safetensors of whole tensors under their plain names, written by one
process into a temporary folder and renamed, never an empty placeholder or one rank's slice.
"""

from __future__ import annotations

import filecmp
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oneloop import models, quantization, sharding, sources, tracking

if TYPE_CHECKING:
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig


def check_output_dir(accelerator: Accelerator, config: RecipeConfig) -> None:
    """Refuse, before anything is loaded, a folder that cannot be written or whose content the export would harm.

    Collective. Raises ValueError on every rank.
    """
    tracking.file_mask()  # an unusable one costs nothing yet
    folder = Path(config.output_dir)
    error = ""
    base = models.base_model_of(config)
    if accelerator.is_main_process:
        try:
            for target in (folder / "model", folder / "merged"):
                if (config.use_peft or base.adapter) and Path(base.name).expanduser().resolve() == target.resolve():
                    error = (
                        f"{target} is the base model of the adapter, and would be replaced. Give another output_dir."
                    )
                elif target.exists() and not (folder / "recipe.yaml").is_file():
                    error = f"{target} exists, but is not of an earlier run. Move it, or give another output_dir."
            tracking.make_output_dir(folder)
            probe = folder / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as failure:
            error = f"cannot be written: {failure}"
    error = _first_ranks(error)
    if error:
        raise ValueError(f"output_dir {config.output_dir!r}: {error}")


def _set_aside(path: Path) -> None:
    """Keep what an earlier run left under this name."""
    if path.exists():
        number = next(n for n in itertools.count(1) if not path.with_name(f"{path.name}.{n}").exists())
        os.replace(path, path.with_name(f"{path.name}.{number}"))


def save(accelerator: Accelerator, model: torch.nn.Module, tokenizer, config: RecipeConfig) -> Path:
    """Write `output_dir/model` (weights or adapter, config, tokenizer) and, for `merge_adapter`, `output_dir/merged`.

    Collective. Weights go first, so that nothing a config file says can lose them. Then every tensor of the file is
    compared with the live one, and every rank learns the outcome. Returns the folder; raises RuntimeError on a
    difference (the folder is then left under its temporary name).
    """
    target = Path(config.output_dir).expanduser() / "model"
    temporary = target.with_name("model.tmp")
    module = accelerator.unwrap_model(model, keep_torch_compile=False)
    is_adapter = hasattr(module, "peft_config")
    wanted = tensor_names(module, is_adapter)
    dtype = export_dtype(config, is_adapter)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in sharding.full_tensors(accelerator, model):
        if accelerator.is_main_process and name in wanted:
            tensors[wanted[name]] = _as_exported(tensor, dtype)
    error = ""
    if accelerator.is_main_process:
        # Whatever goes wrong on this rank, the others are on their way into the next collective and must meet it there.
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            _write(module, tensors, temporary, dtype, is_adapter)
            tokenizer.save_pretrained(temporary)
        except Exception as failure:
            error = f"could not write {temporary}: {failure!r}"
    tensors.clear()
    different = _differences(accelerator, model, temporary, wanted, dtype)
    _raise_together(error or different)
    if accelerator.is_main_process:
        if _has_same_weights(target, temporary):  # of this very run, which was killed or started once more after it
            shutil.rmtree(target)
        _set_aside(target)
        _set_aside(target.with_name("merged"))  # of an earlier adapter; beside a new one it would pass for its own
        os.replace(temporary, target)
        print(f"exported: {target} ({'adapter' if is_adapter else 'model'}, {dtype}, {len(wanted)} tensors verified)")
    if config.merge_adapter:
        _merge(accelerator, target, config)
    accelerator.wait_for_everyone()
    return target


def tensor_names(module: torch.nn.Module, is_adapter: bool) -> dict[str, str]:
    """Name in the live model -> name in the file."""
    live = {sharding.plain_name(name): name for name, _ in module.named_parameters()}
    if not is_adapter:
        saved = {sharding.plain_name(name) for name in module.state_dict()}
        buffers = {sharding.plain_name(name) for name, _ in module.named_buffers()} & saved
        return {name: name for name in [*live, *sorted(buffers)]}
    from peft import get_peft_model_state_dict

    # peft decides which tensors belong to the adapter and what they are called; it is asked with names as values.
    keys = {name: name for name in live}
    placeholders = {name: _Named(name) for name in keys}
    chosen = get_peft_model_state_dict(module, state_dict=placeholders, save_embedding_layers=False)
    return {value.name: key for key, value in chosen.items()}


class _Named:
    """A stand-in for a tensor that remembers whose it is."""

    def __init__(self, name: str):
        self.name = name


def export_dtype(config: RecipeConfig, is_adapter: bool) -> torch.dtype:
    """The number format that `export_dtype` of the config stands for."""
    if config.export_dtype != "auto":
        return models.DTYPES[config.export_dtype]
    # Adapters are small and often continued or merged, so they keep what training holds.
    return torch.float32 if is_adapter else models.start_dtype(config)


def _as_exported(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()


def _write(module, tensors: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype, is_adapter: bool) -> None:
    if is_adapter:
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_settings(module, folder, dtype, is_adapter, {} if is_adapter else tensors)


def write_settings(module, folder: Path, dtype: torch.dtype, is_adapter: bool, tensors: dict | None = None) -> None:
    """Write what stands beside the weights: the adapter's settings, or config and generation config of the model, and
    the model's `tensors` with them where they are given."""
    if is_adapter:
        module.peft_config["default"].save_pretrained(folder)
        return
    module.save_pretrained(folder, state_dict=tensors or {})
    # save_pretrained states the dtype of the live module (transformers 5.24, modeling_utils.py), and training has
    # switched the cache off; the file is about the tensors beside it, which are for use.
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _differences(accelerator, model, folder: Path, wanted: dict[str, str], dtype: torch.dtype) -> str:
    """Read the files back and compare them with the parameters as they are now; empty when all are equal.

    Collective: every rank runs through all tensors, whatever has gone wrong on the first one.
    """
    problems: list[str] = []
    unmatched: dict[str, torch.Tensor] = {}
    compared: set[str] = set()
    files = _open_files(folder, problems) if accelerator.is_main_process else {}
    for name, tensor in sharding.full_tensors(accelerator, model):
        key = wanted.get(name)
        if key in files:
            compared.add(key)
            problems += _difference(files[key], key, _as_exported(tensor, dtype))
        elif key is not None and accelerator.is_main_process:
            unmatched[key] = _as_exported(tensor, dtype)
    if accelerator.is_main_process and not problems:
        module = accelerator.unwrap_model(model, keep_torch_compile=False)
        for key, tensor in in_file_format(module, unmatched).items():
            compared.add(key)
            problems += _difference(files[key], key, tensor) if key in files else [f"{key} is missing"]
        problems += [f"{key} does not belong there" for key in files.keys() - compared]
    return f"{folder} differs from the model: " + "; ".join(problems[:5]) if problems else ""


def _open_files(folder: Path, problems: list[str]) -> dict:
    """Name of a tensor -> the open file that holds it."""
    from safetensors import safe_open

    files = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            files |= dict.fromkeys(file.keys(), file)
    except Exception as failure:  # a damaged file is what this looks for, in whatever way it shows
        problems.append(f"cannot be read: {failure!r}")
    return files


def _difference(file, key: str, live: torch.Tensor) -> list[str]:
    try:
        written = file.get_tensor(key)
    except Exception as failure:  # as above
        return [f"{key} cannot be read: {failure!r}"]
    if live.is_floating_point() and not bool(torch.isfinite(live).all()):
        return [f"{key} holds values that are not finite: the training has diverged"]
    if written.shape != live.shape or written.dtype != live.dtype or not torch.equal(written, live):
        return [f"{key}: file has {tuple(written.shape)} {written.dtype}, live is {tuple(live.shape)} {live.dtype}"]
    return []


def in_file_format(module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers writes for tensors that it keeps otherwise in memory, such as experts fused into one."""
    if not tensors:
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(module, tensors)


def _has_same_weights(folder: Path, other: Path) -> bool:
    """Whether both hold the same weight files, to the last byte."""
    names = [{path.name for path in one.glob("*.safetensors*")} if one.is_dir() else set() for one in (folder, other)]
    return names[0] == names[1] != set() and all(filecmp.cmp(folder / n, other / n, shallow=False) for n in names[0])


def _raise_together(error: str) -> None:
    error = _first_ranks(error)
    if error:
        raise RuntimeError(f"export: {error}")


def _first_ranks(error: str) -> str:
    """What the first rank has to say, on every rank."""
    from accelerate.utils import broadcast_object_list

    message = [error]
    broadcast_object_list(message, from_process=0)
    return message[0]


def _merge(accelerator: Accelerator, adapter: Path, config: RecipeConfig) -> None:
    """Fold the exported adapter into its base model, in fp32, on the host of the first rank.

    After training on a quantised base these are the values that the quantised layers computed with: the adapter has
    learnt beside their rounding, so merging into the original weights would give another model.
    """
    error = ""
    if accelerator.is_main_process:
        try:
            with sharding.plain_loading():
                error = _merge_plain(adapter, config, sharding.compute_dtype(accelerator))
        except Exception as failure:  # the other ranks wait for word of it
            error = f"could not merge {adapter}: {failure!r}"
    _raise_together(error)


def _merge_plain(adapter: Path, config: RecipeConfig, compute_dtype: torch.dtype) -> str:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = models.base_model_of(config)
    model = models.from_source(
        AutoModelForCausalLM,
        sources.find_model(base, config.trust_remote_code),
        config,
        dtype=compute_dtype if config.quantization else torch.float32,  # what was quantised was in this dtype before
        use_safetensors=models.use_safetensors(config),
        **quantization.rounding(config),
    )
    if config.quantization:
        model = model.dequantize().to(torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    models.align_for_generation(model, tokenizer)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    dtype = models.DTYPES[config.export_dtype] if config.export_dtype != "auto" else models.start_dtype(config)
    merged.to(dtype)
    target, temporary = adapter.with_name("merged"), adapter.with_name("merged.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    merged.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    problems: list[str] = []
    files = _open_files(temporary, problems)
    live = in_file_format(merged, {name: tensor.detach() for name, tensor in merged.named_parameters()})
    for key, tensor in live.items():
        problems += _difference(files[key], key, tensor) if key in files else [f"{key} is missing"]
    if problems:
        return f"{temporary} differs from the merged model: " + "; ".join(problems[:5])
    os.replace(temporary, target)
    base_values = f"base as {config.quantization} rounds it, " if config.quantization else ""
    print(f"exported: {target} (merged model, {base_values}{dtype}, {len(live)} tensors verified)")
    return ""
