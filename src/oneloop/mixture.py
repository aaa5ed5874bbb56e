"""Which sources a run reads, and in what shares: the `datasets` list of a config, or the plain flags for one."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place that rows come from."""

    path: str
    """File, folder, glob or hub id."""
    name: str | None = None
    """Configuration of a hub data set, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set."""
    split: str = "train"
    """Split, where the data set has splits."""
    weight: float | None = None
    """Share of an epoch's samples, relative to the other sources'; None for all: each row once."""
    columns: dict[str, str] | None = None
    """Our column names -> the file's, such as {"prompt": "question", "completion": "answer"}."""
    format: str | None = None
    """Form of the rows, a key of `data.rows.FORMATS`; None recognises it by the columns of each row."""
    field: str = "dataset_name"
    """How messages name this source."""


_KEYS = {field.name for field in dataclasses.fields(Source)} - {"field"}


def for_training(config) -> list[Source]:
    """The sources trained on. The config has been checked."""
    if config.datasets is None:
        return [Source(path=config.dataset_name, split=config.dataset_train_split)]
    return [
        Source(field=f"datasets[{number}]", **{"split": config.dataset_train_split} | entry)
        for number, entry in enumerate(config.datasets)
    ]


def for_evaluation(config) -> list[Source]:
    """The source evaluated, if it is one of its own; what `test_split_size` sets apart is part of the training data.

    It is read as the only source of `datasets` is (columns, format), and from the same configuration and revision where
    it is the same data set.
    """
    path = config.eval_dataset_name
    if not path:
        return []
    only = config.datasets[0] if config.datasets is not None and len(config.datasets) == 1 else {}
    keys = ("columns", "format", "name", "revision") if only.get("path") == path else ("columns", "format")
    taken = {key: only[key] for key in keys if key in only}
    return [Source(path=path, split=config.dataset_test_split, field="eval_dataset_name", **taken)]


def read(entries: list[dict] | None) -> list[dict] | None:
    """The `datasets` list as a config holds it; a file or flag gives numbers as text."""

    def number(value):
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value  # for `check` to refuse

    return entries and [
        entry | {"weight": number(entry["weight"])} if isinstance(entry, dict) and "weight" in entry else entry
        for entry in entries
    ]


def check(config) -> None:
    """Raises ValueError for a `datasets` list that cannot be meant, naming the entry."""
    if config.datasets is None:
        if not config.dataset_name:
            raise ValueError("dataset_name is empty: give a file, a folder, a glob or a hub id, or a `datasets` list")
        return
    if config.dataset_name:
        raise ValueError(
            f"dataset_name is {config.dataset_name!r} and `datasets` is given, too: only one can count, drop the other"
        )
    if not config.datasets:
        raise ValueError("datasets is []: list at least one `- path: ...`")
    for number, entry in enumerate(config.datasets):
        _check_entry(f"datasets[{number}]", entry)
    weighted = [entry.get("weight") is not None for entry in config.datasets]
    if any(weighted) and not all(weighted):
        raise ValueError(
            f"datasets[{weighted.index(False)}] has no weight, but others have: give all of them one (a share of the "
            "samples), or none (each row once)"
        )


def _check_entry(name: str, entry: dict) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is {entry!r}: give `path: ...` and, if needed, {', '.join(sorted(_KEYS - {'path'}))}")
    for key, value in entry.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), sorted(_KEYS), n=1)
            raise ValueError(
                f"{name} has an unknown key {key!r}"
                + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(_KEYS))}")
            )
        if key == "columns":
            if not isinstance(value, dict) or not all(isinstance(word, str) for pair in value.items() for word in pair):
                raise ValueError(f"{name}.columns is {value!r}: give `our_name: name in the file` pairs")
        elif key == "weight":
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(f"{name}.weight is {value!r}: give a number above 0, or leave the source out")
        elif not isinstance(value, str) or not value:
            raise ValueError(f"{name}.{key} is {value!r}: a text is expected")
    if "path" not in entry:
        raise ValueError(f"{name} has no path: give a file, a folder, a glob or a hub id")
