"""The folder of states: what is newest, what is removed, and that a kill at any moment costs nothing that was saved.

The kills are real: forked processes leave without a word before the nth change of the disk, for every n there is.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oneloop.state import durable, folders
from oneloop.state import format as state_format
from tests.unit.test_state_format import manifest_of, problems_of

ROOT = Path(__file__).parents[2]


def save(root: Path, step: int, value: float | None = None, limit: int | None = None) -> None:
    """What a run of two ranks does for a state: files, manifest, name, rotation."""
    import torch

    partial = root / (folders.name_of(step) + folders.PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    values, files = torch.full((8,), float(step if value is None else value)), {}
    for rank, start in enumerate((0, 5)):
        name, part = f"rank-{rank:05d}.safetensors", values[start : 5 + 3 * rank]
        written = state_format.write_tensors(partial / name, [(f"param/{start}/w", part)])
        files[name] = written | {"ranges": [["w", "param", start, len(part)]]}
    tensors = {"w": {"shape": [8], "kinds": {"param": {"dtype": "F32", "shape": [8]}}, "scalars": {}}}
    progress = {"step": step, "epoch": 0, "position": 0, "total_steps": 100}
    state_format.write_manifest(partial, manifest_of(tensors, files, progress=progress))
    folders.rotate(root, limit, folders.publish(partial))


def steps(root: Path) -> list[int]:
    return [folders.step_of(path) for path in folders.published(root)]


def loadable(root: Path) -> dict[int, float]:
    """{step: the value in it} of all states that may be continued from."""
    found = {}
    for path in folders.published(root):
        if not problems_of(path):
            values = state_format.open_state(path).read("w", "param")
            assert len(values) == 8 and len(set(values.tolist())) == 1
            found[folders.step_of(path)] = float(values[0])
    return found


def add_unrelated(root: Path) -> None:
    """What other programs and people may have put beside the states; some of it looks much like ours."""
    for name in ("best", "tmp-1234", "step-5", "step-00000005.bak", "step-00000006.partial.old", "Step-00000005"):
        (root / name).mkdir()
        (root / name / "model.safetensors").write_text("theirs")
    (root / "step-00000003").mkdir()  # a checkpoint of another tool
    (root / "step-00000003" / "optimizer.bin").write_text("theirs")
    save(root, 4)
    (root / "step-00000004" / "notes.txt").write_text("the one in the paper")  # ours, with something of a person's
    for name in ("latest", "step-00000007", "step-00000008.partial", "step-00000009~0.removing"):
        (root / name).write_text("a file")
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    for name in ("step-00000010", "step-00000011.partial", "step-00000012~0.removing", "step-00000013~0.replaced"):
        (root / name).symlink_to(elsewhere, target_is_directory=True)


UNRELATED = 16
"""How many of these there are."""


def listing(folder: Path) -> dict[str, str]:
    """Every file and folder beneath, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes().hex() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


# --- what is newest, and what is removed (C37) ------------------------------------------------------------------------


def test_twelve_saves_keep_the_last_three(tmp_path):
    """Each step's folder is looked at; names as text would put 99 after 100 and 102."""
    root = tmp_path / "states"
    root.mkdir()
    add_unrelated(root)
    unrelated = listing(root)
    assert steps(root) == [10, 4, 3] and len(list(root.iterdir())) == UNRELATED
    for number in range(1, 13):
        save(root, 90 + number, limit=3)
        assert [step for step in steps(root) if step > 50] == list(range(90 + number, 90 + max(0, number - 3), -1))
        assert unrelated.items() <= listing(root).items()
        assert len(list(root.iterdir())) == UNRELATED + min(number, 3)
    assert folders.clean(root) == []


@pytest.mark.parametrize("newest", [1000, 99_999_999, 100_000_000, 12_345_678_901])
def test_numbers_decide(tmp_path, newest):
    for step in (newest, 9, 10, newest - 1):
        save(tmp_path, step)
    os.utime(folders.published(tmp_path)[-1], (2**31, 2**31))  # the oldest was copied last
    os.utime(folders.published(tmp_path)[0], (1, 1))
    assert steps(tmp_path) == [newest, newest - 1, 10, 9]
    assert folders.rotate(tmp_path, 2, tmp_path / folders.name_of(newest)) == [
        tmp_path / folders.name_of(step) for step in (10, 9)
    ]
    assert steps(tmp_path) == [newest, newest - 1]


