"""Every shipped config, full and LoRA, on one rank and two, against a trajectory that knows nothing of any of them.

Set ONELOOP_WRITE_DOCS=1 to write the measured differences to docs/equivalence.md.
"""

import functools
import json
import os
import random
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.equivalence import launcher, oracle

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
LORA = {"r": 4, "lora_alpha": 8}
LONGEST = 124  # tokens of the longest row
TRAINING = {
    "global_batch_size": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "max_steps": 12,
    "seed": 11,
}
# name -> (adapter?, mixed precision, what else the recipe is told). With 45 rows the sixth step of an epoch is short.
CASES = {
    "full, 1 a micro-batch": (False, "no", {"per_device_batch_size": 1}),
    "full, 4 a micro-batch": (False, "no", {"per_device_batch_size": 4}),
    "full, checkpointing": (False, "no", {"per_device_batch_size": 2, "gradient_checkpointing": True}),
    "lora": (True, "no", {"per_device_batch_size": 2}),
    "lora, checkpointing": (True, "no", {"per_device_batch_size": 4, "gradient_checkpointing": True}),
    "full, bf16": (False, "bf16", {"per_device_batch_size": 2}),
    "lora, bf16": (True, "bf16", {"per_device_batch_size": 2}),
    "qlora": (True, "no", {"per_device_batch_size": 2, "quantization": "nf4"}),
    "lora, undisturbed": (True, "no", {"per_device_batch_size": 2}),
    "qlora, undisturbed": (True, "no", {"per_device_batch_size": 2, "quantization": "nf4"}),
    "qlora, bf16": (True, "bf16", {"per_device_batch_size": 2, "quantization": "nf4"}),
    "qlora, checkpointing": (
        True,
        "bf16",
        {"per_device_batch_size": 4, "quantization": "nf4", "gradient_checkpointing": True},
    ),
    # The same rows a step, in blocks as long as the longest row: another number of micro-batches at each step.
    "full, packed": (False, "no", {"per_device_batch_size": 1, "packing": True, "max_length": LONGEST}),
    "lora, packed": (True, "bf16", {"per_device_batch_size": 2, "packing": True, "max_length": LONGEST}),
    "full, 100 steps": (False, "no", {"per_device_batch_size": 4, "max_steps": 100}),
    "lora, 100 steps": (True, "no", {"per_device_batch_size": 4, "max_steps": 100}),
}
# Activations are quantised in the forward pass, too, so the reference is not the oracle but the run under `single`.
INT8 = {
    "int8": (True, "no", {"per_device_batch_size": 2, "quantization": "int8"}),
    "int8, undisturbed": (True, "no", {"per_device_batch_size": 2, "quantization": "int8"}),
}
# One step whose loss or gradient is not finite, on one of two ranks; the reference is the run under `single`.
POISONED = {
    "poisoned loss": (False, "no", {"max_steps": 6}),
    "poisoned gradient": (True, "no", {"max_steps": 6}),
    "poisoned loss, bf16": (False, "bf16", {"max_steps": 6}),
}
POISONED_STEP = 2
# Alone, a rank has nothing to exchange: one case of each kind. `single` and two ranks have all of them.
ON_ONE_RANK = ("full, 4 a micro-batch", "full, checkpointing", "full, bf16", "lora", "qlora", "lora, packed")
EVALUATED = ("lora", "qlora", "int8")
SHARDS_WEIGHTS = ("zero3", "fsdp2")
# Largest difference from the oracle that is allowed, relative to the value (weights: to the tensor's largest element).
# Different orders of summation are all that may differ in fp32. Where the optimizer is offloaded, DeepSpeed steps with
# an AdamW kernel of its own, whose rounding adds up over 100 steps. In bf16 the backends also round at different
# places: sharded ones hold a 16-bit working copy of the weights, the others cast inside the operators.
TOLERANCES = {
    "fp32": {"loss": 1e-6, "grad_norm": 2e-5, "lr": 1e-12, "weights": 1e-4},
    "fp32, kernel of its own": {"loss": 5e-6, "grad_norm": 5e-4, "lr": 1e-12, "weights": 2e-4},
    "bf16": {"loss": 1e-3, "grad_norm": 2e-2, "lr": 1e-12, "weights": 0.1},
}
OWN_KERNEL = ("zero2_offload", "zero3_offload")
RANKS = [(config, ranks) for config in CONFIGS for ranks in (1, 2) if not (config == "single" and ranks == 2)]


