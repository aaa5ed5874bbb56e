"""The command: gives each part its process and its time, gathers what they leave, and says what it comes to."""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.outcome import markdown

from gpu_check.processes import kill_family
from gpu_check.report import (
    FAILED,
    HOLDS,
    INCONCLUSIVE,
    MISSED,
    SKIPPED_TIME,
    STOPPED_TIME,
    TOY,
    write_json,
)

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Budget:
    """Seconds of a part: it is not begun with less than `least`, and ended after `most`."""

    least: int
    most: int


BUDGETS = {
    "G1": Budget(70, 140),
    "G2": Budget(60, 115),
    "G3": Budget(30, 75),
    "G4": Budget(30, 80),
    "G5": Budget(95, 125),
    "tests": Budget(10, 60),
}
TOY_SECONDS = 600
TESTS = "tests"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}


def main() -> int:
    arguments = parse()
    started = time.monotonic()
    if not arguments.toy and not has_accelerator():
        print(
            "gpu_check: torch sees no accelerator on this machine, and what is measured here means nothing without "
            "one. Run it on a machine with a GPU, or pass --toy to try every part at toy size.",
            file=sys.stderr,
        )
        return 2
    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.executable).name, *sys.argv],
        "toy": arguments.toy,
        "minutes": arguments.minutes,
        "commit": commit(),
        "machine": {},
        "parts": {},
        "verdict": "running",
    }
    with tempfile.TemporaryDirectory() as name, open(arguments.output.with_suffix(".log"), "w") as log:
        for parts in [arguments.only] if arguments.toy else [[part] for part in arguments.only]:
            left = TOY_SECONDS if arguments.toy else 60 * arguments.minutes - (time.monotonic() - started)
            later = arguments.only[arguments.only.index(parts[-1]) + 1 :]
            for part, result in run_parts(parts, arguments.toy, left, later, Path(name), log).items():
                results["parts"][part] = result
                results["machine"] = results["machine"] or result.pop("machine", {})
                result.pop("machine", None)
                print(f"{part}: {result['status']} ({result['seconds']:.0f} s)", flush=True)
                if result.get("error"):
                    print(f"  {result['error'].splitlines()[0]}\n  the whole output is in {log.name}", flush=True)
            results["seconds"] = round(time.monotonic() - started, 1)
            write_json(arguments.output, results)
    results["verdict"] = verdict(results["parts"], arguments.toy)
    write_json(arguments.output, results)
    print("\n".join(["", *table(results["parts"]), ""]))
    print(f"gpu_check: {results['verdict']} after {results['seconds']:.0f} s; results in {arguments.output}")
    return 0 if results["verdict"] in (HOLDS, TOY) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py", description="Measures, on one GPU and within minutes, what only a GPU can tell."
    )
    parser.add_argument("--toy", action="store_true", help="toy sizes, on whatever device there is; judges nothing")
    parser.add_argument(
        "--only", type=part_names, default=list(BUDGETS), help=f"parts to run, out of {','.join(BUDGETS)}"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="time for everything; what does not fit is skipped")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_check.json", help="the results file")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def part_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in BUDGETS]:
        raise argparse.ArgumentTypeError(f"no part is called {unknown[0]!r}: give some of {','.join(BUDGETS)}")
    return [name for name in BUDGETS if name in names]


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def commit() -> dict | None:
    """The commit of this working tree and whether files differ from it; None where there is no git."""
    try:
        answers = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"hash": answers[0], "changed_files": len(answers[1].splitlines())}


# --- running ----------------------------------------------------------------------------------------------------------


def run_parts(parts: list[str], toy: bool, left: float, later: list[str], folder: Path, log) -> dict[str, dict]:
    """Run parts in one process (tests in another) and return their results by name, those that were cut off too.

    left: seconds until the end; later: parts still to come, for each of which its `least` is kept.
    """
    found: dict[str, dict] = {}
    measured = [part for part in parts if part != TESTS]
    kept = 0 if toy else sum(BUDGETS[part].least for part in later)
    for group, command in ((measured, worker), ([TESTS] if TESTS in parts else [], tests)):
        if not group:
            continue
        seconds = left
        if not toy:
            [part] = group
            seconds = min(BUDGETS[part].most, left - kept)
            if seconds < BUDGETS[part].least:
                found[part] = result_of(part, folder, SKIPPED_TIME, 0.0)
                continue
        began = time.monotonic()
        code, output = ended(command(group, toy, seconds, folder), seconds, log)
        for part in group:
            status = STOPPED_TIME if code is None else None
            found[part] = result_of(part, folder, status, time.monotonic() - began, code, output)
        left -= time.monotonic() - began
    return found


