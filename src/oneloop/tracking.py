"""Where the numbers of a run go: metrics.jsonl always, one experiment tracker if wanted, and a picture at the end.

A tracker is worth less than the training it watches. So nothing here ever asks, waits longer than a few seconds, or
ends a run: a tracker that cannot start or fails later is dropped with one warning, and metrics.jsonl goes on.
"""

import dataclasses
import enum
import itertools
import json
import math
import os
import threading
import warnings
from pathlib import Path

from tqdm import tqdm

from oneloop import config as config_module

NETWORK_TIMEOUT_SECONDS = 3
"""How long the tracker's server may take to accept a connection before the run is recorded offline."""

METRICS_FILE = "metrics.jsonl"


def start(accelerator, config, topology) -> "Tracker":
    """Open the run's records; call it on every process, only the main one writes.

    config: the recipe's config; topology: what was obtained (`sharding.Obtained`). Both are printed, written to
    `output_dir` as recipe.yaml (to be given to --config again) and topology.json, and shown by the tracker as the
    run's settings. Raises ValueError, on every process, for a tracker that is not installed.
    """
    from accelerate.tracking import get_available_trackers

    report_to = config.report_to
    installed = {str(name) for name in get_available_trackers()}
    if report_to is None:
        report_to = "wandb" if "wandb" in installed else "none"
        if report_to == "none" and accelerator.is_main_process:
            print(
                f"tracking: wandb is not installed: {METRICS_FILE} only (pip install wandb, or report_to none)",
                flush=True,
            )
    elif report_to != "none" and report_to not in installed:
        raise ValueError(
            f"report_to is {report_to} but that package is not installed: pip install {report_to}, or report_to none"
        )
    output_dir = Path(config.output_dir)
    settings = config_module.to_dict(config) | {"topology": dataclasses.asdict(topology)}
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        config_module.save_yaml(config, output_dir / "recipe.yaml")
        (output_dir / "topology.json").write_text(json.dumps(settings["topology"], indent=2) + "\n")
        print((output_dir / "recipe.yaml").read_text().rstrip(), "-----------", sep="\n", flush=True)
        _set_aside(output_dir / METRICS_FILE)
    return Tracker(accelerator, settings, output_dir, report_to)


def _set_aside(path: Path) -> None:
    """Keep the metrics of an earlier run in the same folder under another name: two runs in one file read as one."""
    if path.exists() and path.stat().st_size:
        number = next(n for n in itertools.count(1) if not path.with_name(f"metrics.{n}.jsonl").exists())
        path.rename(path.with_name(f"metrics.{number}.jsonl"))


_open: "Tracker | None" = None  # what `finish_open` closes


def finish_open(failed: bool = False) -> None:
    """Close the records of the training of this process, if any; for code that handles errors far from its tracker."""
    if _open is not None:
        _open.finish(failed)


