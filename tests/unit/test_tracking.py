"""Records of a run with the real Accelerator and the real trackers, offline."""

import contextlib
import dataclasses
import enum
import errno
import importlib.util
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from accelerate import Accelerator

from oneloop import config, redaction, tracker_thread, tracking

SRC = Path(__file__).parents[2] / "src"


class Kind(enum.Enum):
    LORA = "lora"


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """No key, no settings of whoever runs the tests, and a home of its own."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("ONELOOP_UMASK", raising=False)
    mask = os.umask(0o022)
    yield
    os.umask(mask)
    # wandb reads the environment once a process; the next test has another one.
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@dataclasses.dataclass
class Topology:
    """Stands in for what `sharding.obtained` returns; the records take whatever fields it has."""

    strategy: str = "single"
    world_size: int = 1
    wrapped: dict = dataclasses.field(default_factory=dict)
    parameter_fraction: float = 1.0


TOPOLOGY = Topology()


def start(accelerator, output_dir, report_to=None, **fields):
    """What a recipe does to open its records."""
    asked = config.RecipeConfig(
        model_name_or_path="m", dataset_name="d", output_dir=output_dir, report_to=report_to, **fields
    )
    return tracking.start(accelerator, asked, TOPOLOGY)


def lines(output_dir):
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def wandb_records(output_dir):
    """Records of the one offline run in `output_dir`: blocks of 32 KiB holding (checksum, length, kind) and a part of
    a record each."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = list((output_dir / "wandb").glob("*run-*"))
    assert len(runs) == 1 and runs[0].name.startswith("offline-run-"), runs
    [file] = runs[0].glob("*.wandb")
    raw, position, part, records = file.read_bytes(), 7, b"", []
    while position + 7 <= len(raw):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", raw[position : position + 7])
        part += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            record = Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    return records


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


def test_every_line_is_on_disk_at_once_and_valid_json(tmp_path, accelerator):
    tracker = start(accelerator, tmp_path / "new" / "run", "none")
    tracker.log({"train/loss": 2.5, "train/tokens": 7}, step=1)
    tracker.log({"train/loss": float("nan"), "train/grad_norm": float("inf")}, step=2)
    assert lines(tmp_path / "new" / "run") == [
        {"step": 1, "train/loss": 2.5, "train/tokens": 7},
        {"step": 2, "train/loss": "nan", "train/grad_norm": "inf"},
    ]
    tracker.finish()
    tracker.finish()
    assert tracker.run_id is None
    assert names(tmp_path / "new" / "run") == ["metrics.jsonl", "recipe.yaml", "sources.json", "topology.json"]


def test_config_and_topology_are_written_beside_the_metrics(tmp_path, accelerator, capsys):
    start(accelerator, tmp_path, "none", learning_rate=1e-5).finish()
    again = config.parse(config.RecipeConfig, ["--config", str(tmp_path / "recipe.yaml")])
    assert (again.learning_rate, again.output_dir) == (1e-5, str(tmp_path))
    assert json.loads((tmp_path / "topology.json").read_text())["strategy"] == "single"
    assert "learning_rate: 1.0e-05" in capsys.readouterr().out


def test_a_second_run_in_the_same_folder_keeps_the_first_ones_metrics(tmp_path, accelerator):
    for loss in (1.0, 2.0, 3.0):
        tracker = start(accelerator, tmp_path, "none")
        tracker.log({"train/loss": loss}, step=1)
        tracker.finish()
    files = ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert [json.loads((tmp_path / file).read_text())["train/loss"] for file in files] == [1.0, 2.0, 3.0]


def test_a_resumed_run_appends_even_after_an_unfinished_line(tmp_path, accelerator):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 9.0}\n{"step": 2, "train/loss": 8.0}\n{"step": 3, "tr'
    )
    tracker = tracking.Tracker(accelerator, {}, tmp_path, "none")
    tracker.log({"train/loss": 7.5}, step=2)
    tracker.log({"train/loss": "nan"}, step=3)
    tracker.finish()
    series = tracking.read_metrics(tmp_path)
    assert list(series["train/loss"]) == [1, 2, 3]
    assert series["train/loss"][2] == 7.5 and series["train/loss"][3] != series["train/loss"][3]


def test_other_processes_write_nothing(tmp_path):
    class OtherProcess:
        is_main_process = False

    tracker = start(OtherProcess(), tmp_path / "out", "wandb")
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.finish()
    assert not (tmp_path / "out").exists()


