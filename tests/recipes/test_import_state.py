"""Runs that were begun with plain Accelerate or transformers' Trainer, and go on here.

The checkpoints are made by the tools themselves, in two ranks where that matters; what their fp32 weights and moments
truly are is asked of the backend while it runs (`foreign_runs`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oneloop.state import folders
from oneloop.state import format as state_format
from tests import tiny
from tests.equivalence import launcher
from tests.recipes import foreign_runs, runs
from tests.test_guards import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from import_state import command, recipe  # noqa: E402

KINDS = ("param", "exp_avg", "exp_avg_sq")
ROWS = [runs.turns(f"What is {i} plus {i}?", f"It is {2 * i}.") for i in range(20)]


def save_odd_model(folder: Path) -> None:
    """A tiny model with biases, tied ends, and sizes that no number of ranks divides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text = tiny.tokenizer()
    settings = LlamaConfig(
        vocab_size=len(text),
        hidden_size=36,
        intermediate_size=129,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=12,
        mlp_bias=True,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(settings).save_pretrained(folder)
    text.save_pretrained(folder)


def settings(folder: Path, adapter: bool = False, **changes) -> dict:
    """The config of the run that goes on, as keywords and as recipe.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        save_odd_model(folder / "model")
    lora = {"use_peft": True, "lora_r": foreign_runs.LORA["r"], "lora_alpha": foreign_runs.LORA["lora_alpha"]}
    own = {"model_name_or_path": str(folder / "model"), "global_batch_size": 4, "per_device_batch_size": 2}
    values = runs.settings(folder, ROWS, **own, max_steps=4, **(lora if adapter else {}), **changes)
    (folder / "recipe.yaml").write_text(json.dumps(values))
    return values


def imported(checkpoint: Path, folder: Path, out: Path, *flags: str):
    """The state that the command makes of a checkpoint, opened and read to the last byte."""
    old = sys.argv
    sys.argv = ["import_state.py", str(checkpoint), str(out), "--config", str(folder / "recipe.yaml"), *flags]
    try:
        state = state_format.open_state(command.convert(*command.parse()))
    finally:
        sys.argv = old
    assert state_format.differences(state) == []
    return state


def assert_holds(state, truth: dict[str, torch.Tensor], step: int) -> None:
    num_equal = 0
    for name, about in state.tensors.items():
        assert about["scalars"] == {"step": step}
        for kind in KINDS:
            assert torch.equal(state.read(name, kind), truth[f"{kind}/{name}"].reshape(-1)), f"{kind} of {name}"
            num_equal += 1
    assert num_equal == len(truth) >= 60
    assert all(bool(truth[f"exp_avg/{name}"].any()) for name in state.tensors), "moments of zero prove nothing"


@pytest.fixture(scope="module", params=["zero2", "zero3", "fsdp2"])
def begun(request, tmp_path_factory):
    """(strategy, folder) of runs of two ranks, in full and with an adapter."""
    folder = tmp_path_factory.mktemp(request.param)
    settings(folder)
    launcher.launch(request.param, 2, Path(foreign_runs.__file__), str(folder))
    return request.param, folder


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_checkpoints_of_two_ranks(begun, tmp_path, adapter):
    strategy, folder = begun
    settings(folder, adapter)
    there = folder / ("lora" if adapter else "full")
    for checkpoint in (there / "accelerate", there / ("gathered" if strategy == "fsdp2" else "engine")):
        state = imported(checkpoint, folder, tmp_path / checkpoint.name)
        assert_holds(state, load_file(there / "truth.safetensors"), foreign_runs.NUM_STEPS)
        assert state.manifest["progress"] == {"step": 3, "epoch": 0, "position": 12, "total_steps": 4}
        assert state.manifest["imported_from"]["world_size"] == (None if checkpoint.name == "gathered" else 2)


def step_by_hand(values: dict, truth: dict[str, torch.Tensor], with_moments: bool) -> dict[str, torch.Tensor]:
    """The weights after one more step on rows 12 to 15, by torch alone."""
    from transformers import LlamaForCausalLM

    module, config = recipe.recipe_config(Path(values["model_name_or_path"]).parent / "recipe.yaml", Path("x"), [])
    rows = rows_of(module, config)[12:16]
    model = LlamaForCausalLM.from_pretrained(values["model_name_or_path"], dtype=torch.float32)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if not (n.endswith("bias") or "norm" in n)], "weight_decay": 0.01},
            {"params": [p for n, p in named.items() if n.endswith("bias") or "norm" in n], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay if group["weight_decay"] else 0.0
    for name, parameter in named.items():
        parameter.data.copy_(truth[f"param/{name}"])
        if with_moments:
            moments = {kind: truth[f"{kind}/{name}"].clone() for kind in KINDS[1:]}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    loss, count = 0.0, 0
    for row in rows:
        ids, labels = (torch.as_tensor(row[key], dtype=torch.int64)[None] for key in ("input_ids", "labels"))
        logits = model(input_ids=ids).logits[0, :-1]
        loss = loss + torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")
        count += int((labels[0, 1:] != -100).sum())
    (loss / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def rows_of(module, config) -> list[dict]:
    from oneloop import models
    from oneloop.data import prepare

    return prepare.load(config, None, models.load_tokenizer(config), module.encode)[0][:]


def test_a_run_goes_on_here(begun, tmp_path):
    """The fourth step of a run of two ranks is done by the recipe, alone: the step that torch does from the same
    weights and moments."""
    strategy, folder = begun
    values = settings(folder) | {"output_dir": str(tmp_path / "out")}
    state = imported(folder / "full" / "accelerate", folder, tmp_path / "out")
    assert state.folder.parent == tmp_path / "out" / folders.FOLDER
    runs.train(tmp_path, values["dataset_name"], **values)
    metrics = launcher.read_metrics(tmp_path / "out")
    assert [line["step"] for line in metrics if "train/loss" in line] == [4]
    after = state_format.open_state(tmp_path / "out" / "states" / "step-00000004")
    truth = load_file(folder / "full" / "truth.safetensors")
    with_moments, without = (step_by_hand(values, truth, moments) for moments in (True, False))
    for name, about in after.tensors.items():
        here = after.read(name, "param").view(about["shape"])
        torch.testing.assert_close(here, with_moments[name], rtol=0, atol=2e-6)
        assert about["scalars"]["step"] == 4
    furthest = max(float((without[name] - with_moments[name]).abs().max()) for name in without)
    assert furthest > 1e-4, "what is compared does not depend on the moments"


def test_trainer_checkpoint(tmp_path):
    """A checkpoint-N folder of transformers' Trainer, unsharded; it numbers the parameters of its optimizer."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    values = settings(tmp_path)
    model = LlamaForCausalLM.from_pretrained(values["model_name_or_path"], dtype=torch.float32)
    data = [{"input_ids": torch.arange(i, i + 12), "labels": torch.arange(i, i + 12)} for i in range(40)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        weight_decay=0.1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    truth = {}
    for name, parameter in trainer.model.named_parameters():
        own = {"param": parameter.detach()} | {kind: inner.state[parameter][kind] for kind in KINDS[1:]}
        truth |= {f"{kind}/{name}": tensor.clone() for kind, tensor in own.items()}
    state = imported(tmp_path / "trainer" / "checkpoint-3", tmp_path, tmp_path / "out")
    assert_holds(state, truth, 3)
    assert state.manifest["imported_from"]["steps"]["trainer_state.json"] == 3


@pytest.mark.parametrize("begun", ["zero2"], indirect=True)
def test_the_command_itself(begun, tmp_path):
    """As docs/import.md has it, in a process of its own."""
    _, folder = begun
    settings(folder)
    words = [sys.executable, str(ROOT / "scripts" / "import_state.py"), str(folder / "full" / "engine")]
    words += [str(tmp_path / "out"), "--config", str(folder / "recipe.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, env=launcher.environment())
    assert done.returncode == 0, done.stderr
    assert "read: DeepSpeed ZeRO-2, 2 rank(s)" in done.stdout and "not taken over: random states" in done.stdout
    assert done.stdout.splitlines()[-1] == f"state: {tmp_path / 'out' / 'states' / 'step-00000003'}"
    again = subprocess.run(words, capture_output=True, text=True, env=launcher.environment())
    assert again.returncode == 2 and "is there already" in again.stderr and "Traceback" not in again.stderr
