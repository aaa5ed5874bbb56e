"""What a model or a data set may be, checked before anything of it is loaded, and what exactly was loaded.

A model is data here: safetensors and JSON. Files that come with it may ask for more (Python code, pickles, compute
kernels from the hub), and are refused by name unless the command line gives `--trust_remote_code`. The libraries have
guards of their own; these stand in front of them, because theirs have failed before (CVE-2026-4372: a key of
config.json downloaded and ran code), and because an error of ours can name file, key and remedy.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oneloop import config as config_module
from oneloop import fingerprint, mixture

if TYPE_CHECKING:
    from oneloop.config import RecipeConfig

RECORD_FILE = "sources.json"

_TRUST = "--trust_remote_code on the command line"
_CHECKED = ("*config*.json", "*.index.json")  # what steers a loader; tokenizer.json and vocabularies do not
_INTERNAL_KEYS = ("_attn_implementation_internal", "_experts_implementation_internal")
_KERNEL_KEYS = ("use_kernels", "kernel_config")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".ot", ".onnx")
_PICKLED_DATA = (".pkl", ".pickle", ".joblib", ".dill", ".pt", ".pth", ".npy", ".npz")


# --- what a model is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BaseModel:
    """Where the weights under an adapter, or the whole model, come from."""

    name: str
    revision: str
    adapter: str | None
    """Folder of an adapter whose training continues."""


@dataclass(frozen=True)
class Found:
    """A model, tokenizer or adapter whose files have been looked at."""

    location: str
    """What a loader is given: a folder, or a hub id."""
    revision: str
    """The commit of a hub id, so that all a run loads is of one state; without meaning for a folder."""
    folder: Path
    """Where the files lie: the folder, or the hub's snapshot in the cache."""


def base_model_of(config: RecipeConfig) -> BaseModel:
    """What `model_name_or_path` stands for: a model, or an adapter folder, which names its base and its revision.

    Raises ValueError for an adapter folder that is damaged or does not name its base model.
    """
    if not config_module.is_adapter_folder(config.model_name_or_path):
        return BaseModel(config.model_name_or_path, config.model_revision or "main", None)
    saved = config_module.adapter_settings(config.model_name_or_path)
    revision = config.model_revision or saved.get("revision") or "main"
    return BaseModel(saved["base_model_name_or_path"], revision, config.model_name_or_path)


def check(config: RecipeConfig) -> None:
    """Look at everything a run is about to load of its model, before hours are spent on its data.

    Hub names are resolved anew, once for the whole run. Raises ValueError naming file, key, value and remedy.
    """
    _snapshots.clear()
    _dataset_commits.clear()
    forbid_hub_kernels(config.trust_remote_code)
    attention = config.attn_implementation
    if attention and "/" in attention and not config.trust_remote_code:
        raise ValueError(
            f"attn_implementation is {attention}: a kernel of the hub is downloaded code. Take sdpa or an installed "
            f"package (flash_attention_2), or read the code and give {_TRUST}."
        )
    base = base_model_of(config)
    if base.adapter is not None:
        find_adapter(base.adapter, config.trust_remote_code)
    find_model(base, config.trust_remote_code)


def find_model(base: BaseModel, trust_remote_code: bool) -> Found:
    """Resolve the base model to a folder or one commit of the hub, and check the files that steer its loading.

    Nothing is unpickled or imported. Called right before each loading, so that a folder is looked at in the state that
    is loaded. Raises ValueError naming file, key, value and remedy.
    """
    name, path = base.name, Path(base.name).expanduser()
    if _exists(path):
        if not path.is_dir():
            raise ValueError(
                f"model_name_or_path: {name!r} is a file: name the folder it lies in"
                + (", converted to safetensors: gguf is no input." if path.suffix.lower() == ".gguf" else ".")
            )
        found, names = Found(str(path), base.revision, path), {file.name for file in path.iterdir()}
        remedy = "merge it (merge_adapter: true) and name the merged folder"
    elif name.startswith(("/", ".", "~")):
        raise ValueError(f"model_name_or_path: there is no folder {name!r}.")
    else:
        folder, names = _hub_snapshot(name, base.revision)
        found = Found(name, folder.name, folder)
        remedy = f"download it (hf download {name} --local-dir FOLDER) and name the folder"
    if "adapter_config.json" in names:
        raise ValueError(f"model_name_or_path: the model {name!r} is itself an adapter: {remedy}.")
    _check_weights(name, names, trust_remote_code)
    _check_indexes(found.folder)
    if not trust_remote_code:
        _check_settings(found.folder)
    return found


