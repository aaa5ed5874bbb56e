"""What generation needs of a row: the prompt up to where the last reply begins, and that reply to compare with."""

from oneloop.data import chat
from oneloop.data.rows import BadRow


def prompt_and_reply(tokenizer, example: dict) -> dict:
    """`prompt_ids` (T,) and `reply` of a normalised row.

    Empty for a row that has no prompt before its last reply, does not end with one, or whose beginning alone the chat
    template refuses: such a row is trained on or evaluated all the same, but there is no answer to ask for.
    """
    if "messages" not in example:
        return {"prompt_ids": tokenizer(example["prompt"])["input_ids"], "reply": example["completion"]}
    *before, last = example["messages"]
    if not before or last["role"] != "assistant" or not last.get("content"):
        return {}
    try:
        text = chat.render(tokenizer, before, example.get("tools"), add_generation_prompt=True)
    except BadRow:
        return {}
    return {"prompt_ids": tokenizer(text, add_special_tokens=False)["input_ids"], "reply": last["content"]}
