"""What a state says of the run that saved it, and whether the run at hand may go on from there."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import random
import re
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oneloop import config as config_module
from oneloop import redaction, sources
from oneloop.state.format import MANIFEST, Damaged

if TYPE_CHECKING:
    from oneloop.config import RecipeConfig
    from oneloop.state.format import State

_HARMLESS = {  # settings that never change what is trained, only what it costs, what is shown and what is kept
    *(field.name for field in dataclasses.fields(config_module.StateConfig)),
    *(field.name for field in dataclasses.fields(config_module.RunConfig)),
    *("per_device_batch_size", "gradient_checkpointing", "torch_compile", "attn_implementation", "trust_remote_code"),
    *("eval_dataset_name", "dataset_test_split", "eval_generations", "eval_match"),
    *("packing", "data_cache_dir", "dataset_num_proc", "show_examples"),
}
_OF_DATA = {  # settings whose effect shows in the tokenised rows, which are compared instead
    *("dataset_name", "datasets", "dataset_train_split", "test_split_size", "max_length", "truncation", "on_bad_row"),
    *("split_special_tokens", "chat_template"),
}
_OF_MODEL = {"model_name_or_path", "model_revision"}  # compared by what was loaded
_OF_LENGTH = {"max_steps", "num_train_epochs"}  # compared by the number of steps they make


# --- what is recorded -------------------------------------------------------------------------------------------------


def of_run(config: RecipeConfig, topology) -> dict[str, Any]:
    """The entries of a manifest that stay the same during a run."""
    loaded = sources.record(config)
    return redaction.redact_value(
        {
            "config": config_module.to_dict(config),
            "topology": dataclasses.asdict(topology),
            "optimizer": {"name": config.optim},
            "model": {"model": loaded["model"], "adapter": loaded["adapter"]},
            "versions": _versions() | {"recipe file": _recipe_sha256()},
            "git_commit": _git_commit(_recipe_path().parent),
        }
    )


def now() -> str:
    """The time as manifests give it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {}
    for name in ["oneloop", *_required_packages()]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _recipe_path() -> Path:
    """The file that this process runs."""
    return Path(getattr(sys.modules.get("__main__"), "__file__", None) or "recipe").resolve()


def _recipe_sha256() -> str:
    try:
        return hashlib.sha256(_recipe_path().read_bytes()).hexdigest()[:12]
    except OSError:
        return "unknown"


def _required_packages() -> list[str]:
    try:
        requirements = metadata.requires("oneloop") or []
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        requirements = ["torch", "accelerate", "transformers"]
    return sorted({re.match(r"[\w.-]+", line).group(0) for line in requirements if "extra ==" not in line})


