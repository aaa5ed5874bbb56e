"""The files of a training state: what is written is read again in any range, and no changed byte gets past.

Nothing here needs a model: states are written with the functions that a run uses, over ranks that are only numbers.
"""

import errno
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oneloop.state import durable
from oneloop.state import format as state_format
from oneloop.state.format import ABSMAX, CHECKSUM, MANIFEST, Damaged, Range

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 8
CODE = [(i - 128) / 128 for i in range(256)]


def manifest_of(tensors: dict, files: dict, **changes) -> dict:
    """A complete manifest around tensors and files; everything else is as small as the format allows."""
    manifest = {
        "format": state_format.FORMAT,
        "format_version": state_format.FORMAT_VERSION,
        "progress": {"step": 60, "epoch": 1, "position": 12, "total_steps": 100},
        "layout": "whole",
        "world_size": len(files),
        "tensors": tensors,
        "quantized": {},
        "files": files,
        "optimizer": {"name": "adamw"},
        "config": {"seed": 42},
        "topology": {"strategy": "ddp"},
        "ranks": [{"random": {"cpu": ""}, "meter": {"tokens_seen": 1}} for _ in files],
        "meter": {"tokens_seen": 1},
        "skipped": {},
        "loss_scaler": None,
        "data": {"sha256": "0" * 64, "num_rows": 16},
        "model": {"name": "tiny"},
        "tracker": {"name": "none", "run_id": None},
        "versions": {"torch": torch.__version__},
        "git_commit": None,
        "created": "2026-01-01T00:00:00+00:00",
    }
    return manifest | changes


def write_state(folder: Path, step: int = 60, seed: int = 0, **changes) -> dict:
    """A state of three ranks with every number format, empty ranges and a quantised kind whose blocks do not begin
    with the tensors; returns {(name, kind): the whole flat tensor as it is to be read}."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True)

    def normal(n):
        return torch.randn(n, generator=generator)

    whole = {
        ("layer.weight", "param"): normal(60),
        ("layer.weight", "exp_avg"): normal(60).bfloat16(),
        ("layer.weight", "count"): torch.randint(-(2**40), 2**40, (60,), generator=generator),
        ("layer.weight", "mask"): torch.randint(0, 2, (60,), generator=generator).bool(),
        ("bias", "param"): normal(7),
        ("bias", "exp_avg_sq"): normal(7),  # a kind that is quantised elsewhere; optimizers leave small tensors alone
        ("bias", "level"): torch.randint(0, 256, (7,), generator=generator).to(torch.uint8),
        ("scale", "param"): normal(1),
    }
    cuts = {"layer.weight": [(0, 25), (25, 35), (60, 0)], "bias": [(0, 0), (0, 3), (3, 4)], "scale": [(0, 1), None]}
    ranks: list[dict[Range, torch.Tensor]] = [{}, {}, {}]
    tensors: dict = {}
    for (name, kind), values in whole.items():
        about = tensors.setdefault(name, {"shape": [12, 5] if len(values) == 60 else [len(values)], "kinds": {}})
        about["scalars"] = {"step": step}
        dtype = state_format.NAMES_OF_DTYPES[values.dtype]
        about["kinds"][kind] = {"dtype": dtype, "shape": about["shape"]}
        for rank, cut in enumerate(cuts[name]):
            if cut is not None:
                ranks[rank][Range(name, kind, *cut)] = values[cut[0] : sum(cut)].clone()
    # 8-bit moments: each rank cuts its own flat partition into blocks, so a tensor may begin in the middle of one.
    tensors["layer.weight"]["kinds"]["exp_avg_sq"] = {"dtype": "U8", "shape": [12, 5]}
    expected = torch.empty(60)
    for rank, (start, length, phase) in enumerate([(0, 25, 3), (25, 35, 0)]):
        blocks = (torch.arange(length) + phase) // BLOCK_SIZE
        codes = torch.randint(0, 256, (length,), generator=generator).to(torch.uint8)
        scales = torch.rand(int(blocks[-1]) + 1, generator=generator)
        ranks[rank][Range("layer.weight", "exp_avg_sq", start, length, phase)] = codes
        ranks[rank][Range("layer.weight", "exp_avg_sq" + ABSMAX, start, len(scales))] = scales
        expected[start : start + length] = torch.tensor(CODE)[codes.long()] * scales[blocks]
    whole["layer.weight", "exp_avg_sq"] = expected
    files = {}
    for rank, entries in enumerate(ranks):
        name = f"rank-{rank:05d}.safetensors"
        written = state_format.write_tensors(folder / name, [(piece.key, value) for piece, value in entries.items()])
        files[name] = written | {"ranges": [piece.to_json() for piece in entries]}
    progress = {"step": step, "epoch": 1, "position": 12, "total_steps": 100}
    quantized = {"exp_avg_sq": {"block_size": BLOCK_SIZE, "code": CODE}}
    values = {"progress": progress, "quantized": quantized} | changes
    state_format.write_manifest(folder, manifest_of(tensors, files, **values))
    return whole


def problems_of(folder: Path) -> list[str]:
    """What is wrong with a state, however it is found; any other exception than Damaged goes through."""
    try:
        state = state_format.open_state(folder)
    except Damaged as error:
        return [str(error)]
    try:
        return state_format.differences(state)
    finally:
        state.close()


def changed(folder: Path, change) -> None:
    """Change the manifest as `change` does, with a checksum that fits."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    state_format.write_manifest(folder, manifest)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state") / "step-00000060"
    return folder, write_state(folder)


