"""Tokenizer and model from a hub id or folder, in the dtypes that the precision contract asks for, with adapters.

The contract, the same under every strategy: what is trained is fp32 whatever the checkpoint's dtype (transformers 5
loads a bf16 checkpoint as bf16, and plain data parallelism would then train in pure bf16); what is frozen is held in
the dtype it computes in.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from oneloop import loss_head, quantization, sharding, sources
from oneloop.data import chat
from oneloop.sources import BaseModel, Found, base_model_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oneloop.config import RecipeConfig

_PACKING_KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_tokenizer(config: RecipeConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template (from `chat_template` if given), a padding token, and as eos the token that
    the template ends an assistant turn with: what the model is taught to stop at is what generation must stop at."""
    from transformers import AutoTokenizer

    sources.check(config)
    source = sources.find_tokenizer(base_model_of(config), config.trust_remote_code)
    tokenizer = from_source(AutoTokenizer, source, config)
    chat.load_template(tokenizer, config.chat_template)
    end_of_turn = chat.end_of_turn_token(tokenizer) if tokenizer.chat_template else None
    if end_of_turn is not None and end_of_turn != tokenizer.eos_token:
        print(f"tokenizer: eos {tokenizer.eos_token!r} -> {end_of_turn!r}, the end of a turn in the chat template")
        tokenizer.eos_token = end_of_turn
    if tokenizer.eos_token is None:
        raise ValueError(f"The tokenizer of {source.location!r} has no eos token; set one in tokenizer_config.json.")
    if tokenizer.pad_token is None:
        # Labels are masked by length, so sharing the id costs nothing.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    config: RecipeConfig, accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel | torch.nn.Module:
    """The model to train, not yet wrapped: a `PreTrainedModel`, or a `PeftModel` around one when adapters are trained.

    Trainable parameters are fp32; frozen ones are in the dtype they compute in.

    Raises ValueError for a checkpoint that cannot be found or loaded, or adapter settings that do not fit the model.
    """
    from transformers import AutoModelForCausalLM

    base = base_model_of(config)
    trains_adapter = config.use_peft or base.adapter is not None
    start_dtype(config)  # read now, while the checkpoint is there: the export will ask for it
    compute_dtype = sharding.compute_dtype(accelerator)
    model, info = from_source(
        AutoModelForCausalLM,
        sources.find_model(base, config.trust_remote_code),
        config,
        dtype=compute_dtype if trains_adapter else torch.float32,
        attn_implementation=config.attn_implementation,
        output_loading_info=True,
        use_safetensors=use_safetensors(config),
        **quantization.settings(config, accelerator),
    )
    if info["missing_keys"]:
        raise ValueError(
            f"model_name_or_path: {base.name!r} lacks {', '.join(sorted(info['missing_keys'])[:3])} "
            f"({len(info['missing_keys'])} in all), which would start from random values. Is a file missing, or is "
            "this no causal language model?"
        )
    model.config.use_cache = False  # of no use in training, and it would make attention ignore packing later
    align_for_generation(model, tokenizer)
    if config.quantization:
        quantization.make_trainable_around(model)
    if trains_adapter:
        model = with_adapter(config, model, base)
    if config.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            {"use_reentrant": sharding.needs_reentrant_checkpointing(accelerator, trains_adapter)}
        )
    loss_head.attach(model, accelerator)
    model.train()  # from_pretrained leaves evaluation mode on
    if config.torch_compile:
        _compile_layers(model)
    return model


def _compile_layers(model: torch.nn.Module) -> None:
    """Compile each of the model's repeated layers, in place: one graph serves them all, and whatever refers to the
    model still does. (accelerate 1.15's `compile_regions` trains a copy instead, beside everything that is bound to
    the original.)"""
    from accelerate.utils.other import is_repeated_blocks

    layers = [layer for module in model.modules() if is_repeated_blocks(module) for layer in module]
    if not layers:
        raise ValueError("torch_compile: the model has no list of equal layers to compile. Leave it out.")
    for layer in layers:
        layer.compile()


