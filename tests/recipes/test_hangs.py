"""A rank that hangs, dies or raises ends the whole run: soon, with its own words first, and nothing is left running."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import UNEVEN

SCRIPT = Path(__file__).with_name("faulty.py")
TIMEOUT = 15
SLACK = 10
"""Seconds after the accident, and after the time limit where that has to pass first, in which all must be over."""


class Run:
    """A launch with an accident in it, followed to its end."""

    def __init__(self, config: str, num_processes: int, fault: str, rank: int, folder: Path, **changes):
        values = runs.settings(folder, UNEVEN, global_batch_size=4, max_steps=5000, **changes)
        flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
        command += ["--config_file", f"accelerate_configs/{config}.yaml", "--main_process_port", "0"]
        command += [str(SCRIPT), fault, str(rank), str(folder), *flags]
        extra = {"ONELOOP_TIMEOUT_SECONDS": str(TIMEOUT), "ONELOOP_ALLOW_OVERSUBSCRIBE": "1", "OMP_NUM_THREADS": "1"}
        self.folder, self.num_processes, self.log = folder, num_processes, folder / "output.txt"
        with open(self.log, "w") as output:
            self.launcher = subprocess.Popen(
                command, cwd=runs.ROOT, env=launcher.environment() | extra, stdout=output, stderr=subprocess.STDOUT
            )
        self.processes: dict[psutil.Process, str] = {}
        """Everything the launch has started, with its command line."""

    def follow(self, until=lambda: False) -> None:
        """Take note of the processes until the launcher ends, or `until`."""
        deadline = time.monotonic() + launcher.TIMEOUT_SECONDS
        while self.launcher.poll() is None and not until():
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"not over after {launcher.TIMEOUT_SECONDS} s\n{self.output}")
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    self.processes.setdefault(process, " ".join(process.cmdline()))
            time.sleep(0.25)

    def end(self) -> None:
        for process in [psutil.Process(self.launcher.pid), *self.processes]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def notes(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def seconds_since_accident(self, rank: int) -> float:
        return time.time() - json.loads((self.folder / f"rank{rank}.json").read_text())["time"]

    def assert_nothing_is_left(self) -> None:
        assert len(self.processes) >= self.num_processes
        _, left = psutil.wait_procs(list(self.processes), timeout=5)
        assert not left, [self.processes[process] for process in left] + [self.output]


def assert_only_word(output: str, title: str) -> str:
    """The text of the only message of a rank, which must have that title."""
    titles = re.findall(r"^--- ((?:rank|the launcher) .*) ---$", output, flags=re.MULTILINE)
    assert titles == [title], output
    return output.partition(f"--- {title} ---\n")[2]


CASES = {
    "hangs in its data": ("cpu", 2, "batch:sleep_for_ever", 1, {"report_to": "wandb"}),
    "hangs in its loss, all sharded": ("fsdp2", 2, "loss:sleep_for_ever", 0, {}),
    "is stopped": ("zero2", 2, "batch:stop", 1, {}),
    "is killed": ("cpu", 2, "loss:die", 1, {}),
    "raises in its data": ("cpu", 4, "batch:raise_error", 2, {}),
    "raises in its loss": ("cpu", 2, "loss:raise_error", 0, {"report_to": "wandb"}),
}


@pytest.mark.parametrize("case", CASES)
def test_one_rank_ends_all(case, tmp_path):  # R11
    config, num_processes, fault, rank, changes = CASES[case]
    run = Run(config, num_processes, fault, rank, tmp_path, **changes)
    run.follow()
    seconds = run.seconds_since_accident(rank)
    print(f"rank {rank} {case}: all over after {seconds:.1f} s")
    assert run.launcher.returncode not in (0, None)
    waits = "sleep" in fault or "stop" in fault
    assert seconds < SLACK + TIMEOUT * waits, f"{seconds:.0f} s\n{run.output}"
    assert not waits or seconds > TIMEOUT, "ended before the limit"
    run.assert_nothing_is_left()
    assert any("wandb-core" in command for command in run.processes.values()) == ("report_to" in changes)

    if "die" in fault:
        words = assert_only_word(run.output, f"rank {rank} has died")
        assert "was killed by signal 9 (SIGKILL)" in words and "for want of memory" in words
        assert re.search(rf"Root Cause.*rank *: {rank} .*Signal 9 \(SIGKILL\)", run.output, flags=re.DOTALL)
    elif "stop" in fault:
        words = assert_only_word(run.output, f"rank {rank} hangs")
        assert "does not answer" in words and "Rank 0 waited at " in words
    else:
        raises = "raise" in fault
        words = assert_only_word(run.output, f"rank {rank} failed" if raises else f"rank {rank} hangs")
        stack = words.partition("\n\n")[0]
        assert ("loaders.py" if "batch" in fault else "recipes/sft.py") in stack
        assert stack.rstrip().endswith("OSError: the disk with the rows is gone" if raises else "time.sleep(100_000)")
        assert re.search(rf"Root Cause.*rank *: {rank} ", run.output, flags=re.DOTALL), "the launcher blames another"

    # S10: what the ranks listen on for each other, the store of the launcher aside, is not reachable from outside.
    assert {note["interface"] for note in run.notes()} <= {"lo", "lo0"}, "the name of this machine decides"
    listening = [address for note in run.notes() for address in note["listening"]]
    assert len(listening) >= num_processes
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_interrupt_leaves_nothing_behind(tmp_path):
    """Ctrl-C reaches the launcher alone: its ranks have sessions of their own."""
    run = Run("cpu", 2, "batch:do_nothing", 0, tmp_path, report_to="wandb")
    run.follow(until=lambda: len(run.notes()) == 2)
    interrupted = time.monotonic()
    run.launcher.send_signal(signal.SIGINT)
    run.follow()
    assert run.launcher.returncode not in (0, None)
    assert time.monotonic() - interrupted < SLACK, run.output
    run.assert_nothing_is_left()
    assert run.output.count("\ninterrupted\n") == 1
    assert "has died" not in run.output and "lost contact" not in run.output
