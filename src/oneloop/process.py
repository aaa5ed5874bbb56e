"""The operating system's side of a run: command line in, exit code and one clear message out, and the launcher that
this process descends from."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from oneloop import config as config_module


def run(main: Callable[[Any], None], config_class: type) -> None:
    """Parse the command line, run `main`, and end the process with one message and a non-zero code if it fails.

    A mistake of the user (ValueError) is found by every rank alike: the first one prints it, the others only if the
    first does not end the job. Anything else is printed with its traceback by the rank that met it.
    """
    from oneloop import tracking

    config = config_module.parse(config_class)
    rank = int(os.environ.get("RANK", 0))
    try:
        main(config)
    except ValueError as error:
        if rank != 0:
            time.sleep(5)
        if os.environ.get("ONELOOP_TRACEBACK") == "1" or not _is_ours(error):
            traceback.print_exc()
        print(f"\nerror: {error}" if rank == 0 else f"\nerror on rank {rank}: {error}", file=sys.stderr, flush=True)
    except BaseException as error:  # printed and turned into an exit code, never swallowed
        if isinstance(error, SystemExit) and not error.code:
            return
        print(f"\n--- rank {rank} failed ---\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    else:
        _close_process_group()
        return
    tracking.finish_open(failed=True)
    sys.stdout.flush()
    # A regular exit waits for the other ranks in the destructors of the process group: for ever, if they wait too.
    os._exit(1)


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised it, with a message for the user; a library's needs its traceback to make sense."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return os.path.dirname(os.path.abspath(__file__)) in os.path.abspath(raised_in)


def _close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def launcher_arguments() -> tuple[str | None, dict] | None:
    """(path of the Accelerate YAML or None, its content with `--num_processes` laid over) of the `accelerate launch`
    that this process descends from; None if there is none. The environment does not carry either (accelerate 1.15)."""
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
        if arguments.num_processes is not None:
            wanted["num_processes"] = arguments.num_processes
        return path, wanted
    return None
