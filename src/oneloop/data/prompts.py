"""What generation needs of a row: the prompt up to where the last reply begins, and that reply to compare with."""

from oneloop.data import rendering
from oneloop.data.files import BadRow

_NOTHING: dict = {"prompt_ids": [], "reply": ""}


def add(tokenizer, examples: list[dict], encoded: list) -> list:
    """Give all rows of each example its prompt and reply; encoded: what `encode.encode_batch` returned."""
    return [
        rows if isinstance(rows, BadRow) else [row | prompt_and_reply(tokenizer, example) for row in rows]
        for example, rows in zip(examples, encoded, strict=True)
    ]


def prompt_and_reply(tokenizer, example: dict) -> dict:
    """`prompt_ids` (T,) and `reply` of a normalised row.

    Both are empty for a text, for a row that has no prompt before its last reply, does not end with one, or whose
    beginning alone the chat template refuses: such a row is trained on or evaluated all the same, but there is no
    answer to ask for.
    """
    if "text" in example:
        return _NOTHING
    if "messages" not in example:
        return {"prompt_ids": tokenizer(example["prompt"])["input_ids"], "reply": example["completion"]}
    *before, last = example["messages"]
    if not before or last["role"] != "assistant" or not last.get("content"):
        return _NOTHING
    try:
        text = rendering.render(tokenizer, before, example.get("tools"), add_generation_prompt=True)
    except BadRow:
        return _NOTHING
    return {"prompt_ids": tokenizer(text, add_special_tokens=False)["input_ids"], "reply": last["content"]}
