"""Who is blamed when ranks wait for each other, and what becomes of processes that hang or lose their launcher."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest

from oneloop import peers, standstill, watchdog
from oneloop.standstill import Report
from tests.equivalence.launcher import ROOT

LIMIT = 100


def report(beats=5, idle=110.0, standing=110.0, in_collective=False, state="runs") -> Report:
    return Report(beats, idle, standing, in_collective, "recipes/sft.py:1 in main", 1, "here", state)


WAITS = report(in_collective=True)
BUSY = report(standing=0)  # for a long time without progress, but not at one place
BLAMED = {  # what all ranks report, which of them are silent: who is blamed
    "one sleeps, the others wait for it": ([WAITS, report(), WAITS], (), [1]),
    "one tries again and again, the others wait for it": ([WAITS, BUSY, WAITS], (), [1]),
    "one is behind, though it waits, too: elsewhere": ([WAITS, report(beats=4, in_collective=True)], (), [1]),
    "one is behind, the other waits for a device": ([report(), report(beats=4, standing=0)], (), [1]),
    "two sleep": ([report(), WAITS, report()], (), [0, 2]),
    "all wait, for different things": ([WAITS, WAITS], (), [0, 1]),
    "all stand, on devices": ([report(), report()], (), [0, 1]),
    "one has left": ([WAITS, report(state="ended", idle=3)], (), [1]),
    "one is stopped, in a collective, without having been idle": (
        [WAITS, report(idle=0, standing=0, in_collective=True)],
        (1,),
        [1],
    ),
    "one is stopped, and ahead": ([WAITS, report(beats=6, idle=0, standing=0)], (1,), [1]),
    # nobody
    "all are busy, with no progress to tell of": ([BUSY, BUSY], (), []),
    "all are busy, unequally far": ([BUSY, report(beats=4, standing=0)], (), []),
    "one waits, not yet for long": ([report(in_collective=True, standing=90), report()], (), []),
    "all wait, not yet for long": ([report(in_collective=True, standing=90, idle=99)] * 2, (), []),
    "one waits, the other one goes on": ([WAITS, report(idle=20, standing=0)], (), []),
    "one is stopped, the other one does not need it": ([BUSY, report()], (1,), []),
    "one has left, the other one does not need it": ([BUSY, report(state="ended")], (), []),
    "all have left": ([report(state="ended"), report(state="ended")], (), []),
}


@pytest.mark.parametrize("case", BLAMED)
def test_blame(case):
    reports, silent, expected = BLAMED[case]
    assert standstill.blame(dict(enumerate(reports)), set(silent), LIMIT) == expected


def test_limit(monkeypatch):
    monkeypatch.delenv(watchdog.TIMEOUT, raising=False)
    assert watchdog.timeout_seconds() == 3600
    monkeypatch.setenv(watchdog.TIMEOUT, "15")
    assert watchdog.timeout_seconds() == 15 < watchdog.backend_timeout().total_seconds()
    for bad in ("0", "-3", "soon", "nan", "inf"):
        monkeypatch.setenv(watchdog.TIMEOUT, bad)
        with pytest.raises(ValueError, match=f"ONELOOP_TIMEOUT_SECONDS is '{bad}': give a number of seconds above 0"):
            watchdog.timeout_seconds()


def frame_in(*paths: str):
    """The innermost frame of calls through functions in files of these names, outermost first."""
    function = sys._getframe
    for path in reversed(paths):
        names = {"inner": function}
        exec(compile("def outer():\n    return inner()\n", path, "exec"), names)
        function = names["outer"]
    return function()


SITE = "/x/site-packages"


@pytest.mark.parametrize(
    "paths,expected",
    [
        (["/r/recipe.py", f"{SITE}/torch/distributed/distributed_c10d.py", f"{SITE}/torch/_ops.py"], True),
        (["/r/recipe.py", f"{SITE}/torch/_tensor.py", f"{SITE}/torch/autograd/graph.py"], True),
        (["/r/recipe.py", f"{SITE}/torch/autograd/graph.py", "/r/loss.py"], False),  # a hook of the recipe's own
        (["/r/recipe.py", f"{SITE}/torch/distributed/checkpoint_wrapper.py", *[f"{SITE}/torch/nn/m.py"] * 4], False),
        (["/r/recipe.py", f"{SITE}/torch/distributed/elastic/errors.py", "/r/loss.py"], False),
    ],
)
def test_where_a_thread_stands(paths, expected):
    in_collective, place = standstill.stands(frame_in(*paths))
    assert in_collective == expected
    own = [path for path in paths if SITE not in path][-1]
    assert place == f"{own.removeprefix('/')}:2 in outer"


# --- processes --------------------------------------------------------------------------------------------------------


class Store(dict):
    """What of torch's store is used."""

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key] for key in keys]


PRELUDE = f"""
import dataclasses, json, os, sys, threading, time
sys.path.insert(0, {str(ROOT / "src")!r})
from oneloop import standstill, watchdog

{inspect.getsource(Store)}
store = Store()
"""


