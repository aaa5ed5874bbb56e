"""A tracker in every kind of trouble, and a training that comes to the same numbers without waiting for it."""

import http.server
import os
import resource
import subprocess
import sys
import threading
import time
import types
import warnings

import psutil
import pytest

from oneloop import tracker_thread, tracking
from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import digest

ROWS = [runs.turns(f"What is {i} plus {i}?", f"{2 * i}.") for i in range(6)]
SETTINGS = {"global_batch_size": 2, "per_device_batch_size": 1, "max_steps": 6}


def numbers(out) -> list[dict]:
    """What a run has measured, without what depends on the clock or the machine."""
    chosen = ("step", "train/loss", "train/grad_norm", "train/lr", "train/tokens_seen")
    return [{name: line[name] for name in chosen} for line in launcher.read_metrics(out)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Numbers and weights of a run without any tracker."""
    out = runs.train(tmp_path_factory.mktemp("reference"), ROWS, **SETTINGS)
    assert len(numbers(out)) == 6
    return numbers(out), digest(out / "model")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    mask = os.umask(0o022)
    yield
    os.umask(mask)
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def train_with_faults(folder, monkeypatch, report_to="wandb", **at_step):
    """Train with a tracker, calling `at_step["step_<n>"]` before step n is logged.

    Returns the output folder, the warnings about tracking, and the seconds that the calls of the records took.
    """
    took = {"log": 0.0, "finish": 0.0}
    originals = {name: getattr(tracking.Tracker, name) for name in took}

    def timed(name, tracker, *arguments, **options):
        began = time.monotonic()
        originals[name](tracker, *arguments, **options)
        took[name] = max(took[name], time.monotonic() - began)

    def log(tracker, metrics, step):
        at_step.get(f"step_{step}", lambda tracker: None)(tracker)
        timed("log", tracker, metrics, step)

    monkeypatch.setattr(tracking.Tracker, "log", log)
    monkeypatch.setattr(tracking.Tracker, "finish", lambda tracker, failed=False: timed("finish", tracker, failed))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = runs.train(folder, ROWS, report_to=report_to, **SETTINGS)
    messages = [str(warning.message) for warning in caught]
    return out, [message for message in messages if message.startswith("tracking:")], took


def kill_service(tracker) -> None:
    services = [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]
    assert len(services) == 1, "nothing to kill: the test would show nothing"
    services[0].kill()
    services[0].wait()


def test_a_server_that_is_broken_and_a_service_that_is_killed(tmp_path, reference, monkeypatch, capfd):
    class Broken(http.server.BaseHTTPRequestHandler):
        requests = []

        def do_POST(self):
            self.requests.append(self.path)
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_error(500)

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    # Asked for online in so many words, wandb tries; the last two only shorten that.
    for name, value in {
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "0123456789" * 4,
        "WANDB_BASE_URL": address,
        "WANDB_INIT_TIMEOUT": "1",
        "WANDB__DISABLE_VIEWER": "true",
    }.items():
        monkeypatch.setenv(name, value)

    def kill_once_recording(tracker):
        assert tracker._thread.started.wait(60) and tracker._thread.problem() is None
        kill_service(tracker)

    out, messages, took = train_with_faults(tmp_path, monkeypatch, step_4=kill_once_recording)
    server.shutdown()
    assert (numbers(out), digest(out / "model")) == reference
    assert "/graphql" in Broken.requests
    assert "tracking: wandb records offline (" in capfd.readouterr().out
    assert len(list((out / "wandb").glob("offline-run-*"))) == 1
    assert len(messages) == 1 and "wandb sync" in messages[0] and "It is dropped" in messages[0]
    assert took["log"] < 1 and took["finish"] < tracker_thread.START_SECONDS


class FullDisk:
    """A file on a disk with `room` bytes left."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if self.room == 0:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self.file.close()


def test_a_full_disk(tmp_path, reference, monkeypatch):
    """Room for a line and a half of metrics until step 5, and for 2 kB in each file of wandb's service to the end."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    from wandb.sdk.lib.service import service_process

    def start(*arguments, **options):
        limit = (2000, 2000)
        return subprocess.Popen(
            *arguments, **options, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        )

    monkeypatch.setattr(service_process, "subprocess", types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    disks = []

    def open_on_full_disk(*arguments, **options):
        disks.append(FullDisk(open(*arguments, **options), room=500))
        return disks[0]

    monkeypatch.setattr(tracking, "open", open_on_full_disk, raising=False)
    written = []

    def make_room(tracker):
        written.append((tmp_path / "run" / "metrics.jsonl").stat().st_size)
        disks[0].room = 1_000_000

    out, messages, took = train_with_faults(tmp_path, monkeypatch, step_5=make_room)
    assert written == [500], "the disk was not full"
    assert (numbers(out), digest(out / "model")) == reference
    assert max(path.stat().st_size for path in (out / "wandb").rglob("*.wandb")) <= 2000
    assert messages[0].startswith("tracking: metrics.jsonl cannot be written ([Errno 28] No space left on device)")
    assert len(messages) <= 2  # wandb may or may not say that its own files are short
    assert took["log"] < 1 and took["finish"] < 10


@pytest.mark.parametrize("moment", ["_start", "_finish"])
def test_a_tracker_that_never_answers(tmp_path, reference, monkeypatch, moment):
    for name in ("START_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(tracker_thread, name, 0.5)
    released = threading.Event()
    for name in ("_start", "_finish"):
        monkeypatch.setattr(tracker_thread.TrackerThread, name, lambda *arguments: None)
    monkeypatch.setattr(tracker_thread.TrackerThread, moment, lambda *arguments: released.wait())
    out, messages, took = train_with_faults(tmp_path, monkeypatch, report_to="tensorboard")
    released.set()
    assert (numbers(out), digest(out / "model")) == reference
    assert len(messages) == 1 and "was not done 0.5 s after the end of the run" in messages[0]
    assert took["log"] < 0.4 and took["finish"] < 2
