"""C7: how long training stands still for a checkpoint of 500 MB, and what it is worth to have it on the disk by then.

All contenders save the same fp32 weights and AdamW moments. Ours, torch's distributed checkpoint (DCP) and the raw
write end when the disk has everything; `accelerator.save_state` ends when the system has, and a machine that dies
shortly after loses it. What one leaves to the system to be written is written before the next one's turn.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import baton
from benchmarks.outcome import Outcome, Target

WIDTH, LAYERS = 2048, 10
"""42 M parameters: 503 MB with both moments."""
QUICK_WIDTH = 512
ROUNDS = 6
LIMITS = {"accelerate": 1.05, "DCP": 0.70, "raw": 2.0}


def run(quick: bool) -> Outcome:
    """Alternate the contenders, each in an order that changes from round to round."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder_on_disk()) as name:
        contenders = make(Path(name), QUICK_WIDTH if quick else WIDTH)
        seconds = alternate(contenders, Path(name), 2 if quick else ROUNDS)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    control = baton.ratio(seconds["ours, again"], seconds["ours"])
    targets = [Target(f"ours / {name}", medians["ours"] / medians[name], limit) for name, limit in LIMITS.items()]
    targets.append(Target("ours, in the background / ours", medians["ours, in the background"] / medians["ours"], 0.6))
    table = [["contender", "seconds (median)", "all", "ours / it", "on the disk by then"]]
    durable = {"ours", "ours, again", "DCP", "raw"}
    for name, values in seconds.items():
        figures = [f"{medians[name]:.2f}", " ".join(f"{value:.2f}" for value in values)]
        table.append([name, *figures, f"{medians['ours'] / medians[name]:.2f}", "yes" if name in durable else "no"])
    return Outcome(
        name="saving",
        targets=targets,
        tables=[table],
        control=control.of_medians,
        conclusive=control_holds(control.of_medians),
        notes=["In the background is the copy that training waits for; the writing itself is that of `ours`."],
        series={"seconds": medians},
        quick=quick,
    )


def control_holds(ratio: float) -> bool:
    """A disk is less steady than a processor: two copies of the same code may differ by a seventh."""
    return 0.87 <= ratio <= 1.15


def folder_on_disk() -> str:
    """Below the project rather than under /tmp, which is often kept in memory, where nothing is durable."""
    from benchmarks import subjects

    folder = subjects.ROOT / ".cache"
    folder.mkdir(exist_ok=True)
    return str(folder)


def alternate(contenders: dict, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contender in each round, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            place = folder / "checkpoint"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            os.sync()
            began = time.perf_counter()
            contenders[name](place)
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}


def make(folder: Path, width: int) -> dict:
    """name: function that saves into an empty folder."""
    import torch
    from accelerate import Accelerator

    from oneloop.state import writer

    accelerator = Accelerator(cpu=True)
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    model(torch.randn(1, width)).sum().backward()
    optimizer.step()
    pieces = ranges_of(module, optimizer.optimizer)
    host = writer.HostCopy()

    def save_state(place: Path) -> None:
        accelerator.save_state(str(place))

    def in_the_background(place: Path) -> None:
        host.take({piece.key: tensor for piece, tensor in pieces})

    return {
        "ours": lambda place: ours(place, pieces),
        "accelerate": save_state,
        "DCP": lambda place: dcp(place, module, optimizer.optimizer),
        "raw": lambda place: raw(place, pieces),
        "ours, in the background": in_the_background,
        "ours, again": lambda place: ours(place, pieces),
    }


def ranges_of(module, optimizer) -> list:
    """(range, flat tensor) of all weights and moments."""
    from oneloop.state.format import Range

    found = []
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        for kind, tensor in (("param", parameter.detach()), *((k, state[k]) for k in ("exp_avg", "exp_avg_sq"))):
            found.append((Range(name, kind, 0, tensor.numel()), tensor.view(-1)))
    return found


def ours(place: Path, pieces: list) -> None:
    """File, hash, manifest, name; all of it through to the disk."""
    from oneloop.state import folders
    from oneloop.state import format as state_format

    partial = place / (folders.name_of(1) + folders.PARTIAL)
    partial.mkdir()
    entries = [(piece.key, tensor) for piece, tensor in pieces]
    written = state_format.write_tensors(partial / "rank-00000.safetensors", entries)
    files = {"rank-00000.safetensors": written | {"ranges": [piece.to_json() for piece, _ in pieces]}}
    state_format.write_manifest(partial, {"format": state_format.FORMAT, "files": files})
    folders.publish(partial)


def dcp(place: Path, module, optimizer) -> None:
    import torch.distributed.checkpoint as checkpoint

    names = [name for name, _ in module.named_parameters()]
    state = {
        f"{name}.{key}": value
        for name, number in zip(names, optimizer.state_dict()["state"].values(), strict=True)
        for key, value in number.items()
    }
    writer = checkpoint.FileSystemWriter(place, sync_files=True)
    checkpoint.save(dict(module.state_dict()) | state, storage_writer=writer, no_dist=True)


def raw(place: Path, pieces: list) -> None:
    import torch

    with open(place / "raw", "wb", buffering=0) as file:
        for _, tensor in pieces:
            data = memoryview(tensor.view(torch.uint8).numpy())
            while data:
                data = data[file.write(data) :]
        os.fsync(file.fileno())
