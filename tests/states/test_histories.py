"""Folders with more than one history in them, settings that change on the way, and what optimizers keep elsewhere."""

import errno
import re
import shutil

import pytest

from oneloop import stopping
from oneloop.state import folders, states, writer
from oneloop.state import format as state_format
from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs
from tests.states.test_resume import BASE as EXACT
from tests.states.test_resume import ROWS, metrics, rewound, weights
from tests.unit.test_tracking import own_environment  # noqa: F401

BASE = EXACT | {"warmup_steps": 0}  # runs of one and two steps
SCRIPT = runs.ROOT / "recipes" / "sft.py"


def steps(folder) -> list[int]:
    return [folders.step_of(path) for path in folders.published(folder)]


@pytest.mark.parametrize("name", ["Counting", "Late"])
def test_what_an_optimizer_keeps_elsewhere_goes_on(name, tmp_path):
    settings = BASE | {"optim": f"tests.states.odd.{name}", "learning_rate": 0.05, "max_steps": 6}
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    for step in (1, 2, 4):
        out = rewound(whole, step, tmp_path / str(step))
        runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
        assert metrics(out) == metrics(whole) and weights(out) == weights(whole), step


def test_another_optimizer_says_what_it_leaves_behind(tmp_path, capsys):
    out = rewound(runs.train(tmp_path, ROWS, **BASE), 4, tmp_path / "other")
    settings = BASE | {"optim": "torch.optim.SGD", "output_dir": str(out), "allow_changes": ["optim"]}
    runs.train(tmp_path, ROWS, **settings)
    assert "resume: SGD has no use for exp_avg, exp_avg_sq: left behind" in capsys.readouterr().out


def test_a_refused_run_changes_nothing(tmp_path):
    settings = BASE | {"max_steps": 5}
    out = runs.train(tmp_path, ROWS, **settings)
    with pytest.raises(ValueError, match="nowhere.jsonl"):
        runs.train(tmp_path, str(tmp_path / "nowhere.jsonl"), resume="none", **settings)
    other = runs.write_rows(tmp_path / "other.jsonl", ROWS[:-1])
    with pytest.raises(ValueError, match="training rows are other ones"):
        runs.train(tmp_path, other, resume=str(out / "states" / "step-00000001"), **settings)
    assert steps(out / "states") == [5, 4, 3, 2, 1] and not (out / "states.1").exists()


def test_the_same_path_goes_on_from_where_it_was(tmp_path, monkeypatch, capsys):
    """A fork that is stopped again and again by its budget comes to its end."""
    first = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "first"), **BASE)
    settings = BASE | {"resume": str(first / "states" / "step-00000002"), "max_hours": 1e-6}
    fork = tmp_path / "run"
    for step in (3, 4):
        with pytest.raises(stopping.Stopped, match=rf"stopped after step {step} of 9 \(max_hours"):
            runs.train(tmp_path, ROWS, **settings)
    assert steps(fork / "states") == [4, 3] and not (fork / "states.1").exists()
    runs.train(tmp_path, ROWS, **settings | {"max_hours": None})
    assert weights(fork) == weights(first)
    assert [line["step"] for line in metrics(fork)] == [3, 4, 5, 6, 7, 8, 9]
    assert re.findall(r"resume: \S*(first|run)/states/step-0*(\d+),", capsys.readouterr().out) == [
        ("first", "2"),
        ("run", "3"),
        ("run", "4"),
    ]


def test_a_fork_is_another_run_of_the_tracker(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = BASE | {"max_steps": 3, "report_to": "wandb"}
    first = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "first"), **settings)
    fork = runs.train(tmp_path, ROWS, resume=str(first / "states" / "step-00000002"), **settings)
    ids = [state_format.read_manifest(out / "states" / "step-00000003")["tracker"]["run_id"] for out in (first, fork)]
    assert len(set(ids)) == 2 and all(ids)


def test_the_model_is_exported_though_its_last_state_is_not(tmp_path, monkeypatch):
    settings = BASE | {"max_steps": 3, "save_every": -1}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "disk")

    with monkeypatch.context() as patched:
        patched.setattr(state_format, "write_tensors", full)
        with pytest.raises(ValueError, match="There is none yet.*begins anew"):
            runs.train(tmp_path, ROWS, **settings)
    out = tmp_path / "run"
    assert weights(out) and not folders.published(out / "states")
    runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "again"), **settings)
    assert weights(out) == weights(tmp_path / "again")


