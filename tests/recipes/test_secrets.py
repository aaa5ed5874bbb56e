"""Secrets planted wherever a run can meet one, looked for in everything it leaves: printed, recorded and exported.

And the modes of all these files, which nobody else may read.
"""

import json
import os
import random
import stat
import string
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
import yaml

from oneloop import config as config_module
from oneloop import process, redaction, tracking
from tests.equivalence import launcher
from tests.equivalence.scenario import ROOT
from tests.recipes import runs


def made_up(name: str, length: int = 24, alphabet: str = string.ascii_letters + string.digits) -> str:
    """A secret of that name, drawn here so that none stands in this file for a scanner to find."""
    return "".join(random.Random(name).choices(alphabet, k=length - 2)) + "q7"


VARIABLES = {
    "HF_TOKEN": "hf_" + made_up("hub", 34),
    "HUGGING_FACE_HUB_TOKEN": made_up("hub, by value"),
    "WANDB_API_KEY": made_up("wandb", 40, "0123456789abcde").replace("q", "f"),
    "AWS_ACCESS_KEY_ID": "AKIA" + made_up("aws id", 16, string.ascii_uppercase).upper(),
    "AWS_SECRET_ACCESS_KEY": made_up("aws", 20) + "/" + made_up("aws, rest", 19),
    "AWS_SESSION_TOKEN": made_up("aws session", 200),
    "GITHUB_TOKEN": "ghp_" + made_up("github", 36),
    "GITHUB_PAT": made_up("github, by value", 36),
    "OPENAI_API_KEY": "sk-proj-" + made_up("openai", 48),
    "ANTHROPIC_API_KEY": made_up("anthropic, by value", 48),
    "AZURE_CLIENT_SECRET": made_up("azure", 34) + "~",
    "MLFLOW_TRACKING_PASSWORD": "two words " + made_up("mlflow", 8),
    "PGPASSWORD": made_up("postgres", 8),
    "SMTP_AUTH": made_up("mail"),
    "SLACK_BOT_TOKEN": "xoxb-" + made_up("slack"),
    "SIGNING_KEY": made_up("line 1", 64) + "\n" + made_up("line 2", 64),
    "CREDENTIALS": json.dumps({"id": 5, "value": made_up("json")}),
}
ELSEWHERE = {
    "netrc": made_up("netrc"),
    "token file": "hf_" + made_up("token file", 34),
    "folder in a flag": "hf_" + made_up("flag", 34),
    "folder in YAML": "ghp_" + made_up("yaml", 36),
    "data row": "hf_" + made_up("row", 34),
    "bad data row": "hf_" + made_up("bad row", 34),
    "address in a flag": made_up("address", 14),
    "unknown flag": made_up("unknown flag", 14),
    "unknown key": made_up("unknown key", 14),
    "library error": made_up("library", 14),
    "our error": made_up("ours", 14),
    "nested": made_up("nested", 14),
    "header": made_up("header", 30),
}
PARTS = {  # what of each may not be found; of several lines or spellings, any of them
    **{f"{name} {i}": line for name, value in VARIABLES.items() for i, line in enumerate(value.splitlines())},
    "CREDENTIALS 0": made_up("json"),
    **ELSEWHERE,
}


def leaks(content: str | bytes) -> list[str]:
    """Names of the planted secrets in `content`."""
    content = content.encode() if isinstance(content, str) else content
    return [name for name, secret in PARTS.items() if secret.encode() in content]