def start_dtype(config: RecipeConfig) -> torch.dtype:
    """The dtype that the checkpoint itself is stored in, which `export_dtype: auto` writes again."""
    return stored_dtype(base_model_of(config), config.trust_remote_code)


@functools.cache
def stored_dtype(base: BaseModel, trust_remote_code: bool) -> torch.dtype:
    from transformers import AutoConfig

    source = sources.find_model(base, trust_remote_code)
    saved = _load(AutoConfig.from_pretrained, source, revision=source.revision, trust_remote_code=trust_remote_code)
    if getattr(saved, "quantization_config", None):
        raise ValueError(
            f"model_name_or_path: {base.name!r} is quantised already, in a form that need not bear sharding or "
            "merging. Name the original model, and set quantization: nf4 to hold it in 4 bits."
        )
    dtype = saved.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def use_safetensors(config: RecipeConfig) -> bool | None:
    """What transformers is told: nothing but safetensors, unless pickled weights are trusted."""
    return None if config.trust_remote_code else True


def from_source(auto_class, source: Found, config: RecipeConfig, **kwargs):
    """`from_pretrained` of a transformers class on a checked source, at the commit that was checked."""
    return _load(
        auto_class.from_pretrained,
        source,
        revision=source.revision,
        trust_remote_code=config.trust_remote_code,
        **kwargs,
    )


def _load(load: Callable, source: Found, **kwargs):
    """Call a library's loader. Raises ValueError naming the field for whatever it raises: a damaged or foreign
    checkpoint shows as many kinds of errors as there are ways to be damaged."""
    try:
        return load(source.location, **kwargs)
    except ImportError as error:
        raise ValueError(
            f"attn_implementation or model_name_or_path needs a package that is missing: {error} (The package kernels, "
            "which runs code of the hub, is used with --trust_remote_code only.)"
        ) from error
    except Exception as error:
        raise ValueError(
            f"model_name_or_path: cannot load {source.location!r}: {type(error).__name__}: {error}"
        ) from error


