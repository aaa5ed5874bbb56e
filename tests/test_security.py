"""Nothing that a model, an adapter, a tokenizer or a data set brings along is ever run.

Two proofs. The source text: no file of the tree holds a call that runs what it reads, but for the listed ones, each
with its reason. And the files themselves: every kind of file that would run when it is loaded the unsafe way lies in
every slot where a loader might look, was seen running, and is not run by training.
"""

import ast
import copy
import io
import json
import re
import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch

from oneloop.data import chat
from tests import tiny
from tests.equivalence import launcher
from tests.recipes import runs

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for path in ROOT.rglob("*.py") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

# --- the source text --------------------------------------------------------------------------------------------------

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED = {  # full name, or a prefix that ends in a dot -> rule
    **dict.fromkeys(("pandas.read_pickle", "torch.jit.load", "torch.export.load", "torch.package."), "unpickles"),
    **dict.fromkeys(("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"), "yaml"),
    **dict.fromkeys(("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"), "yaml"),
    **dict.fromkeys(("eval", "exec", "compile", "__import__", "builtins.", "code.", "types.CodeType"), "runs text"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "shell"),
    **dict.fromkeys(("asyncio.create_subprocess_shell",), "shell"),
    **dict.fromkeys(
        ("jinja2.Environment", "jinja2.Template", "jinja2.environment.", "jinja2.nativetypes."), "template"
    ),
    **dict.fromkeys(("importlib.util.spec_from_file_location", "importlib.machinery.", "runpy."), "imports by name"),
    **dict.fromkeys(("pkgutil.resolve_name", "pydoc.locate", "importlib.__import__", "imp."), "imports by name"),
    "torch.hub.": "downloads code",
}
# Whoever's they are: those of Accelerate and DeepSpeed unpickle (accelerate 1.15, checkpointing.py, load_custom_state;
# deepspeed 0.19.8, TorchCheckpointEngine.load).
BANNED_METHODS = dict.fromkeys(("load_state", "register_for_checkpointing", "load_checkpoint"), "unpickles")
ALLOWED = {  # (file, function, rule) -> reason
    ("src/oneloop/__init__.py", "_Deferred", "imports by name"): "names are those of this package's own files",
    ("src/oneloop/state/__init__.py", "__getattr__", "imports by name"): "names out of a table in the same file",
    ("scripts/compare_checkpoints.py", "accelerate_trainer", "unpickles"): "files this very script had written",
    ("src/oneloop/optim.py", "_own", "imports by name"): "`optim` may be the import path of a user's own class",
    ("scripts/benchmark.py", "*", "imports by name"): "a name out of a table in the same file",
    ("scripts/benchmarks/subjects.py", "*", "imports by name"): "recipes are scripts, not a package",
    ("scripts/prepare_data.py", "recipe_module", "imports by name"): "runs the recipe that its command line names",
    (
        "scripts/import_state/unpickling.py",
        "*",
        "unpickles",
    ): "reads indexes with a table of stand-ins; unpickles with --trust_checkpoint only",
    ("tests/equivalence/scenario.py", "load_recipe", "imports by name"): "recipes are scripts, not a package",
    ("tests/unit/test_demo_data.py", "*", "imports by name"): "the script under test, by its path in this tree",
    ("tests/test_guards.py", "test_every_module_imports", "imports by name"): "names are those of this tree's files",
    (
        "tests/recipes/test_memory_limit.py",
        "run_command",
        "shell",
    ): "runs the command of docs/out-of-memory.md as printed",
    ("tests/recipes/test_memory_limit.py", "limit_bites", "shell"): "ulimit is a command of the shell",
    ("tests/unit/test_loss_head.py", "FakeLiger", "imports by name"): "makes a stand-in for a package; imports nothing",
    ("tests/unit/test_watchdog.py", "frame_in", "runs text"): "a frame of a file of a given name, to be looked at",
    ("tests/unit/test_watchdog.py", "test_how_a_process_ended_is_known", "shell"): "a child that kills itself",
    ("tests/test_security.py", "run_unsafely", "unpickles"): "shows that the planted files would run",
    ("tests/test_security.py", "run_unsafely", "imports by name"): "shows that the planted files would run",
    ("tests/test_security.py", "render_unsafely", "template"): "shows that the planted templates would run",
}
NEEDS_SOURCE = {"src/oneloop/models.py", "src/oneloop/export.py"}  # whose from_pretrained calls go through `sources`