@pytest.fixture
def copy(pristine, tmp_path):
    return Path(shutil.copytree(pristine[0], tmp_path / "step-00000060"))


# --- reading what was written -----------------------------------------------------------------------------------------


def test_any_range_is_read(pristine):
    folder, whole = pristine
    state = state_format.open_state(folder)
    assert state.step == 60 and set(state.tensors) == {"layer.weight", "bias", "scale"}
    num_ranges = 0
    for (name, kind), values in whole.items():
        assert state.num_elements(name, kind) == len(values)
        assert torch.equal(state.read(name, kind), values), (name, kind)
        for start in range(len(values) + 1):
            for length in range(len(values) - start + 1):
                part = state.read(name, kind, start, length)
                assert part.dtype == values.dtype and torch.equal(part, values[start : start + length])
                num_ranges += 1
    assert num_ranges > 9000
    assert state_format.differences(state) == []
    state.close()


def test_quantised_ranges_are_taken_over_as_they_are(pristine):
    """What the writer's own layout reads is codes and scales, bit for bit; pieces join where a block ends."""
    folder, whole = pristine
    state = state_format.open_state(folder)
    for file, start, length, phase in (("rank-00000", 0, 25, 3), ("rank-00001", 25, 35, 0)):
        codes, scales = state.read_packed("layer.weight", "exp_avg_sq", start, length)
        raw = load_file(folder / f"{file}.safetensors")
        assert torch.equal(codes, raw[f"exp_avg_sq/{start}/layer.weight"])
        assert torch.equal(scales, raw[f"exp_avg_sq{ABSMAX}/{start}/layer.weight"])
        values = torch.tensor(CODE)[codes.long()] * scales[(torch.arange(length) + phase) // BLOCK_SIZE]
        assert torch.equal(values, whole["layer.weight", "exp_avg_sq"][start : start + length])
        begin = start + BLOCK_SIZE - phase  # the second block
        part_codes, part_scales = state.read_packed("layer.weight", "exp_avg_sq", begin, 2 * BLOCK_SIZE)
        assert torch.equal(part_codes, codes[begin - start : begin - start + 2 * BLOCK_SIZE])
        assert torch.equal(part_scales, scales[1:3])


def test_files_are_those_of_safetensors(tmp_path):
    """Another reader reads them, the hash is that of the file, and a tensor begins where its numbers may lie."""
    entries = {f"param/0/{dtype}": torch.arange(5).to(dtype) for dtype in state_format.NAMES_OF_DTYPES}
    entries |= {"param/0/none": torch.empty(0), "param/0/many": torch.randn(3 * state_format.BLOCK_BYTES // 4 + 1)}
    path = tmp_path / "rank-00000.safetensors"
    written = state_format.write_tensors(path, entries.items())
    data = path.read_bytes()
    assert written == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    read = load_file(path)
    assert set(read) == set(entries) and len(read) == 12
    for key, value in entries.items():
        assert read[key].dtype == value.dtype and torch.equal(read[key], value), key
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    assert header.pop("__metadata__") == {"format": "oneloop-state", "format_version": "1"}
    for key, about in header.items():
        assert (8 + header_bytes + about["data_offsets"][0]) % entries[key].element_size() == 0, key


def test_order_of_empty_ranges_does_not_matter(copy):
    """A rank without a share may stand before or after the one whose range begins at the same place."""

    def later(manifest):
        files = manifest["files"]
        empty = next(item for item in files["rank-00000.safetensors"]["ranges"] if item[:2] == ["bias", "param"])
        files["rank-00000.safetensors"]["ranges"].remove(empty)
        files["rank-00002.safetensors"]["ranges"].append(empty)

    changed(copy, later)
    assert torch.equal(state_format.open_state(copy).read("bias", "param"), load_bias(copy))


def load_bias(folder: Path) -> torch.Tensor:
    first, second = (load_file(folder / f"rank-0000{rank}.safetensors") for rank in (1, 2))
    return torch.cat([first["param/0/bias"], second["param/3/bias"]])


def test_the_reader_of_the_documentation(pristine, tmp_path):
    """docs/state-format.md promises twenty lines of plain Python; they are taken from there and run."""
    folder, whole = pristine
    text = (ROOT / "docs" / "state-format.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 20
    assert set(re.findall(r"(?:^|\n)(?:import|from) (\w+)", blocks[0])) <= {"json", "pathlib", "torch", "safetensors"}
    names = list(whole)
    ending = (
        f"for i, (name, kind) in enumerate({names!r}):\n    save_file({{'x': read(r'{folder}', name, kind)}}, str(i))\n"
    )
    (tmp_path / "reader.py").write_text(f"{blocks[0]}\nfrom safetensors.torch import save_file\n{ending}")
    subprocess.run([sys.executable, "-I", "reader.py"], cwd=tmp_path, check=True, timeout=100)
    for number, (name, kind) in enumerate(names):
        read = load_file(tmp_path / str(number))["x"]
        shape = [12, 5] if name == "layer.weight" else [len(whole[name, kind])]
        assert list(read.shape) == shape and torch.equal(read.flatten(), whole[name, kind]), (name, kind)


# --- damage (R4) ------------------------------------------------------------------------------------------------------


def all_files(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [MANIFEST, CHECKSUM, *(f"rank-0000{n}.safetensors" for n in range(3))]
    return files


def names_file(problems: list[str], file: Path) -> bool:
    return any(file.name in problem for problem in problems)


def test_undamaged(copy):
    assert problems_of(copy) == []


def test_a_flipped_bit(copy):
    """One bit at 200 random places of every file, headers and checksums too: found each time, and the file is named."""
    draw, num_found = random.Random(0), 0
    for file in all_files(copy):
        data = file.read_bytes()
        for _ in range(200):
            place = draw.randrange(8 * len(data))
            broken = bytearray(data)
            broken[place // 8] ^= 1 << place % 8
            file.write_bytes(broken)
            assert names_file(problems_of(copy), file), f"{file.name}: bit {place}"
            num_found += 1
        file.write_bytes(data)
    assert num_found == 1000 and problems_of(copy) == []


def test_a_cut_file(copy):
    draw, num_found = random.Random(1), 0
    for file in all_files(copy):
        data = file.read_bytes()
        for length in {0, 1, len(data) - 1, *(draw.randrange(len(data)) for _ in range(47))}:
            file.write_bytes(data[:length])
            assert names_file(problems_of(copy), file), f"{file.name}: {length} of {len(data)} bytes"
            num_found += 1
        file.write_bytes(data)
    assert num_found >= 5 * 40


@pytest.mark.parametrize("half", ["first", "second"])
def test_a_zeroed_half(copy, half):
    for file in all_files(copy):
        data = file.read_bytes()
        middle = len(data) // 2
        zeros = bytes(middle), data[middle:]
        file.write_bytes(b"".join(zeros) if half == "first" else data[:middle] + bytes(len(data) - middle))
        assert names_file(problems_of(copy), file), file.name
        file.write_bytes(data)


def test_a_longer_file(copy):
    for file in all_files(copy):
        data = file.read_bytes()
        file.write_bytes(data + b"\n")
        assert names_file(problems_of(copy), file), file.name
        file.write_bytes(data)


@pytest.mark.parametrize("instead", ["nothing", "folder", "dangling link"])
def test_a_missing_file(copy, instead):
    for file in all_files(copy):
        file.rename(copy.parent / "elsewhere")
        if instead == "folder":
            file.mkdir()
        elif instead == "dangling link":
            file.symlink_to("/does/not/exist")
        assert names_file(problems_of(copy), file), file.name
        if instead == "folder":
            file.rmdir()
        (copy.parent / "elsewhere").replace(file)
    assert problems_of(copy) == []


def test_file_that_vanishes_after_opening(copy):
    state = state_format.open_state(copy)
    (copy / "rank-00001.safetensors").unlink()
    assert names_file(state_format.differences(state), copy / "rank-00001.safetensors")
    with pytest.raises(Damaged, match="rank-00001.safetensors"):
        state.read("bias", "param")


def test_swapped_files(copy):
    """Files of equal length trade their names: sizes fit, names fit, and other numbers would be read."""
    entries = [("param/0/bias", torch.zeros(7))]
    tensors = {"bias": {"shape": [14], "kinds": {"param": {"dtype": "F32", "shape": [14]}}, "scalars": {}}}
    folder, files = copy.parent / "equal", {}
    folder.mkdir()
    for rank in range(2):
        name, start = f"rank-{rank:05d}.safetensors", 7 * rank
        entries = [(f"param/{start}/bias", torch.full((7,), float(rank)))]
        files[name] = state_format.write_tensors(folder / name, entries) | {"ranges": [["bias", "param", start, 7]]}
    state_format.write_manifest(folder, manifest_of(tensors, files))
    assert problems_of(folder) == []
    for one, other in ((folder, files), (copy, ["rank-00000.safetensors", "rank-00001.safetensors"])):
        first, second = (one / name for name in other)
        first.rename(one / "x"), second.rename(first), (one / "x").rename(second)
        problems = problems_of(one)
        assert names_file(problems, first) or names_file(problems, second)


def test_a_foreign_manifest(copy, tmp_path):
    """The manifest of another state of the same run, with its own checksum: the files are not those it describes."""
    write_state(tmp_path / "other", step=40, seed=1)
    for name in (MANIFEST, CHECKSUM):
        shutil.copy(tmp_path / "other" / name, copy / name)
    problems = problems_of(copy)
    assert len(problems) >= 1 and "rank-0000" in problems[0]


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '"oneloop-state"', "{}", "{", "\xff", '{"format": "other"}'])
def test_a_manifest_that_is_none(copy, text):
    data = text.encode("latin-1")
    (copy / MANIFEST).write_bytes(data)
    (copy / CHECKSUM).write_bytes(f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode())
    assert names_file(problems_of(copy), copy / MANIFEST)


def test_another_version(copy):
    changed(copy, lambda manifest: manifest.update(format_version=2))
    with pytest.raises(Damaged, match="has format version 2; this oneloop reads 1"):
        state_format.open_state(copy)


@pytest.mark.parametrize(
    "name", ["../rank-00000.safetensors", "/etc/hostname", "a/b.safetensors", "rank-00000", "..", "", "x\0.safetensors"]
)
def test_file_names_lead_nowhere_else(copy, name):
    shutil.copy(copy / "rank-00000.safetensors", copy.parent / "rank-00000.safetensors")

    def renamed(manifest):
        manifest["files"][name] = manifest["files"].pop("rank-00000.safetensors")

    changed(copy, renamed)
    with pytest.raises(Damaged, match=r"manifest.json|\.safetensors"):
        state_format.open_state(copy)


RANGES = {  # what becomes of the range of `layer.weight` that rank 1 holds, [25, 60)
    "hole before": lambda item: item.__setitem__(2, 26),
    "overlap": lambda item: item.__setitem__(2, 24),
    "too short": lambda item: item.__setitem__(3, 34),
    "too long": lambda item: item.__setitem__(3, 36),
    "backwards": lambda item: item.__setitem__(3, -35),
    "of another tensor": lambda item: item.__setitem__(0, "layer.other"),
    "of another kind": lambda item: item.__setitem__(1, "exp_avg_cubed"),
    "scales of another kind": lambda item: item.__setitem__(1, "param" + ABSMAX),
    "not numbers": lambda item: item.__setitem__(2, "25"),
    "incomplete": lambda item: item.pop(),
    "gone": list.clear,
}


@pytest.mark.parametrize("kind", ["param", "exp_avg_sq"])
@pytest.mark.parametrize("change", RANGES)
def test_ranges_that_do_not_tile(copy, change, kind):
    def moved(manifest):
        ranges = manifest["files"]["rank-00001.safetensors"]["ranges"]
        RANGES[change](next(item for item in ranges if item[:2] == ["layer.weight", kind]))

    changed(copy, moved)
    with pytest.raises(Damaged, match="step-00000060"):
        state_format.open_state(copy)


def test_a_range_may_not_go_back(copy):
    """Ranges of 40 and -15 elements add up like 25."""

    def moved(manifest):
        ranges = manifest["files"]["rank-00000.safetensors"]["ranges"]
        next(item for item in ranges if item[:2] == ["layer.weight", "param"])[3] = 40
        ranges.append(["layer.weight", "param", 40, -15])
        second = manifest["files"]["rank-00001.safetensors"]["ranges"]
        second.append(["layer.weight", "param", 60, 0])

    changed(copy, moved)
    with pytest.raises(Damaged, match="cannot hold"):
        state_format.open_state(copy)


def test_lengths_are_checked_before_anything_is_read(copy):
    """A cut file would end a process that reads it through a memory map (SIGBUS)."""
    for name in ("rank-00000.safetensors", "rank-00002.safetensors"):
        data = (copy / name).read_bytes()
        for wrong in (data[:-1], data + b" "):
            (copy / name).write_bytes(wrong)
            with pytest.raises(Damaged, match=f"{name} has {len(wrong)} bytes instead of {len(data)}"):
                state_format.open_state(copy)
        (copy / name).write_bytes(data)


def keys_of(value, path=()):
    """Paths of all keys in a manifest that has one entry of each sort."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from keys_of(inner, (*path, key))


OPTIONAL = {"config", "topology", "meter", "versions", "tracker", "data", "model", "optimizer", "skipped", "ranks"}
"""Of these the keys within are the business of whoever wrote them."""


def test_every_component_is_missed(copy):  # R14
    """Each key that the format requires is deleted in turn, and each within them that reading relies on."""
    pristine = json.loads((copy / MANIFEST).read_text())
    num_deleted = 0
    for path in keys_of(pristine):
        if len(path) > 1 and (path[0] in OPTIONAL or path[-2] == "scalars"):
            continue
        changed(copy, lambda manifest, path=path: delete(manifest, path))
        problems = problems_of(copy)
        assert names_file(problems, copy / MANIFEST) or "step-00000060" in problems[0], path
        num_deleted += 1
        state_format.write_manifest(copy, pristine)
    assert num_deleted >= 21 + 4 + 20
    assert problems_of(copy) == []


def delete(manifest: dict, path: tuple) -> None:
    for key in path[:-1]:
        manifest = manifest[key]
    del manifest[path[-1]]


@pytest.mark.parametrize("value", [None, 0, "text", [], [[]], {"x": 1}])
def test_values_of_the_wrong_sort(copy, value):
    """A manifest of other hands is refused with a word, whatever stands in it."""
    pristine = json.loads((copy / MANIFEST).read_text())
    for name in ("progress", "tensors", "quantized", "files"):
        changed(copy, lambda manifest, name=name: manifest.update({name: value}))
        problems = problems_of(copy)
        assert problems and "step-00000060" in problems[0], (name, value)
        state_format.write_manifest(copy, pristine)


# --- faults of the disk (R5) ------------------------------------------------------------------------------------------


class FaultyDisk:
    """Stands in for `open` and `os.fsync`: the nth operation fails, and every write takes less than it is given."""

    def __init__(self, monkeypatch, fail_at: int | None, number: int):
        self.count, self.fail_at, self.number = 0, fail_at, number
        fsync = state_format.os.fsync
        monkeypatch.setattr(durable, "open", self.open, raising=False)
        monkeypatch.setattr(state_format.os, "fsync", lambda descriptor: (self.operation(), fsync(descriptor)))

    def operation(self) -> None:
        self.count += 1
        if self.count - 1 == self.fail_at:
            raise OSError(self.number, "injected")

    def open(self, path, mode, **options):
        self.operation()
        file, write = open(path, mode, **options), None
        write = file.write

        def faulty(block):
            self.operation()
            return write(block[: 1 + len(block) // 2] if options.get("buffering") == 0 else block)

        return Wrapped(file, faulty)


class Wrapped:
    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("what", ["tensors", "manifest"])
def test_every_operation_of_the_disk_fails_once(tmp_path, monkeypatch, what, number):
    """An OSError comes out of whichever operation failed, and the thread that hashes ends."""
    monkeypatch.setattr(state_format, "BLOCK_BYTES", 64)
    entries = [("param/0/a", torch.arange(40.0)), ("param/0/b", torch.arange(9, dtype=torch.uint8))]

    def write(folder):
        folder.mkdir()
        if what == "tensors":
            return state_format.write_tensors(folder / "rank-00000.safetensors", entries)
        return state_format.write_manifest(folder, manifest_of({}, {}))

    with monkeypatch.context() as patch:
        disk = FaultyDisk(patch, None, number)
        written = write(tmp_path / "whole")
        num_operations = disk.count
    assert num_operations >= (15 if what == "tensors" else 7)
    if what == "tensors":  # short writes are gone on with
        data = (tmp_path / "whole" / "rank-00000.safetensors").read_bytes()
        assert written == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    threads = threading.active_count()
    for fail_at in range(num_operations):
        with monkeypatch.context() as patch:
            FaultyDisk(patch, fail_at, number)
            with pytest.raises(OSError) as raised:
                write(tmp_path / str(fail_at))
        assert raised.value.errno == number
        assert threading.active_count() == threads
        if what == "manifest":
            problems = problems_of(tmp_path / str(fail_at))
            # The last operation is the folder's own: all is there by then, though it may not outlive the power.
            assert problems or fail_at == num_operations - 1 or (tmp_path / str(fail_at) / CHECKSUM).exists()


def test_what_beats_may_fail(tmp_path, monkeypatch):
    """A fault that is raised by the sign of life reaches the caller, at each block."""
    monkeypatch.setattr(state_format, "BLOCK_BYTES", 16)
    for number in range(10):
        beats = iter(range(number + 1))

        def beat(beats=beats):
            if next(beats, None) is None:
                raise OSError(errno.ENOSPC, "full")

        threads = threading.active_count()
        entries = [("param/0/a", torch.arange(44.0))]
        with pytest.raises(OSError, match="full"):
            state_format.write_tensors(tmp_path / "x.safetensors", entries, beat)
        assert threading.active_count() == threads


def test_nothing_that_is_no_number(tmp_path):
    """JSON knows no NaN: other readers would choke on it."""
    with pytest.raises(ValueError, match="JSON compliant"):
        state_format.write_manifest(tmp_path, {"loss": float("nan")})


def test_a_key_given_twice(tmp_path):
    with pytest.raises(AssertionError, match="param/0/a is given twice"):
        state_format.write_tensors(tmp_path / "x.safetensors", [("param/0/a", torch.zeros(2))] * 2)
