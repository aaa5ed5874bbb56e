"""The trajectory that every config must reproduce, computed without Accelerate, accumulation or ranks.

A plain torch loop: one padded batch holds all rows of an optimizer step, the loss is the mean over its supervised
tokens, written out with `log_softmax`. What it shares with the product is the tokenised rows and their order.
"""

import math

import torch

from oneloop.data import chat, sampling


def rows_of(tokenizer, examples: list[dict], max_length: int) -> list[dict]:
    return [
        chat.encode_messages(tokenizer, e["messages"], max_length=max_length, truncation="truncate") for e in examples
    ]


def lr_at(step: int, lr: float, warmup: int, total: int) -> float:
    """Linear warm-up, then half a cosine, written independently of `oneloop.schedule`."""
    if step < warmup:
        return lr * step / warmup
    return lr * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def load(model_dir: str, dtype: torch.dtype, quantized: bool):
    """The model; `quantized` gives it the values that NF4 with double quantisation rounds its layers to."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if not quantized:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    rounding = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, quantization_config=rounding)
    return model.dequantize().to(dtype)


def train(
    model_dir: str,
    rows: list[dict],
    pad: int,
    config: dict,
    lora: dict | None = None,
    bf16: bool = False,
    quantized: bool = False,
):
    """Returns (list of {loss, grad_norm, lr}, final state: name -> fp32 tensor as exported)."""
    model = load(model_dir, torch.bfloat16 if bf16 and lora is not None else torch.float32, quantized)
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(config["seed"])
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **lora))
        if bf16:
            for p in model.parameters():
                if p.requires_grad:
                    p.data = p.data.bfloat16().float()
    model.train()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if "norm" not in n]
    plain = [p for n, p in named if "norm" in n]
    groups = [{"params": decayed, "weight_decay": config["weight_decay"]}]
    groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
    optimizer = torch.optim.AdamW(groups, lr=1.0, foreach=False, fused=False)
    log, epoch, position = [], 0, 0
    for step in range(config["max_steps"]):
        order = sampling.epoch_order(len(rows), config["seed"], epoch, shuffle=True)
        chosen = [rows[i] for i in order[position : position + config["global_batch_size"]]]
        position += len(chosen)
        if position == len(rows):
            epoch, position = epoch + 1, 0
        width = max(len(row["input_ids"]) for row in chosen)
        ids = torch.tensor([row["input_ids"] + [pad] * (width - len(row["input_ids"])) for row in chosen])
        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in chosen])
        labels = torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in chosen])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1)
        supervised = labels[:, 1:] != -100
        picked = logprobs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        loss = -picked[supervised].sum() / supervised.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], config["max_grad_norm"])
        lr = lr_at(step, config["learning_rate"], config["warmup_steps"], config["max_steps"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        log.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    if lora is not None:
        from peft import get_peft_model_state_dict

        return log, {n: t.detach().clone() for n, t in get_peft_model_state_dict(model).items()}
    return log, {n: t.detach().clone() for n, t in model.named_parameters()}
