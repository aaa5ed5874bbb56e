"""What the recipe would train and on what: names and shapes of its parameters, and the length of its data."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from import_state.unpickling import Foreign

RECIPES = Path(__file__).parents[2] / "recipes"

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What data parallelism, torch.compile, FSDP1 and activation checkpointing put into the names of parameters."""
MOMENTS = {
    **dict.fromkeys(("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"), ("exp_avg", "exp_avg_sq")),
    "lion": ("exp_avg",),
}


@dataclass(frozen=True)
class Target:
    """The parameters that the recipe trains."""

    shapes: dict[str, tuple[int, ...]]
    """In the order of the model."""
    buffers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Those that a model's own files hold, too: running statistics and the like."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of the same parameter, as of a head that is tied to the embedding."""

    def name_of(self, foreign: str) -> str | None:
        """The recipe's own name for a parameter or buffer of the checkpoint; None if that stays as it is."""
        plain = foreign if foreign in self.shapes else _WRAPPERS.sub("", foreign)
        plain = self.aliases.get(plain, plain)
        if plain in self.shapes or plain in self.buffers:
            return plain
        # peft leaves the adapter's name out of what it saves, and some tools leave out what peft wraps around.
        return self._without_adapter_name.get(plain)

    @property
    def _without_adapter_name(self) -> dict[str, str]:
        return {name.replace(".default.", "."): name for name in self.shapes if ".default." in name}


def target_of(config) -> Target:
    """Build the recipe's model without its weights, and say what of it is trained. Raises ValueError."""
    from oneloop import models, sources
    from oneloop.state import plain

    if config.optim not in MOMENTS:
        raise Foreign(f"optim is {config.optim!r}: only the moments of {', '.join(MOMENTS)} can be imported.")
    base = sources.base_model_of(config)
    model = plain.skeleton(config, base)
    if config.use_peft or base.adapter is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # of an adapter that is continued
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # of transformers 5.24
            model = models.with_adapter(config, model, base)
    shapes, aliases, names = {}, {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
        elif parameter.requires_grad:
            shapes[name] = tuple(parameter.shape)
    saved = set(model.state_dict())
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in saved and buffer.numel()}
    return Target(shapes, buffers, aliases)


def recipe_config(path: Path, output_dir: Path, overrides: list[str]):
    """The recipe's module, and its config from the same file and flags as the run that will go on.

    Ends the program with the recipe's own message if they are wrong.
    """
    sys.path.insert(0, str(RECIPES))
    try:
        import sft
    finally:
        sys.path.remove(str(RECIPES))
    from oneloop import config as config_module

    flags = ["--config", str(path), "--output_dir", str(output_dir), *overrides]
    return sft, config_module.parse(sft.SFTConfig, flags)


def num_rows(module, config) -> int:
    """Rows of an epoch of the recipe, prepared as it does that. Raises ValueError."""
    from oneloop import models
    from oneloop.data import prepare

    train_rows, _ = prepare.load(config, None, models.load_tokenizer(config), module.encode)
    return len(train_rows.order)


def progress(config, rows: int, step: int) -> dict[str, int]:
    """Where a run stands after `step` steps that each used `global_batch_size` rows. Raises ValueError."""
    from oneloop import schedule

    per_epoch = schedule.steps_per_epoch(rows, config.global_batch_size)
    total_steps = schedule.total_steps(config.max_steps, config.num_train_epochs, per_epoch)
    if step >= total_steps:
        raise Foreign(
            f"the checkpoint is of step {step}, and the recipe ends at step {total_steps}: raise max_steps or "
            "num_train_epochs, or give the right step with --step."
        )
    return {
        "step": step,
        "epoch": step // per_epoch,
        "position": step % per_epoch * config.global_batch_size,
        "total_steps": total_steps,
    }
