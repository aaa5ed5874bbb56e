"""Evaluation that is exact over ranks: sums of items, one division, uneven rows and all; and generated answers.

Runs through the wrapped model, so it works on sharded weights. Every rank makes equally many forward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from oneloop import rewards, sharding, watchdog
from oneloop.data import sampling

if TYPE_CHECKING:
    from accelerate import Accelerator


def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, loader, count_items: Callable, compute_loss_sum: Callable
):
    """Mean loss over all items of the evaluation rows, its exponential, and the recipe's metrics as means over items.

    Returns {"eval/loss", "eval/perplexity", "eval/<metric>"...}, the same on every rank and for every world size.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    model.eval()
    with torch.no_grad():
        for batch in loader:
            loss_sum, metrics = compute_loss_sum(model, batch)
            for name, value in {"loss": loss_sum, "items": count_items(batch), **metrics}.items():
                parts.setdefault(name, []).append(value)
    model.train()
    mine = {name: torch.stack(values).cpu().double().sum().item() for name, values in parts.items()}
    everyone = gather_object([mine])
    total = {name: sum(one[name] for one in everyone) for name in mine}
    items = max(total.pop("items"), 1)  # a copied recipe may count items that no row has
    means = {f"eval/{name}": value / items for name, value in total.items()}
    # A loss over 709 nats has no finite exponential in float64.
    means["eval/perplexity"] = math.inf if means["eval/loss"] >= 709 else math.exp(means["eval/loss"])
    return means


def exact_match(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer,
    rows: list[dict],
    batch_size: int,
    match: str = "text",
    num_shown: int = 3,
) -> dict[str, float]:
    """Share of rows whose greedy answer equals the reference reply; prints a few.

    rows: with `prompt_ids` and `reply`; those where they are empty are left out. match: `text` (surrounding white
    space aside), or `number`, see `rewards.final_number`. Answers may be half as long again as the longest reference.
    Returns {"eval/exact_match", "eval/num_generations"}. Collective."""
    rows = [row for row in rows if len(row["prompt_ids"])]
    if not rows:
        raise ValueError("eval_generations: no evaluation row ends with a reply to compare an answer with.")
    longest = max(len(tokenizer(row["reply"])["input_ids"]) for row in rows)
    prompts = [row["prompt_ids"] for row in rows]
    answers = generate_answers(accelerator, model, tokenizer, prompts, longest + longest // 2 + 8, batch_size)
    for row, answer in list(zip(rows, answers, strict=True))[:num_shown]:
        prompt = tokenizer.decode(row["prompt_ids"], skip_special_tokens=True).strip()
        accelerator.print(f"  prompt  {prompt!r}\n  wanted  {row['reply']!r}\n  answer  {answer!r}")
    part = rewards.final_number if match == "number" else str.strip
    wanted = [part(row["reply"]) for row in rows]
    if None in wanted:
        raise ValueError(f"eval_match: number, but the reply of evaluation row {wanted.index(None)} holds no number")
    num_right = sum(part(answer) == value for answer, value in zip(answers, wanted, strict=True))
    return {"eval/exact_match": num_right / len(rows), "eval/num_generations": float(len(rows))}


def generate_answers(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer,
    prompts: list[list[int]],
    max_new_tokens: int,
    batch_size: int,
) -> list[str]:
    """Greedy continuations of `prompts` (lists of token ids), decoded without special tokens, in the prompts' order.

    Collective; the prompts are divided over the ranks and every rank returns all answers.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # What is left out here is taken from the checkpoint's own generation config (transformers 5).
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )
    batches = sampling.even_batches(
        len(prompts),
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        per_device_batch_size=batch_size,
    )
    answers: list[tuple[int, str]] = []
    with sharding.generation(accelerator, model) as (module, needed):
        for row_numbers in batches:
            watchdog.beat()
            rows = [list(prompts[i]) for i in row_numbers] or [
                [tokenizer.eos_token_id]
            ]  # a rank without prompts keeps step
            width = max(map(len, rows))
            # Padded on the left: the next token follows the prompt.
            input_ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
            output = module.generate(
                input_ids=input_ids.to(accelerator.device),
                attention_mask=mask.to(accelerator.device),
                generation_config=settings,
                **needed,
            )
            texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
            answers += [(int(i), text) for i, text in zip(row_numbers, texts, strict=False)]
    return [text for _, text in sorted(gather_object(answers))]
