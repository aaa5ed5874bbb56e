"""The only place that builds an `Accelerator`: from the launcher's wishes to a prepared model, or to a clear refusal.

Whatever the launch asked for (number of processes, strategy, offload) must be what the run gets. Accelerate selects
FSDP and DeepSpeed only where it sees an accelerator; on a machine without one it would start independent one-process
trainings or plain data parallelism instead. `start` therefore brings the process group up itself on CPU, and `prepare`
compares the prepared objects with the request.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from oneloop import schedule, sources, watchdog
from oneloop.launch import machine
from oneloop.launch import plugins as fill
from oneloop.launch.request import Requested, requested

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from oneloop import sharding
    from oneloop.config import RecipeConfig

OVERSUBSCRIBE = "ONELOOP_ALLOW_OVERSUBSCRIBE"
"""Environment variable: set to 1 to run more CPU ranks than the machine has cores."""

_group_kind: Any = None
"""What Accelerate called the process group of this process before a strategy was chosen."""


# --- the accelerator -------------------------------------------------------------------------------------------------


def start(config: RecipeConfig) -> Accelerator:
    """Bring up the process group and build the `Accelerator` that was asked for.

    Raises ValueError for a topology that this machine cannot give, a batch that does not divide, and contradictions
    between recipe flags and the Accelerate or DeepSpeed configuration.
    """
    machine.check_versions()
    sources.forbid_hub_kernels(config.trust_remote_code)  # before any library looks for the package
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        set_seed,
    )
    from transformers.utils import logging as transformers_logging

    from oneloop import sharding

    # transformers 5.24 warns of an attribute that it, accelerate and peft still read themselves.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    global _group_kind
    want = requested()
    accumulation_steps = schedule.nominal_accumulation(config, want.world_size)
    on_cpu = want.use_cpu or not torch.accelerator.is_available()
    _check_devices(want, on_cpu)
    if AcceleratorState._shared_state:  # a second run in the same process, as in a notebook
        AcceleratorState._reset_state()
        GradientState._reset_state()
        if _group_kind is not None:
            # The first run has written its strategy over the kind of process group, which the next one looks for.
            PartialState._shared_state["distributed_type"] = _group_kind
    # torch looks for `ninja` by name, even to load an operator that is built already; it lies beside this Python,
    # which need not be on the path when `.venv/bin/accelerate` is called without activating anything.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if on_cpu:
        _prepare_for_cpu(want)
    machine.keep_to_loopback()
    machine.check_build_locks(want, on_cpu)
    if not PartialState._shared_state:
        needs_backend = on_cpu and want.strategy not in ("single", "ddp")
        PartialState(
            cpu=on_cpu and not needs_backend,
            timeout=watchdog.backend_timeout(),
            **({"backend": "gloo"} if needs_backend else {}),
        )
        _group_kind = PartialState().distributed_type
        if needs_backend:
            PartialState._shared_state["device"] = torch.device("cpu")
    watchdog.start()
    if on_cpu and want.strategy == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugins: dict[str, Any] = {}
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") not in ("no", "bf16", "fp16"):
        raise ValueError(
            f"mixed_precision: {os.environ['ACCELERATE_MIXED_PRECISION']} is not supported: no, bf16 or fp16."
        )
    data_parallel = DistributedDataParallelKwargs(
        # Gradients live in the communication buckets instead of beside them: 4 bytes a parameter less.
        gradient_as_bucket_view=True
    )
    if config.reduce_dtype == "compute":
        fill.reduce_in_compute_dtype(want, data_parallel)
    if want.strategy.startswith("zero"):
        plugins["deepspeed_plugin"] = fill.deepspeed_plugin(config, want, accumulation_steps)
    else:
        fill.refuse_yaml_training_values(config, accumulation_steps)
    if want.strategy == "fsdp2":
        plugins["fsdp_plugin"] = fill.fsdp_plugin(config, on_cpu)
    try:
        accelerator = Accelerator(
            # The default makes the optimizer step on every micro-batch of the last window of an epoch, which it can
            # only know for loaders of its own.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                accumulation_steps,
                sync_with_dataloader=False,
                # Without, FSDP2 keeps whole fp32 gradients on every rank between the micro-batches of a step.
                sync_each_batch=want.strategy == "fsdp2",
            ),
            kwargs_handlers=[data_parallel],
            **plugins,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"Accelerate cannot provide {want.strategy!r} ({want.source}): {error}") from error
    if accelerator.num_processes != want.world_size:
        raise ValueError(
            f"{want.world_size} processes were started, but they form a group of {accelerator.num_processes}."
        )
    sharding.check_optimizer(accelerator, config.optim, is_own="." in config.optim)
    if config.quantization:
        sharding.check_quantization(accelerator, config.quantization)
    if not accelerator.is_main_process:
        transformers_logging.disable_progress_bar()  # of loading and saving: one of them is enough
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


def _prepare_for_cpu(want: Requested) -> None:
    """Make Accelerate select the strategy that was asked for on a machine without accelerator, over gloo.

    accelerate 1.15 (`state.py`) looks for DeepSpeed and FSDP only behind a device backend. With the process group
    already up over gloo it takes DeepSpeed as asked; FSDP also wants to see a non-CPU kind of data parallelism first.
    Both exclude `ACCELERATE_USE_CPU`, which plain data parallelism needs. Can go when AcceleratorState selects the
    plugins independently of the device type.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # said, DeepSpeed does not look for others and warn of finding none
    if want.strategy in ("single", "ddp"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return
    os.environ.pop("ACCELERATE_USE_CPU", None)
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"{want.strategy!r} needs the ranks that `accelerate launch` starts; this process is alone.")


