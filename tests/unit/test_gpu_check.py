"""scripts/gpu_check.py without a GPU: budgets, verdicts and accounting; with one, that its instruments measure."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_check import command, contest, sizes, training  # noqa: E402
from gpu_check import device as devices  # noqa: E402
from gpu_check.report import OutOfTime, Report, TooSmall  # noqa: E402

needs_gpu = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")


def report(tmp_path, toy=False) -> Report:
    return Report("G1", "title", tmp_path / "G1.json", toy)


# --- the command ------------------------------------------------------------------------------------------------------


def test_refuses_where_there_is_no_accelerator(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "has_accelerator", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "out.json")])
    assert command.main() == 2
    message = capsys.readouterr().err
    assert "no accelerator" in message and "--toy" in message and message.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_names_of_parts():
    assert command.part_names("G3,G1") == ["G1", "G3"]
    with pytest.raises(argparse.ArgumentTypeError, match="'G9'.*G1,G2,G3,G4,G5,tests"):
        command.part_names("G1,G9")


def test_part_without_enough_time_is_not_begun(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "ended", lambda *_: pytest.fail("something was started"))
    left = command.BUDGETS["G1"].least + command.BUDGETS["G5"].least - 1
    found = command.run_parts(["G1"], False, left, ["G5"], tmp_path, None)
    assert found["G1"]["status"] == "skipped: time"


def test_part_whose_time_is_up_is_ended_and_leaves_what_it_has(monkeypatch, tmp_path):
    program = (
        "import subprocess, sys, time; from pathlib import Path; from gpu_check.report import Report\n"
        f"part = Report('G1', 'title', Path({str(tmp_path / 'G1.json')!r}), False)\n"
        "part.judge('speed', 2.0, at_least=1.0)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"Path({str(tmp_path / 'child')!r}).write_text(str(child.pid)); print('output', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(command, "worker", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setitem(command.BUDGETS, "G1", command.Budget(1, 5))
    with open(tmp_path / "log", "w") as log:
        found = command.run_parts(["G1"], False, 60, [], tmp_path, log)
    assert found["G1"]["status"] == "stopped: time"
    assert [(bar["name"], bar["verdict"]) for bar in found["G1"]["bars"]] == [("speed", "holds")]
    assert "output" in (tmp_path / "log").read_text()
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_part_that_dies_has_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "worker", lambda *_: [sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    with open(tmp_path / "log", "w") as log:
        found = command.run_parts(["G1"], False, 1000, [], tmp_path, log)
    assert found["G1"]["status"] == "failed"
    assert "code 3: why" in found["G1"]["error"]


def test_whole_run_writes_one_file(monkeypatch, tmp_path, capsys):
    """Two parts, of which the second misses a bar; pytest stands for itself, with nothing to select."""

    def worker(parts, toy, seconds, folder):
        program = (
            "import sys; from pathlib import Path; from gpu_check.report import Report\n"
            f"path = Path({str(folder / parts[0])!r} + '.json')\n"
            f"part = Report({parts[0]!r}, 'title', path, False, machine=dict(a=1))\n"
            f"part.judge('speed', 2.0, at_least={1.0 if parts == ['G1'] else 3.0}); part.finish()"
        )
        return [sys.executable, "-c", program]

    monkeypatch.setattr(command, "worker", worker)
    monkeypatch.setattr(command, "has_accelerator", lambda: True)
    output = tmp_path / "new" / "out.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--only", "G1,G2", "--output", str(output)])
    assert command.main() == 1
    results = json.loads(output.read_text())
    assert {name: part["status"] for name, part in results["parts"].items()} == {"G1": "holds", "G2": "missed"}
    assert results["verdict"] == "missed" and results["machine"] == {"a": 1} and not results["toy"]
    assert "| at least 3 | missed |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "output,code,expected",
    [
        ("1 passed, 9 deselected in 3.20s", 0, "holds"),
        ("1 skipped, 9 deselected in 3.20s", 0, "no tests"),
        ("10 deselected in 3.20s", 5, "no tests"),
        ("1 failed, 2 passed in 3.20s", 1, "failed"),
        ("half a li", None, "stopped: time"),
    ],
)
def test_summary_of_pytest(output, code, expected):
    status = None if code is not None else "stopped: time"
    found = command.test_result({}, status, code, f"....\n{output}\n")
    assert found["status"] == expected
    assert found["summary"] == ("" if code is None else output)


@pytest.mark.parametrize(
    "bars,statuses,toy,expected",
    [
        (["holds", "not built yet"], ["holds"], False, "holds"),
        (["holds", "inconclusive"], ["inconclusive"], False, "inconclusive"),
        (["holds", "inconclusive", "missed"], ["missed"], False, "missed"),
        (["holds"], ["holds", "skipped: time"], False, "holds"),
        (["holds"], ["holds", "failed"], False, "failed"),
        ([], ["skipped: time", "no tests"], False, "nothing was measured"),
        (["toy"], ["toy", "no tests"], True, "toy"),
        (["toy"], ["toy", "failed"], True, "failed"),
    ],
)
def test_verdict_of_all(bars, statuses, toy, expected):
    parts = {str(i): {"status": status, "bars": []} for i, status in enumerate(statuses)}
    parts["0"]["bars"] = [{"verdict": verdict} for verdict in bars]
    assert command.verdict(parts, toy) == expected


# --- reports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value,limit,doubt,expected",
    [
        (1.0, {"at_most": 1.0}, "", "holds"),
        (1.01, {"at_most": 1.0}, "", "missed"),
        (0.98, {"at_least": 0.98}, "", "holds"),
        (0.97, {"at_least": 0.98}, "", "missed"),
        (2.0, {"at_most": 1.0}, "unsteady", "inconclusive"),
        (None, {"at_most": 1.0}, "", "not measured"),
        (float("nan"), {"at_most": 1.0}, "", "missed"),
        (float("inf"), {"at_least": 1.0}, "", "missed"),
    ],
)
def test_bar(tmp_path, value, limit, doubt, expected):
    real, toy = report(tmp_path), report(tmp_path, toy=True)
    for one in (real, toy):
        one.judge("bar", value, doubt=doubt, **limit)
        one.finish()
    assert (real.bars[0].verdict, real.status) == (expected, expected)
    assert (toy.bars[0].verdict, toy.status) == ("toy", "toy")  # whatever the figure
    json.loads(real.path.read_text(), parse_constant=lambda text: pytest.fail(text))


def test_worst_bar_is_the_status(tmp_path):
    one = report(tmp_path)
    one.judge("first", 1.0, at_most=2.0)
    one.leave_out("second", "not built yet", "later")
    assert json.loads(one.path.read_text())["status"] == "running"
    one.judge("third", 3.0, at_most=2.0)
    one.finish()
    assert json.loads(one.path.read_text())["status"] == "missed"


# --- contests ---------------------------------------------------------------------------------------------------------


def test_rounds_that_fit():
    wanted = contest.Rounds(10, 30)
    assert contest.rounds_that_fit(40.0, 1.0, wanted) == wanted
    assert contest.rounds_that_fit(28.0, 1.0, wanted) == contest.Rounds(7, 21)
    with pytest.raises(OutOfTime):
        contest.rounds_that_fit(12.0, 1.0, wanted)


def test_device_that_is_too_small(monkeypatch):
    monkeypatch.setattr(devices, "total_bytes", lambda _: 100)
    contest.check_memory(None, 3, held=10, highest=70)
    with pytest.raises(TooSmall, match="3 contenders"):
        contest.check_memory(None, 3, held=10, highest=75)


class Allocator:
    """Memory counters as an accelerator has them."""

    def __init__(self, monkeypatch):
        self.now = self.peak = 1000  # of somebody else
        monkeypatch.setattr(devices, "allocated_bytes", lambda _: self.now)
        monkeypatch.setattr(devices, "peak_bytes", lambda _: self.peak)
        monkeypatch.setattr(devices, "reset_peak", lambda _: setattr(self, "peak", self.now))

    def take(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def trains(allocator: Allocator, model: int, work: int, state: int, spike: int, steps: int):
    """Takes `model` and, in its first step, `spike` for a while and `state` for good; `work` comes and goes."""

    def contender(step_done):
        allocator.take(model)
        for step in range(steps):
            allocator.take(spike if step == 0 else work)
            allocator.take(-spike if step == 0 else -work)
            allocator.take(state if step == 0 else 0)
            step_done()

    return contender


def test_memory_of_contenders_is_kept_apart(monkeypatch):
    allocator, rounds = Allocator(monkeypatch), contest.Rounds(1, 3)
    contenders = {
        "small": trains(allocator, 100, 10, 20, 5000, rounds.total),
        "large": trains(allocator, 700, 50, 200, 0, rounds.total),
    }
    result = contest.hold(contenders, rounds, torch.device("cpu"))
    assert result.peaks == {"small": 130, "large": 950}
    assert {len(values) for values in result.seconds.values()} == {3}


def test_peer_that_fails_is_left_out(monkeypatch):
    allocator, rounds = Allocator(monkeypatch), contest.Rounds(1, 3)

    def fails(step_done):
        step_done()
        raise RuntimeError("no such kernel")

    steady = trains(allocator, 100, 10, 0, 0, rounds.total)
    result = contest.hold({"ours": steady, "peer": fails}, rounds, torch.device("cpu"), optional=("peer",))
    assert set(result.seconds) == set(result.peaks) == {"ours"}
    assert result.failures == {"peer": "RuntimeError: no such kernel"}
    with pytest.raises(RuntimeError, match="no such kernel"):
        contest.hold({"ours": fails, "peer": steady}, rounds, torch.device("cpu"), optional=("peer",))


def test_unequal_copies_cast_doubt():
    seconds = {"a": [1.0, 1.0, 1.0], "same": [1.01, 1.0, 1.02], "other": [1.2, 1.2, 1.2]}
    result = contest.Result(seconds, dict.fromkeys(seconds, 0))
    assert result.doubt("same", "a") == ""
    assert "1.200" in result.doubt("other", "a")
    assert result.ratio("other", "a") == pytest.approx(1.2)


def test_clock_reads_events(monkeypatch):
    """An event is recorded, waited for, and its milliseconds since the first become seconds."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.at = None

        def record(self):
            self.at = len(happened) * 1500.0
            happened.append("record")

        def synchronize(self):
            happened.append("synchronize")

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch, "get_device_module", lambda _: argparse.Namespace(Event=Event))
    clock = devices.Clock(torch.device("meta"))
    assert [clock(), clock()] == [3.0, 6.0]
    assert happened == ["record", "synchronize"] * 3


