"""What the machine must have and leave alone before a run starts: library versions, build locks, network interfaces."""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import os
import re
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from oneloop import process, watchdog

if TYPE_CHECKING:
    from oneloop.launch.request import Requested

FLOORS = {  # package: (oldest version, what is wrong with older ones)
    "torch": ((2, 10), "CVE-2026-24747: loading a checkpoint can run code, weights_only or not"),
    "transformers": ((5, 3), "CVE-2026-4372: loading a model can run code, trust_remote_code or not"),
    "jinja2": ((3, 1, 6), "CVE-2025-27516: a chat template can leave its sandbox and run code"),
    "datasets": ((4,), "loading a data set can run a script that lies beside it"),
}


def check_versions() -> None:
    """Refuse libraries with holes that this package's own caution cannot close. Reads metadata only, imports nothing.

    Raises ValueError naming all of them at once.
    """
    problems, remedies = [], []
    for package, (oldest, reason) in FLOORS.items():
        wanted = f"{package}>={'.'.join(map(str, oldest))}"
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        # The numbers alone: vendors' builds call themselves 2.10.0a0+their.name.
        release = re.match(r"\d+(\.\d+)*", installed or "0")
        if installed and release and tuple(map(int, release[0].split("."))) >= oldest:
            continue
        remedies.append(f"'{wanted}'")
        problems.append(f"{package} {installed} ({reason})" if installed else f"{package} is not installed")
    if problems:
        raise ValueError(
            f"too old to be safe: {'; '.join(problems)}. Upgrade: {sys.executable} -m pip install {' '.join(remedies)}"
        )


# --- build locks ------------------------------------------------------------------------------------------------------


def check_build_locks(want: Requested, on_cpu: bool) -> None:
    """Wait, and say so, while another process builds an operator that this run needs; a lock that nobody will give
    back is an error.

    torch compiles operators at first use, behind a file named `lock`. In older versions its existence is the lock: a
    build that was killed stops all later runs for ever. In torch 2.15 the file stays, and a kernel lock on it counts,
    which ends with its process, but not while that is stopped.

    Raises ValueError naming the file.
    """
    if not want.strategy.startswith("zero"):
        return
    from torch.utils import cpp_extension

    # What DeepSpeed 0.19 builds: for collectives of CPU ranks, and for an optimizer that is offloaded.
    for operator in ["deepspeed_shm_comm"] * on_cpu + ["cpu_adam"] * want.offload_optimizer:
        folder = Path(cpp_extension._get_build_directory(operator, verbose=False))
        _wait_for_lock(folder / "lock", watchdog.timeout_seconds())


def _wait_for_lock(lock: Path, patience_seconds: float) -> None:
    """Return once `lock` is free. Only the first rank says that it waits."""
    import psutil

    began, told = time.monotonic(), os.environ.get("RANK", "0") != "0"
    while _is_locked(lock):
        holders = _holders(lock)
        if not _is_locked(lock):
            return  # given back meanwhile
        what = f"{lock}: an operator is being built behind this lock"
        end = f"rm {lock}" if _existence_is_the_lock() else "then run again"
        if not holders and _existence_is_the_lock():
            raise ValueError(
                f"{what}, but no process of this machine has it open: a build was killed, and torch would wait for it "
                f"for ever. Unless another machine builds in that folder, delete the file: rm {lock}"
            )
        owner = f"process {holders[0].pid}" if holders else "a process that cannot be seen from here"
        for holder in holders:
            with contextlib.suppress(psutil.Error):  # it has just ended
                if holder.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    raise ValueError(f"{what} by {owner}, which is stopped: end it (kill -9 {holder.pid}), {end}")
        if time.monotonic() - began > patience_seconds:
            raise ValueError(f"{what} by {owner} for more than {patience_seconds:g} s: end it, {end}")
        if not told:
            print(f"{what} by {owner}: waiting for it", flush=True)
        told = True
        time.sleep(0.5)


def _existence_is_the_lock() -> bool:
    from torch.utils import cpp_extension

    return hasattr(cpp_extension, "FileBaton")


def _is_locked(lock: Path) -> bool:
    if not lock.exists() or _existence_is_the_lock():
        return lock.exists()
    import fcntl

    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # gone, not ours to open, or a file system without locks: torch will say what it thinks of it
        return False
    return False


def _holders(lock: Path) -> list:
    """Processes that have the lock open, as its owner has until it is done."""
    import psutil

    lock = lock.resolve()
    holders = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or it has just ended
            if any(Path(opened.path) == lock for opened in candidate.open_files()):
                holders.append(candidate)
    return holders


# --- network ----------------------------------------------------------------------------------------------------------


def keep_to_loopback() -> None:
    """Keep the traffic of a run on one machine off the network, where nothing authenticates it; before the process
    group exists. A choice of the user's is kept.

    Warns, on rank 0, when the ranks meet at an address that others can reach and nobody asked for that.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size == "1" or os.environ.get("LOCAL_WORLD_SIZE") != world_size:
        return
    import psutil

    interfaces = psutil.net_if_stats()
    for name in ("lo", "lo0"):
        if name in interfaces and interfaces[name].isup:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    address = os.environ.get("MASTER_ADDR", "")
    if os.environ.get("RANK") != "0" or is_loopback(address):
        return
    _, asked = process.launcher_arguments() or (None, {})
    if not asked.get("main_process_ip"):
        warnings.warn(
            f"the ranks of this machine meet at {address!r}, which others may reach: the process group has no "
            "authentication. Leave MASTER_ADDR out for 127.0.0.1, or pass --main_process_ip to accelerate launch if "
            "it is meant.",
            RuntimeWarning,
            stacklevel=2,
        )


def is_loopback(address: str) -> bool:
    """Whether a host name or address leads to this machine alone."""
    try:
        found = [information[4][0] for information in socket.getaddrinfo(address, None)] if address else []
        return bool(found) and all(ipaddress.ip_address(one.split("%")[0]).is_loopback for one in found)
    except (OSError, ValueError):
        return False
