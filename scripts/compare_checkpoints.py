"""Does to checkpoints of `accelerator.save_state` and to training states of this project what machines do to them.

    python scripts/compare_checkpoints.py [--kills 12] [--flips 20] [--json FILE]

A small model is trained in one process on the CPU. Killed while saving (SIGKILL, at a random point of its bytes): does
the newest checkpoint load? One bit flipped, at random places of every file: is it noticed, or loaded? Both are asked
to load their newest checkpoint by their own rules: `accelerator.load_state()`, and what `--resume auto` does.

Accelerate unpickles what it loads; it is given nothing but files that this very script had it write, in a folder made
for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = ("accelerate", "oneloop")
WIDTH, LAYERS = 1024, 12
"""Of the model that is killed while it saves: 12.6 M parameters, 151 MB with moments."""
SMALL_WIDTH, SMALL_LAYERS = 64, 2
"""Of the one whose bits are flipped: most of a file is numbers all the same."""
KEEP = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="saves to be killed in (default 12)")
    parser.add_argument("--flips", type=int, default=20, help="bits to flip in each file (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the points and places (default 0)")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kills < 1 or options.flips < 1:
        print("error: --kills and --flips are numbers from 1 on", file=sys.stderr)
        return 2
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    if options.child:
        task, tool, folder, *numbers = options.child
        {"save": keep_saving, "flip": flip_bits}[task](tool, Path(folder), *map(int, numbers))
        return 0
    results = {}
    for tool in TOOLS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            results[tool] = {
                "kills": kill_while_saving(tool, folder, options.kills, random.Random(options.seed)),
                "flips": all_flips(tool, folder / "flips", options.flips, options.seed),
            }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    ours = results["oneloop"]
    good = all(kill["outcome"] == "loads" for kill in ours["kills"])
    return 0 if good and all(flip["outcome"] == "refused" for flip in ours["flips"]) else 1


# --- the two tools ----------------------------------------------------------------------------------------------------
# A trainer is (save, load): `save(number)` after every number of the model and its moments was set to `number`, and
# `load()`, which loads the newest, returns the number and raises what the tool raises.


def model_and_optimizer(width: int, layers: int):
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def set_all(model, optimizer, number: float) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            optimizer.state[parameter]["exp_avg"].fill_(number)
            optimizer.state[parameter]["exp_avg_sq"].fill_(number)


def number_in(model, optimizer) -> float | None:
    """The number that all of them have; None where they differ."""
    found = set()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            found |= {tensor.min().item(), tensor.max().item()}
    return found.pop() if len(found) == 1 else None


def accelerate_trainer(folder: Path, width: int, layers: int):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=KEEP)
    accelerator = Accelerator(cpu=True, project_config=settings)
    model, optimizer = accelerator.prepare(*model_and_optimizer(width, layers))
    inner = optimizer.optimizer

    def save(number: int) -> None:
        set_all(model, inner, number)
        settings.iteration = number
        accelerator.save_state()

    def load() -> float | None:
        set_all(model, inner, -1)
        accelerator.load_state()
        return number_in(model, inner)

    return save, load


def oneloop_trainer(folder: Path, width: int, layers: int):
    from oneloop.state import folders
    from oneloop.state import format as state_format

    model, optimizer = model_and_optimizer(width, layers)
    root = folder / folders.FOLDER

    def held():
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            for kind, tensor in (("param", parameter.detach()), *((k, state[k]) for k in ("exp_avg", "exp_avg_sq"))):
                yield state_format.Range(name, kind, 0, tensor.numel()), tensor.view(-1)

    def save(number: int) -> None:
        """As the background thread of a run: files, manifest, name, removal of what is too much."""
        set_all(model, optimizer, number)
        partial = root / (folders.name_of(number) + folders.PARTIAL)
        partial.mkdir(parents=True)
        entries = [(piece.key, tensor) for piece, tensor in held()]
        written = state_format.write_tensors(partial / "rank-00000.safetensors", entries)
        tensors: dict = {}
        for piece, _ in held():
            about = {"shape": [piece.length], "kinds": {}, "scalars": {}}
            kind = {"dtype": "F32", "shape": [piece.length]}
            tensors.setdefault(piece.name, about)["kinds"][piece.kind] = kind
        manifest = dict.fromkeys(state_format._REQUIRED)  # of what is not compared here there is nothing
        manifest |= {
            "format": state_format.FORMAT,
            "format_version": state_format.FORMAT_VERSION,
            "progress": {"step": number, "epoch": 0, "position": 0, "total_steps": 100},
            "tensors": tensors,
            "quantized": {},
            "files": {"rank-00000.safetensors": written | {"ranges": [piece.to_json() for piece, _ in held()]}},
        }
        state_format.write_manifest(partial, manifest)
        folders.rotate(root, KEEP, folders.publish(partial))

    def load() -> float | None:
        """As `--resume auto`: the newest that is whole, read to the last byte before anything of it is taken over."""
        set_all(model, optimizer, -1)
        folders.clean(root)
        problems = []
        for path in folders.published(root):
            try:
                state = state_format.open_state(path)
                problems += state_format.differences(state)
            except state_format.Damaged as error:
                problems.append(str(error))
            if problems:
                break  # there would be an older one; here the newest is asked for
            for piece, tensor in held():
                tensor.copy_(state.read(piece.name, piece.kind))
            state.close()
            return number_in(model, optimizer)
        raise ValueError("; ".join(problems) or "no state")

    return save, load


def trainer(tool: str, folder: Path, width: int, layers: int):
    return {"accelerate": accelerate_trainer, "oneloop": oneloop_trainer}[tool](folder, width, layers)


def checkpoint_files(tool: str, folder: Path) -> list[Path]:
    """The files of the newest checkpoint."""
    newest = {"accelerate": folder / "checkpoints" / "checkpoint_0", "oneloop": folder / "states" / "step-00000000"}
    return sorted(path for path in newest[tool].rglob("*") if path.is_file())


# --- killed while saving ----------------------------------------------------------------------------------------------


def keep_saving(tool: str, folder: Path) -> None:
    """Run by a child: two whole saves, then one to be killed in."""
    save, _ = trainer(tool, folder, WIDTH, LAYERS)
    for number in range(2):
        save(number)
    print("saving", flush=True)
    save(2)
    print("saved", flush=True)
    time.sleep(100)


def kill_while_saving(tool: str, folder: Path, kills: int, draw: random.Random) -> list[dict]:
    outcomes: list[dict] = []
    num_tries = 0
    while len(outcomes) < kills:
        num_tries += 1
        assert num_tries < 10 * kills, f"{tool} saves too fast to be killed in it"
        place = folder / f"kill-{num_tries}"
        place.mkdir()
        # One in each of as many equal parts of the save.
        share = (len(outcomes) + draw.random()) / kills
        if not kill_child(tool, place, share):
            continue
        outcome = outcome_of(tool, place)
        outcomes.append({"share_of_bytes": share, **outcome})
        say(f"{tool}: killed at {100 * share:.0f} % of a save: {outcome['outcome']} {outcome['says']}")
        shutil.rmtree(place)
    return outcomes


def kill_child(tool: str, folder: Path, share: float) -> bool:
    """Kill a child once `share` of the bytes of its third save are there; False if the save was over by then."""
    child = subprocess.Popen(child_command("save", tool, folder), stdout=subprocess.PIPE, text=True)
    first = child.stdout.readline()
    assert first.startswith("saving"), f"{tool} could not save"
    kept = {path for path in folder.rglob("*") if path.is_file()}
    newest = max((path.parent for path in kept), key=lambda path: path.name)
    wanted = share * sum(path.stat().st_size for path in newest.iterdir())
    deadline = time.monotonic() + 100
    while num_new_bytes(folder, kept) < wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    child.kill()
    left = child.stdout.read()
    child.wait()
    return "saved" not in left


def num_new_bytes(folder: Path, kept: set[Path]) -> int:
    found = 0
    for path in folder.rglob("*"):
        if path not in kept:
            with contextlib.suppress(OSError):  # it was renamed or removed meanwhile
                found += path.stat().st_size if path.is_file() else 0
    return found


def outcome_of(tool: str, folder: Path) -> dict:
    """How loading the newest goes: the second save or, where it got so far, the third; or not, or wrong numbers."""
    _, load = trainer(tool, folder, WIDTH, LAYERS)
    try:
        number = load()
    except Exception as error:  # whatever the tool raises
        return {"outcome": "unloadable", "says": f"({type(error).__name__})"}
    if number not in (1, 2):
        return {"outcome": "loads wrong numbers", "says": f"({number})"}
    return {"outcome": "loads", "says": ""}


# --- flipped bits -----------------------------------------------------------------------------------------------------


def all_flips(tool: str, folder: Path, flips: int, seed: int) -> list[dict]:
    """Flip bits in a child, and go on with another one where a file ends it."""
    folder.mkdir()
    done: list[dict] = []
    while True:
        command = child_command("flip", tool, folder, flips, seed, len(done))
        child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=900)
        lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        done += [line for line in lines if "outcome" in line]
        if child.returncode == 0:
            break
        assert len(lines) > 0, f"{tool}: cannot be loaded at all"
        done.append({**lines[-1], "outcome": "ends the process"})
    counts = {word: sum(one["outcome"] == word for one in done) for word in ("refused", "loads", "ends the process")}
    say(f"{tool}: {len(done)} flipped bits: {counts}")
    return done


def flip_bits(tool: str, folder: Path, flips: int, seed: int, first: int) -> None:
    """Run by a child: flip one bit after the other, from number `first` on, and print how loading went."""
    save, load = trainer(tool, folder, SMALL_WIDTH, SMALL_LAYERS)
    if first == 0:
        save(0)
    assert load() == 0
    draw = random.Random(seed)
    files = checkpoint_files(tool, folder)
    places = [(path, draw.randrange(8 * path.stat().st_size)) for path in files for _ in range(flips)]
    for path, place in places[first:]:
        one = {"file": path.name, "bit": place}
        print(json.dumps(one), flush=True)
        flip(path, place)
        try:
            load()
            print(json.dumps(one | {"outcome": "loads"}), flush=True)
        except Exception as error:  # whatever the tool raises
            print(json.dumps(one | {"outcome": "refused", "says": type(error).__name__}), flush=True)
        flip(path, place)


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place // 8)
        byte = file.read(1)[0]
        file.seek(place // 8)
        file.write(bytes([byte ^ (1 << place % 8)]))


# --- output -----------------------------------------------------------------------------------------------------------


def child_command(*words) -> list[str]:
    return [sys.executable, os.path.abspath(__file__), "--child", *map(str, words)]


def table(results: dict) -> str:
    lines = ["| what happened | what came of it | `accelerator.save_state` | oneloop |", "| --- | --- | --- | --- |"]
    kills = {tool: results[tool]["kills"] for tool in TOOLS}
    for outcome, words in (
        ("unloadable", "newest checkpoint cannot be loaded"),
        ("loads wrong numbers", "newest checkpoint loads something else, without a word"),
        ("loads", "newest complete checkpoint loads"),
    ):
        counts = [f"{sum(kill['outcome'] == outcome for kill in kills[t])} of {len(kills[t])}" for t in TOOLS]
        lines.append(f"| killed while saving | {words} | {counts[0]} | {counts[1]} |")
    for outcome, words in (("loads", "loaded without a word"), ("ends the process", "ends the process")):
        counts = []
        for tool in TOOLS:
            flips = results[tool]["flips"]
            counts.append(f"{sum(one['outcome'] == outcome for one in flips)} of {len(flips)}")
        lines.append(f"| one flipped bit | {words} | {counts[0]} | {counts[1]} |")
    for tool in TOOLS:
        flips = results[tool]["flips"]
        files = dict.fromkeys(one["file"] for one in flips)
        parts = []
        for name in files:
            own = [one for one in flips if one["file"] == name]
            parts.append(f"{name} {sum(one['outcome'] == 'loads' for one in own)} of {len(own)}")
        lines.append(f"\nLoaded by {tool} with a flipped bit in: {', '.join(parts)}.")
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