def tolerance(config: str, mixed_precision: str) -> dict[str, float]:
    if mixed_precision != "no":
        return TOLERANCES[mixed_precision]
    return TOLERANCES["fp32, kernel of its own" if config in OWN_KERNEL else "fp32"]


def cases_for(config: str, ranks: int) -> dict:
    """The cases of one launch: `single` has all but the long ones, other configs most of them on two ranks only."""
    if config == "single":
        return {name: case for name, case in (CASES | INT8 | POISONED).items() if "100 steps" not in name}
    found = {name: case for name, case in CASES.items() if ranks > 1 or name in ON_ONE_RANK}
    return found | int8_for(config, ranks) | (POISONED if ranks > 1 else {})


def int8_for(config: str, ranks: int) -> dict:
    """Sharded configs refuse it; see test_int8_is_refused_where_weights_are_sharded."""
    return INT8 if ranks > 1 and not config.startswith(SHARDS_WEIGHTS) else {}


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """A tiny model folder, a data file with rows of very uneven lengths, and the tokenised rows."""
    folder = tmp_path_factory.mktemp("material")
    model_dir = tiny.save(folder / "model")
    draw = random.Random(5)
    words = "the harbour lamp is lit at dusk by keeper who climbs ninety steps and trims wick".split()

    def sentence(longest):
        return " ".join(draw.choices(words, k=draw.randint(1, longest)))

    examples = []
    for i in range(45):
        turns = [{"role": "user", "content": sentence(12)}, {"role": "assistant", "content": sentence(1 + i)}]
        examples.append({"messages": turns})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(example) + "\n" for example in examples))
    assert max(len(row["input_ids"]) for row in oracle.rows_of(tiny.tokenizer(), examples, 1024)) == LONGEST
    eval_data = folder / "eval.jsonl"
    eval_data.write_text("".join(json.dumps(example) + "\n" for example in examples[:11]))
    tokenizer = tiny.tokenizer()
    return {
        "model_dir": model_dir,
        "data": str(data),
        "cache": str(folder / "cache"),
        "eval_data": str(eval_data),
        "rows": oracle.rows_of(tokenizer, examples, 1024),
        "pad": tokenizer.pad_token_id,
    }


@pytest.fixture(scope="session")
def canonical(material):
    """(adapter?, mixed precision, ...) -> the oracle's trajectory, each computed once."""

    @functools.cache
    def of(adapter: bool, mixed_precision: str, max_steps: int, quantized: bool):
        return oracle.train(
            material["model_dir"],
            material["rows"],
            material["pad"],
            TRAINING | {"max_steps": max_steps},
            lora=LORA if adapter else None,
            bf16=mixed_precision == "bf16",
            quantized=quantized,
        )

    return of