def with_adapter(config: RecipeConfig, model, base: BaseModel):
    from peft import LoraConfig, get_peft_model

    # peft draws the adapter from the global generator; every strategy must start from the same values, however
    # many numbers the loading of the base model has used before.
    torch.manual_seed(config.seed)
    if base.adapter is not None:
        adapter = sources.find_adapter(base.adapter, config.trust_remote_code)
        model = _load(functools.partial(_continued, model), adapter)
    else:
        _check_module_names(config, model)
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=config.lora_target_modules or "all-linear",
            modules_to_save=config.lora_modules_to_save,
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
        )
        try:
            model = get_peft_model(model, lora, revision=config.model_revision)
        except ValueError as error:
            raise ValueError(f"lora_target_modules / lora_modules_to_save do not fit the model: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _continued(model, folder: str):
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    model = PeftModel.from_pretrained(model, folder, is_trainable=True)
    missing = set(get_peft_model_state_dict(model, save_embedding_layers=False)) - set(load_peft_weights(folder, "cpu"))
    if missing:  # peft only warns, and these would start anew
        raise ValueError(f"the adapter lacks {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
    return model


def _check_module_names(config: RecipeConfig, model) -> None:
    """Refuse a name that fits no module: peft is content if any of a list does."""
    names = [name for name, _ in model.named_modules()]
    if config.quantization:
        packed = [name for name, module in model.named_modules() if quantization.is_quantized(module)]
        for wanted in config.lora_modules_to_save or []:
            if any(name == wanted or name.endswith(f".{wanted}") for name in packed):
                raise ValueError(
                    f"lora_modules_to_save: {wanted!r} is held in {config.quantization}, which cannot be trained in "
                    "full. Name it in lora_target_modules, or leave quantization out."
                )
    for field in ("lora_target_modules", "lora_modules_to_save"):
        for wanted in getattr(config, field) or []:
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
                near = difflib.get_close_matches(wanted, {name.rpartition(".")[2] for name in names}, n=2)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f"{field}: {wanted!r} is the name of no module of the model{hint}")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        ends = [name for name, module in model.named_modules() if module in (embedding, head)]
        for wanted in config.lora_modules_to_save or []:
            if any(name == wanted or name.endswith(f".{wanted}") for name in ends):
                # peft would train a copy of one and leave the other behind, and some wrappers tie the two again.
                raise ValueError(
                    f"lora_modules_to_save: {wanted!r} shares its weights with the other end of the model "
                    "(tie_word_embeddings). Leave it out, or train the whole model."
                )


def check_rows_fit(model, config: RecipeConfig, row_sets: list, tokenizer) -> None:
    """Refuse token ids and lengths that the model has no embedding for, before a kernel fails on them, and packing
    where rows would see each other.

    row_sets: with `highest_id` and `longest`. Raises ValueError.
    """
    size = model.get_input_embeddings().num_embeddings
    highest = max([tokenizer.pad_token_id] + [rows.highest_id for rows in row_sets])
    if highest >= size:
        raise ValueError(
            f"model_name_or_path: the tokenizer gives token id {highest}, but the model knows {size} tokens; the two "
            "do not belong together."
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for rows in row_sets:
        if hasattr(rows, "limits"):  # a stream looks at its rows when they come
            rows.limits = (size, limit or sys.maxsize)
    longest = max(rows.longest for rows in row_sets)
    if limit and longest > limit:
        raise ValueError(f"max_length: a row has {longest} tokens, the model has {limit} positions; lower max_length.")
    if config.packing:
        _check_packing(config, model)


def _check_packing(config: RecipeConfig, model) -> None:
    """Refuse packing where rows of a block could see each other: position ids keep attention apart in the kernels named
    here (transformers 5.24, masking_utils.py and modeling_flash_attention_utils.py), and nothing does so in layers
    that carry a state from position to position."""
    text = model.config.get_text_config()
    kernel = text._attn_implementation
    if kernel not in _PACKING_KERNELS:
        raise ValueError(
            f"packing: true with attn_implementation {kernel!r}, which is not known to keep packed rows apart: "
            "set it to "
            f"one of {', '.join(_PACKING_KERNELS)}, or leave packing out"
        )
    if "flash" in kernel and config.attn_implementation != kernel:
        raise ValueError(
            f"packing: true, and the checkpoint asks for {kernel}: set attn_implementation to {kernel}, for "
            "blocks to be "
            "laid out as that kernel needs them"
        )
    kinds = set(getattr(text, "layer_types", None) or ())
    carries = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    names = {type(module).__name__ for module in model.modules()}
    carries += sorted(name for name in names if re.search(r"mamba|rwkv|recurrent|ssm|deltanet|shortconv", name, re.I))
    if carries:
        raise ValueError(
            f"packing: true, but the model has layers that carry a state from one row of a block into the next "
            f"({', '.join(carries)}): leave packing out"
        )
    if "position_ids" not in inspect.signature(_causal(model).forward).parameters:
        raise ValueError(
            f"packing: true, but {type(_causal(model)).__name__} takes no position_ids, by which packed rows are told "
            "apart: leave packing out"
        )


def _causal(model):
    return model.get_base_model() if hasattr(model, "peft_config") else model


def align_for_generation(model, tokenizer) -> None:
    """Make config and generation config stop and pad as the tokenizer does (further eos ids of the checkpoint stay),
    and savable."""
    known = model.generation_config.eos_token_id
    known = known if isinstance(known, list) else [known] if known is not None else []
    eos = [tokenizer.eos_token_id] + [token for token in known if token != tokenizer.eos_token_id]
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = eos if len(eos) > 1 else eos[0]
    _repair_generation_config(model)


def _repair_generation_config(model) -> None:
    """Drop sampling values from a checkpoint that decodes greedily: transformers loads such a file but refuses to
    save it, which would lose the run at its very end. Greedy decoding never read them."""
    generation_config = model.generation_config
    if generation_config.do_sample:
        return
    defaults = type(generation_config)()
    dropped = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"):
        value = getattr(generation_config, name, None)
        if value != getattr(defaults, name, None):
            dropped[name] = value
            setattr(generation_config, name, getattr(defaults, name, None))
    if dropped:
        print(f"generation_config: greedy (do_sample is not set), so these values are dropped: {dropped}")