# --- wandb ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failed", [False, True])
def test_one_offline_run_with_config_metrics_and_outcome(tmp_path, accelerator, monkeypatch, failed):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "my-project")
    fields = {"learning_rate": 1e-5, "use_peft": True, "lora_target_modules": ["q_proj"]}
    tracker = start(accelerator, tmp_path / "run-a", **fields)
    tracker.log({"eval/loss": 3.0}, step=0)
    tracker.log({"train/loss": 2.0}, step=1)
    tracker.log({"train/loss": 1.0, "train/lr": 1e-5}, step=5)
    assert tracker.run_id
    tracker.finish(failed=failed)
    assert accelerator.trackers == []

    records = wandb_records(tmp_path / "run-a")
    [run] = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name, run.run_id) == ("my-project", "run-a", tracker.run_id)
    stored = {u.key: json.loads(u.value_json) for record in [run.config] for u in record.update}
    for record in records:
        stored |= {u.key or u.nested_key[0]: json.loads(u.value_json) for u in record.config.update}
    expected = config.to_dict(config.parse(config.RecipeConfig, ["--config", str(tmp_path / "run-a" / "recipe.yaml")]))
    expected |= {f"topology.{name}": value for name, value in dataclasses.asdict(TOPOLOGY).items() if value != {}}
    assert {key: stored[key] for key in stored if not key.startswith("_")} == expected
    assert stored["learning_rate"] == 1e-5 and stored["topology.world_size"] == 1
    history = []
    for record in records:
        if record.HasField("history"):
            items = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
            history.append((record.history.step.num, {key: items[key] for key in items if not key.startswith("_")}))
    assert history == [
        (0, {"eval/loss": 3.0}),
        (1, {"train/loss": 2.0}),
        (5, {"train/loss": 1.0, "train/lr": 1e-5}),
    ]
    [exit_record] = [record.exit for record in records if record.HasField("exit")]
    assert exit_record.exit_code == int(failed)
    [files] = (tmp_path / "run-a" / "wandb").glob("offline-run-*/files")
    assert not list(files.rglob("wandb-metadata.json")) and not list(files.rglob("code"))


def test_settings_become_plain_values():
    import torch

    nested = {"path": Path("/a"), "kind": Kind.LORA, "dtype": torch.bfloat16, "names": ["a", Path("b")], "none": None}
    nested |= {"limit": float("inf"), "outer": {"inner": {"size": 1}}}
    plain = {"path": "/a", "kind": "lora", "dtype": "torch.bfloat16", "names": ["a", "b"], "none": None}
    plain |= {"limit": "inf", "outer.inner.size": 1}
    assert tracking.plain(nested) == plain
    assert tracking.plain({"names": ["a"], "none": None}, only_scalars=True) == {"names": "['a']", "none": "None"}


TRAIN = """
import dataclasses, os, sys
from accelerate import Accelerator
from oneloop import config, tracking
asked = config.RecipeConfig(model_name_or_path="m", dataset_name="d", output_dir=sys.argv[1])
obtained = dataclasses.make_dataclass("Obtained", [("world_size", int)])(1)
tracker = tracking.start(Accelerator(cpu=True), asked, obtained)
tracker.log({"train/loss": 1.0}, step=1)
tracking.finish_open(failed=True)
print("trained", flush=True)
os._exit(3)
"""


