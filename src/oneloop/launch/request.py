"""What a launch asks for, read off the launcher's YAML and flags and off the environment it made of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from oneloop import process


@dataclass(frozen=True)
class Requested:
    """What the launch asked for."""

    strategy: str
    world_size: int
    offload_optimizer: bool
    offload_parameters: bool
    use_cpu: bool
    source: str
    """Where it was asked: the Accelerate YAML, or `environment`."""


def requested() -> Requested:
    """Read the request off the launcher's YAML and flags, and off the environment it made of them.

    Raises ValueError when the two disagree: then the launcher did not do what the file says.
    """
    env = os.environ
    world_size = int(env.get("WORLD_SIZE", 1))
    if env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        strategy = f"zero{_zero_stage()}"
    elif env.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        strategy = f"fsdp{env.get('FSDP_VERSION', '1')}"
        if strategy != "fsdp2":
            raise ValueError(
                f"fsdp_version: {env.get('FSDP_VERSION', '1')} is not supported: set fsdp_version: 2, or start from "
                "accelerate_configs/fsdp2.yaml."
            )
    else:
        strategy = "ddp" if "LOCAL_RANK" in env else "single"
    use_cpu = env.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1")
    source = "environment"
    launcher = process.launcher_arguments()
    if launcher is not None:
        path, wanted = launcher
        source = path or "accelerate launch's flags"
        use_cpu = use_cpu or bool(wanted.get("use_cpu"))
        _compare_with_launcher(source, wanted, strategy, world_size)
    return Requested(
        strategy=strategy,
        world_size=world_size,
        offload_optimizer=_offloads("OPTIMIZER") or env.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true",
        offload_parameters=_offloads("PARAM") or env.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true",
        use_cpu=use_cpu,
        source=source,
    )


def _compare_with_launcher(source: str, wanted: dict, strategy: str, world_size: int) -> None:
    kind = str(wanted.get("distributed_type", "")).upper()
    if int(wanted.get("num_processes") or world_size) != world_size:
        raise ValueError(
            f"{source} asks for {wanted['num_processes']} processes ({kind or 'no distributed_type'}), {world_size} "
            "was started. accelerate starts one process for MULTI_CPU and for NO; take accelerate_configs/cpu.yaml for "
            "data-parallel ranks on CPU, or pass --num_processes 1."
        )
    family = {"DEEPSPEED": "zero", "FSDP": "fsdp"}.get(kind)
    if family and not strategy.startswith(family):
        raise ValueError(
            f"{source} asks for distributed_type {kind}, but the launcher's flags made it {strategy!r}. Remove the "
            "flag that overrides it (--multi_gpu, --cpu, --use_deepspeed, --use_fsdp)."
        )


def _zero_stage() -> int:
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage not in ("0", "1", "2", "3"):
            raise ValueError(f"zero_stage: {stage} in the Accelerate configuration: give 0 to 3")
        return int(stage)
    return int(read_deepspeed_json(path).get("zero_optimization", {}).get("stage", 0))


def _offloads(what: str) -> bool:
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        return os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") != "none"
    section = read_deepspeed_json(path).get("zero_optimization", {}).get(f"offload_{what.lower()}") or {}
    return section.get("device", "none") != "none"


def read_deepspeed_json(path: str) -> dict:
    """The user's own DeepSpeed configuration. Raises ValueError, naming file and key, where its shape is wrong."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed_config_file: cannot read {path!r}: {error}") from error
    zero = content.get("zero_optimization", {}) if isinstance(content, dict) else {}
    inner = zero if isinstance(zero, dict) else {}
    sections = {"the file": content, "zero_optimization": zero}
    sections |= {key: content.get(key, {}) for key in ("bf16", "fp16") if isinstance(content, dict)}
    sections |= {key: inner.get(key) or {} for key in ("offload_optimizer", "offload_param")}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"deepspeed_config_file {path!r}: {key} is {section!r}, but must be a JSON object")
    if inner.get("stage", 0) not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed_config_file {path!r}: zero_optimization.stage is {inner['stage']!r}: give 0 to 3")
    return content