def script(*parts: str) -> list[str]:
    """A Python process without torch, whose ranks share a store."""
    return [sys.executable, "-c", PRELUDE + "".join(map(textwrap.dedent, parts))]


def run(*parts: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        script(*parts), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, check=False
    )


OTHER_WAITS = """
def other(number=0):
    waits = standstill.Report(1, 9.0, 9.0, True, "sft.py:7 in main", os.getpid(), "elsewhere", number=number)
    store.set("1", json.dumps(dataclasses.asdict(waits)))
    threading.Timer(0.1, other, [number + 1]).start()

other()
watch = watchdog._Watch(store, 0, 2, 1.0, None)
"""


def test_rank_that_hangs_says_where_and_ends():
    result = run(
        OTHER_WAITS,
        """
        def download_for_ever(): time.sleep(1000)
        watch.start()
        download_for_ever()
        """,
    )
    assert result.returncode == 1
    assert result.stdout.startswith(
        "\n--- rank 0 hangs ---\nNo progress for 1 s (ONELOOP_TIMEOUT_SECONDS). Rank 1 waited"
    )
    assert "at sft.py:7 in main" in result.stdout and "in download_for_ever" in result.stdout


def test_progress_keeps_a_rank_alive():
    result = run(
        OTHER_WAITS,
        """
        watch.start()
        for _ in range(15):
            watchdog.beat()
            time.sleep(0.2)
        print("alive", flush=True)
        os._exit(0)
        """,
    )
    assert (result.returncode, result.stdout) == (0, "alive\n")


def test_time_in_suspension_does_not_count(monkeypatch):
    """A job that was stopped as a whole comes back after hours, and none of its ranks has hung."""
    moments, rounds, looked = iter([0, 5, 4000, 4005]), iter([[], [], [], None]), []
    watch = watchdog._Watch(Store(), 0, 2, 100.0, None)
    assert watch.interval == 5
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(watch.peers, "wait", lambda seconds: next(rounds))
    monkeypatch.setattr(watch, "_look", looked.append)
    watch._run()
    watch.peers.close()
    assert looked == [5, 10, 5]


def test_interpreter_that_is_held_shows_its_stack():
    """Native code that keeps the interpreter's lock stops the watchdog of its process, too."""
    result = run(
        """
        import ctypes
        watch = watchdog._Watch(store, 0, 2, 1.0, None)
        watch.start()
        time.sleep(0.5)
        def native_call(): ctypes.PyDLL(None).sleep(3)
        native_call()
        os._exit(0)
        """
    )
    assert re.search(r"Timeout \(0:00:01\)!.*in native_call", result.stdout, flags=re.DOTALL), result.stdout


def test_ranks_end_with_their_launcher(tmp_path):
    rank = script(
        f"""
        watchdog._Watch(store, 0, 2, 5.0, os.getppid()).start()
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(1000)
        """
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({rank!r})"],
        env=os.environ | {"LOCAL_RANK": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    launcher.kill()
    _, left = psutil.wait_procs([orphan], timeout=10)
    assert not left
    _, said = launcher.communicate()
    assert f"--- the launcher is gone ---\nProcess {launcher.pid}, which had started the ranks, has ended." in said


@pytest.mark.parametrize(
    "end,number", [("kill -KILL $$", 9), ("kill -TERM $$", 15), ("kill -SEGV $$", 11), ("exit 3", 0)]
)
def test_how_a_process_ended_is_known(end, number):
    watched = peers.Peers()
    process = subprocess.Popen(["sh", "-c", f"sleep 0.3; {end}"])
    watched.add(7, process.pid)
    assert watched.ranks() == [7] and watched.wait(0.01) == []
    assert watched.wait(10) == [(7, process.pid, number)]
    assert watched.ranks() == []
    process.wait()
    assert peers.signal_of(process.pid) is None
    watched.close()


def test_only_a_death_without_words_is_announced(capsys):

    def told(number, states=("runs", "runs"), rank=1):
        store = Store()
        for other, state in enumerate(states):
            store.set(str(other), json.dumps(vars(report(state=state))))
        watch = watchdog._Watch(store, 0, len(states), 10.0, None)
        watch._peer_ended(rank, 1234, number)
        watch.peers.close()
        return capsys.readouterr().err

    killed = told(signal.SIGKILL)
    assert killed.startswith("\n--- rank 1 has died ---\nProcess 1234 was killed by signal 9 (SIGKILL).")
    assert "for want of memory" in killed and "per_device_batch_size" in killed
    assert "crashed with signal 11 (SIGSEGV)" in told(signal.SIGSEGV)
    assert "ended without a word" in told(None)
    for silent in (told(0), told(signal.SIGTERM), told(None, ("runs", "ended")), told(9, ("failed", "runs"))):
        assert silent == ""


def test_several_ranks_are_told_apart():
    assert watchdog._ranks([3]) == "rank 3" and watchdog._ranks([0, 2]) == "ranks 0, 2"
