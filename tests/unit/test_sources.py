"""What a model's files may say, what comes from the hub at which commit, and what is written down of both."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oneloop import config, fingerprint, sources
from oneloop.data import rows
from oneloop.sources import BaseModel
from tests import tiny
from tests.equivalence import launcher, scenario
from tests.recipes import runs

ROWS = [runs.turns("Name a colour.", "Teal.")]
STEPS = {"global_batch_size": 1, "max_steps": 1}
COMMIT, LATER = "a" * 40, "b" * 40


def model(folder: Path, **settings: dict) -> Path:
    """A folder that looks like a model to everything but a loader; `config={"key": 1}` adds to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
    for name in {"config", *settings}:
        (folder / f"{name}.json").write_text(json.dumps({"model_type": "llama"} | settings.get(name, {})))
    return folder


def find(folder: Path | str, trusting: bool = False) -> sources.Found:
    return sources.find_model(BaseModel(str(folder), "main", None), trusting)


# --- keys of config files ---------------------------------------------------------------------------------------------

REFUSED = [
    ("config", {"auto_map": {"AutoModelForCausalLM": "modeling.M"}}, "auto_map = .*modeling.M"),
    ("config", {"text_config": {"auto_map": {"AutoModel": "other/repo--modeling.M"}}}, "auto_map = .*other/repo"),
    ("config", {"layers": [{"deep": [{"auto_map": ["x.T", None]}]}]}, "auto_map"),
    ("config", {"_attn_implementation_internal": "evil/kernel"}, "_attn_implementation_internal = .*evil"),
    ("config", {"_attn_implementation_internal": "sdpa"}, "_attn_implementation_internal"),
    ("config", {"_experts_implementation_internal": "x"}, "_experts_implementation_internal"),
    ("config", {"attn_implementation": "evil/kernel"}, "attn_implementation = .*evil/kernel.*downloaded code"),
    ("config", {"attn_implementation": "evil/kernel@v1:function"}, "attn_implementation"),
    ("config", {"_attn_implementation": "paged|evil/kernel"}, "_attn_implementation"),
    ("config", {"attn_implementation": {"": "sdpa", "text_config": "evil/kernel"}}, "attn_implementation"),
    ("config", {"vision_config": {"_attn_implementation": "evil/kernel"}}, "_attn_implementation"),
    ("config", {"experts_implementation": "evil/kernel"}, "experts_implementation"),
    ("config", {"use_kernels": True}, "use_kernels"),
    ("config", {"kernel_config": {"RMSNorm": "evil/kernel:Norm"}}, "kernel_config"),
    ("config", {"quantization_config": {"kernel_repo": "evil/kernel"}}, "kernel_repo"),
    ("config", {"transformers_weights": "adapter_model.bin"}, "transformers_weights = .*no safetensors"),
    ("config", {"configuration_files": ["config.5.0.json", "hidden.json"]}, "configuration_files"),
    ("config", {"configuration_files": ["sub/config.5.0.json"]}, "configuration_files"),
    ("config.5.0", {"auto_map": {"AutoModel": "m.M"}}, r"config.5.0.json has auto_map"),
    ("Config", {"auto_map": {"AutoModel": "m.M"}}, r"Config.json has auto_map"),
    ("generation_config", {"auto_map": {"AutoModel": "m.M"}}, "generation_config.json has auto_map"),
    ("tokenizer_config", {"auto_map": ["t.T", None]}, "tokenizer_config.json has auto_map"),
    ("processor_config", {"auto_map": {"AutoProcessor": "p.P"}}, "processor_config.json has auto_map"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_key_that_asks_for_code_is_refused(tmp_path, number):
    name, settings, expected = REFUSED[number]
    folder = model(tmp_path / "m", **{name: settings})
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{expected}") as refused:
        find(folder)
    for word in (str(folder), "Delete the key", "--trust_remote_code on the command line"):
        assert word in str(refused.value)
    assert find(folder, trusting=True).folder == folder


def test_a_key_that_asks_for_nothing_is_left_alone(tmp_path):
    harmless = {
        "auto_map": {},
        "attn_implementation": "flash_attention_2",
        "_attn_implementation": None,
        "vision_config": {"attn_implementation": {"": "sdpa"}},
        "use_mamba_kernels": True,
        "kernel_size": [3, 3],
        "use_kernels": False,
        "_name_or_path": "org/name",
        "transformers_weights": "model.safetensors",
        "configuration_files": ["config.5.0.json"],
        "trust_remote_code": True,
    }
    assert find(model(tmp_path / "m", config=harmless, tokenizer_config={"auto_map": None})).folder == tmp_path / "m"
    (tmp_path / "m" / "config.json").write_text("{cut")  # the loader's own error is about this
    assert find(tmp_path / "m")


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "x.bin", "..", 1]
)
def test_a_shard_is_a_name_beside_its_index(tmp_path, shard):
    index = {"model.safetensors.index": {"weight_map": {"a": "model-1-of-1.safetensors", "b": shard}}}
    with pytest.raises(ValueError, match="index.json has weight_map"):
        find(model(tmp_path / "m", **index), trusting=True)


