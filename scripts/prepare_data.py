"""Prepare the data of a run before it starts: check, tokenise and keep them, once for all runs that need the same.

    python scripts/prepare_data.py recipes/sft.py --config recipes/configs/sft/demo.yaml
    python scripts/prepare_data.py recipes/sft.py --config Y.yaml --dataset_num_proc 32

Takes the recipe and its flags, says what became of the rows, and draws their lengths. A recipe does the same at its
start when it has to; this needs no GPU, and leaves none waiting. Exit code 2: rows or settings that cannot be used.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path


def recipe_module(path: Path):
    """Import a recipe by its path. Raises ValueError for what is none."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: give a recipe first, such as recipes/sft.py, then its flags")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise ValueError(f"{path} is no Python file: give a recipe first, such as recipes/sft.py, then its flags")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def config_class(module) -> type:
    """The recipe's own config class. Raises ValueError for a file that has none, or no `encode`."""
    from oneloop.config import RecipeConfig

    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, RecipeConfig) and value.__module__ == module.__name__
    ]
    if len(found) != 1 or not hasattr(module, "encode"):
        raise ValueError(f"{module.__file__} is no recipe: it has no config class of its own, or no `encode`")
    return found[0]


def main(arguments: list[str]) -> int:
    """Prepare; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        module = recipe_module(Path(arguments[0]))
        from oneloop import config

        settings = config.parse(config_class(module), arguments[1:])
        prepare(module, settings)
    except ValueError as error:
        if os.environ.get("ONELOOP_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    return 0


def prepare(module, settings) -> None:
    """Prepare the training and evaluation rows of a config, and draw the lengths of the first."""
    from oneloop import models, sources
    from oneloop.data import prepare, rowsets, show

    sources.check(settings)
    began = time.perf_counter()
    train_rows, _ = prepare.load(settings, None, models.load_tokenizer(settings), module.encode)
    seconds = time.perf_counter() - began
    for part in train_rows.parts:
        assert isinstance(part, rowsets.Prepared)
        print(f"prepared: {part.entry.folder}")
    picture = prepare.cache_dir(settings) / f"{part.entry.folder.name}.png"
    print(f"lengths:  {show.histogram(train_rows, settings.max_length, picture)}")
    print(f"took:     {seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
