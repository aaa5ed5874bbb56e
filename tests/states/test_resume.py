"""Runs that continue: exactly, at any step, and only when nothing that matters has changed (one process; C.. are
reported faults, R.. bars)."""

import contextlib
import errno
import hashlib
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from oneloop.data import loaders
from oneloop.state import folders, resume
from oneloop.state import format as state_format
from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs

ROWS = [runs.turns(f"question {i}", f"answer {i} " + "yes " * (i % 7)) for i in range(13)]
OF_TIME = ("train/tokens_per_second", "train/step_seconds", "train/peak_memory_gib", "train/data_wait_share")
BASE = {"global_batch_size": 2, "max_steps": 9, "shuffle": True, "save_every": 1, "save_total_limit": -1}
BASE |= {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1}


def metrics(out: Path) -> list[dict]:
    """What was logged, without what measures time."""
    return [{k: v for k, v in line.items() if k not in OF_TIME} for line in launcher.read_metrics(out)]


def weights(out: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (out / "model").glob("*.safetensors")}


def rewound(out: Path, step: int, target: Path) -> Path:
    """A copy of a run as it was when it was killed at some time after `step`: later states never came to be."""
    shutil.copytree(out, target)
    for path in folders.published(target / "states"):
        if folders.step_of(path) > step:
            shutil.rmtree(path)
    shutil.rmtree(target / "model")
    return target


@pytest.fixture(scope="module")
def seen_rows():
    """Row ids of every step that is done in this module's runs, appended to a list that may be cleared."""
    rows, advance = [], loaders.TrainLoader.advance

    def note(self, progress):
        rows.append((progress.step + 1, list(self.last_row_ids)))
        advance(self, progress)

    loaders.TrainLoader.advance = note
    yield rows
    loaders.TrainLoader.advance = advance