def test_what_the_benchmarks_lend(tmp_path):
    from benchmarks import loop

    settings = loop.settings(tmp_path, 7)
    assert settings["optim"] == "adamw_torch_fused" and settings["max_steps"] == 7
    # Laid over by what a GPU needs.
    assert {"per_device_train_batch_size", "learning_rate", "bf16", "use_cpu", "dataloader_pin_memory"} <= set(settings)
    assert callable(loop.silenced) and callable(loop.when_done)


# --- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape,parameters",
    [(sizes.LLAMA_1B, 1_235_814_400), (sizes.LLAMA_3B, 3_212_749_824), (sizes.LLAMA_8B, 8_030_261_248)],
    ids=["1B", "3B", "8B"],
)
def test_shapes_are_the_published_ones(shape, parameters):
    assert sum(p.numel() for p in training.build(shape, torch.bfloat16, "meta").parameters()) == parameters


def test_flops_are_those_of_the_bar():
    """45 % of 989 TFLOP/s are about 41,800 tokens per second at 8,192 tokens."""
    counter = training.flops_counter(sizes.LLAMA_1B, lora=False)
    assert 0.45 * 989e12 / (counter.training(8192, 8192**2) / 8192) == pytest.approx(41_800, rel=0.005)


def test_plan_of_an_adapter_counts_it(monkeypatch):
    from peft import LoraConfig, get_peft_model

    shape = sizes.TOY_UNTIED
    model = training.build(shape, torch.bfloat16, "cpu")
    settings = LoraConfig(task_type="CAUSAL_LM", r=training.LORA_RANK, target_modules="all-linear")
    get_peft_model(model, settings)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    counter = training.flops_counter(shape, lora=True)
    assert counter.trainable_parameters == trained
    full, lora = (training.planned_peak(shape, one, 64, False) for one in (False, True))
    assert 16 * trained < lora < full