def violations(text: str, is_program: bool = True) -> tuple[list[tuple[int, str, str, str]], Counter]:
    """(line, outermost function or class, rule, what) of all that runs what it reads, and how much was looked at."""
    tree = ast.parse(text)
    full_names, looked_at, found = {}, Counter(), []
    for node in ast.walk(tree):  # first all imports: a function may stand above them
        if isinstance(node, ast.Import):
            full_names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            full_names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def full_name(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return {"np": "numpy", "pd": "pandas"}.get(node.id, full_names.get(node.id, node.id))
        return f"{full_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"

    def visit(node: ast.AST, owner: str) -> None:
        if owner == "" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            owner = node.name
        looked_at[type(node).__name__] += 1
        for rule, what in judge(node):
            found.append((node.lineno, owner, rule, what))
        for child in ast.iter_child_nodes(node):
            visit(child, owner)

    def judge(node: ast.AST):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if name.split(".")[0] in UNPICKLERS:
                    yield "unpickles", name
                yield from banned(name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield from banned(full_name(node))
            if isinstance(node, ast.Attribute) and node.attr in BANNED_METHODS:
                yield BANNED_METHODS[node.attr], node.attr
        elif isinstance(node, ast.Call):
            yield from judge_call(full_name(node.func), node)

    def banned(name: str):
        for entry, rule in BANNED.items():
            if name == entry or (entry.endswith(".") and name.startswith(entry)):
                yield rule, name

    def judge_call(name: str, call: ast.Call):
        options = {k.arg: k.value.value if isinstance(k.value, ast.Constant) else ... for k in call.keywords}
        if (name == "torch.load" and options.get("weights_only") is not True) or options.get(
            "weights_only", True
        ) is not True:
            yield "unpickles", f"{name} without weights_only=True"
        if options.get("allow_pickle", False) is not False:
            yield "unpickles", f"{name} with allow_pickle"
        if name in ("yaml.load", "yaml.load_all"):
            loaders = [full_name(k.value) for k in call.keywords if k.arg == "Loader"] + [
                full_name(a) for a in call.args[1:]
            ]
            if loaders not in (["yaml.SafeLoader"], ["yaml.CSafeLoader"]):
                yield "yaml", f"{name} without SafeLoader"
        if options.get("shell", False) is not False:
            yield "shell", f"{name} with shell"
        if name.startswith("subprocess.") and call.args and isinstance(call.args[0], ast.List):
            words = [word.value for word in call.args[0].elts if isinstance(word, ast.Constant)]
            if words[:2] in (["sh", "-c"], ["bash", "-c"]):
                yield "shell", f"{name} of {words[0]} -c"
        archives = {"tarfile", "zipfile"} & {full.split(".")[0] for full in full_names.values()}
        method = name.rpartition(".")[2]
        unpacks = method == "extractall" or (method == "extract" and archives) or name == "shutil.unpack_archive"
        if unpacks and options.get("filter") != "data":
            yield "archive", f"{name} without filter='data'"
        if name == "importlib.import_module" and not (call.args and isinstance(call.args[0], ast.Constant)):
            yield "imports by name", name
        if is_program:
            for option in ("trust_remote_code", "allow_all_kernels", "use_kernels"):
                if options.get(option, False) not in (False, None, ...):
                    yield "trusts", f"{name} with {option}"
            if "kernel_config" in options:
                yield "trusts", f"{name} with kernel_config"

    visit(tree, "")
    return found, looked_at


BAD = {  # each line alone must be found, under the rule it stands under
    "unpickles": """
        import pickle
        from pickle import loads
        import dill as d
        import joblib, json
        from cloudpickle import load
        import shelve
        import marshal
        import torch; torch.load(path)
        import torch as t; t.load(path, weights_only=False)
        import torch; torch.load(path, weights_only=flag)
        from torch import load; load(path)
        load_everything(path, weights_only=False)
        import numpy; numpy.load(path, allow_pickle=True)
        np.load(path, allow_pickle=unknown)
        import pandas; pandas.read_pickle(path)
        import torch; torch.jit.load(path)
        accelerator.load_state(folder)
        accelerator.register_for_checkpointing(thing)
        engine.load_checkpoint(folder)
    """,
    "yaml": """
        import yaml; yaml.load(text)
        import yaml; yaml.load(text, Loader=yaml.Loader)
        import yaml; yaml.load(text, yaml.UnsafeLoader)
        import yaml; yaml.unsafe_load(text)
        from yaml import full_load
    """,
    "runs text": """
        eval(text)
        exec(text)
        compile(text, "x", "exec")
        __import__(name)
        list(map(eval, texts))
        import builtins; builtins.exec(text)
        from builtins import eval as harmless
    """,
    "shell": """
        import subprocess; subprocess.run(text, shell=True)
        import subprocess; subprocess.Popen(text, shell=maybe)
        from subprocess import run; run(["bash", "-c", text])
        import os; os.system(text)
        from os import popen
        import subprocess as s; s.getoutput(text)
    """,
    "template": """
        import jinja2; jinja2.Environment()
        from jinja2 import Template
        from jinja2.nativetypes import NativeEnvironment
    """,
    "archive": """
        import tarfile; tarfile.open(path).extractall(folder)
        import zipfile; zipfile.ZipFile(path).extract(name)
        import shutil; shutil.unpack_archive(path, folder)
        archive.extractall(folder, filter="fully_trusted")
    """,
    "imports by name": """
        import importlib; importlib.import_module(name)
        from importlib import import_module; import_module(name + ".x")
        import importlib.util; importlib.util.spec_from_file_location("x", path)
        import runpy; runpy.run_path(path)
        import pydoc; pydoc.locate(name)
    """,
    "downloads code": "import torch; torch.hub.load(name)",
    "trusts": """
        AutoModel.from_pretrained(name, trust_remote_code=True)
        AutoModel.from_pretrained(name, use_kernels=True)
        AutoModel.from_pretrained(name, kernel_config=settings)
    """,
}
GOOD = """
    import torch; torch.load(path, weights_only=True)
    import re; re.compile(text)
    model.eval(); torch.compile(model)
    import yaml; yaml.load(text, Loader=yaml.SafeLoader); yaml.safe_load(text)
    import subprocess; subprocess.run([sys.executable, "-c", text], shell=False)
    import numpy as np; np.load(path); np.load(path, allow_pickle=False)
    from jinja2.sandbox import ImmutableSandboxedEnvironment; ImmutableSandboxedEnvironment()
    import tarfile; tarfile.open(path).extractall(folder, filter="data")
    import importlib; importlib.import_module("torch")
    import ast; ast.literal_eval(text)
    AutoModel.from_pretrained(name, trust_remote_code=config.trust_remote_code)
"""


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_the_search_finds_each_kind():
    num_lines = 0
    for rule, text in BAD.items():
        for line in lines(text):
            num_lines += 1
            assert rule in {found for _, _, found, _ in violations(line)[0]}, f"{rule}: {line}"
    for line in lines(GOOD):
        assert violations(line)[0] == [], line
    assert num_lines >= 50
    assert violations("def f():\n    import pickle")[0] == [(2, "f", "unpickles", "pickle")]


def test_nothing_in_the_tree_runs_what_it_reads():
    looked_at, found, used = Counter(), [], set()
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        in_file, counts = violations(path.read_text(encoding="utf-8"), is_program=not name.startswith("tests/"))
        looked_at += counts
        for line, owner, rule, what in in_file:
            excuses = {(name, owner, rule), (name, "*", rule)} & ALLOWED.keys()
            used |= excuses
            if not excuses:
                found.append(f"{name}:{line}: {rule}: {what} ({owner})")
    assert found == []
    assert ALLOWED.keys() - used == set(), "excuses that nothing needs any more"
    folders = {path.relative_to(ROOT).parts[0] for path in FILES}
    assert folders == {"src", "recipes", "scripts", "tests"}, "Python files elsewhere: is it meant?"
    assert len(FILES) >= 50
    assert looked_at["Call"] >= 4000 and looked_at["Import"] + looked_at["ImportFrom"] >= 300


def test_models_are_loaded_in_two_modules_only():
    """`from_pretrained` elsewhere would pass by the checks of `sources`."""
    places = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("src/", "recipes/")):
            attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            places += [name for node in attributes if node.attr == "from_pretrained"]
    assert set(places) == NEEDS_SOURCE
    assert len(places) >= 5


def test_shell_scripts_evaluate_and_download_nothing():
    scripts = [*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run", ROOT / "Makefile"]
    text = "\n".join(path.read_text() for path in scripts)
    assert re.findall(r"^.*(?:\beval\b|\bcurl\b|\bwget\b|\|\s*(?:ba)?sh\b).*$", text, flags=re.MULTILINE) == []
    assert len(scripts) >= 3 and len(text.splitlines()) >= 150


# --- planted files ----------------------------------------------------------------------------------------------------

ROWS = [runs.turns(f"What is {i} plus {i}?", f"{2 * i}.") for i in range(4)]
STEPS = {"global_batch_size": 4, "max_steps": 1}
PICKLES = (
    *(
        "pytorch_model.bin",
        "adapter_model.bin",
        "training_args.bin",
        "optimizer.bin",
        "model.bin",
        "consolidated.00.pth",
    ),
    *("model.pt", "optimizer.pt", "scheduler.pt", "rng_state.pth", "random_states_0.pkl", "custom_checkpoint_0.pkl"),
    *("model.ckpt", "model.pkl", "tokenizer.pkl", "vocab.pkl", "tf_model.h5", "flax_model.msgpack", "embeddings.npy"),
    *("global_step1/mp_rank_00_model_states.pt", "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    *("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "step_1/custom_checkpoint_0.pkl"),
    *("pytorch_model-00001-of-00002.bin", "rows.pkl", "rows.joblib", "train.pickle", "state.dill", "prompts.pt"),
)
SCRIPTS = (
    "modeling_tiny.py",
    "configuration_tiny.py",
    "tokenization_tiny.py",
    "__init__.py",
    "setup.py",
    "conftest.py",
)
SCRIPTS += ("custom_generate/generate.py", "sitecustomize.py", "tiny.py", "rows.py", "generate.py", "kernels.py")


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def bare_pickle(marker: Path) -> bytes:
    """The pickle of a call: `open(marker, "w")`."""
    return f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode()


def plant(folder: Path, marker: Path) -> list[Path]:
    """Put everything into a folder that would create `marker`, if it were unpickled or run."""
    archive = io.BytesIO()
    torch.save({"weight": Bomb(marker)}, archive)
    for number, name in enumerate(PICKLES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Half of them in torch's zip format, half as a bare pickle.
        (folder / name).write_bytes(archive.getvalue() if number % 2 else bare_pickle(marker))
    for name in SCRIPTS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "latest").write_text("global_step1")  # how DeepSpeed finds its newest checkpoint
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "pytorch_model-00001-of-00002.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return [folder / name for name in (*PICKLES, *SCRIPTS)]


def run_unsafely(path: Path) -> None:
    if path.suffix == ".py":
        runpy.run_path(str(path))
        return
    try:
        torch.load(path, weights_only=False)
    except Exception:  # a bare pickle is no checkpoint; torch finds out after having read it
        pass


@pytest.fixture
def marker(tmp_path):
    """A file that must not exist when the test ends."""
    path = tmp_path / "it-ran"
    yield path
    assert not path.exists()


def test_planted_files_run_where_nothing_guards(tmp_path):
    path = tmp_path / "it-ran"
    (tmp_path / "planted").mkdir()
    planted = plant(tmp_path / "planted", path)
    for file in planted:
        run_unsafely(file)
        assert path.exists(), f"{file.name} is a dud"
        path.unlink()
    assert len(planted) >= 40


def test_files_beside_a_model_are_never_run(tmp_path, marker):
    """Full training, with evaluation and generated answers, from a planted model on planted data."""
    tiny.save(tmp_path / "tiny")
    plant(tmp_path / "tiny", marker)
    (tmp_path / "data").mkdir()
    plant(tmp_path / "data", marker)
    runs.write_rows(tmp_path / "data" / "train.jsonl", ROWS)
    runs.write_rows(tmp_path / "data" / "test.jsonl", ROWS)
    data = str(tmp_path / "data")
    out = runs.train(tmp_path, data, eval_dataset_name=data, eval_generations=2, **STEPS)
    assert launcher.read_tensors(out / "model")
    assert launcher.column(launcher.read_metrics(out), "eval/num_generations") == [2, 2]


def test_files_beside_an_adapter_are_never_run(tmp_path, marker):
    """New adapter and merge on a planted model, then its continuation and merge from a planted adapter folder."""
    tiny.save(tmp_path / "tiny")
    plant(tmp_path / "tiny", marker)
    adapter = {"use_peft": True, "merge_adapter": True, **STEPS}
    first = runs.train(tmp_path, ROWS, **adapter)
    plant(first / "model", marker)
    again = runs.train(tmp_path / "again", ROWS, model_name_or_path=str(first / "model"), merge_adapter=True, **STEPS)
    for folder in (first / "merged", again / "merged", again / "model"):
        assert launcher.read_tensors(folder)
        assert not list(folder.glob("*.py")) and not list(folder.glob("*.bin")), "nothing of it is passed on"


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "index", "model.pt", "consolidated.00.pth", "tf_model.h5", "model.ckpt"]
)
@pytest.mark.parametrize("trusting", [False, True])
def test_weights_that_are_pickles_are_refused(tmp_path, marker, name, trusting):
    """Trusted, those that transformers can read are read with torch's restricted unpickler: still nothing runs."""
    folder = tmp_path / "tiny"
    tiny.save(folder)
    plant(folder, marker)
    (folder / "model.safetensors").unlink()
    wanted = {"index": ("pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin")}.get(name, (name,))
    for path in folder.iterdir():
        if path.name in (*PICKLES, "pytorch_model.bin.index.json") and path.name not in wanted:
            path.unlink()
    reads = trusting and name in ("pytorch_model.bin", "index")
    expected = "cannot load" if reads else f"only as {re.escape(wanted[-1] if name == 'index' else name)}"
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{expected}") as refused:
        runs.train(tmp_path, ROWS, trust_remote_code=trusting, **STEPS)
    assert reads or ("convert it" in str(refused.value))
    assert ("--trust_remote_code" in str(refused.value)) == (not trusting and name in ("pytorch_model.bin", "index"))


@pytest.mark.parametrize("trusting", [False, True])
def test_adapter_that_is_a_pickle_is_refused(tmp_path, marker, trusting):
    first = runs.train(tmp_path, ROWS, use_peft=True, **STEPS)
    (first / "model" / "adapter_model.safetensors").unlink()
    plant(first / "model", marker)
    expected = "cannot load" if trusting else "only as adapter_model.bin.*--trust_remote_code"
    options = {"model_name_or_path": str(first / "model"), "trust_remote_code": trusting, **STEPS}
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{expected}"):
        runs.train(tmp_path / "again", ROWS, **options)


CODE = {
    "AutoConfig": "configuration_tiny.C",
    "AutoModelForCausalLM": "modeling_tiny.M",
    "AutoTokenizer": "tokenization_tiny.T",
}


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json"]
)
def test_code_that_a_config_file_names_is_refused(tmp_path, marker, file):
    tiny.save(tmp_path / "tiny")
    folder, options = tmp_path / "tiny", {}
    if file == "adapter_config.json":
        folder = runs.train(tmp_path, ROWS, use_peft=True, **STEPS) / "model"
        options = {"model_name_or_path": str(folder)}
    plant(folder, marker)
    settings = json.loads((folder / file).read_text()) | {"auto_map": CODE, "trust_remote_code": True}
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match=f"model_name_or_path: .*{file} has auto_map = .*--trust_remote_code"
    ) as refused:
        runs.train(tmp_path / "again", ROWS, **{"model_name_or_path": str(tmp_path / "tiny")} | options, **STEPS)
    assert "configuration_tiny.C" in str(refused.value)


@pytest.mark.parametrize("name", ["rows.pkl", "rows.joblib", "prompts.pt", "embeddings.npy", "rows.py"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_data_that_is_code_or_a_pickle_is_refused(tmp_path, marker, name, in_folder):
    (tmp_path / "data").mkdir()
    plant(tmp_path / "data", marker)
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file() and path.name != name:
            path.unlink()
    source = tmp_path / "data" if in_folder else tmp_path / "data" / name
    expected = {False: f"{name}.*can run code", True: "cannot read '.py'|without a file of"}[name == "rows.py"]
    with pytest.raises(ValueError, match=f"dataset_name .*({expected})"):
        runs.train(tmp_path, str(source), **STEPS)


def test_pickles_inside_of_tables_stay_bytes(tmp_path, marker):
    """An extension type of Arrow used to be a pickle in the schema (CVE-2023-47248); a cell may hold anything."""
    import pyarrow
    import pyarrow.parquet

    payload = bare_pickle(marker)
    extension = {"ARROW:extension:name": b"arrow.py_extension_type", "ARROW:extension:metadata": payload}
    fields = [
        pyarrow.field("prompt", pyarrow.string(), metadata=extension),
        pyarrow.field("completion", pyarrow.string()),
        pyarrow.field("blob", pyarrow.binary()),
    ]
    rows = [{"prompt": "One and one?", "completion": payload.decode(), "blob": payload}] * 4
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields, metadata={"pandas": payload}))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    text = payload.decode().replace('"', '""')
    (tmp_path / "rows.csv").write_text("prompt,completion\n" + f'"One and one?","{text}"\n' * 4)
    for name in ("rows.parquet", "rows.csv"):
        assert launcher.read_tensors(runs.train(tmp_path / name[5:], str(tmp_path / name), **STEPS) / "model")


# --- templates --------------------------------------------------------------------------------------------------------

OPEN = "['__builtins__']['open'](MARKER, 'w')"
TEMPLATES = [  # each reaches for `open`, or for what leads there
    f"{{{{ cycler.__init__.__globals__{OPEN} }}}}",
    f"{{{{ joiner.__init__.__globals__{OPEN} }}}}",
    f"{{{{ namespace.__init__.__globals__{OPEN} }}}}",
    f"{{{{ lipsum.__globals__{OPEN} }}}}",
    f"{{{{ lipsum['__globals__']{OPEN} }}}}",
    f"{{{{ (lipsum|attr('__globals__')){OPEN} }}}}",
    f"{{{{ (cycler|attr('__init__')|attr('__globals__')){OPEN} }}}}",
    f"{{{{ ([lipsum]|map(attribute='__globals__')|first){OPEN} }}}}",
    f"{{{{ ([cycler]|map(attribute='__init__.__globals__')|first){OPEN} }}}}",
    f"{{{{ ([lipsum]|map('attr', '__globals__')|first){OPEN} }}}}",
    f"{{{{ self.__init__.__globals__{OPEN} }}}}",
    f"{{{{ self._TemplateReference__context.cycler.__init__.__globals__{OPEN} }}}}",
    f"{{% set f = cycler.__init__ %}}{{{{ f.__globals__{OPEN} }}}}",
    f"{{% for m in [1] %}}{{{{ loop.__init__.__globals__{OPEN} }}}}{{% endfor %}}",
    f"{{% macro m() %}}{{{{ caller.__globals__{OPEN} }}}}{{% endmacro %}}{{% call m() %}}x{{% endcall %}}",
    f"{{% set ns = namespace(f=lipsum) %}}{{{{ ns.f.__globals__{OPEN} }}}}",
    f"{{{{ raise_exception.__globals__{OPEN} }}}}",
    f"{{{{ strftime_now.__globals__{OPEN} }}}}",
    f"{{{{ range.__globals__{OPEN} }}}}",
    "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'catch_warnings' %}"
    f"{{{{ c.__init__.__globals__{OPEN} }}}}{{% endif %}}{{% endfor %}}",
    "{% for c in dict.mro()[1].__subclasses__() %}{% if c.__name__ == 'catch_warnings' %}"
    f"{{{{ c.__init__.__globals__{OPEN} }}}}{{% endif %}}{{% endfor %}}",
    "{{ '{0.__init__.__globals__}'.format(cycler) }}",
    "{% set f = '{0.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "{{ ('{0.__init__.__globals__}'|attr('format'))(cycler) }}",
    "{{ (['{0.__init__.__globals__}']|map(attribute='format')|first)(cycler) }}",
    "{{ '{a.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "{% import '/etc/hostname' as x %}",
    "{% include '/etc/hostname' %}",
]