def find_adapter(folder: str, trust_remote_code: bool) -> Found:
    """Check an adapter folder: that it is LoRA, asks for no code, and has safetensors. Raises ValueError."""
    path = Path(folder).expanduser()
    saved = config_module.adapter_settings(folder)
    place = f"model_name_or_path: {path / 'adapter_config.json'}"
    if str(saved.get("peft_type", "LORA")).upper() != "LORA":
        raise ValueError(f"{place} has peft_type = {_short(saved['peft_type'])}: only LORA adapters can be continued.")
    if not trust_remote_code:
        if saved.get("megatron_config"):
            raise ValueError(
                f"{place} has megatron_config, with which peft imports the module that megatron_core names: "
                f"{_short(saved.get('megatron_core'))}. Delete the key, or give {_TRUST}."
            )
        if (path / "adapter_model.bin").is_file() and not (path / "adapter_model.safetensors").is_file():
            raise ValueError(
                f"model_name_or_path: {folder!r} has its weights only as adapter_model.bin: such files can run code "
                "when they are read. Convert it where that does no harm (peft: from_pretrained, then "
                f"save_pretrained), or give {_TRUST}."
            )
        _check_settings(path)
    return Found(str(path), "main", path)


def find_tokenizer(base: BaseModel, trust_remote_code: bool) -> Found:
    """The checked place of the tokenizer: the adapter's folder where that has one, else the base model."""
    if base.adapter is not None and _has_tokenizer(base.adapter):
        return find_adapter(base.adapter, trust_remote_code)
    return find_model(base, trust_remote_code)


def _has_tokenizer(adapter: str) -> bool:
    return (Path(adapter).expanduser() / "tokenizer_config.json").is_file()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name that is too long
        raise ValueError(f"model_name_or_path: {str(path)[:200]!r} cannot be read: {error.strerror}") from error


# --- what its files may say -------------------------------------------------------------------------------------------


def _check_weights(name: str, names: Iterable[str], trust_remote_code: bool) -> None:
    """`names`: the files at the top of the folder. What lies beside safetensors is never opened."""
    names = sorted(names)
    if any(file.endswith(".safetensors") for file in names):
        return
    if found := next((file for file in names if file.endswith(".gguf")), None):
        raise ValueError(
            f"model_name_or_path: {name!r} has {found} and no safetensors: gguf is no input, as its weights are "
            "quantised. Name the model it was made from, or de-quantise it into a safetensors folder first."
        )
    loadable = [file for file in names if re.fullmatch(r"pytorch_model.*\.bin(\.index\.json)?", file)]
    if loadable and trust_remote_code:
        return
    if loadable:
        raise ValueError(
            f"model_name_or_path: {name!r} has its weights only as {loadable[0]}: such files can run code when they "
            "are read. Take a revision with safetensors, or convert it where that does no harm (transformers: "
            f"from_pretrained, then save_pretrained), or give {_TRUST}."
        )
    if others := [file for file in names if file.lower().endswith(_OTHER_WEIGHTS)]:
        raise ValueError(
            f"model_name_or_path: {name!r} has its weights only as {others[0]}, which is not read here. Take a "
            "revision with safetensors, or convert it where that does no harm."
        )


def _check_indexes(folder: Path) -> None:
    """A shard is a plain name beside its index: a loader joins it to the folder and opens what comes out."""
    for path in _files(folder, "*.index.json"):
        settings = _read(path)
        shards = settings.get("weight_map") if isinstance(settings, dict) else None
        ending = ".safetensors" if path.name.endswith(".safetensors.index.json") else ""
        for shard in shards.values() if isinstance(shards, dict) else ():
            if not isinstance(shard, str) or re.search(r"[/\\]|^\.\.?$", shard) or not shard.endswith(ending):
                raise ValueError(
                    f"model_name_or_path: {path} has weight_map with {_short(shard)}: expected are names of "
                    f"{ending or 'files'} beside it. Repair or re-download the model."
                )