def worker(parts: list[str], toy: bool, seconds: float, folder: Path) -> list[str]:
    # It stops by itself in time to say so.
    words = [str(folder), str(max(1.0, seconds - 5)), *parts, *(["--toy"] if toy else [])]
    return [sys.executable, "-m", "gpu_check.worker", *words]


def tests(_: list[str], toy: bool, seconds: float, folder: Path) -> list[str]:
    where = str(ROOT / "tests" / "unit" / "test_gpu_check.py") if toy else str(ROOT / "tests")
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(ROOT), where]


def ended(command: list[str], seconds: float, log) -> tuple[int | None, str]:
    """Exit code (None: its time was up, and it was ended) and output of a command, which goes into the log too."""
    paths = [str(ROOT / "scripts"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_family(process)
        output.seek(0)
        text = output.read()
    log.write(f"$ {' '.join(command)}\n{text}\n")
    log.flush()
    return code, text


def result_of(
    part: str, folder: Path, status: str | None, seconds: float, code: int | None = 0, output: str = ""
) -> dict:
    """What a part left, with the status of how it ended; `tests` leaves its output."""
    empty = {"part": part, "title": "", "status": "running", "seconds": round(seconds, 1), "bars": [], "notes": []}
    if part == TESTS:
        return test_result(empty, status, code, output)
    path = folder / f"{part}.json"
    result = json.loads(path.read_text()) if path.exists() else empty
    result.pop("path", None)
    if result["status"] == "running":  # it did not come to its end
        result["seconds"] = round(seconds, 1)
        result["status"] = status or FAILED
        if status is None:
            result["error"] = f"the process ended with code {code}: {output.strip()[-500:]}"
    return result


def test_result(result: dict, status: str | None, code: int | None, output: str) -> dict:
    """pytest's own last line, and what its exit code means (5: nothing was selected)."""
    lines = [line.strip("= ") for line in output.splitlines() if re.search(r"\d+ \w+.* in [\d.]+", line)]
    summary = lines[-1] if lines else ""
    outcome = status or {0: HOLDS, 5: "no tests"}.get(code, FAILED)
    if outcome == HOLDS and "passed" not in summary:
        outcome = "no tests"  # all were skipped
    return result | {"title": "tests marked gpu", "status": outcome, "summary": summary}


# --- reading ----------------------------------------------------------------------------------------------------------


def verdict(parts: dict[str, dict], toy: bool) -> str:
    """What all parts come to: the worst of what was judged. Without one bar that holds there is nothing to hold."""
    if any(part["status"] == FAILED for part in parts.values()):
        return FAILED
    if toy:
        return TOY
    verdicts = [bar["verdict"] for part in parts.values() for bar in part["bars"]]
    verdicts += [part["status"] for part in parts.values()]
    return next((word for word in (MISSED, INCONCLUSIVE, HOLDS) if word in verdicts), "nothing was measured")


def table(parts: dict[str, dict]) -> list[str]:
    rows = [["part", "bar", "measured", "limit", "verdict"]]
    for name, part in parts.items():
        title = part.get("summary") or part["title"]
        rows.append([name, title, "", "", f"{part['status']}, {part['seconds']:.0f} s"])
        for bar in part["bars"]:
            value = "" if bar["value"] is None else f"{bar['value']:.4g} {bar['unit']}".strip()
            limit = "" if bar["limit"] is None else f"{bar['sense']} {bar['limit']:g}"
            word = f"{bar['verdict']} ({bar['why']})" if bar["why"] else bar["verdict"]
            rows.append(["", bar["name"], value, limit, word])
    return markdown(rows)
