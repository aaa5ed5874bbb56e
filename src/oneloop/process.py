"""The operating system's side of a run: command line in, exit code and one clear message out, and the launcher that
this process descends from."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from oneloop import config as config_module
from oneloop import peers, redaction, stopping, watchdog

_LINGER_SECONDS = 10  # for a training state that is being written
_CLOSING_SECONDS = 30  # for the tracker to take leave, after the run has failed

_DISTRIBUTED_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_CONTACT = (  # of gloo, NCCL and torch's store
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
    "connection was likely closed",
)


def run(main: Callable[[Any], None], config_class: type) -> None:
    """Parse the command line, run `main`, and end the process with one message and a non-zero code if it fails.

    A mistake of the user (ValueError) is found by every rank alike: the first one prints it, the others only if the
    first does not end the job. Anything else is printed with its traceback by the rank that met it, and a rank that
    has only lost another one leaves the first word to that.
    """
    from oneloop import tracking

    redaction.guard_streams()  # first: a message about a flag may quote it
    faulthandler.enable(file=2)  # a crash in native code shows where Python stood
    config = config_module.parse(config_class)
    rank = int(os.environ.get("RANK", 0))
    failed, code = True, 1
    try:
        main(config)
    except ValueError as error:
        watchdog.failed()
        if rank != 0:
            time.sleep(5)
        if os.environ.get("ONELOOP_TRACEBACK") == "1" or not _is_ours(error):
            traceback.print_exc()
        print(f"\nerror: {error}" if rank == 0 else f"\nerror on rank {rank}: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        watchdog.failed()
        if os.environ.get("ONELOOP_TRACEBACK") == "1":
            traceback.print_exc()
        if rank == 0:
            print("\ninterrupted", file=sys.stderr, flush=True)
    except stopping.Stopped as stopped:
        watchdog.stop()
        if rank == 0:
            print(f"\n{stopped.message}", flush=True)
        failed, code = False, stopping.EXIT_CODE
    except BaseException as error:  # printed and turned into an exit code, never swallowed
        if isinstance(error, SystemExit) and not error.code:
            watchdog.stop()
            return
        if lost_contact(error):
            cause = watchdog.wait_for_cause() or "Its own message, if it left one, tells why."
            title, note = f"rank {rank} lost contact to another rank", f"{cause}\n"
        else:
            watchdog.failed()
            title, note = f"rank {rank} failed", ""
        print(f"\n--- {title} ---\n{note}{traceback.format_exc()}", file=sys.stderr, flush=True)
        if _is_out_of_memory(error):
            print(f"error: rank {rank} is out of memory. {peers.OUT_OF_MEMORY}", file=sys.stderr, flush=True)
    else:
        watchdog.stop()
        _close_process_group()
        return
    if failed and "oneloop.state.writer" in sys.modules:
        from oneloop.state import writer

        writer.linger(_LINGER_SECONDS)
    # A tracker that cannot reach its server must not keep the other ranks waiting.
    timer = threading.Timer(_CLOSING_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    tracking.finish_open(failed)
    redaction.release_streams()
    # A regular exit waits for the other ranks in the destructors of the process group: for ever, if they wait too.
    os._exit(code)


def lost_contact(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or does not answer, which had an error of its own.

    False if it arose while another one was dealt with: that one is the cause.
    """
    while error is not None:
        text = str(error).lower()
        is_torch = type(error).__name__ in _DISTRIBUTED_ERRORS or "gloo" in text or "nccl" in text
        if not (isinstance(error, RuntimeError) and is_torch and any(phrase in text for phrase in _LOST_CONTACT)):
            return False
        error = error.__cause__ or error.__context__
    return True


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's class for it is not used by its allocator for the CPU (torch 2.15, c10/core/impl/alloc_cpu.cpp).
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised it, with a message for the user; a library's needs its traceback to make sense."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return os.path.dirname(os.path.abspath(__file__)) in os.path.abspath(raised_in)


def _close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def launcher_arguments() -> tuple[str | None, dict] | None:
    """(path of the Accelerate YAML or None, its content with `--num_processes` and `--main_process_ip` laid over) of
    the `accelerate launch` that this process descends from; None if there is none. The environment does not carry
    either (accelerate 1.15)."""
    import psutil
    import yaml

    for ancestor in psutil.Process().parents()[:4]:
        try:
            words, cwd = ancestor.cmdline(), ancestor.cwd()
        except psutil.Error:  # gone, or another user's (a container's outer process)
            return None
        starts = [
            i for i, word in enumerate(words) if word.endswith(("accelerate-launch", "accelerate/commands/launch.py"))
        ]
        starts += [i + 1 for i, word in enumerate(words[:-1]) if "accelerate" in word and words[i + 1] == "launch"]
        starts += [i for i, word in enumerate(words) if word == "accelerate.commands.launch"]
        if not starts:
            continue
        from accelerate.commands.config.config_args import default_config_file
        from accelerate.commands.launch import launch_command_parser

        try:
            arguments, _ = launch_command_parser().parse_known_args(words[starts[0] + 1 :])
        except SystemExit:  # not its command line after all
            continue
        path = arguments.config_file or (default_config_file if os.path.isfile(default_config_file) else None)
        wanted: dict = {}
        if path is not None:
            with open(os.path.join(cwd, os.path.expanduser(path)), encoding="utf-8") as file:
                wanted = yaml.safe_load(file) or {}
        for name in ("num_processes", "main_process_ip"):
            if getattr(arguments, name) is not None:
                wanted[name] = getattr(arguments, name)
        return path, wanted
    return None