@pytest.fixture(scope="session")
def launched(material, tmp_path_factory):
    """(config, ranks) -> folder with one sub-folder a case; each launched once, with all cases."""

    @functools.cache
    def run(config: str, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{config}-{ranks}")
        cases = []
        for name, (adapter, mixed_precision, extra) in cases_for(config, ranks).items():
            settings = TRAINING | extra | {"output_dir": str(folder / name)}
            settings |= {"model_name_or_path": material["model_dir"], "dataset_name": material["data"]}
            settings |= {"logging_steps": 1, "report_to": "none", "export_dtype": "fp32"}
            settings |= {"data_cache_dir": material["cache"]}
            if name in EVALUATED:
                settings |= {"eval_dataset_name": material["eval_data"], "eval_generations": 3, "eval_steps": 5}
            if adapter:
                settings |= {"use_peft": True, "lora_r": LORA["r"], "lora_alpha": LORA["lora_alpha"]}
            case = {"name": name, "recipe": "sft", "mixed_precision": mixed_precision, "config": settings}
            if name in POISONED:  # two micro-batches a step, whatever the number of ranks
                settings["per_device_batch_size"] = 4 // ranks
                case["poison"] = {"step": POISONED_STEP, "rank": ranks - 1, "what": name.split()[1].strip(",")}
            cases.append(case)
        launcher.run_cases(config, ranks, cases, folder)
        return folder

    return run


measured: dict[tuple[str, int], dict[str, dict[str, float]]] = {}


@pytest.mark.parametrize("config,ranks", RANKS, ids=lambda value: str(value))
def test_same_numbers(config, ranks, launched, canonical):
    folder = launched(config, ranks)
    problems = []
    for name, (adapter, mixed_precision, extra) in cases_for(config, ranks).items():
        if name in INT8 or name in POISONED:
            continue
        steps = extra.get("max_steps", TRAINING["max_steps"])
        log, weights = canonical(adapter, mixed_precision, steps, "quantization" in extra)
        metrics = launcher.read_metrics(folder / name)
        got = {key: launcher.column(metrics, f"train/{key}") for key in ("loss", "grad_norm", "lr")}
        assert all(len(values) == len(log) for values in got.values()), name
        worst = {
            key: max(abs(a - b[key]) / max(abs(b[key]), 1e-12) for a, b in zip(values, log, strict=True))
            for key, values in got.items()
        }
        tensors = launcher.read_tensors(folder / name / "model")
        assert set(tensors) == set(weights), f"{name}: other tensors than the model has"
        worst["weights"] = max(
            ((tensors[key] - weights[key]).abs().max() / weights[key].abs().max()).item() for key in weights
        )
        measured.setdefault((config, ranks), {})[name] = worst
        problems += [
            f"{name}: {key} differs by {value:.1e}"
            for key, value in worst.items()
            if not value <= tolerance(config, mixed_precision)[key]
        ]
        assert_topology(folder / name, config, ranks, extra["per_device_batch_size"])
    assert not problems, "\n".join(problems)


def assert_topology(output_dir: Path, config: str, ranks: int, per_device_batch_size: int) -> None:
    """The run recorded what it obtained, and that is the strategy of the file's name, sharded as the name says."""
    got = json.loads((output_dir / "topology.json").read_text())
    name, _, variant = config.partition("_")
    expected = {"cpu": "ddp"}.get(name, name)
    assert got["strategy"] == expected or (ranks == 1 and expected == "ddp"), got
    assert got["world_size"] == ranks
    assert (got["offload"] != "none") == (variant == "offload"), got
    share = 1 / ranks
    if expected in ("zero3", "fsdp2"):
        assert got["parameter_fraction"] == pytest.approx(share, abs=0.1), got
    if expected in ("zero1", "zero2", "zero3", "fsdp2"):
        assert got["optimizer_fraction"] == pytest.approx(share, abs=0.1), got
    if expected == "fsdp2":
        assert got["wrapped"]["LlamaDecoderLayer"] == 2, got
    elif expected.startswith("zero"):
        assert got["wrapped"]["DeepSpeedEngine"] == 1, got


@pytest.mark.parametrize("config,ranks", [pair for pair in RANKS if int8_for(*pair)], ids=lambda value: str(value))
def test_int8_is_the_same(config, ranks, launched):
    reference = launcher.read_metrics(launched("single", 1) / "int8")
    metrics = launcher.read_metrics(launched(config, ranks) / "int8")
    for name, tolerance in (("train/loss", 2e-5), ("train/grad_norm", 2e-3), ("eval/loss", 2e-5)):
        got, want = launcher.column(metrics, name), launcher.column(reference, name)
        assert len(want) == (4 if name == "eval/loss" else TRAINING["max_steps"])
        assert got == pytest.approx(want, rel=tolerance), name


@pytest.mark.parametrize("config,ranks", [pair for pair in RANKS if pair[1] > 1], ids=lambda value: str(value))
def test_step_that_is_not_finite_is_left_out_on_all_ranks(config, ranks, launched):
    for name, (_, mixed_precision, _) in POISONED.items():
        reference, folder = launched("single", 1) / name, launched(config, ranks) / name
        want, got = launcher.read_metrics(reference), launcher.read_metrics(folder)
        allowed = tolerance(config, mixed_precision)
        for metric in ("loss", "grad_norm"):
            values, expected = (launcher.column(metrics, f"train/{metric}") for metrics in (got, want))
            assert (values[POISONED_STEP] in ("inf", "nan")) == (metric == "grad_norm" or "loss" in name)
            del values[POISONED_STEP], expected[POISONED_STEP]
            assert values == pytest.approx(expected, rel=allowed[metric]), (name, metric)
        assert launcher.column(got, "train/skipped_steps") == [0, 0, 1, 1, 1, 1]
        record = json.loads((folder / "skipped_steps.jsonl").read_text())
        assert record["step"] == POISONED_STEP + 1
        assert len({micro_batch["seed"] for micro_batch in record["micro_batches"]}) == 2 * ranks
        rows = [row for micro_batch in record["micro_batches"] for row in micro_batch["rows"]]
        assert sorted(rows) == sorted(record["rows"]) and len(rows) == TRAINING["global_batch_size"]
        infinite = [m["rank"] for m in record["micro_batches"] if m["loss_sum"] == "inf"]
        assert infinite == ([ranks - 1] if "loss" in name else [])
        tensors, weights = (launcher.read_tensors(at / "model") for at in (folder, reference))
        for key, tensor in tensors.items():
            assert (tensor - weights[key]).abs().max() <= allowed["weights"] * weights[key].abs().max(), (name, key)


@pytest.mark.parametrize("config,ranks", RANKS, ids=lambda value: str(value))
def test_evaluation_leaves_no_trace(config, ranks, launched):
    """Losses and generated answers in the middle of a run, and the run without them: the same bits.

    4-bit layers repack themselves in evaluation mode on some CPUs, and a sharded weight is then gathered in the packing
    that it had before.
    """
    compared = 0
    for name in EVALUATED:
        if f"{name}, undisturbed" not in cases_for(config, ranks):
            continue
        with_it, without = (launched(config, ranks) / case for case in (name, f"{name}, undisturbed"))
        for metric in ("train/loss", "train/grad_norm"):
            got, want = (launcher.column(launcher.read_metrics(folder), metric) for folder in (with_it, without))
            assert got == want and len(got) == TRAINING["max_steps"], f"{name}: {metric}"
        tensors, expected = (launcher.read_tensors(folder / "model") for folder in (with_it, without))
        assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items()), name
        compared += 1
    assert compared == (0 if ranks == 1 and config != "single" else 2 if config.startswith(SHARDS_WEIGHTS) else 3)