def _check_settings(folder: Path) -> None:
    for path in _files(folder, "*config*.json"):
        for key, value in _items(_read(path)):
            reason = _objection(key, value)
            if reason:
                raise ValueError(
                    f"model_name_or_path: {path} has {key} = {_short(value)}: {reason}. Delete the key from a local "
                    f"copy, if the model works without; or read what it names, and give {_TRUST}."
                )


def _objection(key: str, value: Any) -> str:
    """What speaks against a key of a config file, at any depth of it; empty if nothing does."""
    if not value:
        return ""
    if key == "auto_map":
        return "Python code that comes with the model"
    if key in _INTERNAL_KEYS:
        return "a name that is only set inside transformers; from a file it has made it run code of the hub"
    texts = [text for _, text in _items({key: value}) if isinstance(text, str)]
    if key in _KERNEL_KEYS or (re.search("implementation|kernel", key) and any("/" in text for text in texts)):
        return "a kernel of the hub, which is downloaded code"
    if key == "transformers_weights" and not str(value).endswith((".safetensors", ".safetensors.index.json")):
        return "weights that are no safetensors, and may run code when they are read"
    if key == "configuration_files" and not all(re.fullmatch(r"config\.[\w.-]+\.json", text) for text in texts):
        return "config files of names that are not checked"
    return ""


