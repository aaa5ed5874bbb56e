"""States saved under one file of accelerate_configs/ and continued under another, at other numbers of ranks.

Each launch trains six steps undisturbed, saving after the third, and then three more steps from the third of others.
Usually a launch continues what the launches before it have saved, a few of them; ONELOOP_WRITE_DOCS=1 does every pair
and writes docs/resume.md.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from oneloop.state import format as state_format
from tests.equivalence import launcher
from tests.recipes import runs

ROOT = Path(__file__).parents[2]
NAMES = ("train/loss", "train/grad_norm", "numbers")
WRITES_DOCS = os.environ.get("ONELOOP_WRITE_DOCS") == "1"
POINTS = [  # (file of accelerate_configs/, ranks), in the order in which they are launched
    ("single", 1),
    ("cpu", 2),
    ("zero3", 2),
    ("fsdp2", 2),
    ("zero2_offload", 2),
    ("zero1", 2),
    ("fsdp2_offload", 2),
    ("zero3_offload", 2),
    ("zero2", 2),
    ("fsdp2_grad_op", 2),
    ("zero0", 2),
    ("zero3", 4),
    ("fsdp2", 4),
]
ROWS = [runs.turns(f"question {i} " + "so " * (i % 5), f"answer {i} " + "yes " * (i % 7)) for i in range(17)]
TRAINING = {
    "global_batch_size": 4,
    "per_device_batch_size": 1,
    "max_steps": 6,
    "shuffle": True,
    "weight_decay": 0.1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_every": 3,
    "save_total_limit": -1,
}
KINDS = {
    "full": {},
    "lora": {"use_peft": True, "lora_dropout": 0.1},
    "qlora": {"use_peft": True, "quantization": "nf4"},
    "8-bit moments": {"optim": "adamw_8bit"},
}
STEPS_BACK = {"full": (1, 4), "lora": (2, 3), "qlora": (1, 5), "8-bit moments": (1, 2, 5)}
"""Which of the earlier launches one continues, by kind; among any six in a row every kind meets every strategy."""
LOSS, GRAD_NORM, NUMBERS = 1e-6, 5e-5, 5e-4
"""Largest relative difference from the undisturbed run that is allowed; of masters and moments relative to a tensor's
largest element. It is what strategies differ by without any state (docs/equivalence.md)."""


TOLERANCES = {kind: {"train/loss": LOSS, "train/grad_norm": GRAD_NORM, "numbers": NUMBERS} for kind in KINDS}
# Blocks that share a scale are cut elsewhere: moments are rounded anew, to one of 256 values.
TOLERANCES["8-bit moments"] = {"train/loss": 1e-4, "train/grad_norm": 1e-2, "numbers": 0.05}


def kinds_of(point: tuple[str, int]) -> list[str]:
    """What is trained under a file: bitsandbytes' optimizers not where FSDP2 shards or DeepSpeed offloads."""
    has_8bit = not point[0].startswith("fsdp2") and "offload" not in point[0]
    return [kind for kind in KINDS if kind != "8-bit moments" or has_8bit]


def label(point: tuple[str, int]) -> str:
    return f"{point[0]} x{point[1]}"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    runs.settings(folder, ROWS)  # writes model and rows
    return folder


def case(place: Path, name: str, kind: str, **changes) -> dict:
    settings = runs.settings(place, str(place / "rows.jsonl"), **TRAINING, **KINDS[kind])
    return {
        "name": name,
        "recipe": "sft",
        "mixed_precision": "no",
        "config": settings | {"output_dir": str(place / name)} | changes,
    }


def own_run(place: Path, point, kind: str) -> Path:
    return place / f"{label(point)}, {kind}"


def continued_run(place: Path, source, target, kind: str) -> Path:
    return place / f"{label(source)} to {label(target)}, {kind}"


def pairs(index: int) -> list[tuple[tuple, str]]:
    """(source, kind) of what launch number `index` continues: itself, and some of those before it."""
    found = [(POINTS[index], kind) for kind in kinds_of(POINTS[index])]
    for kind, distances in STEPS_BACK.items():
        sources = [POINTS[index - back] for back in distances if index >= back]
        found += [(source, kind) for source in sources if kind in kinds_of(source) and kind in kinds_of(POINTS[index])]
    return found


@pytest.fixture(scope="session")
def launched(place):
    """index -> the launch of that point has been made, and those whose states it continues before it."""
    done = set()

    def make(index: int) -> None:
        if index in done:
            return
        point = POINTS[index]
        for source, _ in pairs(index):
            if source != point:
                make(POINTS.index(source))
        cases = [case(place, own_run(place, point, kind).name, kind) for kind in kinds_of(point)]
        for source, kind in pairs(index):
            state = own_run(place, source, kind) / "states" / "step-00000003"
            name = continued_run(place, source, point, kind).name
            cases.append(case(place, name, kind, resume=str(state)))
        env = {"ONELOOP_ALLOW_OVERSUBSCRIBE": "1"}
        folder = place / f"launch {label(point)}"
        folder.mkdir()
        (folder / "cases.json").write_text(json.dumps(cases))
        script = ROOT / "tests" / "equivalence" / "scenario.py"
        launcher.launch(point[0], point[1], script, str(folder / "cases.json"), **env)
        done.add(index)

    return make


