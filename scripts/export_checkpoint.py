"""Write a training state as a folder that plain transformers or peft loads, without a GPU and without a launch.

    python scripts/export_checkpoint.py runs/demo/states/step-00000060 exported
    python scripts/export_checkpoint.py runs/demo exported --dtype bf16     # the newest good state of a run
    python scripts/export_checkpoint.py runs/demo exported --merge          # an adapter folded into its base model

The weights are those that the run would have exported at that step, bit for bit. They are read, converted and written
one tensor at a time, so a model of any size passes through a small machine. Every file of the state is verified first;
the folder has its name only once it is complete. `export.json` in it says where it came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oneloop.state.format import State

RECORD = "export.json"


def find(path: Path) -> State:
    """The state that `path` names, or the newest good one of the run there, said aloud; verified to the last byte.

    Raises ValueError where there is none; Damaged, a kind of it, where none is good.
    """
    import inspect_state

    from oneloop.state import plain
    from oneloop.state.format import Damaged

    candidates = inspect_state.candidates(path)
    for folder in candidates:
        try:
            state = plain.verified(folder)
            _check_form(state)
        except Damaged as error:
            if folder == candidates[-1]:
                raise
            print(f"warning: {error}; taking the one before", file=sys.stderr)
        else:
            print(f"state: {folder} (step {state.step}, {len(state.manifest['files'])} files verified)")
            return state
    raise AssertionError("there is at least one candidate")


def _check_form(state: State) -> None:
    """Refuse a manifest that is whole and yet not as the format has it. Raises Damaged."""
    import inspect_state

    from oneloop.state.format import MANIFEST, Damaged

    try:
        inspect_state.summary(state)
    except inspect_state.WRONG as error:
        raise Damaged(f"{state.folder / MANIFEST} is not as docs/state-format.md has it: {error!r}") from error


def recorded_config(state: State, model_name_or_path: str | None, trust_remote_code: bool) -> SimpleNamespace:
    """The fields of the run's config that say how its model is built. Not a `RecipeConfig`: its checks ask for data
    and folders that only training needs, and may have gone.

    Trust is never taken from a file that is passed around.
    """
    from oneloop import config as config_module
    from oneloop.sharding.chosen import DTYPES

    defaults = {field.name: field.default for field in dataclasses.fields(config_module.RecipeConfig)}
    config = SimpleNamespace(**defaults | state.manifest["config"])
    config.trust_remote_code, config.attn_implementation = trust_remote_code, None
    config.compute_dtype = DTYPES[(state.manifest["topology"] or {}).get("precision", "no")]
    if model_name_or_path:
        config.model_name_or_path, config.model_revision = model_name_or_path, None
    return config


def check_base(state: State, config: SimpleNamespace, is_named: bool) -> None:
    """Compare the base model with the state's record of it.

    Raises ValueError for one that has moved or changed since, unless it was named on the command line.
    """
    from oneloop import fingerprint, sources

    record = state.manifest["model"]
    record = record.get("model") or record
    remedy = "Name the model that it was trained from: --model_name_or_path FOLDER"
    try:
        base = sources.base_model_of(config)
    except ValueError as error:
        raise ValueError(f"{state.folder} was trained from {config.model_name_or_path!r}: {error} {remedy}") from error
    if record.get("commit"):
        if not is_named:
            config.model_revision = record["commit"]
        return
    folder = Path(base.name).expanduser()
    if not folder.is_dir():
        if is_named:
            return  # a hub id, or the loader says that there is no such folder
        raise ValueError(f"the base model of {state.folder}, {base.name!r}, is not there any more. {remedy}")
    if not record.get("sha256") or fingerprint.of_model(folder)["sha256"] == record["sha256"]:
        return
    if not is_named:
        raise ValueError(f"the base model of {state.folder}, {base.name!r}, has changed since it was saved. {remedy}")
    print(f"warning: {base.name} is not the base model that the state has on record; taken as asked", file=sys.stderr)


def export(arguments: argparse.Namespace) -> None:
    """Write what the command line asks for. Raises ValueError and OSError; nothing is left behind then."""
    from oneloop.state import plain

    plain.check_free(arguments.out)
    state = find(arguments.state)
    config = recorded_config(state, arguments.model_name_or_path, arguments.trust_remote_code)
    check_base(state, config, bool(arguments.model_name_or_path))
    if arguments.dtype:  # all comes out as if the run had been given this
        config.export_dtype = arguments.dtype
    with plain.new_folder(arguments.out) as folder:
        written = folder / "adapter" if arguments.merge else folder
        written.mkdir(exist_ok=True)
        what, dtype, pieces = plain.write_state(state, config, written)
        if arguments.merge:
            what, dtype, pieces = _merge(arguments, config, written, folder, what)
        record = {
            "what": what,
            "state": str(state.folder.resolve()),
            "step": state.step,
            "dtype": str(dtype).removeprefix("torch."),
            "base_model": state.manifest["model"],
            "quantization": config.quantization,
            "precision": (state.manifest["topology"] or {}).get("precision"),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    files = len(list(arguments.out.glob("*.safetensors")))
    size = sum(piece.num_bytes for piece in pieces)
    print(
        f"exported: {arguments.out} ({what} of step {state.step}, {dtype}, {len(pieces)} tensors in "
        f"{files} file{'s' * (files > 1)}, {size / 1e6:.1f} MB)"
    )


def _merge(arguments, config, adapter: Path, folder: Path, what: str):
    """Merge the adapter of a state, written to a folder of its own for the purpose, and remove that."""
    import shutil

    from merge_adapter import merging

    from oneloop import models, sources

    if what != "adapter":
        raise ValueError(f"--merge: {arguments.state} is no state of an adapter, but of a whole model. Leave it out.")
    base = merging.check_choice(arguments.base, config.quantization)
    dtype = None if config.export_dtype == "auto" else models.DTYPES[config.export_dtype]
    source = dataclasses.replace(sources.base_model_of(config), adapter=str(adapter))
    written = merging.merge(config, source, folder, base == "dequantized", dtype)
    shutil.rmtree(adapter)
    return f"model merged into its {base} base" if config.quantization else "merged model", *written


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("state", type=Path, help="a state, or the output_dir of a run: then its newest good state")
    parser.add_argument("out", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--dtype", choices=["auto", "fp32", "bf16", "fp16"], help="number format; left out: that of the run's config"
    )
    parser.add_argument("--merge", action="store_true", help="fold the adapter into its base model")
    parser.add_argument(
        "--base", choices=["16bit", "dequantized"], help="with --merge, after training over a quantised base: which one"
    )
    parser.add_argument("--model_name_or_path", help="the base model, or the adapter continued, if it has moved")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    arguments = parser.parse_args(argv)
    if arguments.base and not arguments.merge:
        parser.error("--base has no effect without --merge")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Export, and answer with an exit code and one message."""
    arguments = parse(argv)
    from transformers.utils import logging

    from oneloop.state.format import Damaged

    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # between libraries; nothing of it can be changed here
    try:
        export(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, Damaged | OSError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
