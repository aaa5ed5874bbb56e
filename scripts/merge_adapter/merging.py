"""A LoRA adapter folded into its base model, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PREFIX = "base_model.model."


def known_quantization(adapter: Path, asked: str | None) -> str | None:
    """What the base was held in when the adapter was trained: as asked, or as the run's record beside it says.

    Raises ValueError where nothing says it: the right base depends on it.
    """
    import yaml

    if asked:
        return None if asked == "none" else asked
    records = [adapter / "export.json", adapter / "recipe.yaml"]
    if adapter.resolve().name == "model":  # model.1 is of a run whose recipe.yaml was replaced
        records.append(adapter.resolve().parent / "recipe.yaml")
    for path in records:
        if path.is_file():
            record = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
            if isinstance(record, dict) and "quantization" in record | {"quantization": None}:
                value = record.get("quantization")
                if value not in (None, "nf4", "int8"):
                    raise ValueError(f"{path} has quantization {value!r}: give --quantization none, nf4 or int8")
                print(f"quantization: {value or 'none'} (says {path})")
                return value
    raise ValueError(
        f"nothing beside {adapter} (export.json, or recipe.yaml of its run) says whether it was trained over a "
        "quantised base: give --quantization none, nf4 or int8"
    )


def known_dtype(adapter: Path):
    """What the base was computed in when the adapter was trained, and so rounded to before it was quantised; fp32
    where no record beside it says otherwise."""
    from oneloop.sharding.chosen import DTYPES

    folder = adapter.resolve()
    for path in (folder / "export.json", *([folder.parent / "topology.json"] if folder.name == "model" else [])):
        if path.is_file():
            precision = json.loads(path.read_text(encoding="utf-8")).get("precision")
            if precision in DTYPES:
                return DTYPES[precision]
    return DTYPES["no"]


def check_choice(base: str | None, quantization: str | None) -> str:
    """Which base to merge into. Raises ValueError for a choice that does not exist."""
    if base == "dequantized" and quantization is None:
        raise ValueError("--base dequantized: the adapter was not trained over a quantised base. Leave it out.")
    return base or ("dequantized" if quantization else "16bit")


def merge(config, base, folder: Path, rounded: bool, dtype=None):
    """Write the base model with an adapter (`base.adapter`) folded in; returns its dtype and tensors.

    rounded: into the base as `config.quantization` rounds it. dtype: None for that of the base model's files. Raises
    ValueError and OSError.
    """
    from transformers import AutoTokenizer

    from oneloop import export, models, sources
    from oneloop.state import plain

    found = sources.find_model(base, config.trust_remote_code)
    _refuse_quantised_storage(found)
    dtype = dtype or models.stored_dtype(base, config.trust_remote_code)
    tokenizer = models.from_source(AutoTokenizer, sources.find_tokenizer(base, config.trust_remote_code), config)
    module = plain.skeleton(config, base)
    models.align_for_generation(module, tokenizer)
    base_values = plain.FileValues(found.folder)
    values = _MergedValues(config, base, module, base_values, rounded)
    pieces = plain.model_pieces(module, dtype, values, base_values)
    plain.check_space(folder, pieces)
    export.write_settings(module, folder, dtype, False)  # first: it removes weight files that it does not know
    tokenizer.save_pretrained(folder)
    plain.write_files(folder, pieces, "model.safetensors")
    return dtype, pieces


def _refuse_quantised_storage(found) -> None:
    path = found.folder / "config.json"
    if path.is_file() and json.loads(path.read_text()).get("quantization_config"):
        raise ValueError(
            f"the base model {found.location!r} is stored quantised, and merging into such storage would round the "
            "result once more. Name the original model: --model_name_or_path FOLDER"
        )


class _MergedValues:
    """What differs from the base model's files, by name in the model: merged layers, modules saved beside the
    adapter, and layers that were only rounded."""

    def __init__(self, config, base, module, base_values, rounded: bool):
        from oneloop import export, quantization
        from oneloop.state import plain

        self._base_values = base_values
        self._keys = {
            group.names[0]: next(iter(group.made)) for group in plain.groups_of(module) if group.is_renamed_only
        }
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._transposed = {
            f"{name}.weight" for name, inner in module.named_modules() if type(inner).__name__ == "Conv1D"
        }
        self._quantization = config.quantization if rounded else None
        self._dtype = config.compute_dtype
        self._rounded = set()
        if rounded:  # the same layers in 4 and in 8 bits; 8-bit ones cannot be built without values
            nf4 = quantization.rounding(SimpleNamespace(quantization="nf4"))
            packed = plain.skeleton(config, base, **nf4)
            self._rounded = {
                f"{name}.weight" for name, inner in packed.named_modules() if quantization.is_quantized(inner)
            }
        self._adapter = plain.FileValues(Path(base.adapter).expanduser(), "adapter_model.safetensors")
        peft_module = _with_empty_adapter(config, base)
        self._wanted = export.tensor_names(peft_module, True)
        if set(self._wanted.values()) != set(self._adapter):
            different = sorted(set(self._wanted.values()) ^ set(self._adapter))
            raise ValueError(
                f"{base.adapter} does not fit its base model {base.name!r}: {different[0]} is on one side only "
                f"({len(different)} in all)"
            )
        self._layers = _adapted_layers(peft_module)
        self._saved = {
            key.removeprefix(PREFIX): key for live, key in self._wanted.items() if ".modules_to_save." in live
        }
        self._names = self._layers.keys() | self._saved.keys() | self._rounded
        for name in sorted(self._names):
            if name not in self._shapes or (name not in self._saved and name not in self._keys):
                raise ValueError(
                    f"{name} cannot be merged tensor by tensor: it is tied to another weight, or stored together with "
                    "others. Train with merge_adapter: true, which merges in memory."
                )

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def blocks(self, name: str) -> Iterator:
        if name in self._saved:
            yield self._adapter.whole(self._saved[name]).flatten()
            return
        weight = self._base_values.whole(self._keys[name])
        if name in self._rounded:
            weight = round_weight(weight.to(self._dtype), self._quantization, name in self._transposed)
        if name in self._layers:
            weight = self._merged(*self._layers[name], weight)
        yield weight.flatten()

    def _merged(self, live_name: str, layer, weight):
        """What peft itself makes of the layer, which is given its values for the time of it."""
        import torch

        tensors = {
            live.removeprefix(f"{live_name}."): self._adapter.whole(key)
            for live, key in self._wanted.items()
            if live.startswith(f"{live_name}.")
        }
        layer.load_state_dict(tensors, strict=False, assign=True)
        layer.get_base_layer().weight = torch.nn.Parameter(weight, requires_grad=False)
        with torch.no_grad():
            layer.merge()
        merged = layer.get_base_layer().weight.data
        layer._caches.clear()
        layer.to("meta")
        return merged


def _with_empty_adapter(config, base):
    from peft import PeftConfig, get_peft_model

    from oneloop import models, sources
    from oneloop.state import plain

    source = sources.find_adapter(base.adapter, config.trust_remote_code)
    settings = models._load(lambda folder, **_: PeftConfig.from_pretrained(folder), source)
    place = f"{base.adapter}/adapter_config.json"
    if settings.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(f"{place}: init_lora_weights {settings.init_lora_weights!r} changes the base model itself")
    for name in ("lora_bias", "target_parameters", "trainable_token_indices", "layer_replication"):
        if getattr(settings, name, None):
            raise ValueError(f"{place}: {name} cannot be merged by this script")
    if settings.bias != "none":
        raise ValueError(f"{place}: bias {settings.bias!r} cannot be merged by this script")
    settings.init_lora_weights = False  # there is nothing to be filled
    return get_peft_model(plain.skeleton(config, base), settings)


def _adapted_layers(peft_module) -> dict[str, tuple[str, Any]]:
    """Name of a weight in the base model -> the adapted layer around it, with its own name."""
    from peft.tuners.lora import LoraLayer

    layers = [(name, layer) for name, layer in peft_module.named_modules() if isinstance(layer, LoraLayer)]
    return {f"{name.removeprefix(PREFIX)}.weight": (name, layer) for name, layer in layers}


def round_weight(weight, quantization: str, transposed: bool = False):
    """A weight (out, in), or (in, out) if transposed, in the dtype it was held in before it was quantised: as its
    quantised layer computes with it, in fp32."""
    import bitsandbytes
    from bitsandbytes import functional

    weight = weight.T.contiguous() if transposed else weight
    if quantization == "nf4":
        packed = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True).to(
            "cpu"
        )
        rounded = functional.dequantize_4bit(packed.data, packed.quant_state)
    else:
        packed = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
        rounded = functional.int8_vectorwise_dequant(packed.data, packed.SCB)
    rounded = rounded.float()
    return rounded.T.contiguous() if transposed else rounded