# --- the prepared model ----------------------------------------------------------------------------------------------


def prepare(
    accelerator: Accelerator, config: RecipeConfig, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, Any, sharding.Obtained]:
    """Wrap model and optimizer for the strategy, check that it is the one asked for, and print the banner.

    Returns the two, and what was obtained.

    Raises ValueError when the strategy obtained is not the one asked for.
    """
    import torch
    from accelerate.utils import set_seed

    from oneloop import banner, loss_head, sharding

    sharding.check_same_on_all_ranks(accelerator, model)
    base_optimizer, masters = optimizer, sharding.take_masters(accelerator, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    watchdog.set_group_timeouts()
    sharding.restore_masters(masters)
    if sharding.strategy(accelerator) == "zero0":
        sharding.clip_before_step(model, base_optimizer, config.max_grad_norm)
    got = sharding.obtained(accelerator, model, optimizer)
    check(requested(), got)
    with torch.compiler.set_stance("force_eager"):  # no graph for the few tokens of this
        how_loss = loss_head.verify(accelerator, model, config.per_device_batch_size * config.max_length)
    if accelerator.is_main_process:
        print(banner.text(accelerator, config, model, got, requested().source, how_loss), flush=True)
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
    if want.strategy in ("zero3", "fsdp2") and got.quantized_fraction > most:
        problems.append(f"a rank holds {got.quantized_fraction:.0%} of the quantised weights instead of a shard")
    if want.strategy == "fsdp2" and len(got.wrapped) < 2:
        problems.append("FSDP2 wrapped no layer (set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP)")
    if problems:
        raise ValueError(f"{want.source}: not the strategy that was asked for:\n  " + "\n  ".join(problems))


def finish(accelerator: Accelerator, tracker) -> None:
    """End the run on all ranks together: barrier, tracker, picture. (`process.run` closes the process group; ranks
    that leave without a barrier hang at exit now and then.)"""
    from oneloop import tracking

    accelerator.wait_for_everyone()
    watchdog.stop()  # from here on each rank ends by itself
    tracker.finish()
    if accelerator.is_main_process:
        try:
            print(f"curve: {tracking.plot(tracker.output_dir)}", flush=True)
        except Exception as error:  # the run is over and exported; a picture must not make it a failed one
            print(f"curve: not drawn ({error!r})", flush=True)
    accelerator.free_memory()