def test_another_run_in_the_folder(tmp_path):
    """A fresh run's own states are never the ones rotated away, whatever higher numbers lie beside them."""
    root = tmp_path / "states"
    save(root, 1000)
    for step in (1, 2, 3):
        save(root, step, limit=1)
        assert steps(root) == [1000, step]
    aside = folders.set_aside(root)
    assert aside == tmp_path / "states.1" and steps(aside) == [1000, 3] and steps(root) == []
    assert folders.set_aside(root) is None
    save(root, 1, limit=1)
    assert folders.set_aside(root) == tmp_path / "states.2"


def test_going_back_leaves_later_states_behind(tmp_path):
    root = tmp_path / "states"
    for step in (20, 40, 60):
        save(root, step)
    aside = folders.move_aside(root, folders.published(root)[:2])
    assert steps(root) == [20] and steps(aside) == [60, 40] and len(loadable(aside)) == 2
    save(root, 40, value=41)
    assert loadable(root) == {40: 41, 20: 20} and loadable(aside)[40] == 40


@pytest.mark.parametrize("limit,left", [(None, 4), (1, 1), (2, 2), (4, 4), (9, 4)])
def test_limits(tmp_path, limit, left):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    removed = folders.rotate(tmp_path, limit, tmp_path / folders.name_of(4))
    assert steps(tmp_path) == [4, 3, 2, 1][:left] and len(removed) == 4 - left


def test_one_run_writes_at_a_time(tmp_path):
    """A second process is told who holds the folder, until that one has ended, in whatever way."""
    root = tmp_path / "states"
    program = (
        "import sys, time; from pathlib import Path; from oneloop.state import folders; "
        f"print(folders.lock(Path({str(root)!r})), flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "\n", "the first gets it"
        assert folders.lock(root).startswith(f"process {other.pid} on ")
        other.kill()
    assert folders.lock(root) == "" == folders.lock(root), "and the same process again"
    assert folders.clean(root) == [] and folders.published(root) == []


def test_no_folder_yet(tmp_path):
    root = tmp_path / "none" / "states"
    assert folders.published(root) == [] and folders.clean(root) == [] and folders.set_aside(root) is None
    assert folders.free_bytes(root) > 0


# --- what a kill leaves (C35) -----------------------------------------------------------------------------------------


def test_clean_takes_leftovers_only(tmp_path):
    root = tmp_path / "states"
    root.mkdir()
    add_unrelated(root)
    for step in (20, 40):
        save(root, step)
    kept = listing(root)
    leftovers = [
        "step-00000020~0.removing",
        "step-00000040~3.replaced",
        "step-00000060.partial",
        "step-123456789.partial",
    ]
    for name in leftovers:
        (root / name).mkdir()
        (root / name / "rank-00000.safetensors").write_text("half")
    assert folders.clean(root) == sorted(leftovers)
    assert listing(root) == kept and folders.clean(root) == []


def test_half_written_states_are_no_candidates(tmp_path):
    """Whatever a killed save leaves has the highest number, and is not taken for the newest; broken ones are named."""
    save(tmp_path, 20)
    save(tmp_path, 40)
    shutil.copytree(tmp_path / "step-00000040", tmp_path / "step-00000060.partial")
    (tmp_path / "step-00000060.partial" / state_format.CHECKSUM).unlink()
    (tmp_path / "step-00000080.partial").mkdir()
    assert steps(tmp_path) == [40, 20]
    (tmp_path / "step-00000040" / "rank-00001.safetensors").unlink()
    with pytest.raises(state_format.Damaged, match="rank-00001.safetensors is missing"):
        state_format.open_state(tmp_path / "step-00000040")
    assert loadable(tmp_path) == {20: 20}
    save(tmp_path, 60)  # over the left-over
    assert steps(tmp_path) == [60, 40, 20] and loadable(tmp_path) == {60: 60, 20: 20}


def test_a_state_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 60, value=1)
    save(tmp_path, 60, value=2)
    assert loadable(tmp_path) == {60: 2} and len(list(tmp_path.iterdir())) == 1


def test_a_name_that_cannot_be_given(tmp_path, monkeypatch):
    """The new state's name is refused by the disk: the former one of that step is back at the next start."""
    save(tmp_path, 60, value=1)
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(folders.PARTIAL):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        save(tmp_path, 60, value=2)
    folders.clean(tmp_path)
    assert loadable(tmp_path) == {60: 1}


# --- a kill before every change of the disk (R2) ----------------------------------------------------------------------

