"""The command line of scripts/merge_adapter.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from merge_adapter import measuring, merging

REPORT = "merge_report.json"


def run(arguments: argparse.Namespace) -> None:
    """Merge and measure as asked. Raises ValueError and OSError; nothing is left behind then."""
    from transformers import AutoTokenizer

    from oneloop import config as config_module
    from oneloop import models, sources
    from oneloop.state import plain

    plain.check_free(arguments.out)
    adapter = arguments.adapter.expanduser()
    if not config_module.is_adapter_folder(str(adapter)):
        raise ValueError(f"{adapter} is no adapter folder: it has no adapter_config.json")
    sources.forbid_hub_kernels(arguments.trust_remote_code)
    quantization = merging.known_quantization(adapter, arguments.quantization)
    chosen = merging.check_choice(arguments.base, quantization)
    defaults = {field.name: field.default for field in dataclasses.fields(config_module.RecipeConfig)}
    config = SimpleNamespace(**defaults)
    config.model_name_or_path, config.quantization = str(adapter), quantization
    config.trust_remote_code = arguments.trust_remote_code
    config.compute_dtype = merging.known_dtype(adapter)
    base = sources.base_model_of(config)
    if arguments.model_name_or_path:
        base = dataclasses.replace(base, name=arguments.model_name_or_path, revision="main")
    dtype = None if arguments.dtype == "auto" else models.DTYPES[arguments.dtype]
    rows = []
    if not arguments.no_report:  # before hours are spent: the file may be none
        tokenizer = models.from_source(AutoTokenizer, sources.find_tokenizer(base, config.trust_remote_code), config)
        rows = measuring.rows_of(tokenizer, arguments.eval_file, arguments.max_eval_tokens)
    with plain.new_folder(arguments.out) as folder:
        dtype, pieces = merging.merge(config, base, folder, chosen == "dequantized", dtype)
        report = {
            "adapter": str(adapter.resolve()),
            "base_model": base.name,
            "quantization": quantization,
            "merged_into": chosen,
            "dtype": str(dtype).removeprefix("torch."),
        }
        if not arguments.no_report:
            report |= _report(config, base, folder, chosen, dtype, rows)
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    into = f"base as {quantization} rounds it" if chosen == "dequantized" else "base of original weights"
    size = sum(piece.num_bytes for piece in pieces)
    if not arguments.no_report:
        measuring.show(report)
    print(f"merged: {arguments.out} ({into}: {base.name}; {dtype}, {len(pieces)} tensors, {size / 1e6:.1f} MB)")


def _report(config, base, folder: Path, chosen: str, dtype, rows: list[dict]) -> dict[str, Any]:
    merged, other = {chosen: folder}, folder.with_name(f"{folder.name}.other")
    try:
        if config.quantization:
            name = "16bit" if chosen == "dequantized" else "dequantized"
            shutil.rmtree(other, ignore_errors=True)
            other.mkdir()
            merging.merge(config, base, other, name == "dequantized", dtype)
            merged[name] = other
        return measuring.measure(config, base, merged, rows)
    finally:
        shutil.rmtree(other, ignore_errors=True)


def no_storage(value: str) -> str:
    """A number format of the merged model; those of quantised storage are refused with the reason."""
    known = ["auto", "fp32", "bf16", "fp16"]
    if value in known:
        return value
    raise argparse.ArgumentTypeError(
        f"{value!r} is none of {', '.join(known)}; never merged into 4-bit or 8-bit storage, which would round the "
        "result once more: quantise the merged model when it is loaded"
    )


def parse(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("adapter", type=Path, help="adapter folder, as a run's model/")
    parser.add_argument("out", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument("--base", choices=["16bit", "dequantized"], help="after training over a quantised base: which")
    parser.add_argument("--dtype", type=no_storage, default="auto", help="auto (the base model's), fp32, bf16 or fp16")
    parser.add_argument(
        "--quantization", choices=["none", "nf4", "int8"], help="what the base was trained in, if no record says it"
    )
    parser.add_argument("--eval_file", help="what to compare on: .txt, or rows as for training (.jsonl, ...)")
    parser.add_argument("--max_eval_tokens", type=int, default=2048, help="tokens to compare on at most (2048)")
    parser.add_argument("--no_report", action="store_true", help="merge only; loads no whole model")
    parser.add_argument("--model_name_or_path", help="the base model, if it is not where the adapter says")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    arguments = parser.parse_args(argv)
    if arguments.max_eval_tokens < 2:
        parser.error("--max_eval_tokens: give 2 or more")
    if arguments.no_report and arguments.eval_file:
        parser.error("--eval_file has no effect with --no_report")
    return arguments


def main(argv: list[str] | None = None, description: str | None = None) -> int:
    """Merge, and answer with an exit code and one message."""
    arguments = parse(argv, description)
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # between libraries; nothing of it can be changed here
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 2
    return 0