@pytest.mark.parametrize(
    ("files_there", "expected"),
    [
        (["model.Q4_K_M.gguf"], "gguf is no input"),
        (["pytorch_model.bin"], "only as pytorch_model.bin.*convert it.*--trust_remote_code"),
        (["pytorch_model.fp16.bin"], "only as pytorch_model.fp16.bin"),
        (["consolidated.00.pth", "params.json"], "only as consolidated.00.pth.*convert it"),
        (["adapter_config.json", "model.safetensors"], "is itself an adapter.*merge_adapter"),
        (["pytorch_model.bin", "model.safetensors"], None),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], None),
        ([], None),
    ],
)
def test_weights_are_safetensors(tmp_path, files_there, expected):
    folder = model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for name in files_there:
        (folder / name).write_text("{}")
    if expected is None:
        assert find(folder)
        return
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{expected}"):
        find(folder)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "m.gguf").write_text("")
    (tmp_path / "m.bin").write_text("")
    with pytest.raises(ValueError, match="m.gguf' is a file.*gguf is no input"):
        find(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="m.bin' is a file: name the folder"):
        find(tmp_path / "m.bin", trusting=True)
    with pytest.raises(ValueError, match="there is no folder"):
        find(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        find("x" * 4096)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"peft_type": "PROMPT_TUNING", "tokenizer_kwargs": {"trust_remote_code": True}}, "peft_type.*only LORA"),
        ({"megatron_config": {"a": 1}, "megatron_core": "evil.module"}, "megatron_config.*evil.module"),
        ({"auto_map": {"x": "y.Z"}}, "adapter_config.json has auto_map"),
    ],
)
def test_an_adapter_is_lora_and_asks_for_no_code(tmp_path, settings, expected):
    saved = {"peft_type": "LORA", "base_model_name_or_path": "base"} | settings
    folder = model(tmp_path / "a", adapter_config=saved)
    (folder / "adapter_model.safetensors").write_text("")
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{expected}"):
        sources.find_adapter(str(folder), False)


def test_pickled_weights_train_when_trusted(tmp_path):
    """And only then; the restricted unpickler that reads them runs nothing (tests/test_security.py)."""
    import torch
    from safetensors.torch import load_file

    tiny.save(tmp_path / "tiny")
    weights = load_file(tmp_path / "tiny" / "model.safetensors")
    torch.save(weights, tmp_path / "tiny" / "pytorch_model.bin")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    out = runs.train(tmp_path, ROWS, use_peft=True, trust_remote_code=True, **STEPS)
    adapter = load_file(out / "model" / "adapter_model.safetensors")
    torch.save(adapter, out / "model" / "adapter_model.bin")
    (out / "model" / "adapter_model.safetensors").unlink()
    options = {"model_name_or_path": str(out / "model"), **STEPS}
    again = runs.train(tmp_path / "again", ROWS, trust_remote_code=True, learning_rate=1e-12, **options)
    for name, tensor in launcher.read_tensors(again / "model").items():
        torch.testing.assert_close(tensor, adapter[name], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="only as adapter_model.bin"):
        runs.train(tmp_path / "third", ROWS, **options)


# --- who may trust ----------------------------------------------------------------------------------------------------


def parse(*words: str):
    recipe = scenario.load_recipe(scenario.ROOT / "recipes" / "sft.py")
    required = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
    return config.parse(recipe.SFTConfig, [*required, *words])


@pytest.mark.parametrize(
    "value", ["true", "True", "'true'", "yes", "on", "1", "[true]", "{a: b}", "null", "!!bool true"]
)
def test_no_config_file_can_switch_it_on(tmp_path, capsys, value):
    (tmp_path / "c.yaml").write_text(f"trust_remote_code: {value}\n")
    with pytest.raises(SystemExit) as stop:
        parse("--config", str(tmp_path / "c.yaml"))
    assert stop.value.code == 2
    assert "give --trust_remote_code on the command line" in capsys.readouterr().err


def test_no_environment_variable_can_either(monkeypatch):
    names = ("TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE", "ONELOOP_TRUST_REMOTE_CODE", "SFT_TRUST_REMOTE_CODE")
    names += ("HF_DATASETS_TRUST_REMOTE_CODE", "ACCELERATE_TRUST_REMOTE_CODE", "JSONARGPARSE_DEFAULT_ENV")
    for name in names:
        monkeypatch.setenv(name, "true")
    assert parse().trust_remote_code is False
    assert parse("--trust_remote_code").trust_remote_code is True
    assert parse("--trust_remote_code", "false").trust_remote_code is False


def test_attention_kernel_of_the_hub_needs_trust(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    values = runs.settings(tmp_path, ROWS, attn_implementation="kernels-community/flash-attn2", **STEPS)
    recipe = scenario.load_recipe(scenario.ROOT / "recipes" / "sft.py")
    with pytest.raises(ValueError, match="attn_implementation is kernels-community/.*--trust_remote_code"):
        sources.check(recipe.SFTConfig(**values))
    sources.check(recipe.SFTConfig(**values, trust_remote_code=True))
    sources.check(recipe.SFTConfig(**values | {"attn_implementation": "sdpa"}))


def test_trust_is_printed(tmp_path, capsys):
    runs.train(tmp_path, ROWS, **STEPS)
    assert "refused (code and pickled files)" in capsys.readouterr().out
    runs.train(tmp_path, ROWS, trust_remote_code=True, **STEPS)
    assert "may run: --trust_remote_code is given" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / sources.RECORD_FILE).read_text())["trust_remote_code"] is True


KERNELS = "def get_kernel(*names, **options):\n    open({marker!r}, 'w')\n    raise ValueError('from the hub')\n"
USES_KERNELS = """
import sys
from oneloop import sources
if sys.argv[1] == "forbid":
    sources.forbid_hub_kernels(False)
from transformers.integrations import hub_kernels  # the way of every model, quantiser and attention to the package
for get in (lambda: hub_kernels.get_kernel("org/kernel", version=1), lambda: __import__("kernels").get_kernel("x")):
    try:
        get()
    except (ImportError, ValueError) as error:
        print(type(error).__name__)
"""


def test_installed_kernels_package_is_not_used(tmp_path):
    """The control shows that the same call does download code where nothing forbids it."""
    marker = tmp_path / "it-ran"
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    names = "CUDAProperties Device KernelizeFallback LayerRepository LocalLayerRepository Mode ROCMProperties "
    names += "register_kernel_mapping replace_kernel_forward_from_hub use_kernel_mapping kernelize "
    names += "use_kernel_forward_from_hub use_kernelized_func"
    stand_ins = "class _Any:\n    def __init__(self, *a, **k): pass\n    def __call__(self, x, *a): return x\n"
    stand_ins += "".join(f"def {name}(*a, **k): return _Any()\n" for name in names.split())
    (package / "__init__.py").write_text(KERNELS.format(marker=str(marker)) + stand_ins)
    (package / "layer").mkdir()
    (package / "layer" / "__init__.py").write_text("")
    (package / "layer" / "mode.py").write_text("Mode = None\n")
    (tmp_path / "site" / "kernels-0.18.3.dist-info").mkdir()
    (tmp_path / "site" / "kernels-0.18.3.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.3\n")
    environment = launcher.environment()
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path / "site")
    printed = {}
    for word in ("forbid", "control"):
        command = [sys.executable, "-c", USES_KERNELS, word]
        printed[word] = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert marker.exists() == (word == "control"), printed[word].stderr[-3000:]
    assert printed["forbid"].stdout.split() == ["ImportError", "ModuleNotFoundError"]
    assert printed["control"].stdout.split() == ["ValueError", "ValueError"]


def test_kernels_in_use_already_are_refused(monkeypatch):
    in_use, own = type(sys)("kernels"), type(sys)("kernels")
    in_use.get_kernel = print
    monkeypatch.setitem(sys.modules, "kernels", in_use)
    with pytest.raises(ValueError, match="has imported the package kernels"):
        sources.forbid_hub_kernels(False)
    sources.forbid_hub_kernels(True)
    monkeypatch.setitem(sys.modules, "kernels", own)  # somebody's own module of this name
    sources.forbid_hub_kernels(False)
    assert sys.modules["kernels"] is own
    monkeypatch.setitem(sys.modules, "kernels", None)  # forbidden by an earlier run of this process
    sources.forbid_hub_kernels(True)
    assert "kernels" not in sys.modules


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sources, "_snapshots", {})
    monkeypatch.setattr(sources, "_dataset_commits", {})
    return tmp_path / "hub"


