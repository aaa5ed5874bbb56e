"""The only place that builds an `Accelerator`: from the launcher's wishes to a prepared model, or to a clear refusal.

Whatever the launch asked for (number of processes, strategy, offload) must be what the run gets. Accelerate selects
FSDP and DeepSpeed only where it sees an accelerator; on a machine without one it would start independent one-process
trainings or plain data parallelism instead. `start` therefore brings the process group up itself on CPU, and `prepare`
compares the prepared objects with the request.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oneloop import process, schedule

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from oneloop import sharding
    from oneloop.config import RecipeConfig

OVERSUBSCRIBE = "ONELOOP_ALLOW_OVERSUBSCRIBE"
"""Environment variable: set to 1 to run more CPU ranks than the machine has cores."""


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


# --- what was asked for ----------------------------------------------------------------------------------------------


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
        return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))
    return int(_read_deepspeed_json(path).get("zero_optimization", {}).get("stage", 0))


def _offloads(what: str) -> bool:
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        return os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") != "none"
    section = _read_deepspeed_json(path).get("zero_optimization", {}).get(f"offload_{what.lower()}") or {}
    return section.get("device", "none") != "none"


def _read_deepspeed_json(path: str) -> dict:
    import json

    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed_config_file: cannot read {path!r}: {error}") from error


# --- the accelerator -------------------------------------------------------------------------------------------------


def start(config: RecipeConfig) -> Accelerator:
    """Bring up the process group and build the `Accelerator` that was asked for.

    Raises ValueError for a topology that this machine cannot give, a batch that does not divide, and contradictions
    between recipe flags and the Accelerate or DeepSpeed configuration.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        TorchDynamoPlugin,
        set_seed,
    )

    want = requested()
    accumulation_steps = schedule.accumulation_steps(
        config.global_batch_size, config.per_device_batch_size, want.world_size
    )
    on_cpu = want.use_cpu or not torch.accelerator.is_available()
    _check_devices(want, on_cpu)
    if AcceleratorState._shared_state:  # a second run in the same process, as in a notebook
        AcceleratorState._reset_state()
        GradientState._reset_state()
    # torch looks for `ninja` by name, even to load an operator that is built already; it lies beside this Python,
    # which need not be on the path when `.venv/bin/accelerate` is called without activating anything.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if on_cpu:
        _bring_up_cpu(want)
    plugins: dict[str, Any] = {}
    data_parallel = DistributedDataParallelKwargs(
        # Gradients live in the communication buckets instead of beside them: 4 bytes a parameter less.
        gradient_as_bucket_view=True
    )
    if config.reduce_dtype == "compute":
        _reduce_in_compute_dtype(want, data_parallel)
    if want.strategy.startswith("zero"):
        plugins["deepspeed_plugin"] = _deepspeed_plugin(config, want, accumulation_steps)
    else:
        _refuse_yaml_training_values(config, accumulation_steps)
    if want.strategy == "fsdp2":
        plugins["fsdp_plugin"] = _fsdp_plugin(config, on_cpu)
    if config.torch_compile:
        plugins["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    try:
        accelerator = Accelerator(
            # The default makes the optimizer step on every micro-batch of the last window of an epoch, which it can
            # only know for loaders of its own.
            gradient_accumulation_plugin=GradientAccumulationPlugin(accumulation_steps, sync_with_dataloader=False),
            kwargs_handlers=[data_parallel],
            **plugins,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"Accelerate cannot provide {want.strategy!r} ({want.source}): {error}") from error
    if accelerator.num_processes != want.world_size:
        raise ValueError(
            f"{want.world_size} processes were started, but they form a group of {accelerator.num_processes}."
        )
    set_seed(config.seed)
    return accelerator


def _check_devices(want: Requested, on_cpu: bool) -> None:
    import torch

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    devices = torch.accelerator.device_count()
    if not on_cpu and per_node > devices:
        raise ValueError(
            f"{want.source} asks for {per_node} processes on this machine, which has {devices} device(s). Pass "
            f"--num_processes {devices} to accelerate launch."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if on_cpu and per_node > cores and os.environ.get(OVERSUBSCRIBE) != "1":
        raise ValueError(
            f"{want.source} asks for {per_node} processes on this machine, which has no accelerator and {cores} CPU "
            f"core(s). Pass --num_processes {cores} to accelerate launch, or set {OVERSUBSCRIBE}=1 to share cores."
        )


def _bring_up_cpu(want: Requested) -> None:
    """Make Accelerate select the strategy that was asked for on a machine without accelerator, over gloo.

    accelerate 1.15 (`state.py`) looks for DeepSpeed and FSDP only behind a device backend. With the process group
    already up over gloo it takes DeepSpeed as asked; FSDP also wants to see a non-CPU kind of data parallelism first.
    Both exclude `ACCELERATE_USE_CPU`, which plain data parallelism needs. Can go when AcceleratorState selects the
    plugins independently of the device type.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if want.strategy in ("single", "ddp"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"{want.strategy!r} needs the ranks that `accelerate launch` starts; this process is alone.")
    PartialState(backend="gloo")
    PartialState._shared_state["device"] = torch.device("cpu")
    if want.strategy == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _reduce_in_compute_dtype(want: Requested, data_parallel) -> None:
    from accelerate.utils import DDPCommunicationHookType

    if want.strategy in ("single", "zero0"):
        raise ValueError(
            f"reduce_dtype: compute has no effect under {want.strategy!r}, which reduces in fp32. Remove it."
        )
    hooks = {"bf16": DDPCommunicationHookType.BF16, "fp16": DDPCommunicationHookType.FP16}
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if want.strategy == "ddp" and precision in hooks:
        data_parallel.comm_hook = hooks[precision]


def _refuse_yaml_training_values(config: RecipeConfig, accumulation_steps: int) -> None:
    from_yaml = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if from_yaml is not None and int(from_yaml) != accumulation_steps:
        raise ValueError(
            f"gradient_accumulation_steps: {from_yaml} in the Accelerate configuration, but global_batch_size "
            f"{config.global_batch_size} and per_device_batch_size {config.per_device_batch_size} make it "
            f"{accumulation_steps}. Remove it there: accumulation follows from the batch sizes."
        )


def _deepspeed_plugin(config: RecipeConfig, want: Requested, accumulation_steps: int):
    """DeepSpeed's configuration from the recipe's flags, laid under what the user's own JSON says."""
    from accelerate import DeepSpeedPlugin

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    json_path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    own = _read_deepspeed_json(json_path) if json_path != "none" else {}
    where = json_path if own else want.source
    if not own:
        # The YAML's deepspeed_config section reaches this process as environment variables.
        for key, name, cast in (
            ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int),
            ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", float),
        ):
            if os.environ.get(name, "auto") != "auto":
                own[key] = cast(os.environ[name])
    for section, owner in (("optimizer", "learning_rate, weight_decay, ..."), ("scheduler", "lr_scheduler_type")):
        if section in own:
            raise ValueError(f"{where} has a {section!r} section, but the recipe builds its own ({owner}). Remove it.")
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    _refuse_other_precision(own, where, mixed_precision)
    from_flags = {
        "train_batch_size": config.global_batch_size,
        "train_micro_batch_size_per_gpu": config.per_device_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": float(config.max_grad_norm),
    }
    flags = {"gradient_clipping": "max_grad_norm", "train_micro_batch_size_per_gpu": "per_device_batch_size"}
    for key, value in from_flags.items():
        if own.get(key, "auto") not in ("auto", value):
            raise ValueError(
                f"{key}: {own[key]} in {where}, but the recipe's {flags.get(key, 'batch sizes')} make it {value}. "
                f'Write "auto" there or remove it, or change the flag.'
            )
    plugin = DeepSpeedPlugin()
    settings = plugin.deepspeed_config
    settings.update(from_flags)
    if want.strategy == "zero0":
        settings["gradient_clipping"] = 0.0  # sharding.clip_before_step clips, and remembers the norm
        if mixed_precision != "no":
            # Stage 0 has no 16-bit mode with fp32 gradients (deepspeed 0.19.8, `_do_optimizer_sanity_check`);
            # autocast over fp32 weights is what data parallelism without DeepSpeed does, too.
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[mixed_precision]
            settings.setdefault("torch_autocast", {"enabled": True, "dtype": dtype})
            settings["bf16"], settings["fp16"] = {"enabled": False}, {"enabled": False}
    elif mixed_precision != "no" and config.reduce_dtype == "fp32":
        settings.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        settings.setdefault("communication_data_type", "fp32")
    return plugin


def _refuse_other_precision(own: dict, where: str, mixed_precision: str) -> None:
    for kind in ("bf16", "fp16"):
        enabled = own.get(kind, {}).get("enabled", "auto")
        if enabled != "auto" and bool(enabled) != (mixed_precision == kind):
            raise ValueError(
                f"{kind}.enabled: {enabled} in {where}, but the launcher's mixed_precision is {mixed_precision!r}. "
                f'Write "auto" there and pass --mixed_precision {kind if enabled else "no"} to accelerate launch (its '
                "YAML may not hold that key beside a DeepSpeed JSON)."
            )


def _fsdp_plugin(config: RecipeConfig, on_cpu: bool):
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    if dtype is not None and config.reduce_dtype == "fp32":
        # Accelerate would reduce in the compute dtype (accelerate 1.15, dataclasses.py, `set_mixed_precision`).
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=dtype
        )
    if on_cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # there is nothing to pin for
    if plugin.activation_checkpointing and config.gradient_checkpointing:
        raise ValueError(
            "gradient_checkpointing: true, and fsdp_activation_checkpointing: true in the Accelerate YAML: activations "
            "would be recomputed twice. Keep the recipe's flag; it works under every strategy."
        )
    return plugin


