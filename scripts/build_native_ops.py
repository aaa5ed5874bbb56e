"""Build DeepSpeed's native operators once, so that no training run has to.

DeepSpeed compiles an operator the first time a run needs it: the shared-memory communication of CPU ranks, and the CPU
Adam of the `*_offload` strategies. That takes minutes on a busy machine, in every rank's start-up. `make setup` calls
this script, and every target of the Makefile sets TORCH_EXTENSIONS_DIR to the folder it fills.

    TORCH_EXTENSIONS_DIR=.cache/torch_extensions python scripts/build_native_ops.py

A build that was killed leaves a file named `lock`, on which torch waits for ever (2.15 takes a kernel lock instead,
older ones do not). Such files are removed first, unless a running process holds them.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path


def lock_holders(lock: Path) -> list[int]:
    """Return the ids of running processes that have a lock file open, as its builder does until it is done."""
    import psutil

    holders = []
    for process in psutil.process_iter():
        try:
            opened = process.open_files()
        # Processes of other users cannot be looked into, and any may end meanwhile; neither builds in this folder.
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if any(Path(entry.path) == lock for entry in opened):
            holders.append(process.pid)
    return holders


def remove_dead_locks(folder: Path) -> list[Path]:
    """Remove every lock file under `folder` that no running process holds, and return their paths."""
    removed = []
    for lock in sorted(folder.resolve().glob("**/lock")):
        holders = lock_holders(lock)
        if holders:
            print(f"{lock}: held by process {holders[0]}, which is building; waiting for it")
            continue
        lock.unlink()
        removed.append(lock)
    return removed


def build() -> None:
    """Build the operators that this machine's accelerator, or its CPUs, can use.

    Raises:
        RuntimeError: the compiler failed; its own output stands above the error.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    builders = ["ShareMemCommBuilder", "CPUAdamBuilder"] if on_cpu else ["CPUAdamBuilder"]
    for name in builders:
        builder = accelerator.create_op_builder(name)
        # A machine with GPUs needs nvcc of torch's CUDA version to build; only the *_offload files use the result.
        if not on_cpu and not builder.is_compatible(verbose=False):
            print(f"{builder.name}: cannot be built here ({builder.error_log}); zero*_offload will not run")
            continue
        start = time.monotonic()
        builder.load(verbose=False)
        print(f"{builder.name}: ready after {time.monotonic() - start:.0f} s ({accelerator.device_name()})")


def main() -> None:
    """Clear dead locks and build."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not folder:
        sys.exit("build_native_ops: set TORCH_EXTENSIONS_DIR to the folder to build into; `make setup` does")
    if importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is not installed: no native operators to build")
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    for lock in remove_dead_locks(Path(folder)):
        print(f"{lock}: removed; no running process holds it, and older torch would have waited on it for ever")
    # Torch calls `ninja` by name, which lies beside an interpreter whose environment nobody has activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Each compiler process takes about 2 GB.
    os.environ.setdefault("MAX_JOBS", "2")
    build()


if __name__ == "__main__":
    main()