def test_recipe_trains_on_what_it_is_given(tmp_path):
    """The recipe's own loop, with weights and rows from memory, stopped where it counts its last step."""
    shape, steps = sizes.TOY_TIED, []
    before = dict(os.environ)
    training.recipe(
        lambda: steps.append(time.monotonic()),
        3,
        shape,
        training.random_rows(shape, 32),
        tmp_path,
        torch.device("cpu"),
        logging_steps=1,
    )
    assert len(steps) == 3
    # The third line would come after the step that ends the run.
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/tokens_seen"] for line in metrics] == [32, 64]
    # A model that knows nothing is right once in `vocabulary` times: these are its rows, and all their tokens count.
    assert metrics[0]["train/loss"] == pytest.approx(torch.tensor(shape.vocabulary).log().item(), rel=0.02)
    assert json.loads((tmp_path / "run" / "topology.json").read_text())["precision"] == "bf16"
    assert not (tmp_path / "run" / "model").exists()
    assert dict(os.environ) == before


# --- with a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_device_clock_agrees_with_the_hosts():
    device = devices.find()
    clock = devices.Clock(device)
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    host, began = time.perf_counter(), clock()
    for _ in range(50):
        matrix @ matrix
    seconds = clock() - began
    assert seconds == pytest.approx(time.perf_counter() - host, rel=0.1)
    assert seconds > 0.001


@pytest.mark.gpu
@needs_gpu
def test_device_memory_is_counted_and_limited():
    device = devices.find()
    devices.release(device)
    before = devices.allocated_bytes(device)
    devices.reset_peak(device)
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    del block
    assert devices.peak_bytes(device) - before == 64 << 20
    assert devices.allocated_bytes(device) == before
    devices.release(device)
    with devices.limited(device, 256 << 20):
        torch.empty(128 << 20, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 << 20, dtype=torch.uint8, device=device)
    torch.empty(512 << 20, dtype=torch.uint8, device=device)


@pytest.mark.gpu
@needs_gpu
def test_recipe_trains_on_the_device(tmp_path):
    device, shape = devices.find(), sizes.TOY_TIED
    watch = training.PeakWatch(device)
    training.recipe(watch, 3, shape, training.random_rows(shape, 64), tmp_path, device, torch_compile=True)
    assert watch.steps == 3 and watch.bytes > 0