def render_unsafely(template: str) -> str:
    import jinja2

    return jinja2.Environment().from_string(template).render(messages=[])


def with_marker(template: str, marker: Path) -> str:
    return template.replace("MARKER", repr(str(marker)))


def test_most_planted_templates_run_where_nothing_guards(tmp_path):
    path, ran = tmp_path / "it-ran", 0
    for template in TEMPLATES:
        try:
            ran += "__builtins__" in render_unsafely(with_marker(template, path))
        except Exception:  # names that only transformers knows, and files without a loader
            pass
        ran += path.exists()
        path.unlink(missing_ok=True)
    assert ran >= 18


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_templates_cannot_leave_their_sandbox(tmp_path, marker, number):
    template = tiny.CHATML + with_marker(TEMPLATES[number], marker)
    (tmp_path / "t.jinja").write_text(template)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    chat.load_template(tokenizer, str(tmp_path / "t.jinja"))
    rules = {"max_length": 4096, "truncation": "truncate"}
    try:
        row = chat.encode_messages(tokenizer, ROWS[0]["messages"], **rules)
    except ValueError:
        return
    text = tokenizer.decode(row["input_ids"])
    assert "__builtins__" not in text and "open" not in text


@pytest.mark.parametrize(
    "place", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/default.jinja"]
)
def test_templates_of_a_model_folder_cannot_either(tmp_path, marker, place):
    folder = tmp_path / "tiny"
    tiny.save(folder)
    template = tiny.CHATML + with_marker(TEMPLATES[0], marker)
    if place == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / place).read_text()) | {"chat_template": template}
        (folder / place).write_text(json.dumps(settings))
    else:
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(template)
    if place.startswith("additional"):
        (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError):
        runs.train(tmp_path, ROWS, **STEPS)