EXACT = {  # name: (settings, steps continued from)
    "full": ({"num_train_epochs": 2.0, "max_steps": -1}, (2, 8)),  # 7 steps an epoch; C32
    "end of an epoch": ({"global_batch_size": 4, "max_steps": 8}, (4,)),
    "accumulation": ({"global_batch_size": 4, "per_device_batch_size": 2}, (3,)),
    "lora, dropout": ({"use_peft": True, "lora_dropout": 0.3}, (4,)),
    "qlora": ({"use_peft": True, "lora_dropout": 0.1, "quantization": "nf4"}, (3,)),
    "modules to save, dora": ({"use_peft": True, "use_dora": True, "lora_modules_to_save": ["norm"]}, (3,)),
    "intervals open": ({"logging_steps": 4, "eval_steps": 3, "eval": True, "use_peft": True}, (2, 3, 5)),
    "checkpointing": ({"gradient_checkpointing": True, "optim": "lion", "learning_rate": 1e-4}, (3,)),
    "adamw_8bit": ({"optim": "adamw_8bit"}, (3,)),
    "adafactor": ({"optim": "adafactor"}, (3,)),
    "own": ({"optim": "torch.optim.RMSprop"}, (3,)),
    "own, stateless at first": ({"optim": "torch.optim.SGD"}, (3,)),
    "written at once": ({"async_save": False}, (3,)),
    "packed": ({"packing": True, "max_length": 100, "num_train_epochs": 2.0, "max_steps": -1}, (2, 8)),
    "tokens": (
        {"batch_unit": "tokens", "global_batch_size": 110, "max_length": 100, "num_train_epochs": 2.5, "max_steps": -1},
        (3,),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_goes_on_to_the_last_bit(name, tmp_path, seen_rows):
    changes, steps = EXACT[name]
    settings = BASE | changes
    if settings.pop("eval", False):
        settings["eval_dataset_name"] = runs.write_rows(tmp_path / "eval.jsonl", ROWS[:4])
    seen_rows.clear()
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    all_rows = list(seen_rows)
    last = all_rows[-1][0]
    assert [step for step, _ in all_rows] == list(range(1, last + 1)) and last >= 8
    for step in steps:
        out = rewound(whole, step, tmp_path / f"from {step}")
        seen_rows.clear()
        runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
        assert seen_rows == all_rows[step:], "the same rows in the same order"
        assert metrics(out) == metrics(whole)
        assert weights(out) == weights(whole) != {}
        first, second = (state_format.open_state(path / "states" / folders.name_of(last)) for path in (whole, out))
        for key in ("progress", "tensors", "meter", "skipped"):
            assert first.manifest[key] == second.manifest[key]
        sums = [{n: f["sha256"] for n, f in s.manifest["files"].items()} for s in (first, second)]
        assert sums[0] == sums[1], "moments too"


def test_other_random_states_go_on_too(tmp_path, monkeypatch):
    """What a user's own code draws from Python and numpy in the middle of a run."""
    drawn = []
    step = loaders.TrainLoader.advance

    def draw(self, progress):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        step(self, progress)

    monkeypatch.setattr(loaders.TrainLoader, "advance", draw)
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **BASE)
    first = list(drawn)
    drawn.clear()
    runs.train(tmp_path, ROWS, output_dir=str(rewound(whole, 4, tmp_path / "again")), **BASE)
    assert drawn == first[4:] and len(drawn) == 5


def test_learning_rate_goes_on(tmp_path):  # C34
    settings = {"max_steps": 10, "global_batch_size": 4, "learning_rate": 1e-3, "save_every": 4}
    settings |= {"lr_scheduler_type": "linear", "warmup_steps": 2, "save_total_limit": -1}
    curve = [0, 5e-4, 1e-3, 8.75e-4, 7.5e-4, 6.25e-4, 5e-4, 3.75e-4, 2.5e-4, 1.25e-4]
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    out = rewound(whole, 4, tmp_path / "a")
    runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
    assert launcher.column(launcher.read_metrics(out), "train/lr") == pytest.approx(curve)
    longer = settings | {"max_steps": 20}
    with pytest.raises(ValueError, match=r"(?s)the run had 10 steps and has 20 \(max_steps.*--allow_changes max_steps"):
        runs.train(tmp_path, ROWS, output_dir=str(rewound(whole, 4, tmp_path / "b")), **longer)
    runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "b"), allow_changes=["max_steps"], **longer)
    rates = launcher.column(launcher.read_metrics(tmp_path / "b"), "train/lr")
    assert rates == pytest.approx(curve[:4] + [1e-3 * (20 - step) / 18 for step in range(4, 20)])
    halved = settings | {"learning_rate": 5e-4}
    with pytest.raises(ValueError, match=r"learning_rate was 0.001 and is 0.0005"):
        runs.train(tmp_path, ROWS, output_dir=str(rewound(whole, 4, tmp_path / "c")), **halved)
    runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "c"), allow_changes=["learning_rate"], **halved)
    rates = launcher.column(launcher.read_metrics(tmp_path / "c"), "train/lr")
    assert rates == pytest.approx(curve[:4] + [rate / 2 for rate in curve[4:]])


def test_adapter_goes_on(tmp_path, capsys):  # C39
    settings = BASE | {"use_peft": True, "lora_r": 4}
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    counted = re.findall(r"^parameters .*$", capsys.readouterr().out, flags=re.MULTILINE)
    out = rewound(whole, 4, tmp_path / "again")
    runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
    assert re.findall(r"^parameters .*$", capsys.readouterr().out, flags=re.MULTILINE) == counted
    norms = {
        step: float(state_format.open_state(out / "states" / folders.name_of(step)).read(name, "param").norm())
        for step in (4, 5)
        for name in ["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    }
    assert norms[4] > 0 and abs(norms[5] / norms[4] - 1) < 0.5
    names = state_format.open_state(out / "states" / folders.name_of(9)).tensors
    assert names and all("lora_" in name for name in names), "nothing of the base model"
    # The same from an adapter's folder, which is a model of its own to start from.
    settings = BASE | {"model_name_or_path": str(whole / "model")}
    more = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "more"), **settings)
    out = rewound(more, 4, tmp_path / "more again")
    runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
    assert weights(out) == weights(more) and metrics(out) == metrics(more)


