"""Promises of the source text that no single test of behaviour would notice being broken.

Every guard says how much it examined: one that has nothing left to look at must fail, not pass.
"""

import ast
import functools
import graphlib
import importlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import yaml

from oneloop import config
from tests.equivalence import launcher, scenario

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "oneloop"
MODULES = {  # a package with code of its own counts as the module of its name
    path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path not in (PACKAGE / "__init__.py", PACKAGE / "data" / "__init__.py")
}
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
RECIPE_FILES = sorted((ROOT / "recipes" / "configs").glob("*/*.yaml"))
SOURCES = [*sorted(PACKAGE.rglob("*.py")), *RECIPES]
PROGRAMS = [*SOURCES, *sorted((ROOT / "scripts").glob("*.py"))]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


@functools.cache
def config_class(recipe: str) -> type:
    """The config dataclass of recipes/<recipe>.py."""
    module = scenario.load_recipe(ROOT / "recipes" / f"{recipe}.py")
    return next(value for name, value in vars(module).items() if name.lower() == f"{recipe}config")


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_loop_is_one_text():
    blocks = {}
    for path in RECIPES:
        parts = re.findall(
            r"^ *# --- training loop.*?# --- end of training loop", path.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        assert len(parts) == 1, f"{path.name} has {len(parts)} blocks"
        blocks[path.name] = parts[0]
    assert len(blocks) >= 1
    assert len(set(blocks.values())) == 1, f"the loop differs among {', '.join(blocks)}"
    lines = next(iter(blocks.values())).splitlines()
    # The lower bound: a loop that moved into a function would leave an equal, empty text in all of them.
    assert 15 <= len(lines) <= 30
    for call in ("loader.steps(", "compute_loss_sum(", "accelerator.backward(", "optimizer.step()"):
        assert sum(call in line for line in lines) == 1, call


def test_recipes_are_short():
    num_functions = 0
    for path in RECIPES:
        assert num_lines(path) <= 200, path.name
        functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        num_functions += len(functions)
        long = [f"{f.name} ({f.end_lineno - f.lineno + 1})" for f in functions if f.end_lineno - f.lineno >= 40]
        assert [name for name in long if not name.startswith("main ")] == []
        assert "main" in {function.name for function in functions}
    assert num_functions >= 4 * len(RECIPES) >= 4


def test_flag_budget():
    counts = {path.stem: config.num_flags(config_class(path.stem)) for path in RECIPES}
    assert len(counts) >= 1
    assert {name: count for name, count in counts.items() if not 30 <= count <= 65} == {}


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipe_file(path):
    parsed = config.parse(config_class(path.parent.name), ["--config", str(path)])
    assert len(yaml.safe_load(path.read_text())) >= 5
    assert parsed.output_dir
    lines = path.read_text().splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    for word in ("Hardware:", "Result:"):
        assert any(word in line for line in header), f"no {word} above the first key"


def test_there_are_recipe_files():
    assert len(RECIPE_FILES) >= 1
    assert {path.parent.name for path in RECIPE_FILES} == {path.stem for path in RECIPES}


# --- modules ----------------------------------------------------------------------------------------------------------


def test_modules_are_short_and_named_for_something():
    assert len(MODULES) >= 19
    assert {name: num_lines(path) for name, path in MODULES.items() if num_lines(path) > 400} == {}
    words = {word for name in MODULES for word in re.split(r"[/_]", name)}
    assert words & {"utils", "util", "common", "misc", "helpers", "base", "trainer"} == set()


def test_every_module_imports():
    names = ["oneloop", "oneloop.data", *(f"oneloop.{name.replace('/', '.')}" for name in MODULES)]
    assert len([importlib.import_module(name).__name__ for name in names]) == len(MODULES) + 2 >= 21


def layers() -> dict[str, int]:
    """Module -> layer, as the table of CONTRIBUTING.md has it."""
    rows = re.findall(r"^\| (\d) \w+ \| ([^|]*) \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    return {name: int(number) for number, cell in rows for name in re.findall(r"`([\w/]+)`", cell)}


def imported_modules(path: Path) -> list[tuple[str, ast.AST]]:
    """The modules of this package that a file imports, at its top, in functions and for type checkers."""
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            added = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path, node)}: relative import"
            added = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        # Through a package all of its modules can be reached, and nobody could say which.
        assert not {"oneloop", "oneloop.data"} & set(added), f"{place(path, node)}: imports a whole package"
        names += [(name, node) for name in added]
        if isinstance(node, ast.ImportFrom):
            names.append((node.module, node))
    inside = [(name.removeprefix("oneloop.").replace(".", "/"), node) for name, node in names]
    return [(name, node) for name, node in inside if name in MODULES]


