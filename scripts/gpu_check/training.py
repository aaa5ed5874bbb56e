"""Llamas with random weights made on the device, rows of random tokens, and the loops that train them.

`recipe` is recipes/sft.py itself: its `main`, untouched, with two things put in its way. Weights come from a config in
memory instead of a checkpoint, rows from a generator instead of a file; all else is what a user runs.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from benchmarks import subjects

from gpu_check import device as devices
from gpu_check.sizes import Shape

NUM_ROWS = 8
LEARNING_RATE = 1e-5
LOGGING_STEPS = 10
LORA_RANK = 16


class _Finished(Exception):
    """Raised where the recipe's next step would begin: export and the rest are no part of a measurement."""


def llama_config(shape: Shape):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=131_072,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
        dtype="bfloat16",  # of the checkpoint that it stands for
    )


def build(shape: Shape, dtype: torch.dtype, device: torch.device | str) -> torch.nn.Module:
    """A causal language model whose random weights are drawn where they will be used; "meta" for its shapes alone."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(llama_config(shape), dtype=dtype)


def random_rows(shape: Shape, num_tokens: int) -> list[dict]:
    """Rows packed full, each token supervised; as the recipe's own tokenisation would hand them over."""
    import numpy as np

    generator = np.random.default_rng(0)
    tokens = generator.integers(shape.vocabulary, size=(NUM_ROWS, num_tokens), dtype=np.int32)
    return [{"input_ids": row, "labels": row} for row in tokens]


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of rows that need no padding, as the peers take it."""
    batch = {key: torch.stack([torch.from_numpy(row[key]) for row in rows]).long() for key in rows[0]}
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def flops_counter(shape: Shape, lora: bool):
    """`oneloop.flops.Counter` of a model that is not built."""
    from oneloop import flops

    model = build(shape, torch.bfloat16, "meta")
    counter = flops.Counter.of(model, torch.numel)
    if not lora:
        return counter
    trainable = lora_parameters(model)
    return flops.Counter(counter.matmul_parameters + trainable, trainable, counter.attention_width)


def lora_parameters(model: torch.nn.Module) -> int:
    """Parameters of adapters of `LORA_RANK` on all linear layers but the head."""
    from oneloop import memory

    linear = [m for m in model.modules() if type(m) is torch.nn.Linear and m is not model.get_output_embeddings()]
    return memory.lora_parameters(LORA_RANK, [(m.in_features, m.out_features) for m in linear])


# --- the recipe -------------------------------------------------------------------------------------------------------


def recipe(
    step_done: Callable,
    num_steps: int,
    shape: Shape,
    rows: list[dict],
    folder: Path,
    device: torch.device,
    mixed_precision: str | None = "bf16",
    **settings,
) -> None:
    """Train with recipes/sft.py and call `step_done` where it counts a step as done.

    mixed_precision: what an Accelerate file would say; None under `accelerate launch`, which has said it. settings:
    further fields of the recipe's config.
    """
    from transformers import AutoModelForCausalLM

    from oneloop import models, tracking
    from oneloop.data import loaders, prepare, rowsets

    model_folder = folder / "model"
    llama_config(shape).save_pretrained(model_folder)
    subjects.tokenizer().save_pretrained(model_folder)
    (folder / "rows.jsonl").touch()
    sft = subjects.load_recipe("sft")
    from_source, advance = models.from_source, loaders.TrainLoader.advance
    # A backend that shards or offloads wants the weights on the host, as from a checkpoint.
    stays = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true"

    def weights(auto_class, source, config, **kwargs):
        if auto_class is not AutoModelForCausalLM:
            return from_source(auto_class, source, config, **kwargs)
        model = build(shape, kwargs["dtype"], device)
        return (model if stays else model.to("cpu")), {"missing_keys": []}

    def counted(self, progress):
        advance(self, progress)
        step_done()
        if progress.step == num_steps:
            raise _Finished

    values = {
        "model_name_or_path": str(model_folder),
        "dataset_name": str(folder / "rows.jsonl"),
        "output_dir": str(folder / "run"),
        "global_batch_size": 1,
        "per_device_batch_size": 1,
        "learning_rate": LEARNING_RATE,
        "logging_steps": LOGGING_STEPS,
        "max_steps": num_steps,
        "report_to": "none",
    }
    environment = {} if mixed_precision is None else {"ACCELERATE_MIXED_PRECISION": mixed_precision}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(
            prepare, "load", lambda *args: (rowsets.RowSet([rowsets.InMemory(rows)]), rowsets.RowSet([]))
        ),
        mock.patch.object(models, "from_source", weights),
        mock.patch.object(loaders.TrainLoader, "advance", counted),
        # It remembers the newest run's records, and with them the model, which the next attempt has no room beside.
        mock.patch.object(tracking, "_open", None),
    ):
        with contextlib.suppress(_Finished):
            sft.main(sft.SFTConfig(**values | settings))
        tracking.finish_open()


# --- bare loops -------------------------------------------------------------------------------------------------------


def bare(
    step_done: Callable,
    num_steps: int,
    shape: Shape,
    rows: list[dict],
    device: torch.device,
    *,
    compiled: bool,
    lora: bool,
) -> None:
    """The least that a training loop can be: the model's own loss, autocast, fused AdamW, clipping, cosine schedule.

    compiled: layer by layer, as the recipe compiles. lora: adapters of peft on a frozen bf16 model with gradient
    checkpointing, else all weights in fp32.
    """
    model = build(shape, torch.bfloat16 if lora else torch.float32, device)
    if lora:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=32, target_modules="all-linear")
        model = get_peft_model(model, settings)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    forward = compile_by_layers(model) if compiled else model
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for step in range(num_steps):
        batch = {key: value.to(device) for key, value in collate([rows[step % len(rows)]]).items()}
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step + 1) % LOGGING_STEPS == 0:
            loss.item()
        step_done()


def compile_by_layers(model: torch.nn.Module) -> torch.nn.Module:
    """What `torch_compile: true` does: each of the repeated layers, in place."""
    from accelerate.utils.other import is_repeated_blocks

    for module in model.modules():
        if is_repeated_blocks(module):
            for layer in module:
                layer.compile()
    return model


def trainer(
    step_done: Callable, num_steps: int, shape: Shape, rows: list[dict], device: torch.device, folder: Path
) -> None:
    """transformers' Trainer as it comes, in bf16 with fused AdamW; it is not asked to compile."""
    from benchmarks import loop
    from transformers import Trainer, TrainingArguments

    changes = {"per_device_train_batch_size": 1, "learning_rate": LEARNING_RATE, "bf16": True}
    changes |= {"use_cpu": device.type == "cpu", "dataloader_pin_memory": device.type != "cpu"}
    arguments = TrainingArguments(**loop.settings(folder / "trainer", num_steps) | changes)
    loop.silenced(
        Trainer(
            build(shape, torch.float32, device),
            arguments,
            train_dataset=rows,
            data_collator=collate,
            callbacks=[loop.when_done(step_done)],
        )
    ).train()


