"""Where the numbers of a run go: metrics.jsonl always, one experiment tracker if wanted, and a picture at the end.

A tracker is worth less than the training it watches. So nothing here ever asks, waits longer than a few seconds, or
ends a run: a tracker that cannot start or fails later is dropped with one warning, and metrics.jsonl goes on.
"""

import contextlib
import dataclasses
import enum
import itertools
import json
import math
import os
import warnings
from pathlib import Path

from tqdm import tqdm

from oneloop import arguments, redaction, sources, tracker_thread
from oneloop import config as config_module

METRICS_FILE = "metrics.jsonl"


def start(accelerator, config, topology, resumed=None) -> "Tracker":
    """Open the run's records; call it on every process, only the main one writes.

    config: the recipe's config; topology: what was obtained (`sharding.Obtained`); resumed: the training state that the
    run continues from, whose records then go on: metrics after its step, which will be logged again, are taken out of
    metrics.jsonl, and the tracker's run is the same one. Config and topology are printed, written to
    `output_dir` as recipe.yaml (to be given to --config again) and topology.json, and shown by the tracker as the
    run's settings, without secrets. From here on files are made with `file_mask`. Raises ValueError, on every process,
    for a tracker that is not installed.
    """
    from accelerate.tracking import get_available_trackers

    # Not earlier: a data or model cache that others share keeps the modes it had.
    os.umask(file_mask())
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
    shown = redaction.redact_value(settings)
    own = resumed is not None and resumed.folder.parent.resolve() == (output_dir / "states").resolve()
    if accelerator.is_main_process:
        make_output_dir(output_dir)
        _warn_of_secrets([name for name in settings if shown[name] != settings[name]])
        # To be given to --config again, and then to continue by itself.
        once = ("topology", "resume", "allow_changes")
        recipe = arguments.to_yaml({name: value for name, value in shown.items() if name not in once})
        _write(output_dir / "recipe.yaml", recipe)
        _write(output_dir / "topology.json", json.dumps(shown["topology"], indent=2) + "\n")
        loaded = redaction.redact_value(sources.record(config))
        _write(output_dir / sources.RECORD_FILE, json.dumps(loaded, indent=2) + "\n")
        print(recipe.rstrip(), "-----------", sep="\n", flush=True)
        if not own or not _cut(output_dir / METRICS_FILE, resumed.step):
            _set_aside(output_dir / METRICS_FILE)
    continued = None
    if own:  # a run that goes on from another one's state is a new run
        saved = resumed.manifest["tracker"] or {}
        continued = (saved.get("run_id") if saved.get("name") == report_to else None, resumed.step)
    return Tracker(accelerator, shown, output_dir, report_to, continued)


def file_mask() -> int:
    """The permissions that files of a run do not have: ONELOOP_UMASK in octal, or all of group and others.

    Raises ValueError for a variable that is no such mask.
    """
    text = os.environ.get("ONELOOP_UMASK") or "077"
    try:
        mask = int(text, 8)
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o777 or mask & 0o700:
        raise ValueError(f"ONELOOP_UMASK is {text!r}: give octal digits that leave the owner all rights, as in 022")
    return mask


def make_output_dir(folder: Path) -> None:
    """Make the folder of a run, closed to others as `file_mask` says; one that exists keeps its mode."""
    if not folder.is_dir():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o777 & ~file_mask())


def _warn_of_secrets(fields: list[str]) -> None:
    if fields:
        warnings.warn(
            f"tracking: {', '.join(fields)} holds what looks like a secret. The run uses it, but its records have "
            f"{redaction.MARK} instead, recipe.yaml too. Give secrets by environment variable (HF_TOKEN) or ~/.netrc.",
            RuntimeWarning,
            stacklevel=3,
        )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk
        warnings.warn(f"tracking: {path.name} is not written ({error})", RuntimeWarning, stacklevel=3)


def _set_aside(path: Path) -> None:
    """Keep the metrics of an earlier run in the same folder under another name: two runs in one file read as one."""
    if path.exists() and path.stat().st_size:
        number = next(n for n in itertools.count(1) if not path.with_name(f"metrics.{n}.jsonl").exists())
        path.rename(path.with_name(f"metrics.{number}.jsonl"))