# --- which state ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a state after each of its six steps."""
    folder = tmp_path_factory.mktemp("finished")
    out = runs.train(folder, ROWS, **BASE | {"max_steps": 6})
    return folder, out


def again(finished, tmp_path, step: int = 6, **changes) -> Path:
    """Run the same command again on a copy that has states up to `step`."""
    folder, out = finished
    copy = rewound(out, step, tmp_path / "run")
    changes.setdefault("model_name_or_path", str(folder / "tiny"))
    return copy, lambda **more: runs.train(
        tmp_path,
        str(folder / "rows.jsonl"),
        **(BASE | {"max_steps": 6, "output_dir": str(copy)} | changes | more),
    )


def flip(path: Path, offset: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_damaged_state_is_passed_over(finished, tmp_path, capsys):  # C35
    out, run = again(finished, tmp_path)
    flip(out / "states" / "step-00000006" / "rank-00000.safetensors")
    (out / "states" / "step-00000005" / "manifest.json").unlink()
    (out / "states" / "step-00000007.partial").mkdir()
    (out / "states" / "step-00000007.partial" / "rank-00000.safetensors").write_bytes(b"half")
    (out / "states" / "step-00000008").mkdir()
    with pytest.warns(RuntimeWarning, match=r"step-00000008 is no complete.*step-00000006/rank-00000.*step-00000005"):
        run()
    text = capsys.readouterr().out
    assert "removed step-00000007.partial" in text and re.search(r"resume: .*step-00000004, step 4 of 6", text)
    assert metrics(out) == metrics(finished[1]) and weights(out) == weights(finished[1])
    for step in (5, 6):
        state = state_format.open_state(out / "states" / folders.name_of(step))
        assert state_format.differences(state) == [], "written anew"


def test_named_state_must_be_good(finished, tmp_path):
    out, run = again(finished, tmp_path)
    bad = out / "states" / "step-00000003"
    flip(bad / "rank-00000.safetensors")
    with pytest.raises(ValueError, match=r"step-00000003/rank-00000.safetensors was changed"):
        run(resume=str(bad))
    (bad / "rank-00000.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step-00000003/rank-00000.safetensors is missing"):
        run(resume=str(bad))
    with pytest.raises(ValueError, match=r"no training state at .*nowhere"):
        run(resume=str(tmp_path / "nowhere"))
    for path in folders.published(out / "states"):
        (path / "manifest.sha256").write_text("")
    with pytest.raises(ValueError, match=r"(?s)no state can be continued from: .*--resume none"):
        run()


def test_explicit_path_goes_back(finished, tmp_path, capsys):
    out, run = again(finished, tmp_path)
    run(resume=str(out / "states" / "step-00000002"))
    assert "4 later state(s) are kept as" in capsys.readouterr().out
    assert sorted(path.name for path in (out / "states.1").iterdir()) == [folders.name_of(s) for s in (3, 4, 5, 6)]
    assert metrics(out) == metrics(finished[1]) and weights(out) == weights(finished[1])
    other = tmp_path / "other"
    run(resume=str(out), output_dir=str(other))
    assert "nothing is left to train" in capsys.readouterr().out
    assert weights(other) == weights(out) and not metrics(other)


def test_none_begins_anew(finished, tmp_path):  # C37
    out, run = again(finished, tmp_path)
    unrelated = out / "states" / "best"
    unrelated.mkdir()
    run(resume="none", max_steps=2, lr_scheduler_type="constant", warmup_steps=0)
    assert [folders.step_of(path) for path in folders.published(out / "states")] == [2, 1]
    assert [folders.step_of(path) for path in folders.published(out / "states.1")] == [6, 5, 4, 3, 2, 1]
    assert [line["step"] for line in metrics(out)] == [1, 2]


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "lock", lambda *_: "process 7 on elsewhere")
    monkeypatch.setattr(resume, "_WAIT_FOR_OTHER_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"states is being written to by another run \(process 7 on elsewhere\)"):
        runs.train(tmp_path, ROWS, **BASE)
    runs.train(tmp_path, ROWS, **BASE | {"save_every": 0})


def test_rotation(tmp_path):  # C37
    settings = BASE | {"max_steps": 12, "save_total_limit": 3}
    out = runs.train(tmp_path, ROWS, **settings)
    assert [folders.step_of(path) for path in folders.published(out / "states")] == [12, 11, 10]
    (out / "states" / "best").mkdir()
    settings |= {"max_steps": 14, "allow_changes": ["max_steps"]}
    runs.train(tmp_path, str(tmp_path / "rows.jsonl"), **settings)
    assert [folders.step_of(path) for path in folders.published(out / "states")] == [14, 13, 12]
    assert (out / "states" / "best").is_dir()


# --- what may have changed --------------------------------------------------------------------------------------------

HARMLESS = {"per_device_batch_size": 2, "logging_steps": 2, "gradient_checkpointing": True, "export_dtype": "bf16"}
HARMLESS |= {"save_every": 3, "save_total_limit": 5, "async_save": False, "attn_implementation": "eager"}
ALTERING = {
    "seed": 7,
    "weight_decay": 0.2,
    "adam_betas": [0.9, 0.95],
    "max_grad_norm": 0.5,
    "optim": "lion",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "global_batch_size": 4,
    "shuffle": False,
}


def test_harmless_changes_pass(finished, tmp_path):
    out, run = again(finished, tmp_path, 3)
    run(**HARMLESS)
    losses = [launcher.column(metrics(path), "train/loss") for path in (out, finished[1])]
    assert losses[0][:3] == losses[1][:3] and losses[0][-1] == pytest.approx(sum(losses[1][4:]) / 2, rel=0.1)


@pytest.mark.parametrize("name", ALTERING)
def test_altering_change_is_named(finished, tmp_path, name):
    _, run = again(finished, tmp_path, 3)
    with pytest.raises(ValueError, match=rf"(?s){name} was .* and is .*--allow_changes {name}"):
        run(**{name: ALTERING[name]})


def test_changed_rows_and_model_are_named(finished, tmp_path, capsys):
    folder, _ = finished
    out, run = again(finished, tmp_path, 3)
    other = runs.write_rows(tmp_path / "other.jsonl", ROWS[:-1])
    with pytest.raises(ValueError, match=r"training rows are other ones \(13 then, 12 now; dataset_name was .*other"):
        run(dataset_name=other)
    with pytest.raises(ValueError, match=r"13 then, 13 now; max_length was 1024 and is 45\)"):
        run(max_length=45)
    moved = tmp_path / "moved.jsonl"
    shutil.copy(folder / "rows.jsonl", moved)
    model = tmp_path / "moved"
    shutil.copytree(folder / "tiny", model)
    run(dataset_name=str(moved), model_name_or_path=str(model))
    assert weights(out) == weights(finished[1]), "what has only moved is the same"
    torch.manual_seed(3)
    with pytest.raises(ValueError, match=r"the model that training started from is another one"):
        out, run = again(finished, tmp_path / "b", 3)
        run(model_name_or_path=tiny.save(tmp_path / "tiny2", tie=False))


def test_other_adapter_is_refused(finished, tmp_path):
    _, run = again(finished, tmp_path, 3)
    with pytest.raises(ValueError, match=r"use_peft was False and is True"):
        run(use_peft=True)
    with pytest.raises(ValueError, match=r"lacks base_model\S*lora_A.*another model or adapter"):
        run(use_peft=True, allow_changes=["use_peft"])


def test_every_component_is_needed(finished, tmp_path):  # R14
    out, run = again(finished, tmp_path, 3)
    folder = out / "states" / "step-00000003"
    whole = json.loads((folder / "manifest.json").read_text())
    assert len(whole) >= 20 and whole.keys() - {"continued_from"} == set(state_format._REQUIRED)
    for name in state_format._REQUIRED:
        state_format.write_manifest(folder, {key: value for key, value in whole.items() if key != name})
        with pytest.raises(ValueError, match=r"manifest.json (lacks|is no manifest|has format)"):
            run(resume=str(folder))
    for name in ("random", "meter"):
        ranks = [{key: value for key, value in whole["ranks"][0].items() if key != name}]
        state_format.write_manifest(folder, whole | {"ranks": ranks})
        with pytest.raises(ValueError, match=rf"ranks.*{name}"):
            run(resume=str(folder))
    state_format.write_manifest(folder, whole | {"ranks": []})
    with pytest.raises(ValueError, match="ranks"):
        run(resume=str(folder))
    tensors = dict(whole["tensors"])
    name, about = tensors.popitem()
    state_format.write_manifest(folder, whole | {"tensors": tensors})
    with pytest.raises(ValueError, match=re.escape(name)):
        run(resume=str(folder))
    kinds = {kind: value for kind, value in about["kinds"].items() if kind != "exp_avg_sq"}
    tensors[name] = about | {"kinds": kinds}
    state_format.write_manifest(folder, whole | {"tensors": tensors})
    with pytest.raises(ValueError, match="exp_avg_sq"):
        run(resume=str(folder))


def test_what_cannot_be_saved_shows_at_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="optim: Odd keeps 'history' for .*, which cannot be saved"):
        runs.train(tmp_path, ROWS, **BASE | {"optim": "tests.states.odd.Odd", "save_every": 500})
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]


