"""C9: bytes that tensors hold on each rank under each strategy, against the formula of `oneloop.memory`.

The real recipe runs under the shipped Accelerate files, over gloo, on 1, 2 and 4 ranks, in fp32 and in bf16. Each rank
adds up the storages of all its tensors at the end of the last micro-batch's backward pass and after the optimizer's
step (`rank.py`). Resident memory would not do: it also holds what was freed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import subjects
from benchmarks.outcome import Outcome, Target

SHAPE = {"layers": 8, "hidden": 512, "vocabulary": 24576, "heads": 8}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
RANKS = (1, 2, 4)
PRECISIONS = ("no", "bf16")
MOMENTS = ("after backward", "after step")
GLOBAL_BATCH = 4
LAUNCH_SECONDS = 900


def run(quick: bool) -> Outcome:
    """One launch for each strategy and number of ranks, with both precisions in it."""
    from oneloop import memory, sharding

    ranks = RANKS[:2] if quick else RANKS
    rows, per_parameter, largest, notes = [], {}, 0.0, []
    model = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subjects.save(folder / "model", **SHAPE)
        subjects.write_rows(folder / "rows.jsonl", num_rows=2 * GLOBAL_BATCH, num_characters=7)
        for strategy in STRATEGIES:
            for num_ranks in ranks:
                print(f"memory: {strategy} on {num_ranks}", file=sys.stderr, flush=True)
                for precision, found in launch(strategy, num_ranks, folder).items():
                    model = model or describe(found[0]["parameters"])
                    layout = sharding.layout(strategy, num_ranks)
                    expected = memory.state(model, layout, precision)
                    for moment, predicted in zip(MOMENTS, (expected.after_backward, expected.after_step), strict=True):
                        measured = [one[moment] for one in found]
                        worst = max(measured, key=lambda value: abs(value / predicted - 1))
                        error = worst / predicted - 1
                        largest = max(largest, abs(error))
                        key = f"{strategy}, {num_ranks}, {precision}, {moment}"
                        per_parameter[key] = (worst / model.parameters, predicted / model.parameters)
                        cells = [strategy, num_ranks, precision, moment, f"{worst / 1e6:.1f}"]
                        per_weight = [f"{value:.2f}" for value in per_parameter[key]]
                        rows.append([*cells, *per_weight, f"{100 * error:+.2f} %"])
    ddp = max(measured for key, (measured, _) in per_parameter.items() if key.startswith("ddp"))
    head = [
        "file",
        "ranks",
        "precision",
        "when",
        "MB on the fullest rank",
        "bytes a parameter",
        "formula",
        "difference",
    ]
    notes.append(
        f"Model of {model.parameters:,} parameters, all trained. What stands under ZeRO-3 includes its bucket of "
        f"{sharding.layout('zero3', 1).bucket_elements:,} gradients, whatever the size of the model."
    )
    return Outcome(
        name="memory",
        targets=[
            Target("largest difference from the formula", largest, 0.03),
            Target("bytes a parameter under ddp", ddp, 17.0),
        ],
        tables=[[head, *rows]],
        notes=notes,
        series={"bytes per parameter": per_parameter},
        quick=quick,
    )


def describe(num_parameters: int):
    from oneloop import memory

    return memory.Model(
        parameters=num_parameters,
        trainable=num_parameters,
        hidden=SHAPE["hidden"],
        layers=SHAPE["layers"],
        vocabulary=SHAPE["vocabulary"],
    )


def launch(strategy: str, num_ranks: int, folder: Path) -> dict[str, list[dict]]:
    """Train two steps in each precision; returns what each rank wrote. Raises RuntimeError with its output."""
    cases = [
        {
            "mixed_precision": precision,
            "result": str(folder / f"{strategy}-{num_ranks}-{precision}"),
            "config": {
                "model_name_or_path": str(folder / "model"),
                "dataset_name": str(folder / "rows.jsonl"),
                "output_dir": str(folder / "run"),
                "global_batch_size": GLOBAL_BATCH,
                "per_device_batch_size": GLOBAL_BATCH // num_ranks,
                "max_steps": 2,
                "logging_steps": 1,
                "report_to": "none",
            },
        }
        for precision in PRECISIONS
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_ranks)]
    command += ["--config_file", str(subjects.ROOT / "accelerate_configs" / f"{strategy}.yaml")]
    command += ["--main_process_port", "0", str(Path(__file__).with_name("rank.py")), str(folder / "cases.json")]
    process = subprocess.run(
        command,
        env=os.environ | {"ONELOOP_ALLOW_OVERSUBSCRIBE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LAUNCH_SECONDS,
    )
    if process.returncode:
        raise RuntimeError(f"{strategy} on {num_ranks} ranks: exit {process.returncode}\n{process.stdout[-5000:]}")
    return {
        case["mixed_precision"]: [
            json.loads(Path(f"{case['result']}.{rank}.json").read_text()) for rank in range(num_ranks)
        ]
        for case in cases
    }
