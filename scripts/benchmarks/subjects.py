"""What is trained in the benchmarks: Llamas with random weights, a byte-level tokenizer and rows of equal length."""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def load_recipe(name: str):
    """Import recipes/<name>.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tokenizer():
    """One token a byte, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    built = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    built.chat_template = TEMPLATE
    return built


def llama(*, layers: int, hidden: int, vocabulary: int, heads: int = 4, intermediate: int | None = None, tie=True):
    """A Llama in fp32 whose weights are the same at every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(torch.float32)


def save(folder: Path, **shape) -> str:
    """Write model and tokenizer as a folder that transformers loads; returns its path."""
    llama(**shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, num_rows: int, num_characters: int) -> str:
    """Conversations whose reply has `num_characters` characters: all rows have equally many tokens."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(num_rows):
            reply = "".join(chr(97 + (number * 7 + i * i) % 26) for i in range(num_characters))
            turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": reply}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return str(path)
