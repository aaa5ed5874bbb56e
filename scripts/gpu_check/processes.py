"""Ends a child process with all that it has started."""

import contextlib
import subprocess

import psutil


def kill_family(process: subprocess.Popen) -> None:
    """Kill a child that still runs, with its descendants: ranks are sessions of their own, which outlive a launcher."""
    if process.poll() is not None:
        return
    try:
        descendants = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        descendants = []
    process.kill()
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()
    psutil.wait_procs(descendants, timeout=5)  # the device's memory is free when they are gone