def test_imports_go_down_the_layers():
    layer = layers()
    assert set(layer) == set(MODULES), "the table of CONTRIBUTING.md and src/oneloop have other modules"
    assert set(layer.values()) == {0, 1, 2, 3}
    graph, num_imports, upward = {}, 0, []
    for name, path in MODULES.items():
        imports = imported_modules(path)
        num_imports += len(imports)
        graph[name] = {other for other, _ in imports} - {name}
        upward += [f"{place(path, node)}: {other}" for other, node in imports if layer[other] > layer[name]]
    assert upward == []
    assert num_imports >= 25
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_help_needs_no_heavy_package():
    code = (
        "import sys, oneloop.arguments, oneloop.config, oneloop.schedule\n"
        "heavy = 'torch accelerate transformers datasets deepspeed peft wandb numpy pandas pyarrow matplotlib'\n"
        "print(len(sys.modules), [name for name in heavy.split() if name in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], env=launcher.environment(), text=True)
    count, found = output.split(maxsplit=1)
    assert found.strip() == "[]"
    assert int(count) >= 50


# --- words ------------------------------------------------------------------------------------------------------------

BACKEND = re.compile(r"deepspeed|fsdp|zero[0-3]|ddp", re.IGNORECASE)
KNOWS_BACKENDS = {*(PACKAGE / "launch").glob("*.py"), *(PACKAGE / "sharding").glob("*.py")} - {
    PACKAGE / "sharding" / "__init__.py"  # names only
}


def words(path: Path) -> list[tuple[str, ast.AST]]:
    """All identifiers and texts of a file's code; comments, docstrings and the sentences beneath fields are none."""
    documents = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree(path)):
        if id(node) in documents and isinstance(node, ast.Constant):
            continue
        for _, value in ast.iter_fields(node):
            found += [(text, node) for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return found


def test_only_two_packages_name_a_backend():
    num_words, elsewhere, known = 0, [], set()
    for path in SOURCES:
        for text, node in words(path):
            num_words += 1
            if BACKEND.search(text) and path in KNOWS_BACKENDS:
                known.add(path)
            elif BACKEND.search(text):
                elsewhere.append(f"{place(path, node)}: {text[:60]!r}")
    assert elsewhere == []
    assert known == KNOWS_BACKENDS, "these surely do: is the search blind?"
    assert num_words >= 8000


def test_no_device_by_name():
    num_tokens, found = 0, []
    for path in SOURCES:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            num_tokens += 1
            if token.type != tokenize.COMMENT and "cuda" in token.string.lower():
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string[:60]}")
    assert found == []
    assert num_tokens >= 15000


# --- pins -------------------------------------------------------------------------------------------------------------


def test_constraints_hold_versions_only():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 100
    # No address, no path, no option of an installer: only `name==version`, perhaps with a marker.
    pin = re.compile(r"[a-z0-9][a-z0-9._-]*==[0-9][A-Za-z0-9.+!]*( ; [^/:@\\]+)?")
    assert [line for line in lines if not pin.fullmatch(line)] == []
    assert {"torch", "transformers", "accelerate", "deepspeed", "peft"} <= {line.split("==")[0] for line in lines}