def differences(reference: Path, continued: Path) -> dict[str, float]:
    """Largest relative differences of the three steps, and of masters and moments at the end."""
    rows = [[line for line in launcher.read_metrics(path) if line["step"] > 3] for path in (reference, continued)]
    assert [line["step"] for line in rows[0]] == [line["step"] for line in rows[1]] == [4, 5, 6]
    result = {}
    for name in ("train/loss", "train/grad_norm"):
        result[name] = max(abs(b[name] / a[name] - 1) for a, b in zip(*rows, strict=True))
    for name in ("train/lr", "train/tokens_seen", "train/non_padding_share", "train/token_accuracy"):
        if name != "train/token_accuracy":
            assert [line[name] for line in rows[0]] == [line[name] for line in rows[1]]
    ours, theirs = (state_format.open_state(path / "states" / "step-00000006") for path in (continued, reference))
    assert ours.tensors.keys() == theirs.tensors.keys() and len(ours.tensors) >= 14
    assert ours.manifest["progress"] == theirs.manifest["progress"]
    result["numbers"] = 0.0
    for name, about in theirs.tensors.items():
        assert ours.tensors[name]["scalars"] == about["scalars"] and about["scalars"]["step"] == 6
        assert about["kinds"].keys() == ours.tensors[name]["kinds"].keys() == {"param", "exp_avg", "exp_avg_sq"}
        for kind in about["kinds"]:
            a, b = theirs.read(name, kind), ours.read(name, kind)
            assert a.dtype == b.dtype == torch.float32
            scale = float(a.abs().max())
            result["numbers"] = max(result["numbers"], float((a - b).abs().max()) / scale if scale else 0.0)
    return result


@pytest.mark.parametrize("index", range(len(POINTS)), ids=[label(point).replace(" ", "-") for point in POINTS])
def test_continued_elsewhere(launched, place, index):
    launched(index)
    target = POINTS[index]
    seen = []
    for source, kind in pairs(index):
        reference, continued = own_run(place, target, kind), continued_run(place, source, target, kind)
        found = differences(reference, continued)
        if source == target:
            # To the last bit: the very same files.
            first, second = (
                state_format.open_state(path / "states" / "step-00000006").manifest["files"]
                for path in (reference, continued)
            )
            assert {n: f["sha256"] for n, f in first.items()} == {n: f["sha256"] for n, f in second.items()}
            assert found == dict.fromkeys(found, 0.0)
        seen.append((source, kind, found))
        assert all(found[name] <= limit for name, limit in TOLERANCES[kind].items()), (source, kind, found)
    assert len(seen) == len(pairs(index)) >= 3


@pytest.mark.skipif(not WRITES_DOCS, reason="every pair takes half an hour: ONELOOP_WRITE_DOCS=1")
def test_write_docs(place, launched):
    for index in range(len(POINTS)):
        launched(index)
    table = {}
    for target in POINTS:
        missing = [
            (source, kind)
            for source in POINTS
            for kind in kinds_of(target)
            if kind in kinds_of(source)
            and not (continued_run(place, source, target, kind) / "states" / "step-00000006").is_dir()
        ]
        cases = [
            case(
                place,
                continued_run(place, source, target, kind).name,
                kind,
                resume=str(own_run(place, source, kind) / "states" / "step-00000003"),
            )
            for source, kind in missing
        ]
        path = place / f"launch {label(target)}" / "all.json"
        path.write_text(json.dumps(cases))
        launcher.launch(
            target[0],
            target[1],
            ROOT / "tests" / "equivalence" / "scenario.py",
            str(path),
            **{"ONELOOP_ALLOW_OVERSUBSCRIBE": "1"},
        )
        for source in POINTS:
            for kind in set(kinds_of(source)) & set(kinds_of(target)):
                found = differences(own_run(place, target, kind), continued_run(place, source, target, kind))
                table[source, target, kind] = found
                within = all(found[name] <= limit for name, limit in TOLERANCES[kind].items())
                assert within, (source, target, kind, found)
    (ROOT / "docs" / "resume.md").write_text(document(table))


def document(table: dict) -> str:
    lines = [
        "# Stopped under one file, continued under another",
        "",
        "Written by `ONELOOP_WRITE_DOCS=1 make test PYTEST_ARGS=tests/states/test_matrix.py`: a tiny model on CPU",
        "ranks, fp32, six steps. Each cell is a run that was saved after step 3 under the file of its row and",
        "continued under that of its column; the numbers are the largest relative difference of its losses, in",
        "units of 1e-7, from six steps under the column's file without any interruption: full / LoRA with dropout",
        "/ QLoRA. `=` is equality to the last bit of losses, gradient norms, weights and moments. `x2` is the",
        "number of ranks.",
        "",
    ]
    half = (len(POINTS) + 1) // 2
    for columns in (POINTS[:half], POINTS[half:]):
        lines += ["| from \\ to | " + " | ".join(map(label, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
        for source in POINTS:
            cells = [" / ".join(_cell(table[source, target, kind]) for kind in list(KINDS)[:3]) for target in columns]
            lines.append(f"| {label(source)} | " + " | ".join(cells) + " |")
        lines.append("")
    worst, worst_8bit = (
        {
            name: max(f[name] for (*_, kind), f in table.items() if (kind == "8-bit moments") == is_8bit)
            for name in NAMES
        }
        for is_8bit in (False, True)
    )
    lines += [
        f"{len(table)} runs. Largest difference of a loss: {worst['train/loss']:.1e}, of a gradient norm: "
        f"{worst['train/grad_norm']:.1e},",
        f"of a weight or moment, relative to the largest of its tensor: {worst['numbers']:.1e}.",
        "",
        "With moments in 8 bits (`optim: adamw_8bit`) another strategy cuts the blocks that share a scale elsewhere,",
        f"and they are rounded anew: loss {worst_8bit['train/loss']:.1e}, gradient norm "
        f"{worst_8bit['train/grad_norm']:.1e}; under the same file and number of",
        "ranks, equal to the last bit.",
        "",
    ]
    return "\n".join(lines)


def _cell(found: dict[str, float]) -> str:
    return "=" if not any(found.values()) else f"{found['train/loss'] * 1e7:.1f}"