def test_another_batch_size_keeps_the_epochs(tmp_path):
    settings = BASE | {"global_batch_size": 1, "max_steps": -1, "num_train_epochs": 2.0}  # 26 steps
    whole = runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **settings)
    out = rewound(whole, 7, tmp_path / "other")
    settings |= {"global_batch_size": 4, "allow_changes": ["global_batch_size", "max_steps"]}
    runs.train(tmp_path, ROWS, output_dir=str(out), **settings)
    newest = state_format.open_state(folders.published(out / "states")[0])
    # 6 rows of the first epoch in 2 steps, 13 of the second in 4.
    assert newest.manifest["progress"] == {"step": 13, "epoch": 2, "position": 0, "total_steps": 13}


def test_fewer_rows_than_were_used(tmp_path, capsys):
    out = rewound(runs.train(tmp_path, ROWS, output_dir=str(tmp_path / "whole"), **BASE), 5, tmp_path / "run")
    fewer = runs.write_rows(tmp_path / "fewer.jsonl", ROWS[:6])
    runs.train(tmp_path, fewer, **BASE, allow_changes=["dataset_name"])
    assert "further in its epoch than there are rows" in capsys.readouterr().out
    assert all(line["train/loss"] > 0 for line in metrics(out)) and metrics(out)[-1]["step"] == 9


def test_states_on_another_disk(tmp_path):
    """`states` is a link to a folder elsewhere, and one state in it a link to yet another place."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "states").symlink_to(disk, target_is_directory=True)
    out = runs.train(tmp_path, ROWS, **BASE)
    whole = metrics(out), weights(out)
    for step in (5, 6, 7, 8, 9):
        shutil.rmtree(disk / folders.name_of(step))
    shutil.move(disk / folders.name_of(4), tmp_path / "kept")
    (disk / folders.name_of(4)).symlink_to(tmp_path / "kept", target_is_directory=True)
    runs.train(tmp_path, ROWS, **BASE | {"save_total_limit": 2})
    assert (metrics(out), weights(out)) == whole and len(metrics(out)) == 9
    assert steps(disk) == [9, 8, 4] and (tmp_path / "kept" / "manifest.json").exists(), "a link is never rotated away"
    runs.train(tmp_path, ROWS, resume="none", **BASE | {"max_steps": 2, "allow_changes": ["max_steps"]})
    assert steps(disk) == [2, 1] and steps(tmp_path / "disk.1") == [9, 8, 4]


def test_a_folder_that_cannot_be_locked_is_said_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folders, "lock", refuse)
    with pytest.raises(ValueError, match="states cannot be written: Read-only file system"):
        runs.train(tmp_path, ROWS, **BASE)
    runs.train(tmp_path, ROWS, **BASE | {"save_every": 0, "max_steps": 1})


def test_finished_run_started_again_keeps_one_model(tmp_path):
    out = runs.train(tmp_path, ROWS, **BASE)
    before = weights(out)
    runs.train(tmp_path, ROWS, **BASE)
    assert weights(out) == before and not (out / "model.1").exists()


def test_a_state_nobody_could_open_removes_no_other(tmp_path, monkeypatch):
    share_of = writer.share_of

    def twice(*arguments):
        share = share_of(*arguments)
        share.ranges.append(share.ranges[0])
        return share

    out = runs.train(tmp_path, ROWS, **BASE | {"max_steps": 2, "save_total_limit": 1})
    monkeypatch.setattr(states.writer, "share_of", twice)
    with pytest.raises(ValueError, match="could not be saved: Damaged"):
        runs.train(tmp_path, ROWS, **BASE | {"max_steps": 4, "save_total_limit": 1, "allow_changes": ["max_steps"]})
    assert steps(out / "states") == [2]


def test_hub_model_goes_on(tmp_path):
    """In a process of its own each time: what the hub's names stand for is not known before it is asked."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub = tmp_path / "home" / "hub" / "models--me--tiny"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    tiny.save(hub / "snapshots" / commit)
    values = runs.settings(tmp_path, ROWS, model_name_or_path="me/tiny", **BASE | {"max_steps": 2})
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    env = {"HF_HOME": str(tmp_path / "home")}
    launcher.launch("single", 1, SCRIPT, *words, extra=("--mixed_precision", "no"), **env)
    words[words.index("--max_steps") + 1] = "4"
    words += ["--allow_changes", "max_steps"]
    output = launcher.launch("single", 1, SCRIPT, *words, extra=("--mixed_precision", "no"), **env).stdout
    assert "step 2 of 2" in output and steps(tmp_path / "run" / "states") == [4, 3, 2, 1]
