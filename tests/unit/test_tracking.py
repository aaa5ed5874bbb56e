"""Records of a run with the real Accelerator and the real trackers, offline."""

import dataclasses
import enum
import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from accelerate import Accelerator

from oneloop import config, sharding, tracking

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
    yield
    # wandb reads the environment once a process; the next test has another one.
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


TOPOLOGY = sharding.Obtained("single", 1, "cpu", "fp32", "none", {}, 1.0, 1.0)


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
    assert names(tmp_path / "new" / "run") == ["metrics.jsonl", "recipe.yaml", "topology.json"]


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
import os, sys
from accelerate import Accelerator
from oneloop import config, sharding, tracking
asked = config.RecipeConfig(model_name_or_path="m", dataset_name="d", output_dir=sys.argv[1])
obtained = sharding.Obtained("single", 1, "cpu", "fp32", "none", {}, 1.0, 1.0)
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


def test_with_key_but_without_network_it_records_offline(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    url = f"http://127.0.0.1:{port}"
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert tracking._why_offline(url) == f"{url} cannot be reached"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert tracking._why_offline(url) is None


def test_reachable_host_and_host_behind_a_proxy(monkeypatch):
    for name in ("http_proxy", "no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert tracking._is_reachable(here)
        monkeypatch.setenv("http_proxy", here)
        assert tracking._is_reachable("http://does-not-exist.invalid")
    assert not tracking._is_reachable("http://does-not-exist.invalid")


def test_a_slow_network_costs_no_more_than_the_limit(monkeypatch):
    monkeypatch.setattr(tracking, "NETWORK_TIMEOUT_SECONDS", 0.3)

    def slow_name_lookup(*arguments, **options):  # obeys no socket timeout
        time.sleep(3)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", slow_name_lookup)
    began = time.monotonic()
    assert not tracking._is_reachable("http://127.0.0.1:9")
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


def test_a_tracker_that_fails_while_logging_is_dropped_with_one_warning(tmp_path, accelerator, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = start(accelerator, tmp_path, "wandb")
    tracker.log({"train/loss": 3.0}, step=1)
    wandb.run.finish()  # logging to a finished run raises
    with pytest.warns(RuntimeWarning, match="tracking: wandb failed at step 2 and is dropped") as caught:
        tracker.log({"train/loss": 2.0}, step=2)
        tracker.log({"train/loss": 1.0}, step=3)
    assert len(caught) == 1
    tracker.finish(failed=True)
    assert [line["train/loss"] for line in lines(tmp_path)] == [3.0, 2.0, 1.0]


def test_a_tracker_that_cannot_start_is_dropped_with_one_warning(tmp_path, accelerator, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "not/allowed")
    with pytest.warns(RuntimeWarning, match="tracking: wandb did not start and is dropped") as caught:
        tracker = start(accelerator, tmp_path, "wandb")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.log({"train/loss": 1.0}, step=1)
        tracker.finish()
    assert lines(tmp_path) == [{"step": 1, "train/loss": 1.0}]


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
