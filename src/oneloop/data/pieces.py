"""Makes a row fit into `max_length`: cut off, left out, or cut into pieces of which none is lost."""

from typing import Any

from oneloop.data.files import BadRow

IGNORE_INDEX = -100
TRUNCATIONS = ("truncate", "drop", "split")


def fit(row: dict[str, Any], max_length: int, truncation: str) -> list[dict[str, Any]]:
    """Return the rows of at most `max_length` tokens that become of one.

    row: `input_ids` and `labels`, equally long lists or int arrays (T,). `truncate` keeps the beginning; `num_cut` is
    how many tokens it cuts off. `split` cuts into consecutive pieces; the first token of a piece that continues has no
    label, since it is predicted from nothing. Pieces without a target are left out: then the first of the others has
    `num_left_out` and `tokens_left_out`, the pieces and their tokens.

    Raises BadRow("no_target") for a row without a target, "too_long" under `drop`, and "no_target_left" where no piece
    that is kept has one.
    """
    if truncation not in TRUNCATIONS:
        raise ValueError(f"truncation must be one of {', '.join(TRUNCATIONS)}, not {truncation!r}")
    refuse_without_target(row)
    input_ids, labels = row["input_ids"], row["labels"]
    length = len(input_ids)
    if length <= max_length:
        return [row]
    if truncation == "drop":
        raise BadRow("too_long", f"{length} tokens are over max_length {max_length}, and truncation is 'drop'")
    if truncation == "truncate":
        found = [
            row | {"input_ids": input_ids[:max_length], "labels": labels[:max_length], "num_cut": length - max_length}
        ]
    else:
        borders = [*range(0, length, max_length), length]
        if length % max_length == 1 and max_length > 2:
            borders[-2] -= (
                1  # a piece of one token, mostly the one that ends the row, would have nothing to learn it from
            )
        found = []
        for start, end in zip(borders, borders[1:], strict=False):
            piece = labels[start:end].copy()
            if start:
                piece[0] = IGNORE_INDEX
            found.append(row | {"input_ids": input_ids[start:end], "labels": piece})
    kept = [piece for piece in found if _has_target(piece["labels"])]
    if not kept:
        raise BadRow("no_target_left", f"of {length} tokens, none within max_length {max_length} is a target")
    left_out = [len(piece["labels"]) for piece in found if not _has_target(piece["labels"])]
    if left_out:
        kept[0] = kept[0] | {"num_left_out": len(left_out), "tokens_left_out": sum(left_out)}
    return kept


def refuse_without_target(row: dict[str, Any]) -> None:
    """Raise BadRow("no_target") for a row from which nothing can be learnt."""
    if not _has_target(row["labels"]):
        raise BadRow("no_target", "no token of the row is a target")


def _has_target(labels: Any) -> bool:
    import numpy as np

    # The first token is predicted from nothing, so a label there is no target.
    return bool((np.asarray(labels[1:]) != IGNORE_INDEX).any())