def test_without_key_and_stdin_nothing_is_asked_and_a_hard_exit_loses_nothing(tmp_path):
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "run")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    )
    assert result.returncode == 3, result.stderr
    assert "tracking: wandb records offline (no API key" in result.stdout and "trained" in result.stdout
    assert time.monotonic() - began < 60
    records = wandb_records(tmp_path / "run")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]
    assert [record.history.step.num for record in records if record.HasField("history")] == [1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_with_key_but_without_network_it_records_offline(monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    for name, value in {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": url}.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    import wandb

    settings = wandb.setup().settings
    assert tracker_thread._why_offline(settings) == f"{url} does not answer"
    assert settings.silent, "the variable of these tests"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert tracker_thread._why_offline(settings) is None


@contextlib.contextmanager
def server(answer: bytes | None):
    """A server on this machine that sends `answer` to whoever connects and hangs up; None never answers. Yields its
    address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.close()


OK, REFUSED, BROKEN = (f"HTTP/1.0 {status}\r\n\r\n".encode() for status in ("200 OK", "404 Not Found", "500 Broken"))


def test_reachable_is_what_answers(monkeypatch):
    for name in ("http_proxy", "no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for answer, reachable in {OK: True, REFUSED: True, b"no HTTP at all": True, b"": True, BROKEN: False}.items():
        with server(answer) as url:
            assert tracker_thread._is_reachable(url) is reachable, answer
    with server(None) as url, monkeypatch.context() as hurried:
        hurried.setattr(tracker_thread, "NETWORK_TIMEOUT_SECONDS", 0.3)
        assert not tracker_thread._is_reachable(url)
    assert not tracker_thread._is_reachable(f"http://127.0.0.1:{free_port()}")
    with server(OK) as url:
        monkeypatch.setenv("http_proxy", url)
        assert tracker_thread._is_reachable("http://does-not-exist.invalid")
    monkeypatch.delenv("http_proxy")
    assert not tracker_thread._is_reachable("http://does-not-exist.invalid")


def test_a_slow_network_costs_no_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(tracker_thread, "NETWORK_TIMEOUT_SECONDS", 0.3)

    def slow_name_lookup(*arguments, **options):  # obeys no socket timeout
        time.sleep(3)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", slow_name_lookup)
    began = time.monotonic()
    assert not tracker_thread._is_reachable("http://127.0.0.1:9")
    assert time.monotonic() - began < 2


def test_disabled_leaves_no_files(tmp_path, accelerator, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = start(accelerator, tmp_path / "run", "wandb")
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.finish()
    assert "wandb" not in names(tmp_path / "run")
    assert lines(tmp_path / "run")


def test_without_wandb_one_line_says_so(tmp_path, accelerator, monkeypatch, capsys):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    start(accelerator, tmp_path).finish()
    assert capsys.readouterr().out.count("tracking: wandb is not installed") == 1


def test_a_tracker_that_is_not_installed_is_refused(tmp_path, accelerator, monkeypatch):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    with pytest.raises(ValueError, match="report_to is trackio but that package is not installed: pip install trackio"):
        start(accelerator, tmp_path, "trackio")


# --- trackers that fail -----------------------------------------------------------------------------------------------


class FakeTracker:
    """Stands in for the package behind the thread: `calls` says what it does, waiting or raising where it is told."""

    def __init__(self, accelerator, monkeypatch):
        self.logged = []
        self.started = self.logging = self.closing = lambda: None
        monkeypatch.setattr(tracker_thread.TrackerThread, "_start", lambda thread, *arguments: self.started())
        monkeypatch.setattr(tracker_thread.TrackerThread, "_finish", lambda thread: self.closing())
        monkeypatch.setattr(accelerator, "log", self.log, raising=False)

    def log(self, values, step):
        self.logging()
        self.logged.append(step)


@pytest.fixture
def fake(accelerator, monkeypatch):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["trackio"])
    return FakeTracker(accelerator, monkeypatch)


def fail(error):
    raise error


def logged_three_steps(accelerator, folder):
    """Seconds that the calls of a run took, and the warnings it gave."""
    took = []

    def timed(call, *arguments, **options):
        began = time.monotonic()
        result = call(*arguments, **options)
        took.append(time.monotonic() - began)
        return result

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracker = timed(start, accelerator, folder, "trackio")
        for step in (1, 2, 3):
            timed(tracker.log, {"train/loss": 1.0 * step}, step=step)
            time.sleep(0.1)
        timed(tracker.finish)
    assert [line["train/loss"] for line in lines(folder)] == [1.0, 2.0, 3.0]
    assert accelerator.trackers == []
    return took, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("moment", "what"),
    [("started", "did not start"), ("logging", "failed at step 1"), ("closing", "did not close")],
)
@pytest.mark.parametrize("error", [RuntimeError("no such room"), SystemExit(3)])
def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path, accelerator, fake, moment, what, error):
    setattr(fake, moment, lambda: fail(error))
    took, messages = logged_three_steps(accelerator, tmp_path)
    assert messages == [f"tracking: trackio {what} ({error}). It is dropped; metrics.jsonl has everything"]
    assert max(took) < 2
    assert fake.logged == ([1, 2, 3] if moment == "closing" else [])


@pytest.mark.parametrize("moment", ["started", "logging", "closing"])
def test_a_tracker_that_hangs_holds_nothing_up(tmp_path, accelerator, fake, monkeypatch, moment):
    for name in ("START_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(tracker_thread, name, 0.5)
    released = threading.Event()
    setattr(fake, moment, released.wait)
    took, messages = logged_three_steps(accelerator, tmp_path)
    released.set()
    assert messages == [
        "tracking: trackio was not done 0.5 s after the end of the run. It is dropped; metrics.jsonl has everything"
    ]
    assert max(took[1:4]) < 0.3, "log waited"
    assert max(took) < 2


def test_a_call_without_end_is_given_up_during_the_run(tmp_path, accelerator, fake, monkeypatch):
    monkeypatch.setattr(tracker_thread, "GIVE_UP_SECONDS", 0.05)
    released = threading.Event()
    fake.logging = released.wait
    took, messages = logged_three_steps(accelerator, tmp_path)
    released.set()
    assert messages == ["tracking: trackio has not answered for 0.05 s. It is dropped; metrics.jsonl has everything"]
    assert max(took) < 2


def test_a_tracker_that_starts_late_catches_up(tmp_path, accelerator, fake, monkeypatch, capsys):
    monkeypatch.setattr(tracker_thread, "START_SECONDS", 0.1)
    fake.started = lambda: time.sleep(0.6)
    _, messages = logged_three_steps(accelerator, tmp_path)
    assert messages == [] and fake.logged == [1, 2, 3]
    assert "tracking: trackio has not started yet" in capsys.readouterr().out


def test_a_failed_run_waits_less(tmp_path, accelerator, fake, monkeypatch):
    monkeypatch.setattr(tracker_thread, "FAILED_END_SECONDS", 0.1)
    released = threading.Event()
    fake.closing = released.wait
    start(accelerator, tmp_path, "trackio")
    with pytest.warns(RuntimeWarning, match="trackio was not done 0.1 s after the end"):
        tracking.finish_open(failed=True)
    released.set()


def test_a_service_that_nobody_can_wait_for_is_killed(tmp_path, accelerator, fake, monkeypatch):
    """Else the end of Python would wait for it: wandb has an exit handler that does."""
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["wandb"])
    monkeypatch.setattr(tracker_thread, "END_SECONDS", 0.2)
    (tmp_path / "wandb-core").symlink_to(shutil.which("sleep"))
    with subprocess.Popen([tmp_path / "wandb-core", "60"]) as service:
        fake.closing = service.wait
        tracker = start(accelerator, tmp_path / "run", "wandb")
        with pytest.warns(RuntimeWarning, match="wandb was not done 0.2 s after the end of the run"):
            tracker.finish()
        assert service.wait(timeout=5) == -signal.SIGKILL


def test_a_run_that_somebody_else_finished_is_dropped(tmp_path, accelerator, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "not/allowed")
    with pytest.warns(RuntimeWarning, match="tracking: wandb did not start") as caught:
        tracker = start(accelerator, tmp_path, "wandb")
        tracker.finish()
    assert len(caught) == 1
    wandb.teardown()  # which reads the environment anew
    monkeypatch.setenv("WANDB_PROJECT", "allowed")
    tracker = start(accelerator, tmp_path, "wandb")
    wandb.run.finish()  # logging to a finished run raises
    with pytest.warns(RuntimeWarning, match="tracking: wandb failed at step 2.*wandb sync .*offline-run") as caught:
        tracker.log({"train/loss": 2.0}, step=2)
        tracker.finish(failed=True)
    assert len(caught) == 1
    assert [line["train/loss"] for line in lines(tmp_path)] == [2.0]


# --- full disks -------------------------------------------------------------------------------------------------------


class Disk:
    """Stands in for the file of the metrics: takes `room` bytes, then raises what a full disk does."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self):
        self.file.close()


@pytest.mark.parametrize("room", range(0, 75, 7))
def test_lines_wait_for_room_on_the_disk(tmp_path, accelerator, monkeypatch, room):
    disks = []
    monkeypatch.setattr(
        tracking, "open", lambda *args, **kw: disks.append(Disk(open(*args, **kw), room)) or disks[0], raising=False
    )
    tracker = start(accelerator, tmp_path, "none")
    with pytest.warns(RuntimeWarning, match="metrics.jsonl cannot be written .*No space left.*kept") as caught:
        for step in (1, 2, 3):
            tracker.log({"train/loss": 1.0 * step}, step=step)
    assert len(caught) == 1
    assert (tmp_path / "metrics.jsonl").stat().st_size == room
    disks[0].room = 10_000
    tracker.log({"train/loss": 4.0}, step=4)
    tracker.finish()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_a_disk_that_stays_full_costs_the_lines_and_nothing_else(tmp_path, accelerator):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (tmp_path / "topology.json").symlink_to("/dev/full")
    with pytest.warns(RuntimeWarning) as caught:
        tracker = start(accelerator, tmp_path, "none")
        tracker.log({"train/loss": 1.0}, step=1)
        tracker.log({"train/loss": 1.0}, step=2)
        tracker.finish()
    assert [str(warning.message).split(" (")[0] for warning in caught] == [
        "tracking: topology.json is not written",
        "tracking: metrics.jsonl cannot be written",
        "tracking: metrics.jsonl lacks its last 2 lines",
    ]


def test_a_screen_that_is_gone_ends_nothing(tmp_path, accelerator, monkeypatch):
    tracker = start(accelerator, tmp_path, "none")
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        tracker.log({"train/loss": 1.0}, step=1)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    tracker.finish()
    assert len(lines(tmp_path)) == 1


# --- permissions and secrets ------------------------------------------------------------------------------------------


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize(("mask", "folder", "file"), [(None, 0o700, 0o600), ("022", 0o755, 0o644), ("7", 0o770, 0o660)])
def test_records_are_closed_to_others(tmp_path, accelerator, monkeypatch, mask, folder, file):
    if mask is not None:
        monkeypatch.setenv("ONELOOP_UMASK", mask)
    tracker = start(accelerator, tmp_path / "run", "none")
    tracker.log({"train/loss": 1.0}, step=1)
    tracker.finish()
    tracking.plot(tmp_path / "run")
    written = ("metrics.jsonl", "recipe.yaml", "sources.json", "topology.json", "loss.png")
    assert modes(tmp_path / "run") == {"run": folder} | dict.fromkeys(written, file)


def test_a_folder_that_exists_keeps_its_mode(tmp_path, accelerator):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o751)
    start(accelerator, tmp_path / "mine", "none").finish()
    assert modes(tmp_path / "mine") == {"mine": 0o751} | dict.fromkeys(
        ("metrics.jsonl", "recipe.yaml", "sources.json", "topology.json"), 0o600
    )


@pytest.mark.parametrize("text", ["rwx", "8", "0o1000", "-1", "777", "100"])
def test_a_mask_that_is_none_is_refused(tmp_path, accelerator, monkeypatch, text):
    monkeypatch.setenv("ONELOOP_UMASK", text)
    with pytest.raises(ValueError, match=f"ONELOOP_UMASK is '{text}': give octal digits"):
        start(accelerator, tmp_path, "none")


def test_a_setting_that_holds_a_secret_is_recorded_without_it(tmp_path, accelerator, capsys):
    password = "pW7" + "q" * 9
    asked = f"https://me:{password}@example.com/rows.jsonl"
    with pytest.warns(RuntimeWarning, match="eval_dataset_name holds what looks like a secret") as caught:
        tracker = start(accelerator, tmp_path, "none", eval_dataset_name=asked)
    assert len(caught) == 1
    tracker.log({f"eval/{asked}": 1.0}, step=1)
    tracker.finish()
    written = "".join(path.read_text() for path in tmp_path.iterdir()) + capsys.readouterr().out
    assert password not in written
    shown = f"https://{redaction.MARK}@example.com/rows.jsonl"
    again = config.parse(config.RecipeConfig, ["--config", str(tmp_path / "recipe.yaml")])
    assert again.eval_dataset_name == shown
    assert list(lines(tmp_path)[0]) == ["step", f"eval/{shown}"]


# --- other trackers ---------------------------------------------------------------------------------------------------


def test_tensorboard_holds_the_same_numbers(tmp_path, accelerator):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = start(accelerator, tmp_path / "run", "tensorboard")
    tracker.log({"train/loss": 2.0}, step=1)
    tracker.log({"train/loss": 1.0}, step=4)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "run" / "oneloop")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (4, 1.0)]


