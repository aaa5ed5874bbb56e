"""Starts `accelerate launch` with a shipped config under a timeout, and reads what a run left on disk."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
# Below pytest's own limit, which would not show what the ranks printed.
TIMEOUT_SECONDS = int(os.environ.get("ONELOOP_TEST_TIMEOUT", 420))


def environment() -> dict[str, str]:
    """The environment of a test launch: no hub, no tracker login, no leftovers of an outer launch."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "WANDB_"))}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    kept.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    return kept | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false"}


def kill_family(process: subprocess.Popen) -> None:
    """Kill a launcher and its ranks: these are sessions of their own, and would keep its pipe open."""
    family = psutil.Process(process.pid)
    for member in [*family.children(recursive=True), family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def launch(
    config: str, num_processes: int, script: Path, *arguments: str, check: bool = True, extra=(), **env: str | None
):
    """Run `script` as `num_processes` ranks under `accelerate_configs/<config>.yaml` (or the path `config`).

    `extra` are further words for the launcher; `env` is laid over the environment, None removes a variable. Raises
    AssertionError with the output of all ranks when it fails (unless `check` is off) or runs out of time.
    """
    path = config if config.endswith(".yaml") else str(ROOT / "accelerate_configs" / f"{config}.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path]
    command += ["--num_processes", str(num_processes), "--main_process_port", "0", *extra, str(script), *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={name: value for name, value in (environment() | env).items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        kill_family(process)
        output, _ = process.communicate()
        raise AssertionError(f"{config} x {num_processes}: not done after {TIMEOUT_SECONDS} s\n{output}") from None
    result = subprocess.CompletedProcess(command, process.returncode, output)
    if check:
        assert result.returncode == 0, f"{config} x {num_processes}: exit {result.returncode}\n{result.stdout[-20000:]}"
    return result


def run_cases(config: str, num_processes: int, cases: list[dict], folder: Path) -> str:
    """Train `cases` (name, recipe, mixed_precision, config) in one launch; returns the output of the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    return launch(config, num_processes, Path(__file__).with_name("scenario.py"), str(path)).stdout


def read_metrics(output_dir: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


def column(metrics: list[dict], name: str) -> list[float]:
    """One metric over the steps that have it."""
    return [line[name] for line in metrics if name in line]


def read_tensors(folder: Path) -> dict:
    """All tensors of an exported folder."""
    from safetensors.torch import load_file

    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors
