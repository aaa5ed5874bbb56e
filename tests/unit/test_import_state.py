"""scripts/import_state.py on checkpoints made here by hand: what is read, what is refused, and that nothing runs.

tests/recipes/test_import_state.py has the checkpoints that the other tools themselves write.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.storage import WriteResult

from oneloop.state import folders
from oneloop.state import format as state_format
from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs
from tests.test_guards import ROOT
from tests.test_security import Bomb, bare_pickle, run_unsafely

sys.path.insert(0, str(ROOT / "scripts"))

from import_state import command  # noqa: E402
from import_state.unpickling import Foreign  # noqa: E402

KINDS = ("param", "exp_avg", "exp_avg_sq")
STEP = 7
NUM_ROWS, GLOBAL_BATCH = 18, 4  # five steps an epoch, the last of two rows


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    """A config file for a tiny model and 18 rows."""
    folder = tmp_path_factory.mktemp("recipe")
    tiny.save(folder / "model")
    rows = runs.write_rows(folder / "rows.jsonl", [runs.turns(f"What is {i}?", f"{i}.") for i in range(NUM_ROWS)])
    values = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": rows,
        "output_dir": "unused",
        "num_train_epochs": 2.0,
        "global_batch_size": GLOBAL_BATCH,
        "per_device_batch_size": 2,
        "report_to": "none",
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def values():
    """kind -> name -> tensor, for every parameter of the tiny model."""
    generator = torch.Generator().manual_seed(3)
    names = dict(tiny.tiny_model(len(tiny.tokenizer())).named_parameters())
    return {
        kind: {name: torch.randn(value.shape, generator=generator) for name, value in names.items()} for kind in KINDS
    }


@pytest.fixture
def marker(tmp_path):
    """A file that must not exist when the test ends."""
    path = tmp_path / "it-ran"
    yield path
    assert not path.exists()


def convert(checkpoint: Path, recipe_file: Path, out: Path, *flags: str):
    """What the command does, without the process around it; returns the opened state."""
    old = sys.argv
    sys.argv = ["import_state.py", str(checkpoint), str(out), "--config", str(recipe_file), *flags]
    try:
        folder = command.convert(*command.parse())
    finally:
        sys.argv = old
    state = state_format.open_state(folder)
    assert state_format.differences(state) == []
    return state


def assert_holds(state, values) -> None:
    assert set(state.tensors) == set(values["param"])
    for name, about in state.tensors.items():
        assert set(about["kinds"]) == set(KINDS) and about["scalars"] == {"step": STEP}
        for kind in KINDS:
            assert torch.equal(state.read(name, kind), values[kind][name].reshape(-1)), f"{kind} of {name}"


# --- the other tools' folders -----------------------------------------------------------------------------------------


def groups_of(values) -> list[list[str]]:
    names = list(values["param"])
    return [[name for name in names if "norm" not in name], [name for name in names if "norm" in name]]


def model_states(values, order: list[list[str]], **more) -> dict:
    shapes = [{name: values["param"][name].shape for name in names} for names in order]
    return {"param_shapes": shapes, "buffer_names": [], "module": {}, "global_steps": STEP, "mp_world_size": 1} | more


def torch_state(tensors: dict[str, torch.Tensor]) -> dict:
    return {"step": torch.tensor(float(STEP)), **tensors}


def write_stage_2(folder: Path, values, ranks=3, order=None, gap=1, elastic=False, prefix="") -> Path:
    """All parameters of a group end to end, each aligned to `gap` elements, cut into one equal part a rank."""
    order = order or groups_of(values)
    folder.mkdir(parents=True)
    torch.save(model_states(values, order), folder / "mp_rank_00_model_states.pt")
    parts = [{"weights": [], "states": []} for _ in range(ranks)]
    paddings = []
    for names in order:
        sizes = [values["param"][name].numel() for name in names]
        paddings.append([-size % gap for size in sizes[:-1]] + [0])
        whole = {}
        for kind in KINDS:
            pieces = []
            for name, padding in zip(names, paddings[-1], strict=True):
                pieces += [values[kind][name].reshape(-1), torch.full((padding,), 7.0)]
            whole[kind] = torch.cat(pieces)
        length = len(whole["param"])
        part = -(-length // (2 * ranks)) * 2
        for rank in range(ranks):
            low, high = rank * part, min((rank + 1) * part, length)
            parts[rank]["weights"].append(whole["param"][low:high].clone())
            # Moments keep what is padded at the very end, weights do not.
            pad = 0 if elastic else (rank + 1) * part - max(high, low)
            parts[rank]["states"].append(
                torch_state({k: torch.cat([whole[k][low:high], torch.full((pad,), 9.0)]) for k in KINDS[1:]})
            )
    for rank, part in enumerate(parts):
        base = {"state": dict(enumerate(part["states"])), "param_groups": [{"lr": 1.0}] * len(order)}
        state = {
            "single_partition_of_fp32_groups": part["weights"],
            "base_optimizer_state": part["states"] if elastic else base,
            "zero_stage": 2,
            "partition_count": [ranks] * len(order),
            "param_alignment_paddings": paddings,
        }
        torch.save({"optimizer_state_dict": state}, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_stage_3(folder: Path, values, ranks=3) -> Path:
    """Each parameter cut into one equal part a rank, the last padded; a rank's parts of a group end to end."""
    order = groups_of(values)
    folder.mkdir(parents=True)
    for rank in range(ranks):
        flat = []
        for names in order:
            group = {kind: [] for kind in KINDS}
            for name in names:
                part = -(-values["param"][name].numel() // ranks)
                for kind in KINDS:
                    piece = values[kind][name].reshape(-1)[rank * part : (rank + 1) * part]
                    group[kind].append(torch.cat([piece, torch.full((part - len(piece),), 5.0)]))
            flat.append({kind: torch.cat(pieces) for kind, pieces in group.items()})
        base = {"state": {i: torch_state({k: one[k] for k in KINDS[1:]}) for i, one in enumerate(flat)}}
        state = {
            "fp32_flat_groups": [one["param"] for one in flat],
            "optimizer_state_dict": base,
            "partition_count": ranks,
        }
        torch.save(model_states(values, order), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def write_sharded(folder: Path, values, step=lambda: torch.tensor(float(STEP)), dtype=torch.float32) -> Path:
    """Accelerate's layout of two torch.distributed.checkpoint folders."""
    weights = {name: value.to(dtype) for name, value in values["param"].items()}
    state = {name: {k: values[k][name] for k in KINDS[1:]} | {"step": step()} for name in weights}
    folder.mkdir(parents=True)
    dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    optimizer = {"state": state, "param_groups": {name: {"lr": 0.1} for name in weights}}
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder


def write_replicated(folder: Path, values) -> Path:
    folder.mkdir(parents=True)
    save_file({f"module.{name}": value for name, value in values["param"].items()}, folder / "model.safetensors")
    order = [name for group in groups_of(values) for name in group]
    state = {i: torch_state({k: values[k][name] for k in KINDS[1:]}) for i, name in enumerate(order)}
    sizes = [len(group) for group in groups_of(values)]
    groups = [{"params": list(range(sizes[0]))}, {"params": list(range(sizes[0], sum(sizes)))}]
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.bin")
    return folder


def write_gathered(folder: Path, values) -> Path:
    """Whole tensors that were gathered from shards, all by name; tied ends twice."""
    folder.mkdir(parents=True)
    weights = dict(values["param"]) | {"lm_head.weight": values["param"]["model.embed_tokens.weight"]}
    torch.save(weights, folder / "pytorch_model_fsdp.bin")
    state = {name: torch_state({k: values[k][name] for k in KINDS[1:]}) for name in values["param"]}
    torch.save({"state": state, "param_groups": [{"params": list(state)}]}, folder / "optimizer.bin")
    return folder


def write_index(folder: Path, tensors: dict, storage: dict, planner_data=None) -> None:
    """An index as torch writes it; tensors: key -> (shape, boxes), storage: (key, offset) -> place."""
    folder.mkdir(parents=True, exist_ok=True)
    properties = dcp_metadata.TensorProperties(dtype=torch.float32)
    about = {
        key: dcp_metadata.TensorStorageMetadata(
            properties,
            torch.Size(shape),
            [dcp_metadata.ChunkStorageMetadata(torch.Size(low), torch.Size(size)) for low, size in boxes],
        )
        for key, (shape, boxes) in tensors.items()
    }
    written = [
        WriteResult(dcp_metadata.MetadataIndex(key, offset), place[2], filesystem._StorageInfo(*place))
        for (key, offset), place in storage.items()
    ]
    index = dcp_metadata.Metadata(about, planner_data=planner_data)
    filesystem.FileSystemWriter(folder).finish(index, [written])


WRITERS = {
    "stage-2": write_stage_2,
    "stage-3": write_stage_3,
    "sharded": write_sharded,
    "replicated": write_replicated,
    "gathered": write_gathered,
}


def saved(archive) -> bytes:
    data = io.BytesIO()
    torch.save(archive, data)
    return data.getvalue()


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
def test_values_are_taken_over_bit_for_bit(tmp_path, recipe_file, values, kind):
    state = convert(WRITERS[kind](tmp_path / "there", values), recipe_file, tmp_path / "out")
    assert_holds(state, values)
    # Step 7 is the second of the second epoch: its first five used up the 18 rows, the last of them two.
    assert state.manifest["progress"] == {"step": 7, "epoch": 1, "position": 8, "total_steps": 10}
    assert state.folder == tmp_path / "out" / "states" / "step-00000007"
    assert state.manifest["config"]["global_batch_size"] == GLOBAL_BATCH
    for key in ("data", "model", "meter", "skipped"):
        assert state.manifest[key] is None
    assert state.manifest["ranks"] == [] and state.manifest["imported_from"]["unknown"]


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 1},
        {"ranks": 7, "gap": 24},
        {"elastic": True, "ranks": 5},
        {"prefix": "bf16_", "order": "shuffled"},
    ],
    ids=str,
)
def test_flat_partitions_in_all_their_forms(tmp_path, recipe_file, values, options):
    if options.get("order") == "shuffled":  # round-robin gradients
        options = options | {"order": [names[::-1] for names in groups_of(values)]}
    checkpoint = write_stage_2(tmp_path / "there" / "global_step7", values, **options)
    (tmp_path / "there" / "latest").write_text("global_step7\n")
    assert_holds(convert(tmp_path / "there", recipe_file, tmp_path / "a"), values)
    assert_holds(convert(checkpoint, recipe_file, tmp_path / "b"), values)


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_parts_of_every_parameter(tmp_path, recipe_file, values, ranks):
    """With two ranks no parameter of this model is padded, with seven each one is."""
    assert_holds(convert(write_stage_3(tmp_path / "there", values, ranks), recipe_file, tmp_path / "out"), values)


def test_a_tensor_cut_across_its_rows(tmp_path, recipe_file, values):
    """Tensor parallelism cuts a matrix along its second axis: its boxes are no ranges."""
    folder = write_sharded(tmp_path / "there", values)
    part = folder / "pytorch_model_fsdp_0"
    tensors, storage, data = {}, {}, b""
    for name, value in values["param"].items():
        shape = tuple(value.shape)
        half = shape[-1] // 2
        boxes = [((0,) * (value.dim() - 1) + (low,), (*shape[:-1], half)) for low in (0, half)]
        tensors[f"model.{name}"] = shape, boxes
        for low, _ in boxes:
            piece = saved(value[..., low[-1] : low[-1] + half].clone())
            storage[f"model.{name}", low] = "__0_0.distcp", len(data), len(piece)
            data += piece
    write_index(part, tensors, storage)
    (part / "__0_0.distcp").write_bytes(data)
    assert_holds(convert(folder, recipe_file, tmp_path / "out"), values)


def test_trainer_says_the_step(tmp_path, recipe_file, values):
    folder = write_sharded(tmp_path / "there", values)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    state = convert(folder, recipe_file, tmp_path / "a")
    assert state.step == 4 and "several steps" in state.manifest["imported_from"]["notes"][0]
    assert state.tensors["model.norm.weight"]["scalars"] == {"step": STEP}  # what its moments have seen
    assert convert(folder, recipe_file, tmp_path / "b", "--step", "3").step == 3


def test_files_stay_small(tmp_path, recipe_file, values, monkeypatch):
    from import_state import writing

    monkeypatch.setattr(writing, "FILE_BYTES", 50_000)
    state = convert(write_stage_3(tmp_path / "there", values), recipe_file, tmp_path / "out")
    sizes = [about["num_bytes"] for about in state.manifest["files"].values()]
    assert len(sizes) > 10 and max(sizes) < 150_000  # the largest piece has 102,400 bytes
    assert_holds(state, values)


# --- what is refused --------------------------------------------------------------------------------------------------


def replace(path: Path, change) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def narrowed(values, names=1):
    return {kind: dict(list(tensors.items())[names:]) for kind, tensors in values.items()}


SHARD = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def rounded(content):
    state = content["optimizer_state_dict"]
    state["single_partition_of_fp32_groups"] = [w.bfloat16() for w in state["single_partition_of_fp32_groups"]]


def smaller(content):
    content["param_shapes"][0]["model.embed_tokens.weight"] = torch.Size((400, 63))


def later(content):
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = state["step"] + 1


@pytest.mark.parametrize(
    "spoil,message",
    [
        (lambda f: (f / SHARD.format(1)).unlink(), r"lacks the optimizer shard of rank\(s\) 1"),
        (lambda f: (f / SHARD.format(2)).unlink(), "written by .* but the folder has 2 shards"),
        (lambda f: (f / "mp_rank_00_model_states.pt").unlink(), "lacks mp_rank_00_model_states.pt"),
        (lambda f: [(f / SHARD.format(i)).unlink() for i in range(3)], "lacks zero_pp_rank"),
        (lambda f: (f / SHARD.format(1)).rename(f / "zero_pp_rank_1_mp_rank_01_optim_states.pt"), "spread over ranks"),
        (lambda f: replace(f / SHARD.format(1), later), "other shards are of step 7"),
        (lambda f: replace(f / SHARD.format(0), rounded), "in bfloat16 only: .*--allow_16bit_weights"),
        (lambda f: replace(f / SHARD.format(0), lambda c: c.pop("optimizer_state_dict")), "holds no fp32 partitions"),
        (
            lambda f: replace(f / SHARD.format(0), lambda c: c["optimizer_state_dict"].pop("base_optimizer_state")),
            "only weights were saved",
        ),
        (
            lambda f: replace(f / "mp_rank_00_model_states.pt", smaller),
            "the shards have .* elements in group 0",
        ),
        (lambda f: (f / SHARD.format(0)).write_bytes((f / SHARD.format(0)).read_bytes()[:-9000]), "cut off"),
    ],
)
def test_spoilt_partitions(tmp_path, recipe_file, values, spoil, message):
    folder = write_stage_2(tmp_path / "there", values)
    spoil(folder)
    with pytest.raises(Foreign, match=message):
        convert(folder, recipe_file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "spoil,message",
    [
        (lambda f: next(f.glob("optimizer_0/*.distcp")).unlink(), "distcp is missing"),
        (lambda f: (f / "optimizer_0" / ".metadata").unlink(), "lacks .metadata, .* never completed"),
        (lambda f: [p.unlink() for p in f.glob("optimizer_0/*")], "weights but no moments"),
        (lambda f: [p.unlink() for p in f.glob("pytorch_model_fsdp_0/*")], "moments of an optimizer but no weights"),
    ],
)
def test_spoilt_shards(tmp_path, recipe_file, values, spoil, message):
    folder = write_sharded(tmp_path / "there", values)
    spoil(folder)
    with pytest.raises(Foreign, match=message):
        convert(folder, recipe_file, tmp_path / "out")


def test_another_model(tmp_path, recipe_file, values):
    with pytest.raises(Foreign, match=r"lacks model.embed_tokens.weight\. Check model_name_or_path"):
        convert(write_stage_3(tmp_path / "a", narrowed(values)), recipe_file, tmp_path / "out")
    with pytest.raises(Foreign, match="lacks base_model.*and .* more; it has .* besides"):
        convert(write_stage_3(tmp_path / "b", values), recipe_file, tmp_path / "out", "--use_peft", "true")
    wider = {kind: tensors | {"model.norm.weight": torch.zeros(65)} for kind, tensors in values.items()}
    with pytest.raises(Foreign, match=r"model.norm.weight has shape \[65\], in the recipe's model \[64\]"):
        convert(write_sharded(tmp_path / "c", wider), recipe_file, tmp_path / "out")
    with pytest.raises(Foreign, match="has exp_avg_sq, but optim lion keeps exp_avg"):
        convert(write_sharded(tmp_path / "d", values), recipe_file, tmp_path / "out", "--optim", "lion")
    with pytest.raises(Foreign, match="optim is 'adafactor': only the moments of adamw"):
        convert(tmp_path / "d", recipe_file, tmp_path / "out", "--optim", "adafactor")


def test_rounded_weights_only_when_asked(tmp_path, recipe_file, values):
    folder = write_sharded(tmp_path / "there", values, dtype=torch.bfloat16)
    with pytest.raises(Foreign, match="has weights in bfloat16 only"):
        convert(folder, recipe_file, tmp_path / "out")
    state = convert(folder, recipe_file, tmp_path / "out", "--allow_16bit_weights")
    assert "saved in bfloat16" in state.manifest["imported_from"]["notes"][0]
    widened = {name: value.bfloat16().float() for name, value in values["param"].items()}
    assert_holds(state, values | {"param": widened})


def test_unknown_order_of_an_optimizer(tmp_path, recipe_file, values):
    folder = write_replicated(tmp_path / "there", values)
    replace(
        folder / "optimizer.bin", lambda c: c["param_groups"][1]["params"].append(c["param_groups"][0]["params"].pop())
    )
    with pytest.raises(Foreign, match="none of the usual orders fits"):
        convert(folder, recipe_file, tmp_path / "out")


@pytest.mark.parametrize(
    "files,message",
    [
        ([], "no checkpoint that is known"),
        (["model.safetensors"], "weights but no optimizer"),
        (["checkpoint-5/x", "checkpoint-9/x"], "several checkpoints"),
        (["a/mp_rank_00_model_states.pt", "b/mp_rank_00_model_states.pt"], "holds a, b and no `latest`"),
        (["zero/x/fp32.pt"], "universal checkpoint"),
    ],
)
def test_other_folders(tmp_path, recipe_file, files, message):
    for name in files:
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).touch()
    (tmp_path / "there").mkdir(exist_ok=True)
    with pytest.raises(Foreign, match=message):
        convert(tmp_path / "there", recipe_file, tmp_path / "out")


def test_wrong_places_and_steps(tmp_path, recipe_file, values):
    folder = write_sharded(tmp_path / "there", values)
    with pytest.raises(Foreign, match="is of step 10, and the recipe ends at step 10"):
        convert(folder, recipe_file, tmp_path / "out", "--step", "10")
    with pytest.raises(Foreign, match="--step is -1"):
        convert(folder, recipe_file, tmp_path / "out", "--step=-1")
    convert(folder, recipe_file, tmp_path / "out")
    with pytest.raises(Foreign, match="step-00000007 is there already"):
        convert(folder, recipe_file, tmp_path / "out")
    assert folders.published(tmp_path / "out" / "states") == [tmp_path / "out" / "states" / "step-00000007"]


def test_command_line(tmp_path, recipe_file):
    script = [sys.executable, str(ROOT / "scripts" / "import_state.py")]
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'scripts')!r}]; sys.argv[1:] = ['--help']\n"
        "from import_state import command\n"
        "try: command.parse()\n"
        "finally: print([name for name in ('torch', 'numpy', 'transformers', 'oneloop') if name in sys.modules])"
    )
    helped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=launcher.environment())
    assert "--trust_checkpoint" in helped.stdout and helped.stdout.splitlines()[-1] == "[]", helped.stderr
    command_line = [*script, str(tmp_path), str(tmp_path / "out"), "--config", str(recipe_file)]
    refused = subprocess.run(command_line, capture_output=True, text=True, env=launcher.environment())
    assert refused.returncode == 2
    assert [line[:7] for line in refused.stderr.splitlines() if line] == ["error: "], refused.stderr


# --- nothing runs -----------------------------------------------------------------------------------------------------

NEVER_READ = (
    *("scheduler.bin", "scheduler.pt", "random_states_0.pkl", "rng_state_0.pth", "dl_state_dict.bin", "sampler.bin"),
    *("scaler.pt", "training_args.bin", "custom_checkpoint_0.pkl", "pytorch_model.bin", "zero_to_fp32.py"),
)


def bombs(marker: Path, slot: Path) -> dict[str, bytes]:
    """Files that create `marker` when they are read the unsafe way."""
    planted = {"bare": bare_pickle(marker), "archive": saved({"state": Bomb(marker)})}
    if slot.suffix in (".pt", ".bin"):  # all that belongs there, and one thing more
        planted["hidden"] = saved({**torch.load(slot, weights_only=True), "client_state": Bomb(marker)})
    return planted


@pytest.mark.parametrize("kind", WRITERS)
def test_planted_files_run_nothing(tmp_path, recipe_file, values, kind, marker):
    """Each file of a checkpoint in turn is replaced: it is refused by name, or was never read."""
    folder = WRITERS[kind](tmp_path / "there", values)
    for number, name in enumerate(NEVER_READ):
        text = f"open({str(marker)!r}, 'w')".encode()
        bomb = text if name.endswith(".py") else [bare_pickle(marker), saved(Bomb(marker))][number % 2]
        (folder / name).write_bytes(bomb)
        run_unsafely(folder / name)
        assert marker.exists(), f"{name} is a dud"
        marker.unlink()
    assert_holds(convert(folder, recipe_file, tmp_path / "out"), values)
    num_refused = num_planted = 0
    slots = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in NEVER_READ]
    for slot in slots:
        original = slot.read_bytes()
        for form, bomb in bombs(marker, slot).items():
            slot.write_bytes(bomb)
            num_planted += 1
            try:
                state = convert(folder, recipe_file, tmp_path / f"out-{num_planted}")
            except Foreign as error:
                assert str(slot) in str(error), f"{form} in {slot.name}: {error}"
                num_refused += 1
            else:
                assert_holds(state, values)
                assert slot.name.endswith("model_states.pt") and "rank_0_" not in slot.name, "read, yet not refused"
            assert not marker.exists(), f"{form} in {slot.name} ran"
        slot.write_bytes(original)
    assert len(slots) == {"stage-2": 4, "stage-3": 6, "sharded": 4, "replicated": 2, "gathered": 2}[kind]
    assert num_refused >= 2 * (len(slots) - (2 if kind == "stage-3" else 0))