# --- disks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(monkeypatch, at_call: int, error: int = errno.ENOSPC):
    """The disk is full at one call of the writer of tensors, and at that one only."""
    write, calls = state_format.write_tensors, [0]

    def failing(path, entries, beat=lambda: None):
        def count():
            calls[0] += 1
            if calls[0] == at_call:
                raise OSError(error, "No space left on device", str(path))
            beat()

        return write(path, entries, count)

    with monkeypatch.context() as patched:
        patched.setattr(state_format, "write_tensors", failing)
        yield
    assert calls[0] >= at_call


@pytest.mark.parametrize("async_save", [True, False])
def test_full_disk_stops_the_run_and_keeps_what_is_there(tmp_path, monkeypatch, async_save):  # R5
    settings = BASE | {"save_every": 3, "async_save": async_save}
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    blocks = len(state_format.open_state(whole / "states" / "step-00000003").pieces)
    with (
        full_disk(monkeypatch, blocks + 5),
        pytest.raises(ValueError, match=r"could not be saved: No space.*MiB are free"),
    ):
        runs.train(tmp_path, ROWS, **settings)
    out = tmp_path / "run"
    assert [path.name for path in (out / "states").glob("*step*")] == ["step-00000003"]
    assert state_format.differences(state_format.open_state(out / "states" / "step-00000003")) == []
    runs.train(tmp_path, ROWS, **settings)
    assert weights(out) == weights(whole) and metrics(out) == metrics(whole)
    with full_disk(monkeypatch, blocks + 5), pytest.warns(RuntimeWarning, match="training goes on"):
        runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "on"), on_save_error="continue", **settings)
    assert weights(tmp_path / "on") == weights(whole)
    assert sorted(path.name for path in (tmp_path / "on" / "states").glob("*step*")) == [
        "step-00000003",
        "step-00000009",
    ]


def test_room_is_looked_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "free_bytes", lambda _: 17 << 20)
    with pytest.raises(
        ValueError, match=r"save_every: a training state needs [\d.]+ MiB, and there are 17 MiB free at"
    ):
        runs.train(tmp_path, ROWS, **BASE)
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "before anything was trained"
    runs.train(tmp_path, ROWS, **BASE | {"save_every": 0})


def test_states_that_vanish_stop_the_run(tmp_path, monkeypatch):
    advance = loaders.TrainLoader.advance

    def vanish(self, progress):
        advance(self, progress)
        if progress.step == 5:
            (tmp_path / "run" / "states").rename(tmp_path / "unmounted")  # at once, also while one is being written

    monkeypatch.setattr(loaders.TrainLoader, "advance", vanish)
    # The one before is being written, or was written, when that happens.
    found = r"step-0000000[34] has vanished|No such file or directory: .*step-0000000[45]"
    with pytest.raises(ValueError, match=rf"could not be saved: .*({found})"):
        runs.train(tmp_path, ROWS, **BASE)
