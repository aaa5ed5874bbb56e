"""Merged models compared with the live adapter over its base, as it was trained: logits and perplexity."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
    "What is 12 times 12? It is 144. And half of that is 72.",
    "Dear Sir or Madam,\nthank you for your letter of last week. Please find enclosed what you asked for.",
    '{"name": "set_timer", "arguments": {"minutes": 10, "label": "tea"}}',
    "Once upon a time there was a keeper of a lighthouse who climbed ninety steps every evening.",
    "First peel the potatoes, then cut them into pieces and boil them for twenty minutes in salted water.",
)
"""What the models are compared on when no file is given."""


def rows_of(tokenizer, eval_file: str | None, max_tokens: int) -> list[dict]:
    """What the models are compared on: `input_ids` (T,) and `labels` (T,), `max_tokens` in all at most."""
    from oneloop import data

    def of_text(text: str) -> dict:
        ids = tokenizer(text)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    def encode(example: dict) -> dict:
        rules = {"max_length": max_tokens, "truncation": "truncate"}
        if "text" in example:
            return of_text(example["text"])
        if "messages" in example:
            return data.chat.encode_messages(tokenizer, example["messages"], tools=example.get("tools"), **rules)
        return data.chat.encode_text(tokenizer, example["prompt"], example["completion"], **rules)

    if eval_file is None:
        rows = [of_text(text) for text in TEXTS]
    elif eval_file.endswith(".txt"):
        text = Path(eval_file).read_text(encoding="utf-8")
        rows = [of_text(part) for part in text.split("\n\n") if part.strip()]
    else:
        rows, _ = data.rows.collect(eval_file, "test", encode, "stop", field="--eval_file")
    kept, left = [], max_tokens
    for row in rows:
        row = {name: row[name][:left] for name in ("input_ids", "labels")}
        if len(row["input_ids"]) > 1:
            kept.append(row)
            left -= len(row["input_ids"])
    if not any(label != -100 for row in kept for label in row["labels"][1:]):
        raise ValueError(f"--eval_file {eval_file}: no token of it can be predicted")
    return kept


def measure(config, base, merged: dict[str, Path], rows: list[dict]) -> dict[str, Any]:
    """Compare merged models, by the base they were merged into, with the live adapter over its base, as trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from oneloop import models, quantization, sources

    source = sources.find_model(base, config.trust_remote_code)
    model = _loaded(config, source, **quantization.rounding(config))
    for parameter in model.parameters():  # what is packed is no floating-point tensor, and stays as it is
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    if config.quantization:
        quantization.make_trainable_around(model)  # or some CPUs compute its evaluation in bf16
    adapter = sources.find_adapter(base.adapter, config.trust_remote_code)
    model = models._load(functools.partial(_adapted, PeftModel, model), adapter).eval()
    live, perplexity = _logits(model, rows), {}
    with model.disable_adapter():
        bare = _logits(model, rows)
    del model
    perplexity["base"], perplexity["adapter"] = _perplexity(bare, rows), _perplexity(live, rows)
    effect = _difference(live, bare)
    del bare
    differences = {}
    for name, folder in merged.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=_fp32(), use_safetensors=True).eval()
        logits = _logits(model, rows)
        del model
        perplexity[name] = _perplexity(logits, rows)
        found = _difference(logits, live)
        shares = {f"{key}_share": value / effect[key] if effect[key] else math.inf for key, value in found.items()}
        differences[name] = found | shares
    return {
        "num_texts": len(rows),
        "num_tokens": sum(len(row["input_ids"]) for row in rows),
        "adapter_effect": effect,
        "difference": differences,
        "perplexity": perplexity,
    }


def _fp32():
    import torch

    return torch.float32


def _loaded(config, source, **kwargs):
    from transformers import AutoModelForCausalLM

    from oneloop import models

    dtype = config.compute_dtype if config.quantization else _fp32()
    return models.from_source(
        AutoModelForCausalLM, source, config, dtype=dtype, use_safetensors=models.use_safetensors(config), **kwargs
    )


def _adapted(peft_class, model, folder: str, **_):
    return peft_class.from_pretrained(model, folder)


def _logits(model, rows: list[dict]) -> list:
    """(T, V) fp32 of each row."""
    import torch

    with torch.no_grad():
        return [model(input_ids=torch.tensor(row["input_ids"])[None]).logits[0].float() for row in rows]


def _difference(first: list, second: list) -> dict[str, float]:
    """Largest and mean absolute difference of logits, over all tokens and the whole vocabulary."""
    both = [(one - other).abs() for one, other in zip(first, second, strict=True)]
    count = sum(one.numel() for one in both)
    return {"max": max(float(one.max()) for one in both), "mean": sum(float(one.sum()) for one in both) / count}


def _perplexity(logits: list, rows: list[dict]) -> float:
    import torch

    loss_sum, count = 0.0, 0
    for one, row in zip(logits, rows, strict=True):
        labels = torch.tensor(row["labels"])[1:]
        loss_sum += float(torch.nn.functional.cross_entropy(one[:-1], labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    return math.exp(min(loss_sum / count, 700))


def show(report: dict[str, Any]) -> None:
    """Print what was measured."""
    base = f"base in {report['quantization']}" if report["quantization"] else "base"
    effect, perplexity = report["adapter_effect"], report["perplexity"]
    rows = [("", "max |logits|", "mean |logits|", "perplexity")]
    rows.append((base, "", "", f"{perplexity['base']:.4f}"))
    difference = (f"{effect['max']:.3g}", f"{effect['mean']:.3g}")
    rows.append((f"adapter over it, minus {base}", *difference, f"{perplexity['adapter']:.4f}"))
    for name, found in report["difference"].items():
        difference = (f"{found['max']:.3g}", f"{found['mean']:.3g}")
        rows.append((f"merged into {name} base, minus adapter", *difference, f"{perplexity[name]:.4f}"))
        rows.append(("  of what the adapter does", f"{found['max_share']:.3%}", f"{found['mean_share']:.3%}", ""))
    print(f"\nmeasured on {report['num_texts']} texts, {report['num_tokens']} tokens, in fp32")
    for label, *values in rows:
        print(f"  {label:<42}" + "".join(f"{value:>15}" for value in values))