class Tracker:
    """The open records of one training. `start` makes it, `finish` closes it; both ends belong to the same process."""

    def __init__(self, accelerator, config: dict, output_dir: Path, report_to: str):
        self.output_dir = output_dir
        self._accelerator = accelerator
        self._report_to = "none"
        self._file = None
        self.run_id = None
        """Id the tracker gave this run, to be kept with a checkpoint; None without a tracker or on other processes."""
        if not accelerator.is_main_process:
            return
        global _open
        _open = self
        output_dir.mkdir(parents=True, exist_ok=True)
        self._file = _open_for_append(output_dir / METRICS_FILE)
        if report_to == "none":
            return
        self._report_to = report_to
        # A tracker may fail in any way its authors or the network find; none is worth the training.
        try:
            self._start_tracker(config, output_dir)
        except Exception as error:
            self._drop("did not start", error)

    def _start_tracker(self, config: dict, output_dir: Path) -> None:
        from accelerate.tracking import filter_trackers

        name = os.environ.get("WANDB_NAME") or output_dir.resolve().name
        project = os.environ.get("WANDB_PROJECT") or "oneloop"
        settings = {}
        if self._report_to == "wandb":
            settings = {**_wandb_settings(output_dir), "name": name}
        elif self._report_to == "trackio":
            # Read when trackio is imported; a user's own place is kept.
            os.environ.setdefault("TRACKIO_DIR", str(output_dir / "trackio"))
            settings = {"name": name}
        accelerator = self._accelerator
        # The Accelerator is built before the output folder is known, so its trackers are chosen now, as its
        # constructor would (accelerate 1.15, accelerator.py line 528).
        accelerator.project_configuration.logging_dir = str(output_dir)
        accelerator.log_with = filter_trackers([self._report_to], accelerator.logging_dir)
        # TensorBoard's hyperparameters know neither None nor lists.
        values = plain(config, only_scalars=self._report_to == "tensorboard")
        accelerator.init_trackers(project, config=values, init_kwargs={self._report_to: settings})
        if self._report_to == "wandb":
            self.run_id = accelerator.get_tracker("wandb", unwrap=True).id

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record `metrics` of optimizer step `step`; a step may be logged in parts, but never after a later one."""
        if self._file is None:
            return
        values = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        # JSON knows no NaN: a line with one would be unreadable for everything but Python.
        line = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk; the next line may find room again
            warnings.warn(f"tracking: step {step} is missing in {METRICS_FILE} ({error})", RuntimeWarning, stacklevel=2)
        # Not print: a progress bar may stand on the line.
        tqdm.write(f"step {step:>5}  " + "  ".join(f"{name} {_short(value)}" for name, value in values.items()))
        if self._report_to == "none":
            return
        # As above: the training is worth more than its tracker.
        try:
            self._accelerator.log(values, step=step)
        except Exception as error:
            self._drop(f"failed at step {step}", error)

    def finish(self, failed: bool = False) -> None:
        """Close the records, the tracker's run as finished or as failed; calling it again does nothing.

        Accelerate's `end_training` is not used: it knows no failed runs and takes the process group down with it.
        """
        if self._file is None:
            return
        self._file.close()
        self._file = None
        try:
            if self._report_to == "wandb":
                import wandb

                self._accelerator.get_tracker("wandb", unwrap=True).finish(exit_code=int(failed))
                # Of a failed run, `finish` returns before all is written (wandb 0.31), and a process that failed may
                # leave without the exit handlers that would wait for it.
                wandb.teardown()
            elif self._report_to != "none":
                self._accelerator.get_tracker(self._report_to).finish()
        except Exception as error:  # the training is over and its results are safe
            self._drop("did not close", error)
        self._forget()

    def _drop(self, what: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(
            f"tracking: {self._report_to} {what} and is dropped ({reason}); {METRICS_FILE} goes on",
            RuntimeWarning,
            stacklevel=3,
        )
        self._forget()

    def _forget(self) -> None:
        self._report_to = "none"
        self._accelerator.trackers.clear()
        self._accelerator.log_with = []


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


def _open_for_append(path: Path):
    """Open a file of lines; if a killed run left its last line unfinished, ours starts on a new one all the same."""
    unfinished = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    file = open(path, "a", encoding="utf-8")
    if unfinished:
        file.write("\n")
    return file


def plain(value: dict, only_scalars: bool = False) -> dict:
    """A nested dict as one level of plain values: keys joined by dots, enums by value, paths, dtypes and the like as
    text."""

    def flat(value):
        if isinstance(value, enum.Enum):
            return flat(value.value)
        if isinstance(value, (list, tuple)) and not only_scalars:
            return [flat(item) for item in value]
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return None if value is None and not only_scalars else str(value)

    result = {}
    for name, item in value.items():
        if isinstance(item, dict):
            result |= {f"{name}.{inner}": part for inner, part in plain(item, only_scalars).items()}
        else:
            result[str(name)] = flat(item)
    return result


# --- wandb ------------------------------------------------------------------------------------------------------------


def _wandb_settings(output_dir: Path) -> dict:
    """Arguments of `wandb.init`: offline by itself where online would ask or hang; no machine details, no code."""
    import wandb

    settings = wandb.setup().settings
    mode = settings.mode
    if mode == "online":
        reason = _why_offline(settings.base_url)
        if reason:
            mode = "offline"
            print(
                f"tracking: wandb records offline ({reason}); upload with: wandb sync {output_dir}/wandb/offline-run-*",
                flush=True,
            )
    return {
        "dir": str(output_dir),
        "mode": mode,
        "settings": wandb.Settings(x_disable_meta=True, save_code=False),
    }


def _why_offline(base_url: str) -> str | None:
    """What stands against an online run, or None. Credentials come first: without them wandb would ask at the
    terminal."""
    import wandb
    from wandb.errors import AuthenticationError

    try:
        if not wandb.login(prompt=False, verify=False):
            return "no API key: run wandb login, or set WANDB_API_KEY"
    except AuthenticationError as error:
        return f"unusable credentials: {error}"
    # A user who asks for online in so many words gets wandb's own retries instead of our short look.
    if os.environ.get("WANDB_MODE") != "online" and not _is_reachable(base_url):
        return f"{base_url} cannot be reached"
    return None


def _is_reachable(url: str) -> bool:
    """Whether a connection to the host of `url`, or to the proxy in front of it, opens in time.

    In a thread of its own because the timeout of a socket does not cover the name look-up, which can take a minute.
    """
    import socket
    import urllib.parse
    import urllib.request

    target = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname):
        target = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = target.port or (443 if target.scheme == "https" else 80)
    opened = threading.Event()

    def connect():
        try:
            socket.create_connection((target.hostname, port), timeout=NETWORK_TIMEOUT_SECONDS).close()
        except OSError:
            return
        opened.set()

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(NETWORK_TIMEOUT_SECONDS)
    return opened.is_set()


# --- picture ----------------------------------------------------------------------------------------------------------


def read_metrics(output_dir: str | os.PathLike) -> dict[str, dict[int, float]]:
    """metrics.jsonl as {name: {step: value}}; of a step logged again after a resume, the later value counts."""
    series = {}
    with open(Path(output_dir) / METRICS_FILE, encoding="utf-8") as file:
        for line in file:
            try:
                values = json.loads(line)
            except json.JSONDecodeError:  # a line that a killed run did not finish
                continue
            step = values.pop("step")
            for name, value in values.items():
                series.setdefault(name, {})[step] = float(value)
    return {name: dict(sorted(points.items())) for name, points in series.items()}


def plot(output_dir: str | os.PathLike) -> Path | None:
    """Draw `loss.png` in `output_dir` from metrics.jsonl: losses above, learning rate and gradient norm below.

    Returns the file, or None when no training loss was logged.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = read_metrics(output_dir)
    if "train/loss" not in series:
        return None
    # Not pyplot: it keeps every figure alive and looks for a display.
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    norm = below.twinx()
    figure.suptitle(Path(output_dir).resolve().name)
    for axes, name, style in (
        (above, "train/loss", {"color": "tab:blue"}),
        (above, "eval/loss", {"color": "tab:orange", "marker": "o", "linestyle": "--"}),
        (below, "train/lr", {"color": "tab:green"}),
        (norm, "train/grad_norm", {"color": "tab:red", "alpha": 0.7}),
    ):
        points = series.get(name)
        if points is None:
            continue
        # A single point has no line to be seen by.
        axes.plot(
            list(points), list(points.values()), label=name, **({"marker": "."} if len(points) == 1 else {}) | style
        )
    below.xaxis.get_major_locator().set_params(integer=True)
    above.set_ylabel("loss")
    above.legend()
    below.set(xlabel="optimizer step", ylabel="learning rate")
    norm.set_ylabel("gradient norm")
    below.legend(handles=[*below.lines, *norm.lines])
    above.grid(alpha=0.3)
    below.grid(alpha=0.3)
    path = Path(output_dir) / "loss.png"
    figure.savefig(path, dpi=120)
    return path