def test_trackio_keeps_its_files_with_the_run(tmp_path, accelerator, monkeypatch):
    # Not importorskip: trackio reads the folder's name when it is imported.
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is optional")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    tracker = start(accelerator, tmp_path / "run", "trackio")
    tracker.log({"train/loss": 2.0}, step=1)
    tracker.finish()
    assert lines(tmp_path / "run") == [{"step": 1, "train/loss": 2.0}]
    assert list((tmp_path / "run" / "trackio").iterdir()), "nothing was recorded there"


# --- picture ----------------------------------------------------------------------------------------------------------


def test_plot_draws_what_was_logged(tmp_path, accelerator):
    from matplotlib.image import imread

    tracker = start(accelerator, tmp_path, "none")
    assert tracking.plot(tmp_path) is None
    for step in range(1, 21):
        tracker.log({"train/loss": 5 / step, "train/lr": 1e-4, "train/grad_norm": float("nan")}, step=step)
    tracker.log({"eval/loss": 4.0}, step=20)
    tracker.finish()
    picture = imread(tracking.plot(tmp_path))
    assert picture.shape[0] > 600 and picture.shape[1] > 900
    blue, orange = ((picture[..., :3] - color) ** 2 for color in ((0.12, 0.47, 0.71), (1.0, 0.5, 0.05)))
    assert (blue.sum(-1) < 0.01).sum() > 200 and (orange.sum(-1) < 0.01).sum() > 20