# --- the prepared model ----------------------------------------------------------------------------------------------


def prepare(
    accelerator: Accelerator, config: RecipeConfig, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, Any, sharding.Obtained]:
    """Wrap model and optimizer for the strategy, check that it is the one asked for, and print the banner.

    Returns the two, and what was obtained.

    Raises ValueError when the strategy obtained is not the one asked for.
    """
    from accelerate.utils import set_seed

    from oneloop import banner, sharding

    sharding.check_same_on_all_ranks(accelerator, model)
    base_optimizer = optimizer
    model, optimizer = accelerator.prepare(model, optimizer)
    if sharding.strategy(accelerator) == "zero0":
        sharding.clip_before_step(model, base_optimizer, config.max_grad_norm)
    got = sharding.obtained(accelerator, model, optimizer)
    check(requested(), got)
    if accelerator.is_main_process:
        print(banner.text(accelerator, config, model, got, requested().source), flush=True)
    # Same weights on every rank until here; from here on each rank draws its own dropout.
    set_seed(config.seed, device_specific=True)
    return model, optimizer, got


def check(want: Requested, got) -> None:
    """Compare request and result. Raises ValueError naming both where they differ."""
    problems = []
    if got.strategy != want.strategy and not (want.strategy == "ddp" and want.world_size == 1):
        problems.append(f"strategy {want.strategy!r} was asked for, {got.strategy!r} was obtained")
    if got.world_size != want.world_size:
        problems.append(f"{want.world_size} processes were asked for, {got.world_size} take part")
    for part, asked in (("optimizer", want.offload_optimizer), ("parameters", want.offload_parameters)):
        if asked != (part in got.offload):
            problems.append(f"offload of {part}: asked for {asked}, obtained {part in got.offload}")
    # Every shard may be padded, and small parameters are kept whole; half the way to a full copy is neither.
    most = 1 / want.world_size + 0.5 * (1 - 1 / want.world_size)
    if want.strategy in ("zero1", "zero2", "zero3", "fsdp2") and got.optimizer_fraction > most:
        problems.append(f"a rank holds {got.optimizer_fraction:.0%} of the optimizer state instead of a shard")
    if want.strategy in ("zero3", "fsdp2") and got.parameter_fraction > most:
        problems.append(f"a rank holds {got.parameter_fraction:.0%} of the parameters instead of a shard")
    if want.strategy == "fsdp2" and len(got.wrapped) < 2:
        problems.append("FSDP2 wrapped no layer (set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP)")
    if problems:
        raise ValueError(f"{want.source}: not the strategy that was asked for:\n  " + "\n  ".join(problems))


def finish(accelerator: Accelerator, tracker) -> None:
    """End the run on all ranks together: barrier, tracker, picture. (`process.run` closes the process group; ranks
    that leave without a barrier hang at exit now and then.)"""
    from oneloop import tracking

    accelerator.wait_for_everyone()
    tracker.finish()
    if accelerator.is_main_process:
        print(f"curve: {tracking.plot(tracker.output_dir)}", flush=True)
    accelerator.free_memory()
