"""A byte-level tokenizer and a two-layer Llama, built in memory so that no test needs a network."""

from functools import lru_cache
from pathlib import Path

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKERS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIP_THINK = (
    "{% for message in messages %}{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] | trim %}"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a tiny model.<|im_end|>\n{% endif %}" + CHATML
)

CORPUS = [
    "<|im_start|>system\nAnswer in one word.\nuser\nWhat is the colour of the sky?\nassistant\nThe sky is blue.",
    "The harbour lamp is lit at dusk by the keeper, who climbs ninety steps and trims the wick.",
    "Think first. <think>maybe 3</think>Three. Sure? Yes. Name a colour. Teal. It is warmer.",
    "What is 1 plus 1? 2. What is 2 plus 2? 4. What is 8 plus 8? 16. 0 1 2 3 4 5 6 7 8 9 10.",
    "clause 0 of the agreement clause 1 of the agreement clause 2 of the agreement is signed by both sides",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n{'name': 'clock', 'arguments': {'zone': 'UTC'}}",
]


@lru_cache
def tokenizer(template: str | None = CHATML, bos: bool = False, eos: str = "<|im_end|>", pad: str | None = None):
    """Return a byte-level BPE tokenizer with ChatML tokens and `<s>`, `</s>`; `bos=True` puts `<s>` before plain text.

    The padding token is the end token unless named, as in most published chat models: the harder case for labels.
    One object per set of arguments is shared by the whole process, so a test that changes it must copy it first.
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(_trained())
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    built = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token=pad or eos)
    built.chat_template = template
    return built


@lru_cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    return backend.to_str()


def tiny_model(vocab_size: int, tie: bool = True, hidden_size: int = 64, intermediate_size: int = 128):
    """Return a two-layer fp32 `LlamaForCausalLM` without dropout whose weights are the same on every call."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tie,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # The caller's random state is left as it was: building a model must not move a test's own draws.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(torch.float32)


def save(folder: str | Path, template: str | None = CHATML, bos: bool = False, tie: bool = True, **sizes) -> str:
    """Write the tiny model and its tokenizer as a `save_pretrained` folder and return the folder's path."""
    text = tokenizer(template, bos)
    model = tiny_model(len(text), tie, **sizes)
    model.config.bos_token_id = text.bos_token_id
    model.config.eos_token_id = model.generation_config.eos_token_id = text.eos_token_id
    model.config.pad_token_id = model.generation_config.pad_token_id = text.pad_token_id
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    return str(folder)
