"""The documents against what they describe: commands, copied recipe, metrics, tables, files."""

import fnmatch
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from oneloop import config
from tests import tiny
from tests.equivalence import launcher
from tests.test_guards import ROOT, config_class

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "accelerate_configs").glob("*")),
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted((ROOT / "recipes" / "configs").glob("*/*.yaml")),
]
CONFIG_FILE = str(ROOT / "accelerate_configs" / "cpu.yaml")
RECIPE_FILE = str(ROOT / "recipes" / "configs" / "sft" / "demo.yaml")
PLACEHOLDER = re.compile(r"(.*/)?([A-Z]|FILE|<[^>]+>)(\.yaml)?")


def commands() -> list[tuple[str, list[str]]]:
    """(document, words) of every command that runs a recipe."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".yaml":
            text = "\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        text = re.sub(r"\\\n\s*", "", text)
        for command in re.findall(r"(?:accelerate launch|python) [^`\n]*\.py\b[^`\n]*", text):
            if re.search(r"\b(recipes/|my_)\w+\.py", command):
                found.append((str(path.relative_to(ROOT)), shlex.split(command, comments=True)))
    return found


def filled(words: list[str], option: str, value: str) -> list[str]:
    """The words with a placeholder after `option` replaced by a file that exists."""
    before = ["", *words]
    return [
        value if last == option and PLACEHOLDER.fullmatch(word) else word
        for last, word in zip(before, words, strict=False)
    ]


def taken(words: list[str], option: str) -> str | None:
    """Remove `option` and its value from the words and return the value."""
    if option not in words:
        return None
    index = words.index(option)
    del words[index]
    return words.pop(index)


@pytest.mark.parametrize("document,words", commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_command(document, words):
    if words[0] == "accelerate":
        arguments = launch_command_parser().parse_args(filled(words[2:], "--config_file", CONFIG_FILE))
        script, flags = arguments.training_script, arguments.training_script_args
        config_file = arguments.config_file or taken(flags, "--config_file")
        assert config_file, "no Accelerate file"
    else:
        script, flags = words[1], words[2:]
        if script.startswith("scripts/"):  # a tool that takes a recipe with its flags
            assert (ROOT / script).is_file(), f"{script} does not exist"
            script, flags = flags[0], flags[1:]
        config_file = taken(flags, "--config_file")
    if arguments_after := taken(flags, "--num_processes"):
        assert config_file and int(arguments_after) >= 1
    assert config_file is None or (ROOT / config_file).is_file(), f"{config_file} does not exist"
    recipe = Path(script).stem.removeprefix("my_")
    assert (ROOT / "recipes" / f"{recipe}.py").is_file(), f"{script} does not exist"
    flags = filled(flags, "--config", RECIPE_FILE)
    if flags[:1] == ["--help"]:
        return
    paths = [i + 1 for i, word in enumerate(flags) if word == "--config"]
    assert config.parse(config_class(recipe), [str(ROOT / w) if i in paths else w for i, w in enumerate(flags)])


def test_commands_are_found():
    by_document = [document for document, _ in commands()]
    assert len(by_document) >= 20
    assert by_document.count("README.md") >= 6
    assert {f"accelerate_configs/{path.name}" for path in (ROOT / "accelerate_configs").glob("*.yaml")} <= set(
        by_document
    )
    assert {"recipes/sft.py", "recipes/configs/sft/demo.yaml", "accelerate_configs/README.md"} <= set(by_document)


def test_make_targets():
    targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split())
    blocks = "\n".join(
        block
        for path in DOCUMENTS
        if path.suffix == ".md"
        for block in re.findall(r"```bash\n(.*?)```|(`make [^`]*`)", path.read_text(), flags=re.DOTALL)
        for block in block
    )
    named = re.findall(r"\bmake ([a-z]+)", blocks)
    assert len(named) >= 8
    assert set(named) <= targets


# --- a copied recipe --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied_run(tmp_path_factory):
    """Output folder of `cp recipes/sft.py my_sft.py` and two steps of it on a tiny model."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copy(ROOT / "recipes" / "sft.py", folder / "my_sft.py")
    turns = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "2."}]
    (folder / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    flags = {
        "model_name_or_path": tiny.save(folder / "model"),
        "dataset_name": folder / "rows.jsonl",
        "eval_dataset_name": folder / "rows.jsonl",
        "eval_generations": 2,
        "output_dir": folder / "run",
        "use_peft": True,
        "merge_adapter": True,
        "global_batch_size": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    launcher.launch("single", 1, folder / "my_sft.py", *words)
    return folder / "run"


def first_column(heading: str) -> list[str]:
    """The words in backticks of the first column of the first table under a heading."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def test_metrics_are_explained(copied_run):
    lines = launcher.read_metrics(copied_run)
    emitted = {name for line in lines for name in line} - {"step"}
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    explained = first_column("Metrics")
    assert len(explained) == len(set(explained)) >= 13
    # Known GPUs alone have a peak rate to compare with.
    assert set(explained) == emitted | {"train/mfu"}


def test_outputs_are_listed(copied_run):
    listed = first_column("What a run writes")
    assert len(listed) >= 6
    sometimes = {"rejected.jsonl", "lengths.png"}  # where something was skipped, or asked for; other tests find them
    assert sometimes <= set(listed)
    always = set(listed) - sometimes
    assert {name.rstrip("/") for name in always} == {path.name for path in copied_run.iterdir()}
    assert all((copied_run / name).is_dir() == name.endswith("/") for name in always)


# --- tables and files -------------------------------------------------------------------------------------------------


def test_every_config_and_recipe_has_a_row():
    configs = first_column("Which file for which hardware")
    assert len(configs) == 12
    assert sorted(configs) == sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
    recipes = [name for name in first_column("Running a recipe") if name.startswith("recipes/")]
    assert recipes == [f"recipes/{path.name}" for path in sorted((ROOT / "recipes").glob("*.py"))]


def test_links_lead_somewhere():
    links = [
        path.parent / link
        for path in DOCUMENTS
        if path.suffix == ".md"
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert len(links) >= 4
    assert [str(link) for link in links if not link.exists()] == []


def test_environment_variables_exist():
    named = {name for path in DOCUMENTS for name in re.findall(r"\bONELOOP_\w+", path.read_text(encoding="utf-8"))}
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests" / "equivalence").glob("*.py")]
    read = {name for path in sources for name in re.findall(r"\"(ONELOOP_\w+)\"", path.read_text(encoding="utf-8"))}
    assert len(named) >= 3
    assert named <= read


def listed_files() -> list[str]:
    """The paths of the README's tree, folders with a slash at their end."""
    block = README.split("\n## Files\n")[1].split("```")[1]
    paths, parents = [], [""]
    for line in block.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = parents[depth] + line.split()[0]
        assert len(line.split()) >= 2 or path.endswith("/"), f"{path} has no line about it"
        paths.append(path)
        parents[depth + 1 :] = [path]
    return paths


def on_disk(folder: Path) -> set[str]:
    """Entries of a folder, without what git ignores, and git itself."""
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    return {
        path.relative_to(ROOT).as_posix() + "/" * path.is_dir()
        for path in folder.iterdir()
        if not path.name.startswith(".git") and not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }


def test_tree_is_the_disk():
    listed = listed_files()
    assert len(listed) == len(set(listed)) >= 30
    package = ROOT / "src" / "oneloop"
    actual = on_disk(package)
    for inner in ("data", "launch", "sharding", "state"):
        actual |= on_disk(package / inner)
    actual |= {entry for entry in on_disk(ROOT) if entry != "src/"} | {"src/oneloop/"}
    assert set(listed) == actual
