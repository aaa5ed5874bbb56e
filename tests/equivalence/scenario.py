"""Run inside the ranks of one launch: trains every case of a JSON list through the real recipe, one after the other.

Importing the stack costs more than a tiny training run, so one launch of a shipped config serves many cases. A case
that fails is reported with its traceback and ends the launch: ranks may no longer be in step after it.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load_recipe(path: Path):
    """Import a recipe by its path: recipes are scripts, not a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def poison(recipe, step: int, rank: int, what: str) -> None:
    """Spoil the last micro-batch of one training step (counted from 0, two micro-batches each) on one rank.

    what: `loss` makes it infinite but leaves the gradient as it is; `gradient` the other way round.
    """
    healthy = recipe.compute_loss_sum
    seen = []

    def compute_loss_sum(model, batch):
        loss_sum, metrics = healthy(model, batch)
        if loss_sum.requires_grad:
            seen.append(None)
            if len(seen) == 2 * (step + 1) and int(os.environ.get("RANK", 0)) == rank:
                if what == "loss":
                    loss_sum = loss_sum + float("inf")
                else:
                    loss_sum.register_hook(lambda gradient: gradient * float("nan"))
        return loss_sum, metrics

    recipe.compute_loss_sum = compute_loss_sum


def main(cases_path: str) -> None:
    for case in json.loads(Path(cases_path).read_text()):
        # What `accelerate launch --mixed_precision` sets; the YAML's value is the launcher's own.
        os.environ["ACCELERATE_MIXED_PRECISION"] = case["mixed_precision"]
        recipe = load_recipe(ROOT / "recipes" / f"{case['recipe']}.py")
        if "poison" in case:
            poison(recipe, **case["poison"])
        config_class = next(c for name, c in vars(recipe).items() if name.lower() == f"{case['recipe']}config")
        try:
            recipe.main(config_class(**case["config"]))
        except BaseException:
            print(f"case {case['name']} failed", traceback.format_exc(), sep="\n", flush=True)
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