# --- the planner ------------------------------------------------------------------------------------------------------


def planned_peak(shape: Shape, lora: bool, tokens: int, gradient_checkpointing: bool) -> float:
    """Bytes on the device that `oneloop.memory` foresees for one process in bf16 that shards and offloads nothing."""
    from oneloop import losses, memory

    model = build(shape, torch.bfloat16, "meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainable = lora_parameters(model) if lora else parameters
    facts = memory.Model(
        parameters=parameters + (trainable if lora else 0),
        trainable=trainable,
        hidden=shape.hidden,
        layers=shape.layers,
        vocabulary=shape.vocabulary,
        tied=shape.tied,
    )
    layout = memory.Layout(ranks=1)
    work = memory.work(
        facts,
        layout,
        "bf16",
        tokens=tokens,
        logits_chunk_bytes=losses.CHUNK_BYTES["default"],
        gradient_checkpointing=gradient_checkpointing,
    )
    return memory.peak(memory.state(facts, layout, "bf16"), work, layout).device


class PeakWatch:
    """A `step_done` that remembers the most bytes held in any step but the first, which has no optimizer state yet."""

    def __init__(self, device: torch.device):
        self.device = device
        devices.release(device)
        self.before = devices.allocated_bytes(device)
        self.steps = self.bytes = 0

    def __call__(self) -> None:
        devices.synchronize(self.device)
        if self.steps:
            self.bytes = max(self.bytes, devices.peak_bytes(self.device) - self.before)
        self.steps += 1
        devices.reset_peak(self.device)