KEEP = 2
CASES = {  # states there, what lies about, and the step that is saved
    "the first": ((), (), 20),
    "the second": ((20,), (), 40),
    "the third": ((20, 40), (), 60),
    "over what a kill left": ((20, 40), ("step-00000060.partial", "step-00000020~0.removing"), 60),
    "anew": ((40, 60), (), 60),
    "several too many": ((10, 20, 30, 40), (), 60),
}


def prepare(root: Path, case: str) -> None:
    before, leftovers, _ = CASES[case]
    root.mkdir(parents=True)
    (root / "best").mkdir()
    (root / "best" / "theirs").write_text("theirs")
    for step in before:
        save(root, step)
    for name in leftovers:
        (root / name).mkdir()
        (root / name / "rank-00000.safetensors").write_text("half")


class Killer:
    """Ends this process before the nth operation that changes the disk, as a SIGKILL there would."""

    OPERATIONS = ("rename", "fsync", "unlink", "rmdir", "mkdir")

    def __init__(self, at: int | None):
        self.count, self.at = 0, at
        for name in self.OPERATIONS:
            setattr(os, name, self.counted(getattr(os, name)))
        durable.open = self.open

    def counted(self, operation):
        def call(*arguments, **options):
            if self.count == self.at:
                os._exit(9)
            self.count += 1
            return operation(*arguments, **options)

        return call

    def open(self, *arguments, **options):
        file = self.counted(open)(*arguments, **options)
        return file if "b" not in arguments[1] or "w" not in arguments[1] else _File(file, self)


class _File:
    """A file whose every write counts, half of it on the disk when the process ends in it."""

    def __init__(self, file, killer: Killer):
        self._file, self._killer = file, killer

    def write(self, data):
        if self._killer.count == self._killer.at:
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            os._exit(9)
        self._killer.count += 1
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def in_child(root: Path, step: int, at: int | None) -> int:
    """Save in a forked process that ends before operation `at`; returns the number of operations, -1 if killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            killer = Killer(at)
            save(root, step, value=1000 + step, limit=KEEP)
            os.write(write, str(killer.count).encode())
            os._exit(0)
        os._exit(1)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9) and (code == 0) == bool(text), f"exit {code}"
    return int(text) if text else -1


def do_not_wait(descriptor: int) -> None:
    """In place of fsync, which matters to a machine that dies, not to a process."""


def kill_everywhere(folder: str) -> None:
    """Run by a process of its own, which has not used any thread: forks would not carry those on."""
    os.fsync = do_not_wait
    counts = {}
    for case, (_, _, step) in CASES.items():
        prepare(Path(folder, case, "whole"), case)
        counts[case] = in_child(Path(folder, case, "whole"), step, None)
        for at in range(counts[case]):
            prepare(Path(folder, case, str(at)), case)
            assert in_child(Path(folder, case, str(at)), step, at) == -1
    print(json.dumps(counts))


def test_a_kill_at_any_moment(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", do_not_wait)
    program = f"from tests.unit import test_state_folders as t; t.kill_everywhere({str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    seen = set()
    for case, (before, _, step) in CASES.items():
        assert counts[case] >= 18, (case, counts)
        for at in [*range(counts[case]), "whole"]:
            root = tmp_path / case / str(at)
            found = loadable(root)
            bound = min(len(before), KEEP)
            out_of_the_way = list(root.glob(f"*{folders.REPLACED}"))
            # A state that is replaced by a newer one of its step is out of the way for one moment, and put back.
            assert len(found) >= bound - (case == "anew" and step not in found and len(out_of_the_way) == 1), (case, at)
            folders.clean(root)
            found = loadable(root)
            assert len(found) >= bound, (case, at)
            assert max(found, default=0) in {max(before, default=0), step}, (case, at)
            assert {path.name for path in root.iterdir()} == {"best", *(folders.name_of(one) for one in found)}, (
                case,
                at,
            )
            assert (root / "best" / "theirs").read_text() == "theirs"
            values = {one: {one, 1000 + one} if one == step else {one} for one in found}
            assert all(found[one] in values[one] for one in found), (case, at)
            seen.add((case, step in found, 1000 + step in found.values(), len(found)))
            save(root, step, value=1000 + step, limit=KEEP)  # the next start gets there, whatever it finds
            found = loadable(root)
            assert found[step] == 1000 + step and len(found) == min(KEEP, len({*before, step})), (case, at)
            assert {path.name for path in root.iterdir()} == {"best", *(folders.name_of(one) for one in found)}
    print(f"{sum(counts.values())} kills; outcomes {sorted(seen)}")
    assert len(seen) >= 15 and sum(counts.values()) >= 140