def leaks_in_files(*folders) -> list[str]:
    """The same for every file below, with the file's name; asserts that there were some."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [f"{path}: {name}" for path in files for name in leaks(path.read_bytes()) + leaks(str(path.name))]


def test_they_are_thirty_and_would_be_found():
    assert len(VARIABLES) + len(ELSEWHERE) >= 30
    assert len(set(PARTS.values())) == len(PARTS)
    for name, secret in PARTS.items():
        assert leaks(f"a{secret}b") == [name]


@pytest.fixture
def home(tmp_path):
    """A home folder with two secrets where their owners keep them."""
    home = tmp_path / "home"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text(ELSEWHERE["token file"])
    (home / ".netrc").write_text(f"machine example.com login me password {ELSEWHERE['netrc']}\n")
    (home / ".netrc").chmod(0o600)
    return home


def run_recipe(home, *arguments):
    """`python recipes/sft.py` with all variables planted; returns its exit code and output."""
    kept = {n: v for n, v in launcher.environment().items() if n not in ("HF_HOME", "NETRC", "ONELOOP_UMASK")}
    result = subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "sft.py"), *arguments],
        env=kept | VARIABLES | {"HOME": str(home), "ACCELERATE_USE_CPU": "true", "ONELOOP_TRACEBACK": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=launcher.TIMEOUT_SECONDS,
        umask=0o022,
    )
    return result.returncode, result.stdout + result.stderr


def test_run_that_succeeds(tmp_path, home):
    train, test = tmp_path / ELSEWHERE["folder in a flag"], tmp_path / ELSEWHERE["folder in YAML"]
    rows = [runs.turns(f"Say {i}.", f"{i} {ELSEWHERE['data row']}") for i in range(4)]
    for folder in (train, test):
        folder.mkdir()
        runs.write_rows(folder / "rows.jsonl", rows)
    settings = runs.settings(tmp_path / "work", rows, report_to="wandb", max_steps=2, global_batch_size=2)
    del settings["dataset_name"]
    settings |= {"eval_dataset_name": str(test / "rows.jsonl"), "eval_generations": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    code, output = run_recipe(
        home, "--config", str(tmp_path / "recipe.yaml"), "--dataset_name", str(train / "rows.jsonl")
    )
    assert code == 0, output
    out = tmp_path / "work" / "run"
    assert leaks(output) == []
    (home / ".cache" / "huggingface" / "token").unlink()
    (home / ".netrc").unlink()
    records = {"metrics.jsonl", "recipe.yaml", "sources.json", "topology.json", "loss.png"}
    assert {path.name for path in out.iterdir()} == records | {"model", "states", "wandb"}
    assert len(list(out.rglob("*.wandb"))) == 1 and len(list((out / "model").glob("*.safetensors"))) == 1
    assert leaks_in_files(out, *(folder for folder in (home,) if any(p.is_file() for p in folder.rglob("*")))) == []
    # And yet the run had read both files, and says so once.
    assert len(launcher.column(launcher.read_metrics(out), "train/loss")) == 2
    assert output.count("dataset_name, eval_dataset_name holds what looks like a secret") == 1
    recorded = yaml.safe_load((out / "recipe.yaml").read_text())
    assert recorded["dataset_name"] == str(tmp_path / redaction.MARK / "rows.jsonl")
    assert f"data: {recorded['dataset_name']}: " in output

    # Nobody else can read any of it.
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in [out, *out.rglob("*")] if not path.is_symlink()}
    open_to_others = {str(p.relative_to(tmp_path)): oct(mode) for p, mode in found.items() if mode & 0o077}
    assert open_to_others == {}
    assert {mode for path, mode in found.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if path.is_file()} == {0o600}
    assert len(found) >= 15


def test_run_that_fails(tmp_path, home):
    address = f"https://me:{ELSEWHERE['address in a flag']}@hub.example.com/model"
    settings = runs.settings(tmp_path / "work", [runs.turns("a", "b")], model_name_or_path=address)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    code, output = run_recipe(home, "--config", str(tmp_path / "recipe.yaml"))
    assert code == 1, output
    assert leaks(output) == []
    assert f"https://{redaction.MARK}@hub.example.com/model" in output


class Left(Exception):
    """Raised in place of os._exit."""


def ends_with(monkeypatch, capsys, main, *arguments, config_class=config_module.RecipeConfig) -> tuple[int, str]:
    """`process.run` in this process: its exit code and what it printed."""

    def leave(code):
        if threading.current_thread() is threading.main_thread():  # and not the timer that runs beside it
            raise Left(code)

    monkeypatch.setattr(process.os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["recipe.py", *arguments])
    streams = sys.stdout, sys.stderr
    try:
        process.run(main, config_class)
        code = 0
    except (Left, SystemExit) as error:
        code = error.args[0]
    finally:
        sys.stdout, sys.stderr = streams
    return code, "".join(capsys.readouterr())


@pytest.fixture
def planted(monkeypatch, home):
    for name in ("HF_HOME", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (VARIABLES | {"HOME": str(home)}).items():
        monkeypatch.setenv(name, value)
    mask = os.umask(0o022)
    yield
    os.umask(mask)


NEEDED = ("--model_name_or_path", "m", "--dataset_name", "d", "--output_dir")


def test_errors_on_the_command_line(tmp_path, planted, monkeypatch, capsys):
    (tmp_path / "recipe.yaml").write_text(f"hub_token: {ELSEWHERE['unknown key']}\noutput_dir: x\n")
    flags = ("--hub_password", ELSEWHERE["unknown flag"], ELSEWHERE["folder in a flag"], VARIABLES["HF_TOKEN"])
    code, output = ends_with(monkeypatch, capsys, None, "--config", str(tmp_path / "recipe.yaml"), *flags)
    assert code == 2 and "unknown flag --hub_password" in output and "hub_token" in output
    assert leaks(output) == []


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError, KeyboardInterrupt])
def test_text_of_an_error(tmp_path, planted, monkeypatch, capsys, kind):
    monkeypatch.setenv("ONELOOP_TRACEBACK", "1")  # else an interruption is one word

    def main(config):
        everything = {"env": dict(VARIABLES), "password": ELSEWHERE["nested"], "n": [ELSEWHERE["folder in YAML"]]}
        print(everything, VARIABLES["SIGNING_KEY"], sep="\n")
        print(f"GET https://me:{ELSEWHERE['library error']}@host", end="")
        raise kind(f"{everything}\nAuthorization: Bearer {ELSEWHERE['header']}", VARIABLES["PGPASSWORD"])

    code, output = ends_with(monkeypatch, capsys, main, *NEEDED, str(tmp_path / "run"))
    assert code == 1 and kind.__name__ in output
    assert leaks(output) == []
    assert f"GET https://{redaction.MARK}@host" in output


def test_row_that_cannot_be_used(tmp_path, planted, monkeypatch, capsys):
    from tests.equivalence.scenario import load_recipe

    rows = [{"messages": [{"role": f"assistant {ELSEWHERE['bad data row']}", "content": ELSEWHERE["data row"]}]}]
    values = runs.settings(tmp_path / "work", rows)
    flags = [f"--{name}={value}" for name, value in values.items()]
    recipe = load_recipe(ROOT / "recipes" / "sft.py")
    code, output = ends_with(monkeypatch, capsys, recipe.main, *flags, config_class=recipe.SFTConfig)
    assert code == 1 and "rows.jsonl:1" in output
    assert leaks(output) == []


def test_settings_within_settings(tmp_path, planted, capsys):
    from accelerate import Accelerator

    @dataclass
    class Topology:
        wrapped: dict

    address = f"s3://me:{ELSEWHERE['address in a flag']}@bucket/rows.jsonl"
    asked = config_module.RecipeConfig(
        model_name_or_path="m",
        dataset_name=address,
        output_dir=str(tmp_path / "run"),
        report_to="tensorboard",
        use_peft=True,
        lora_target_modules=["q_proj", VARIABLES["PGPASSWORD"]],
    )
    obtained = Topology({"api_key": ELSEWHERE["nested"], "x": [{"y": f"password={ELSEWHERE['our error']}"}]})
    with pytest.warns(RuntimeWarning, match="lora_target_modules, dataset_name, topology holds what looks") as caught:
        tracker = tracking.start(Accelerator(cpu=True), asked, obtained)
    assert len(caught) == 1
    tracker.log({f"eval/{VARIABLES['HF_TOKEN']}": 1.0}, step=1)
    tracker.finish()
    assert leaks("".join(capsys.readouterr())) == []
    assert leaks_in_files(tmp_path / "run") == []
    assert asked.dataset_name == address, "the run itself needs it"
    assert len(list((tmp_path / "run").rglob("events.out.tfevents*"))) >= 1