def in_cache(cache: Path, name: str, commit: str = COMMIT, kind: str = "models", branch: str = "main") -> Path:
    """The snapshot folder of a repository in the cache, `branch` pointing to it."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / branch).write_text(commit)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_hub_model_is_found_at_its_commit(cache):
    folder = model(in_cache(cache, "org/name"))
    found = find("org/name")
    assert (found.location, found.revision, found.folder) == ("org/name", COMMIT, folder)
    model(in_cache(cache, "org/name", LATER))
    assert find("org/name").revision == COMMIT, "within a run a branch does not move"
    model(in_cache(cache, "gpt2", LATER, branch="v1"))
    assert sources.find_model(BaseModel("gpt2", "v1", None), False).revision == LATER
    with pytest.raises(
        ValueError, match=r"model_name_or_path: 'org/other' \(revision main\).*cannot be read from the hub"
    ):
        find("org/other")


@pytest.mark.parametrize("number", [0, 3, 6, 14, 18, 21])
def test_files_on_the_hub_are_checked_alike(cache, number):
    name, settings, expected = REFUSED[number]
    model(in_cache(cache, "org/name"), **{name: settings})
    with pytest.raises(ValueError, match=f"model_name_or_path: .*{COMMIT}.*{expected}"):
        find("org/name")


def test_weights_on_the_hub_are_checked_alike(cache):
    folder = model(in_cache(cache, "org/name"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="'org/name' has its weights only as pytorch_model.bin"):
        find("org/name")
    model(in_cache(cache, "org/adapter"), adapter_config={"base_model_name_or_path": "elsewhere/evil"})
    with pytest.raises(ValueError, match="'org/adapter' is itself an adapter: download it"):
        find("org/adapter")


def test_a_run_records_the_commits_it_loaded(cache, tmp_path):
    tiny.save(in_cache(cache, "org/tiny"))
    out = runs.train(tmp_path, ROWS, model_name_or_path="org/tiny", use_peft=True, merge_adapter=True, **STEPS)
    record = json.loads((out / sources.RECORD_FILE).read_text())
    assert record["model"] == record["tokenizer"] == {"name": "org/tiny", "asked": "main", "commit": COMMIT}
    assert record["dataset"] == {"name": str(tmp_path / "rows.jsonl"), **fingerprint.of_data(tmp_path / "rows.jsonl")}
    assert record["adapter"] is record["chat_template"] is record["eval_dataset"] is None
    options = {"model_name_or_path": str(out / "model"), "eval_dataset_name": str(tmp_path / "rows.jsonl"), **STEPS}
    (tmp_path / "t.jinja").write_text(tiny.CHATML)
    again = runs.train(tmp_path / "again", ROWS, chat_template=str(tmp_path / "t.jinja"), **options)
    record = json.loads((again / sources.RECORD_FILE).read_text())
    assert record["model"]["commit"] == COMMIT
    adapter = {"name": str(out / "model"), **fingerprint.of_model(out / "model")}
    assert record["adapter"] == record["tokenizer"] == adapter
    assert record["chat_template"]["num_bytes"] == len(tiny.CHATML)
    assert record["eval_dataset"]["num_files"] == 1


def test_a_data_set_is_read_at_the_commit_that_is_recorded(cache, monkeypatch):
    import datasets

    in_cache(cache, "org/rows", kind="datasets")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **options: asked.append((name, options)) or ROWS)
    assert len(list(rows.read("org/rows", "train"))) == 1
    assert asked == [("org/rows", {"split": "train", "revision": COMMIT})]
    in_cache(cache, "org/rows", LATER, kind="datasets")
    recipe = scenario.load_recipe(scenario.ROOT / "recipes" / "sft.py")
    names = {"dataset_name": "org/rows", "eval_dataset_name": "org/unread"}
    record = sources.record(recipe.SFTConfig(model_name_or_path="org/unread", output_dir="o", **names))
    assert record["dataset"] == {"name": "org/rows", "commit": COMMIT}
    assert record["model"]["commit"] is record["eval_dataset"]["commit"] is None, "what was not loaded has no commit"
    assert sources.dataset_commit("org/unknown") is None


class Hub(http.server.BaseHTTPRequestHandler):
    """Two states of one repository: the branch moves after it has been looked at once."""

    folder: Path
    asked: list[str] = []

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        names = sorted(file.name for file in self.folder.iterdir())
        if path == "/api/models/org/tiny/revision/main":
            moved = self.asked.count(path) > 1
            siblings = [{"rfilename": name} for name in names]
            self.send_json({"id": "org/tiny", "sha": LATER if moved else COMMIT, "siblings": siblings})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": (self.folder / n).stat().st_size, "oid": n} for n in names]
            self.send_json(tree)
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/") and path.rpartition("/")[2] in names:
            body = (self.folder / path.rpartition("/")[2]).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{path.rpartition("/")[2]}"', "Content-Length": len(body)}
            self.send(200, headers, body if with_body else b"")
        else:
            self.send(404, {"X-Error-Code": "EntryNotFound", "Content-Length": 0}, b"")

    def send_json(self, value) -> None:
        body = json.dumps(value).encode()
        self.send(200, {"Content-Type": "application/json", "Content-Length": len(body)}, body)

    def send(self, status: int, headers: dict, body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_all_of_a_run_is_of_one_commit_though_the_branch_moves(cache, tmp_path, monkeypatch):
    from huggingface_hub import constants
    from transformers.utils import hub

    tiny.save(tmp_path / "tiny")
    Hub.folder, Hub.asked = tmp_path / "tiny", []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "_hf_api", None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        out = runs.train(tmp_path, ROWS, model_name_or_path="org/tiny", **STEPS)
    finally:
        server.shutdown()
        server.server_close()
    assert launcher.read_tensors(out / "model")
    record = json.loads((out / sources.RECORD_FILE).read_text())
    assert record["model"] == record["tokenizer"] == {"name": "org/tiny", "asked": "main", "commit": COMMIT}
    assert any(path.endswith(f"/{COMMIT}/model.safetensors") for path in Hub.asked)
    assert not [path for path in Hub.asked if LATER in path or "/resolve/main/" in path]


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_tells_models_apart(tmp_path, monkeypatch):
    folder = model(tmp_path / "m")
    first = fingerprint.of_model(folder)
    assert first == fingerprint.of_model(model(tmp_path / "same")) and first["num_files"] == 2
    (folder / "README.md").write_text("not loaded")
    (folder / "optimizer.pt").write_text("not loaded")
    assert fingerprint.of_model(folder) == first
    seen = {first["sha256"]}
    for name, content in (("config.json", "{}"), ("model.safetensors", "x"), ("t.jinja", ""), ("u.jinja", "")):
        (folder / name).write_text(content)
        seen.add(fingerprint.of_model(folder)["sha256"])
    assert len(seen) == 5, "content, size and names count, each alone"
    # A large file is read in spots: a change of nearly every weight shows, and so does one of the header.
    monkeypatch.setattr(fingerprint, "_WHOLE_UP_TO_BYTES", 1 << 16)
    header = json.dumps({"a": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
    start = len(header).to_bytes(8, "little") + header
    digests = set()
    for body in (bytes(1 << 20), bytes([1]) * (1 << 20), bytes((1 << 20) - 1) + b"\1"):
        (folder / "model.safetensors").write_bytes(start + body)
        digests.add(fingerprint.of_model(folder)["sha256"])
    (folder / "model.safetensors").write_bytes(start.replace(b"U8", b"I8") + bytes(1 << 20))
    assert len(digests | {fingerprint.of_model(folder)["sha256"]}) == 4


def test_a_fingerprint_of_data_is_of_all_its_files(tmp_path):
    (tmp_path / "d" / "deep").mkdir(parents=True)
    (tmp_path / "d" / "deep" / "a.jsonl").write_text("{}")
    first = fingerprint.of_data(tmp_path / "d")
    (tmp_path / "d" / ".cache").write_text("hidden")
    assert fingerprint.of_data(tmp_path / "d") == first == first | {"num_files": 1, "num_bytes": 2}
    (tmp_path / "d" / "b.jsonl").write_text("{}")
    assert fingerprint.of_data(tmp_path / "d")["num_files"] == 2
    assert fingerprint.of_data(tmp_path / "d" / "b.jsonl")["num_bytes"] == 2


def test_a_record_does_not_end_a_run(tmp_path, monkeypatch):
    def unreadable(path):
        raise OSError(5, "Input/output error")

    recipe = scenario.load_recipe(scenario.ROOT / "recipes" / "sft.py")
    settings = recipe.SFTConfig(**runs.settings(tmp_path, ROWS, **STEPS))
    monkeypatch.setattr(fingerprint, "of_data", unreadable)
    record = sources.record(settings)
    assert record["dataset"] == {"name": settings.dataset_name, "unreadable": "[Errno 5] Input/output error"}
    assert record["model"]["num_files"] >= 4