@pytest.mark.parametrize("config", ("zero3", "fsdp2"))
def test_sharding_of_4_bit_weights_is_measured(config, launched):
    whole, sharded = (
        json.loads((launched(*at) / "qlora" / "topology.json").read_text()) for at in (("single", 1), (config, 2))
    )
    assert whole["quantized_fraction"] == 1 and whole["quantized_bytes"] > 0
    assert sharded["quantized_fraction"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("config", CONFIGS)
def test_evaluation_is_the_same(config, launched):
    """Token-weighted evaluation and generated answers do not depend on the config or the number of ranks."""
    references = {name: launcher.read_metrics(launched("single", 1) / name) for name in ("lora", "qlora")}
    names = ("eval/loss", "eval/perplexity", "eval/token_accuracy", "eval/exact_match")
    for ranks, case in ((r, case) for c, r in RANKS if c == config for case in references):
        metrics = launcher.read_metrics(launched(config, ranks) / case)
        for name in names:
            got, want = launcher.column(metrics, name), launcher.column(references[case], name)
            assert len(got) == len(want) == 4, "before step 1, after 5 and 10, and at the end"
            assert got == pytest.approx(want, rel=1e-5), name


def test_document(launched, canonical):
    """docs/equivalence.md states the tolerances that are asserted here, and is written from a run on request."""
    path = ROOT / "docs" / "equivalence.md"
    if os.environ.get("ONELOOP_WRITE_DOCS") == "1":
        assert set(measured) == set(RANKS), "run the whole module to write the document"
        path.parent.mkdir(exist_ok=True)
        path.write_text(document())
    text = path.read_text()
    assert tolerance_table() in text
    assert all(f"| `{config}` | {ranks} |" in text for config, ranks in RANKS)


def tolerance_table() -> str:
    lines = ["| compute | loss | grad norm | learning rate | final weights |", "| --- | --- | --- | --- | --- |"]
    for label, t in TOLERANCES.items():
        lines.append(f"| {label} | {t['loss']:g} | {t['grad_norm']:g} | {t['lr']:g} | {t['weights']:g} |")
    return "\n".join(lines)


def document() -> str:
    lines = [
        "# Equivalence of the configs",
        "",
        "Written by `ONELOOP_WRITE_DOCS=1 make test PYTEST_ARGS=tests/equivalence` on CPU ranks over gloo: a tiny",
        f"Llama, 45 rows of uneven lengths, {TRAINING['max_steps']} steps of {TRAINING['global_batch_size']} rows,",
        "AdamW, warm-up, cosine, clipping at 1. The reference is a plain torch loop without Accelerate, accumulation",
        "or ranks.",
        "",
        "Largest relative difference allowed (weights: relative to the largest element of a tensor):",
        "",
        tolerance_table(),
        "",
        f"A kernel of its own steps under {' and '.join(OWN_KERNEL)}: DeepSpeed's AdamW for the CPU.",
        "",
        "Largest differences measured over all steps:",
        "",
        "| config | ranks | case | loss | grad norm | weights |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (config, ranks), cases in sorted(measured.items()):
        for name, worst in cases.items():
            values = " | ".join(f"{worst[key]:.0e}" for key in ("loss", "grad_norm", "weights"))
            lines.append(f"| `{config}` | {ranks} | {name} | {values} |")
    return "\n".join(lines) + "\n"