def _files(folder: Path, pattern: str) -> list[Path]:
    # Names are compared in lower case: a file system may open Config.json for config.json.
    ending = re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
    return sorted(path for path in folder.iterdir() if ending.fullmatch(path.name.lower())) if folder.is_dir() else []


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the loader reads it with the same parser, and says what is wrong


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Every (key, value) below `value`, at any depth; what stands in a list comes under the key of the list."""
    rest = [("", value)]
    while rest:
        key, value = rest.pop()
        if key:
            yield key, value
        if isinstance(value, dict):
            rest += [(str(inner), item) for inner, item in value.items()]
        elif isinstance(value, list):
            rest += [(key, item) for item in value]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def forbid_hub_kernels(trust_remote_code: bool) -> None:
    """Make the package `kernels`, if installed, unimportable: it downloads compiled code from the hub and runs it.

    More than a config asks for it: bitsandbytes tries it when imported on some CPUs (0.50, backends/cpu/ops.py), and
    transformers does for quantised checkpoints, some model types, and `flash_attention_2` without its package (5.24,
    integrations/hub_kernels.py). None of them has a switch for all; an import that fails is a case all of them handle.

    Raises ValueError when the package is in use already.
    """
    if trust_remote_code:
        if sys.modules.get("kernels", sys) is None:
            del sys.modules["kernels"]
    elif hasattr(sys.modules.get("kernels"), "get_kernel"):
        raise ValueError(
            "trust_remote_code is false, but this process has imported the package kernels, which runs code of the "
            f"hub: start the run in a process of its own, or give {_TRUST}."
        )
    elif "kernels" not in sys.modules:
        spec = importlib.util.find_spec("kernels")
        # Not a module of the user's own that happens to have this name.
        if spec is not None and spec.origin and "get_kernel" in Path(spec.origin).read_text(encoding="utf-8"):
            sys.modules["kernels"] = None  # what Python itself takes for "cannot be imported"


def refuse_pickled_data(paths: Iterable[Path], field: str) -> None:
    """Refuse data files that can run code when they are read. Raises ValueError naming the first one."""
    for path in sorted(paths):
        suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() in _PICKLED_DATA]
        if suffixes:
            raise ValueError(
                f"{field} {str(path)!r}: a {suffixes[-1]} file can run code when it is read, and is no input. Write "
                "the rows as .jsonl or .parquet where that does no harm."
            )


# --- the hub ----------------------------------------------------------------------------------------------------------


# What this run has looked up, so that a branch that moves meanwhile changes nothing, and what `record` writes down.
_snapshots: dict[tuple[str, str], tuple[Path, frozenset[str]]] = {}
_dataset_commits: dict[tuple[str, str | None], str | None] = {}


def _hub_snapshot(name: str, revision: str) -> tuple[Path, frozenset[str]]:
    """The cache's folder of a model at the commit that `revision` is now, its config files downloaded, and the names
    of all its files. Without a network: the newest commit in the cache, and what is cached of it."""
    if (name, revision) in _snapshots:
        return _snapshots[name, revision]
    from huggingface_hub import HfApi, snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_CHECKED), ignore_patterns="*/*"))
    except Exception as error:  # unknown, gated, unreachable, not a valid id: each has a class of its own
        raise ValueError(
            f"model_name_or_path: {name!r} (revision {revision}) is no folder here and cannot be read from the hub: "
            f"{type(error).__name__}: {error}"
        ) from error
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    try:
        names |= {file for file in HfApi().list_repo_files(name, revision=folder.name) if "/" not in file}
    except Exception:
        pass  # offline: what the cache has is all that can be loaded
    _snapshots[name, revision] = folder, frozenset(names)
    return _snapshots[name, revision]


def dataset_commit(name: str, revision: str | None = None) -> str | None:
    """The commit that a branch or tag of a hub data set is at now; the revision itself where it cannot be told, as for
    a copy made by `datasets` that is read offline."""
    from huggingface_hub import snapshot_download

    if (name, revision) not in _dataset_commits:
        try:
            options = {"revision": revision, "repo_type": "dataset", "allow_patterns": "README.md"}
            _dataset_commits[name, revision] = Path(snapshot_download(name, **options)).name
        except Exception:  # the loader of the rows says what is wrong, if anything is
            _dataset_commits[name, revision] = revision
    return _dataset_commits[name, revision]


# --- what was loaded --------------------------------------------------------------------------------------------------


def record(config: RecipeConfig) -> dict[str, Any]:
    """What exactly this run loaded, for its record: commits of what came from the hub, fingerprints of local files.

    Asks nobody anything anew, and states a file that can no longer be read: a record is no reason to end a run.
    """
    base = base_model_of(config)
    model = _model_record(base)
    adapter = {"name": base.adapter, **_content(base.adapter, of_model=True)} if base.adapter else None
    template = config.chat_template
    train = [_data_record(source) for source in mixture.for_training(config)]
    evaluated = [_data_record(source) for source in mixture.for_evaluation(config)]
    return {
        "trust_remote_code": config.trust_remote_code,
        "model": model,
        "adapter": adapter,
        "tokenizer": adapter if adapter and _has_tokenizer(base.adapter) else model,
        "chat_template": {"name": template, **_content(template)} if template else None,
        "dataset": train[0] if len(train) == 1 else train,
        "eval_dataset": evaluated[0] if evaluated else None,
    }


def _model_record(base: BaseModel) -> dict[str, Any]:
    if _exists(Path(base.name).expanduser()):
        return {"name": base.name, **_content(base.name, of_model=True)}
    folder, _ = _snapshots.get((base.name, base.revision), (None, None))
    return {"name": base.name, "asked": base.revision, "commit": folder.name if folder else None}


def _data_record(source: mixture.Source) -> dict[str, Any]:
    name = source.path
    if _exists(Path(name).expanduser()):
        return {"name": name, **_content(name)}
    if found := sorted(glob.glob(os.path.expanduser(name), recursive=True)):
        return {"name": name, "files": [{"name": path, **_content(path)} for path in found]}
    asked = {"asked": source.revision} if source.revision else {}
    return {"name": name, **asked, "commit": _dataset_commits.get((name, source.revision))}


def _content(name: str, of_model: bool = False) -> dict[str, Any]:
    try:
        path = Path(name).expanduser()
        return fingerprint.of_model(path) if of_model else fingerprint.of_data(path)
    except OSError as error:
        return {"unreadable": str(error)}
