"""Training that is killed over and over ends as one that was not (R1), shown by scripts/chaos.py; and that it would
notice if it did not, shown on stand-ins for a training that do it wrong in one way each.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equivalence import launcher
from tests.recipes import runs
from tests.recipes.test_sft import UNEVEN

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from chaos import comparison  # noqa: E402

CHAOS = ROOT / "scripts" / "chaos.py"

FAKE = '''
"""A training of 60 steps without libraries: resumes, saves every 5 steps in some 20 ms, and exports. As under a
launcher, the work is done by a child."""
import json, os, pathlib, shutil, subprocess, sys, time

fault, output = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
if "LOCAL_RANK" not in os.environ:
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": "0"}).returncode != 0)
states = output / "states"
states.mkdir(parents=True, exist_ok=True)
for path in states.glob("*.partial"):
    shutil.rmtree(path)
found = sorted(states.iterdir())
step, value = 0, 1.0
if found and fault == "goes back":
    found = found[:-1]
if found:
    step, value = json.loads((found[-1] / "manifest.json").read_text())
    print(f"resume: {found[-1]}, step {step} of 60, saved", flush=True)
metrics = output / "metrics.jsonl"
lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
if fault != "repeats lines":
    lines = [line for line in lines if line.endswith("\\n") and json.loads(line)["step"] <= step]
metrics.write_text("".join(lines))
if fault == "forgets" and found:
    value += 1e-9
if fault == "loses a line" and found:
    metrics.write_text("".join(lines[:-1]))
if fault == "fails" and found:
    sys.exit("no more")
while step < 60:
    step += 1
    value = (value * 1.25 + step) % 7
    time.sleep(0.01)
    with open(metrics, "a") as file:
        seconds = 1.0 if fault == "measures the same" else time.time()
        file.write(json.dumps({"step": step, "train/loss": value, "train/step_seconds": seconds}) + "\\n")
    if step % 5 == 0:
        partial = states / f"step-{step:08d}.partial"
        partial.mkdir()
        (partial / "rank-00000.safetensors").write_text(str(value))
        time.sleep(0.02)
        (partial / "manifest.json").write_text(json.dumps([step, value]))
        partial.rename(partial.with_suffix(""))
        for path in sorted(states.iterdir())[:-2]:
            shutil.rmtree(path)
(output / "model.safetensors").write_text(repr(value))
if fault == "writes more" and found:
    (output / "adapter.safetensors").write_text("")
'''


def run_chaos(folder: Path, *command: str, kills: int, **options) -> tuple[int, str, dict]:
    """Exit code, output and results of the program."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--kills", str(kills), "--folder", str(folder / "chaos"), "--json", str(folder / "results.json")]
    environment = launcher.environment() | {"OMP_NUM_THREADS": "1", "ONELOOP_ALLOW_OVERSUBSCRIBE": "1"}
    done = subprocess.run(
        [sys.executable, str(CHAOS), *words, "--", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=launcher.TIMEOUT_SECONDS,
    )
    path = folder / "results.json"
    return done.returncode, done.stdout, json.loads(path.read_text()) if path.exists() else {}


def fake(folder: Path, fault: str, kills: int = 8) -> tuple[int, str, dict]:
    (folder / "fake.py").write_text(FAKE)
    return run_chaos(folder, sys.executable, str(folder / "fake.py"), fault, kills=kills, inside=0.4, seed=1)


def test_a_right_training_passes(tmp_path):
    code, output, results = fake(tmp_path, "none", kills=20)
    assert code == 0, output
    assert results["problems"] == [] and len(results["kills"]) == 20
    assert 8 <= results["inside_save"] == sum(kill["inside_save"] for kill in results["kills"])
    assert {kill["which"] for kill in results["kills"]} == {"all", "rank 0"}
    assert any(kill["resumed_step"] for kill in results["kills"])
    assert "20 kills" in output.splitlines()[-1] and "every bit" in output.splitlines()[-1]
    assert len([line for line in output.splitlines() if line.startswith("| ")]) == 22
    assert results["starts"] == 1 + 20 + results["rounds"]  # the last start of each round runs to the end


FAULTS = {
    "goes back": r"the run went on from (step \d+|the beginning), and not from step \d+",
    "repeats lines": r"has train/loss twice",
    "forgets": r"model.safetensors: other content",
    "loses a line": r"metrics: step \d+, train/loss",
    "fails": r"exit code 1 by itself",
    "writes more": r"adapter.safetensors: undisturbed lacks it",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_training_is_found_out(tmp_path, fault):
    code, output, results = fake(tmp_path, fault)
    assert code == 1, output
    text = "\n".join(results["problems"])
    assert re.search(FAULTS[fault], text), text
    assert "something differs" in output.splitlines()[-1]
    assert list((tmp_path / "chaos").glob("killed-*")), "what differs is kept"


def test_what_was_set_aside_is_not_compared(tmp_path):
    """A run that is killed after its export exports again, and keeps the first as model.1."""
    for name, others in (("whole", ()), ("killed", ("model.1", "states.1/step-00000005", "states/step-00000004"))):
        for folder in ("model", "states/step-00000005", *others):
            (tmp_path / name / folder).mkdir(parents=True)
            (tmp_path / name / folder / "x.safetensors").write_text(folder)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 0.5}) + "\n")
    assert comparison.differences(tmp_path / "whole", tmp_path / "killed") == []
    for folder in ("model", "states/step-00000005"):
        (tmp_path / "killed" / folder / "x.safetensors").write_text("other")
        assert len(comparison.differences(tmp_path / "whole", tmp_path / "killed")) == 1
        (tmp_path / "killed" / folder / "x.safetensors").write_text(folder)


@pytest.mark.parametrize(
    "words,says",
    [
        ([], "no command"),
        (["--", "recipes/sft.py", "--output_dir", "x"], "--output_dir belongs to this program"),
        (["--kills", "0", "--", "x"], "--kills is a number from 1 on"),
        (["--inside", "1.5", "--", "x"], "a share from 0 to 1"),
        (["--num_processes", "2", "--", "x"], "no effect without --config_file"),
        (["--config_file", "none.yaml", "--", "x"], "no such file"),
        (["--folder", str(ROOT), "--", "x"], "is not empty"),
    ],
)
def test_bad_usage(words, says):
    done = subprocess.run([sys.executable, str(CHAOS), *words], capture_output=True, text=True, cwd=ROOT / "scripts")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and says in done.stderr
    assert "Traceback" not in done.stderr


def test_sft(tmp_path):
    """The shipped recipe and file, one process, five kills; the documented run has fifty."""
    changes = {"save_every": 6, "max_steps": 150, "num_train_epochs": 99, "global_batch_size": 4}
    values = runs.settings(tmp_path, UNEVEN * 6, per_device_batch_size=2, shuffle=True, **changes)
    del values["output_dir"]
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    launch = {"config_file": "accelerate_configs/cpu.yaml", "num_processes": 1}
    code, output, results = run_chaos(tmp_path, "recipes/sft.py", *flags, kills=5, inside=0.4, seed=1, **launch)
    print(output)
    assert code == 0, output
    assert len(results["kills"]) == 5 and results["inside_save"] >= 2
    assert any(kill["resumed_step"] for kill in results["kills"]), output