def _git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder` or above it; read from git's files, as git itself may run hooks."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if not git.exists():
            continue
        try:
            if git.is_file():  # a worktree or submodule: "gitdir: PATH"
                git = parent / git.read_text().partition(":")[2].strip()
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            reference = head.removeprefix("ref: ")
            common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
            if (common / reference).exists():
                return (common / reference).read_text().strip()
            packed = (common / "packed-refs").read_text()
            match = re.search(rf"^([0-9a-f]{{40,64}}) {re.escape(reference)}$", packed, re.MULTILINE)
            return match.group(1) if match else None
        except OSError:
            return None
    return None


def random_states(device: torch.device) -> dict[str, Any]:
    """This rank's random states as JSON: torch's on CPU and device, Python's and numpy's."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    states = {
        "cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "python": [version, base64.b64encode(np.array(numbers, np.uint64).tobytes()).decode(), gauss],
        "numpy": [kind, base64.b64encode(keys.astype(np.uint32).tobytes()).decode(), *rest],
    }
    if device.type != "cpu":
        state = torch.get_device_module(device).get_rng_state()
        states[device.type] = base64.b64encode(state.cpu().numpy().tobytes()).decode()
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_states` took; a device of another kind than then keeps its seed. Raises KeyError,
    ValueError for what is incomplete."""

    def decoded(text: str, dtype) -> np.ndarray:
        return np.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype)

    torch.set_rng_state(torch.from_numpy(decoded(states["cpu"], np.uint8)))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(int(number) for number in decoded(numbers, np.uint64)), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, decoded(keys, np.uint32), *rest))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(torch.from_numpy(decoded(states[device.type], np.uint8)))


# --- what may differ --------------------------------------------------------------------------------------------------


def check_settings(state: State, config: RecipeConfig, precision: str) -> list[str]:
    """Compare the settings of the run at hand with the saved ones, before anything of it is loaded.

    precision: what matrix products are computed in, which belongs to the Accelerate file. Returns the changes that
    `allow_changes` allows, as sentences. Raises ValueError naming every other one that alters the training.
    """
    saved = state.manifest["config"]
    current = redaction.redact_value(config_module.to_dict(config))
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    defaults |= {
        f.name: f.default_factory()
        for f in dataclasses.fields(config)
        if f.default_factory is not dataclasses.MISSING
    }  # fmt: skip
    judged = _HARMLESS | _OF_DATA | _OF_MODEL | _OF_LENGTH
    changes = {}
    for name in sorted((saved.keys() | current.keys()) - judged):
        old, new = saved.get(name, defaults.get(name)), current.get(name)
        if isinstance(old, list) and isinstance(new, list) and name.startswith("lora_"):  # names, in any order
            old, new = sorted(old), sorted(new)
        if old != new and not (name not in current and not old):
            changes[name] = f"{name} was {old} and is {new}"
    old = (state.manifest["topology"] or {}).get("precision", precision)
    if old != precision:
        changes["mixed_precision"] = f"mixed_precision was {old} and is {precision} (Accelerate file)"
    problem = _other_model(state, config)
    if problem:
        changes["model_name_or_path"] = problem
    return _allowed(state, config, changes)


def check_content(state: State, config: RecipeConfig, data_sha256: str, num_rows: int, total_steps: int) -> list[str]:
    """Compare the rows and the length of the run with the saved ones. Returns and raises as `check_settings` does."""
    changes = {}
    data = state.manifest["data"]
    if data is not None and data["sha256"] != data_sha256:
        saved, current = state.manifest["config"], redaction.redact_value(config_module.to_dict(config))
        named = [f"{name} was {saved.get(name)} and is {current[name]}" for name in sorted(_OF_DATA) if saved.get(name) != current[name]]  # fmt: skip # noqa: E501
        why = "; ".join(named) or "the file, the tokenizer, its template or the shares of the sources have changed"
        if saved.get("streaming", False) != current["streaming"]:
            why = "they come from a stream at one time and are prepared at the other, which gives another order"
        elif not current["streaming"]:
            why = f"{data['num_rows']} then, {num_rows} now; {why}"
        changes["dataset_name"] = f"the training rows are other ones ({why})"
    saved_steps = state.manifest["progress"]["total_steps"]
    if saved_steps != total_steps:
        changes["max_steps"] = (
            f"the run had {saved_steps} steps and has {total_steps} (max_steps, num_train_epochs, or another number of "
            "rows); from here on the learning rate is that of the new length"
        )
    return _allowed(state, config, changes)


def _other_model(state: State, config: RecipeConfig) -> str:
    recorded = state.manifest["model"]
    if recorded is None:
        return ""
    loaded = redaction.redact_value(sources.record(config))
    for part in ("model", "adapter"):
        old, new = recorded[part] or {}, loaded[part] or {}
        for key in ("sha256", "commit"):
            if old.get(key) != new.get(key):
                hint = f"; --model_revision {old['commit']} names it" if old.get("commit") else ""
                return (
                    f"the {part} that training started from is another one: {old.get('name')} "
                    f"({key} {str(old.get(key))[:12]}) then, {new.get('name')} ({str(new.get(key))[:12]}) now{hint}"
                )
    return ""


def _allowed(state: State, config: RecipeConfig, changes: dict[str, str]) -> list[str]:
    allowed = set(config.allow_changes or ())
    if allowed & _OF_LENGTH:
        allowed |= _OF_LENGTH
    if allowed & _OF_DATA:
        allowed |= _OF_DATA
    if allowed & _OF_MODEL:
        allowed |= _OF_MODEL
    refused = [name for name in changes if name not in allowed]
    if refused:
        raise ValueError(
            f"resume: {state.folder} was saved by a run with other settings:\n  "
            + "\n  ".join(changes[name] for name in refused)
            + "\nTake the old ones to continue that run; or --allow_changes "
            + " ".join(refused)
            + " to continue it with these; or --resume none to begin anew."
        )
    return list(changes.values())


def check_complete(state: State) -> None:
    """Raises Damaged for a state that lacks something of the run which the format does not ask for; an import from
    another tool may not know some of it."""
    manifest = state.manifest
    where = state.folder / MANIFEST
    if manifest.get("imported_from"):
        return
    empty = [name for name in ("data", "model", "meter", "skipped", "config", "topology") if not manifest[name]]
    if empty:
        raise Damaged(f"{where}: {', '.join(empty)} is empty")
    if len(manifest["ranks"]) != manifest["world_size"]:
        raise Damaged(f"{where}: ranks has {len(manifest['ranks'])} entries for {manifest['world_size']} ranks")
    for rank, entry in enumerate(manifest["ranks"]):
        missing = {"random", "meter"} - entry.keys()
        missing |= {f"random.{name}" for name in {"cpu", "python", "numpy"} - entry.get("random", {}).keys()}
        if missing:
            raise Damaged(f"{where}: ranks, entry {rank}, lacks {', '.join(sorted(missing))}")


def version_changes(state: State) -> list[str]:
    """Packages and the recipe's file where they are others than when the state was saved, as `name old -> new`."""
    current = _versions() | {"recipe file": _recipe_sha256()}
    return [
        f"{name} {old} -> {current.get(name)}"
        for name, old in (state.manifest["versions"] or {}).items()
        if current.get(name) != old
    ]
