"""Rewards that can be checked: what a text says, compared with what it should say."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def final_number(text: str) -> Decimal | None:
    """The number a text ends up with: the first one behind the last `####`, where there is one (as in GSM8K, Cobbe et
    al., arXiv 2110.14168), else the last of all; None without a number. Commas between digits and a currency sign do
    not count."""
    _, marked, behind = text.rpartition("####")
    found = _NUMBER.findall(behind)
    if not found:
        return None
    chosen = found[0] if marked else found[-1]
    return Decimal(re.sub(r"[,$\s]", "", chosen))
