"""The reason for the configs: under a real limit of memory, the very command of docs/out-of-memory.md dies under plain
data parallelism with one clear message, and trains under the files that shard everything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.equivalence import launcher

PAGE = (launcher.ROOT / "docs" / "out-of-memory.md").read_text(encoding="utf-8")
MODEL = launcher.ROOT / ".cache" / "SmolLM2-135M-Instruct"  # `make setup` writes it


def run_command(config: str, folder: Path) -> subprocess.CompletedProcess:
    """The page's command with another Accelerate file and output folder, run by a shell as a reader would."""
    command = re.search(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)[1]
    for old, new in (("configs/ddp.yaml", f"configs/{config}.yaml"), ("runs/limited", str(folder / "run"))):
        assert command.count(old) == 1
        command = command.replace(old, new)
    assert len(re.findall(r"^ *ulimit -d \d+", command, flags=re.MULTILINE)) == 1
    environment = launcher.environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=launcher.ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=launcher.TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill_family(process)
        output, _ = process.communicate()
        raise AssertionError(f"{config}: not done after {launcher.TIMEOUT_SECONDS} s\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.fixture(scope="module", autouse=True)
def limit_bites():
    """Some sandboxes accept the limit and do not keep to it."""
    program = "import sys; bytearray(600 * 2**20)"
    limited = subprocess.run(["bash", "-c", f"ulimit -d 500000; {sys.executable} -c '{program}'"], capture_output=True)
    if b"MemoryError" not in limited.stderr:
        pytest.skip("ulimit -d limits nothing here")
    assert MODEL.is_dir(), "make setup"


def test_data_parallelism_dies_with_one_clear_message(tmp_path):
    result = run_command("ddp", tmp_path)
    assert result.returncode == 1
    words = re.findall(r"^error: (.*)$", result.stdout, flags=re.MULTILINE)
    assert words, result.stdout[-5000:]
    assert all("out of memory" in word and "accelerate_configs/" in word for word in words)
    assert re.sub(r"rank \d", "rank 0", words[0]) in PAGE, "the page shows another message"
    # It is the state that does not fit: the model was loaded, prepared, and the loop reached. At which line of it the
    # memory ends depends on what this CPU's kernels need for themselves.
    assert "134,515,008 trainable" in result.stdout
    lines = r"optimizer\.step\(\)|accelerator\.backward\(|loss_sum, metrics = compute_loss_sum\("
    assert re.search(rf"in main\n +({lines})", result.stdout), result.stdout[-5000:]
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("config", ["zero3", "fsdp2"])
def test_sharding_trains(config, tmp_path):
    result = run_command(config, tmp_path)
    assert result.returncode == 0, result.stdout[-5000:]
    metrics = launcher.read_metrics(tmp_path / "run")
    losses = launcher.column(metrics, "train/loss")
    assert len(losses) == 2
    shown = [float(number) for number in re.findall(r"^step .*train/loss ([\d.]+)", PAGE, flags=re.MULTILINE)]
    assert losses == pytest.approx(shown, rel=3e-2)  # bf16: not the same on every kind of CPU
    assert list((tmp_path / "run" / "model").glob("*.safetensors"))
