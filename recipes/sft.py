"""Supervised fine-tuning: next-token cross-entropy on the replies.

Objective: with y the supervised tokens of an optimizer step's rows (over all micro-batches and ranks),
    loss = - sum_t log p(y_t | everything before it) / number of y        (Ouyang et al., arXiv 2203.02155, step 1)

Launch, X being where and how (ddp, zero3, fsdp2, ...) and Y what:
    accelerate launch --config_file accelerate_configs/X.yaml recipes/sft.py --config recipes/configs/sft/Y.yaml

Columns: `messages`; `prompt` and `completion`; `instruction`, `input`, `output`; ShareGPT `conversations`; or `text`.
To change the recipe, copy this file: everything it does is in `main`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oneloop import (
    config,
    data,
    evaluate,
    export,
    launch,
    losses,
    meter,
    models,
    optim,
    process,
    scaling,
    sharding,
    skipped,
    state,
    tracking,
)


@dataclass(kw_only=True)
class SFTConfig(config.RecipeConfig):
    """What supervised fine-tuning adds to the fields of every recipe."""

    assistant_only_loss: bool = True
    """Learn only the assistant's turns of a conversation; false learns every token of it."""
    eval_generations: int = 0
    """Evaluation rows to answer greedily at each evaluation and to compare with the reference reply; 0 for none."""
    eval_match: Literal["text", "number"] = "text"
    """What must be the same for an answer to be right: the text letter by letter, or the number it ends up with."""


def count_items(batch):
    """The loss is a mean over supervised tokens."""
    return losses.num_targets(batch["labels"])


def compute_loss_sum(model, batch):
    """Sum of the losses of a micro-batch's items, and sums of further metrics; labels (B, T) int64."""
    inputs = {name: value for name, value in batch.items() if name != "lengths"}
    output = model(**inputs)  # logits are never held: see loss_head
    return output["loss_sum"], {"token_accuracy": output["num_correct"]}


def encode(config, tokenizer, examples, for_evaluation):
    """Token ids and labels of rows in a known form: for each a list of rows, or why it has none."""
    rows = data.encode.encode_batch(
        tokenizer,
        examples,
        assistant_only_loss=config.assistant_only_loss,
        split_special_tokens=config.split_special_tokens,
        max_length=config.max_length,
        truncation=config.truncation,
    )
    return data.prompts.add(tokenizer, examples, rows) if for_evaluation else rows


def main(config: SFTConfig):
    accelerator = launch.start(config)
    export.check_output_dir(accelerator, config)
    resumed = state.find(accelerator, config)  # the training state to continue from, verified; None to begin anew
    tokenizer = models.load_tokenizer(config)
    train_rows, eval_rows = data.prepare.load(config, accelerator, tokenizer, encode)
    if config.show_examples:
        return data.show.examples(config, accelerator, tokenizer, train_rows)
    model = models.load_model(config, accelerator, tokenizer)
    models.check_rows_fit(model, config, [train_rows, eval_rows], tokenizer)
    optimizer = optim.build(config, model, accelerator)
    model, optimizer, topology = launch.prepare(accelerator, config, model, optimizer)
    loader = data.prepare.loader(train_rows, accelerator, config, tokenizer.pad_token_id)
    eval_loader = data.loaders.EvalLoader(eval_rows, accelerator, config, tokenizer.pad_token_id)
    window = meter.Meter(accelerator, model, loader)
    skips = skipped.SkippedSteps(accelerator, config)
    states = state.States(accelerator, config, model, optimizer, loader, window, skips, topology)
    progress = states.begin(resumed)
    states.tracker = tracker = tracking.start(accelerator, config, topology, resumed)
    data.prepare.keep_rejected(accelerator, config, [train_rows, eval_rows])

    def run_evaluation():
        with window.paused():
            metrics = evaluate.evaluate(accelerator, model, eval_loader, count_items, compute_loss_sum)
            if config.eval_generations:
                rows = eval_rows[: config.eval_generations]
                metrics |= evaluate.exact_match(accelerator, model, tokenizer, rows, 16, config.eval_match)
            tracker.log(metrics, progress.step)

    if len(eval_rows) and not resumed:
        run_evaluation()
    # --- training loop: the same text in every recipe (a test compares them); copy the file to change it ---
    for micro_batches in loader.steps(progress):  # all micro-batches of one optimizer step
        lr = optim.set_lr(optimizer, config, progress)  # before backward: DeepSpeed steps inside it
        num_items = scaling.count_items(accelerator, count_items, micro_batches)
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss_sum, metrics = compute_loss_sum(model, batch)
                accelerator.backward(scaling.share_of_mean(accelerator, loss_sum, num_items))
                grad_norm = sharding.clip_grad_norm(accelerator, model, config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            window.add(batch, loss_sum, count_items(batch), metrics)
        window.step(grad_norm)
        skips.record(grad_norm, window, loader, progress)
        loader.advance(progress)
        if progress.due(config.logging_steps):
            tracker.log(window.read(lr) | skips.metrics() | loader.metrics(), progress.step)
        if len(eval_rows) and progress.due(config.eval_steps):
            run_evaluation()
        if states.due(progress):  # every save_every steps, at the end, and when a signal or max_hours asks to stop
            states.save(progress)
    # --- end of training loop ---
    export.save(accelerator, model, tokenizer, config)
    states.finish()
    launch.finish(accelerator, tracker)


if __name__ == "__main__":
    process.run(main, SFTConfig)