@pytest.mark.parametrize("tag", ["../elsewhere", "/tmp", "..", "a/b", "", "\x00", "x\ny"])
def test_latest_leads_nowhere_else(tmp_path, recipe_file, values, tag):
    write_stage_2(tmp_path / "elsewhere", values)
    (tmp_path / "there" / "a").mkdir(parents=True)
    (tmp_path / "there" / "latest").write_text(tag)
    with pytest.raises(Foreign, match="latest holds .* no name of a folder beside it"):
        convert(tmp_path / "there", recipe_file, tmp_path / "out")
    (tmp_path / "there" / "latest").write_bytes(bare_pickle(tmp_path / "it-ran"))
    with pytest.raises(Foreign, match="latest holds"):
        convert(tmp_path / "there", recipe_file, tmp_path / "out")
    assert not (tmp_path / "it-ran").exists()


def test_parts_of_a_sharded_checkpoint_run_nothing(tmp_path, recipe_file, values, marker):
    """What only a forger of the index could plant: a bomb where a tensor lies, and where a plain value lies."""
    folder = write_sharded(tmp_path / "value", values, step=lambda: Bomb(marker))
    with pytest.raises(Foreign, match=r"distcp holds more than tensors and plain values.*--trust_checkpoint"):
        convert(folder, recipe_file, tmp_path / "out")
    folder = write_sharded(tmp_path / "tensor", values)
    part, bomb = folder / "pytorch_model_fsdp_0", saved(Bomb(marker))
    shapes = {f"model.{name}": tuple(value.shape) for name, value in values["param"].items()}
    places = {(key, (0,) * len(shape)): ("__0_0.distcp", 0, len(bomb)) for key, shape in shapes.items()}
    tensors = {key: (shape, [((0,) * len(shape), shape)]) for key, shape in shapes.items()}
    write_index(part, tensors, places)
    (part / "__0_0.distcp").write_bytes(bomb)
    with pytest.raises(Foreign, match="distcp holds more than tensors and plain values"):
        convert(folder, recipe_file, tmp_path / "out")
    write_index(part, tensors, places, planner_data=Bomb(marker))
    with pytest.raises(
        Foreign, match=r"\.metadata is no index of a checkpoint, and could run code.*asks for _?io.open"
    ):
        convert(folder, recipe_file, tmp_path / "out", "--trust_checkpoint")  # no index needs more than its classes
    for outside in ("../../elsewhere.distcp", "/etc/passwd", "..", "x.pt", "a\x00.distcp"):
        write_index(part, tensors, {where: (outside, 0, len(bomb)) for where in places})
        with pytest.raises(Foreign, match="as a file of the checkpoint: expected is NAME.distcp beside it"):
            convert(folder, recipe_file, tmp_path / "out")
    assert not any((tmp_path / "out").rglob("step-*[0-9]"))


def test_an_index_cannot_change_torch(tmp_path, recipe_file, values):
    """A pickle may set attributes of what it names: it gets hold of nothing that is in use elsewhere."""
    folder = write_sharded(tmp_path / "there", values)
    before = dict(vars(dcp_metadata.Metadata)), dict(vars(filesystem._StorageInfo))
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("collections", "OrderedDict"),
    ):
        # The class itself on the stack, then BUILD with (None, {"__init__": None}): setattr in the pickle machine.
        (folder / "optimizer_0" / ".metadata").write_bytes(f"c{module}\n{name}\n(N}}V__init__\nNstb.".encode())
        with pytest.raises(Foreign, match=r"\.metadata"):
            convert(folder, recipe_file, tmp_path / "out")
    assert before == (dict(vars(dcp_metadata.Metadata)), dict(vars(filesystem._StorageInfo)))
    assert torch.Size((1,)) == (1,)


def test_trust_reads_everything(tmp_path, recipe_file, values):
    folder = write_stage_2(tmp_path / "there", values)
    path = folder / "mp_rank_00_model_states.pt"
    path.write_bytes(saved(torch.load(path, weights_only=True) | {"client_state": Bomb(tmp_path / "it-ran")}))
    assert_holds(convert(folder, recipe_file, tmp_path / "out", "--trust_checkpoint"), values)
    assert (tmp_path / "it-ran").exists()