def _cut(path: Path, step: int) -> bool:
    """Leave out of metrics.jsonl what a run that continues at `step` will write again; False if it cannot be read or
    written, which is no reason not to continue."""
    try:
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):  # a line that a killed run did not finish
                continue
        shorter = path.with_name(path.name + ".tmp")
        shorter.write_text("".join(kept), encoding="utf-8")
        os.replace(shorter, path)
    except OSError:
        return False
    return True


_open: "Tracker | None" = None  # what `finish_open` closes


def finish_open(failed: bool = False) -> None:
    """Close the records of the training of this process, if any; for code that handles errors far from its tracker."""
    if _open is not None:
        _open.finish(failed)


class Tracker:
    """The open records of one training. `start` makes it, `finish` closes it; both ends belong to the same process."""

    def __init__(self, accelerator, config: dict, output_dir: Path, report_to: str, continued=None):
        """continued: (the tracker's id of the run that goes on, or None; the step it goes on from); None for a new
        run."""
        self.output_dir, self.report_to = output_dir, report_to
        self._accelerator = accelerator
        self._file = None
        self._thread = None
        self._run_id = None
        if not accelerator.is_main_process:
            return
        global _open
        _open = self
        make_output_dir(output_dir)
        self._file = _MetricsFile(output_dir / METRICS_FILE)
        if report_to != "none":
            # TensorBoard's hyperparameters know neither None nor lists.
            values = plain(config, only_scalars=report_to == "tensorboard")
            self._thread = tracker_thread.TrackerThread(accelerator, report_to, values, output_dir, continued)
            self._drop_if(self._thread.problem())

    @property
    def run_id(self) -> str | None:
        """Id the tracker gave this run, to be kept with a checkpoint; None without a tracker, before it has started,
        and on other processes."""
        return self._run_id if self._thread is None else self._thread.run_id

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record `metrics` of optimizer step `step`; a step may be logged in parts, but never after a later one."""
        if self._file is None:
            return
        known = redaction.known_secrets()
        values = {
            redaction.redact(name, known): value if isinstance(value, int) else float(value)
            for name, value in metrics.items()
        }
        # JSON knows no NaN: a line with one would be unreadable for everything but Python.
        line = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        try:
            # Not print: a progress bar may stand on the line.
            tqdm.write(f"step {step:>5}  " + "  ".join(f"{name} {_short(value)}" for name, value in values.items()))
        except OSError:  # whoever read the output has left, or it went to the full disk
            pass
        if self._thread is not None:
            self._thread.log(values, step)
            self._drop_if(self._thread.problem())

    def finish(self, failed: bool = False) -> None:
        """Close the records, the tracker's run as finished or as failed; calling it again does nothing."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self._thread is not None:
            self._drop_if(self._thread.close(failed))
            self._forget()
        global _open
        _open = None  # it would keep the Accelerator alive, and with it the model

    def _drop_if(self, problem: str | None) -> None:
        if problem is not None:
            warnings.warn(
                f"tracking: {self._thread.name} {problem}. It is dropped; {METRICS_FILE} has everything",
                RuntimeWarning,
                stacklevel=3,
            )
            self._forget()

    def _forget(self) -> None:
        self._run_id, self._thread = self.run_id, None
        self._accelerator.trackers.clear()
        self._accelerator.log_with = []


class _MetricsFile:
    """metrics.jsonl; lines that find no room on the disk are kept, and written before the next one that does."""

    def __init__(self, path: Path):
        self._path = path
        self._file = None
        self._waiting = b""
        self._is_failing = False
        # If a killed run left its last line unfinished, ours starts on a new one all the same.
        if path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n"):
            self._waiting = b"\n"
        self._flush()  # a run that logs nothing leaves an empty file; an error shows at the first line

    def write(self, line: str) -> None:
        self._waiting += line.encode()
        error = self._flush()
        if error and not self._is_failing:
            warnings.warn(
                f"tracking: {METRICS_FILE} cannot be written ({error}); its lines are kept until it can",
                RuntimeWarning,
                stacklevel=3,
            )
        self._is_failing = bool(error)

    def close(self) -> None:
        error = self._flush()
        if error:
            lost = self._waiting.count(b"\n")
            warnings.warn(
                f"tracking: {METRICS_FILE} lacks its last {lost} lines ({error})", RuntimeWarning, stacklevel=3
            )
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _flush(self) -> OSError | None:
        try:
            if self._file is None:
                # No buffer: Python's would lose or repeat parts of a line when the disk is full.
                self._file = open(self._path, "ab", buffering=0)
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error
        return None


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"


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
