"""Faults that users of other tools met, run through the real recipe on one rank (C.. are ids of reported faults)."""

import hashlib
import json
import warnings
from pathlib import Path

import pytest
import torch

from oneloop import models
from tests import tiny
from tests.equivalence import launcher, oracle
from tests.recipes import runs

# Three one-word replies and a long one: a mean of row means is far from the token mean.
UNEVEN = [
    runs.turns("Name a colour.", "Teal."),
    runs.turns(
        "Describe the keeper's evening.", "The harbour lamp is lit at dusk by the keeper, who climbs ninety steps."
    ),
    runs.turns("Say yes.", "Yes."),
    runs.turns("One digit?", "7"),
]
ANSWERS = [runs.turns(f"What is {i} plus {i}?", f"{2 * i}.") for i in range(8)]


def loss_of(folder: Path, rows: list[dict]) -> float:
    """Token-mean loss of an exported folder, loaded with plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return mean_loss(model, rows)


def mean_loss(model, rows: list[dict]) -> float:
    model.eval()
    total, count = 0.0, 0
    for row in oracle.rows_of(tiny.tokenizer(), rows, 1024):
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits
        picked = torch.log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        total -= picked[labels[:, 1:] != -100].sum().item()
        count += (labels[:, 1:] != -100).sum().item()
    return total / count


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.glob("*.safetensors")))).hexdigest()


def test_accumulation_does_not_change_the_update(tmp_path):  # C01
    reference = None
    for per_device in (4, 2, 1):
        folder = tmp_path / str(per_device)
        out = runs.train(folder, UNEVEN, global_batch_size=4, per_device_batch_size=per_device, max_steps=2)
        metrics = launcher.read_metrics(out)
        got = launcher.column(metrics, "train/loss"), launcher.column(metrics, "train/grad_norm")
        weights = launcher.read_tensors(out / "model")
        if reference is None:
            model = tiny.tiny_model(len(tiny.tokenizer()))
            expected = mean_loss(model, UNEVEN)
            of_rows = [mean_loss(model, [row]) for row in UNEVEN]
            assert abs(expected - sum(of_rows) / 4) > 1e-3, "the file must tell the two means apart"
            assert got[0][0] == pytest.approx(expected, rel=1e-6)
            reference = got, weights
        assert got[0] == pytest.approx(reference[0][0], rel=1e-6)
        assert got[1] == pytest.approx(reference[0][1], rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, reference[1][name], rtol=1e-4, atol=1e-5)


def test_seed_gives_bit_equal_runs(tmp_path):
    options = {"global_batch_size": 4, "max_steps": 4, "shuffle": True, "use_peft": True, "lora_dropout": 0.1}
    digests = [digest(runs.train(tmp_path / n, UNEVEN, **options) / "model") for n in "ab"]
    assert digests[0] == digests[1]
    other = runs.train(tmp_path / "c", UNEVEN, **options, seed=7)
    assert digest(other / "model") != digests[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_small_updates_arrive_under_mixed_precision(tmp_path, monkeypatch, dtype):  # C07
    """Norm weights start at exactly 1.0; in pure bf16 a step of 1e-4 would be rounded away every time."""
    tiny.save(tmp_path / "tiny")
    model = tiny.tiny_model(len(tiny.tokenizer())).to(models.DTYPES[dtype])
    model.save_pretrained(tmp_path / "tiny")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    out = runs.train(tmp_path, UNEVEN, global_batch_size=4, per_device_batch_size=4, max_steps=30, learning_rate=1e-4)
    norms = [t for name, t in launcher.read_tensors(out / "model").items() if "norm" in name]
    assert len(norms) == 5
    moved = torch.cat(norms) != 1.0
    assert moved.float().mean() > 0.9


def test_exported_dtype_is_the_checkpoints_own(tmp_path):  # C07
    tiny.save(tmp_path / "tiny")
    tiny.tiny_model(len(tiny.tokenizer())).bfloat16().save_pretrained(tmp_path / "tiny")
    out = runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=1, export_dtype="auto")
    dtypes = {t.dtype for t in launcher.read_tensors(out / "model").values()}
    assert dtypes == {torch.bfloat16}
    assert json.loads((out / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_checkpointing_trains_the_same_adapter(tmp_path):  # C08
    options = {"global_batch_size": 4, "max_steps": 3, "use_peft": True, "lora_r": 4}
    plain = launcher.read_tensors(runs.train(tmp_path / "off", UNEVEN, **options) / "model")
    again = runs.train(tmp_path / "on", UNEVEN, gradient_checkpointing=True, **options)
    recomputed = launcher.read_tensors(again / "model")
    b_norms = [t.norm().item() for name, t in recomputed.items() if "lora_B" in name]
    assert len(b_norms) == 14 and min(b_norms) > 0
    for name, tensor in recomputed.items():
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=1e-6)


def test_model_learns_to_stop_although_padding_is_the_end_token(tmp_path):  # C10
    out = runs.train(
        tmp_path,
        ANSWERS,
        eval_dataset_name=str(tmp_path / "rows.jsonl"),
        eval_generations=8,
        global_batch_size=8,
        per_device_batch_size=8,
        max_steps=120,
        learning_rate=5e-3,
        logging_steps=60,
    )
    tokenizer = tiny.tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert launcher.column(launcher.read_metrics(out), "eval/exact_match") == [0.0, 1.0]
    # An answer that equals the reference has stopped by itself: the limit is longer than every reference.


@pytest.mark.parametrize("num_rows,batch", [(5, 2), (9, 4), (3, 4)])
def test_every_row_is_used_once_an_epoch(tmp_path, monkeypatch, num_rows, batch):  # C28
    from oneloop.data import loaders

    seen = []
    original = loaders.TrainLoader.advance

    def advance(self, progress):
        seen.append((progress.epoch, list(self.last_row_ids)))
        original(self, progress)

    monkeypatch.setattr(loaders.TrainLoader, "advance", advance)
    out = runs.train(tmp_path, ANSWERS[:1] * num_rows, global_batch_size=batch, num_train_epochs=2.0, shuffle=True)
    for epoch in (0, 1):
        rows = [row for e, chosen in seen for row in chosen if e == epoch]
        assert sorted(rows) == list(range(num_rows))
    tokens = launcher.column(launcher.read_metrics(out), "train/tokens_seen")[-1]
    one_row = len(oracle.rows_of(tiny.tokenizer(), ANSWERS[:1], 1024)[0]["input_ids"])
    assert tokens == 2 * num_rows * one_row


def test_short_last_step_is_a_mean_over_what_it_has(tmp_path):
    out = runs.train(tmp_path, UNEVEN, global_batch_size=3, num_train_epochs=1.0, learning_rate=1e-9)
    losses = launcher.column(launcher.read_metrics(out), "train/loss")
    model = tiny.tiny_model(len(tiny.tokenizer()))
    assert losses == pytest.approx([mean_loss(model, UNEVEN[:3]), mean_loss(model, UNEVEN[3:])], rel=1e-5)


def test_training_of_an_adapter_continues(tmp_path):  # C39
    options = {"global_batch_size": 4, "max_steps": 4, "eval_dataset_name": str(tmp_path / "first" / "rows.jsonl")}
    first = runs.train(tmp_path / "first", UNEVEN, use_peft=True, lora_r=4, lora_dropout=0.0, **options)
    base = digest(tmp_path / "first" / "tiny")
    second = runs.train(tmp_path / "second", UNEVEN, model_name_or_path=str(first / "model"), **options)
    before, after = launcher.read_metrics(first), launcher.read_metrics(second)
    ended, began = launcher.column(before, "eval/loss")[-1], launcher.column(after, "eval/loss")[0]
    assert began == pytest.approx(ended, rel=1e-6), "the second run starts where the first one ended"
    assert launcher.column(after, "train/loss")[-1] < launcher.column(before, "train/loss")[-1]
    old, new = launcher.read_tensors(first / "model"), launcher.read_tensors(second / "model")
    assert set(old) == set(new) and all("lora_" in name for name in new)
    assert any(not torch.equal(old[name], new[name]) for name in new)
    assert digest(tmp_path / "first" / "tiny") == base


@pytest.mark.parametrize(
    "adapter",
    [
        {},
        {"use_peft": True, "merge_adapter": True},
        {"use_peft": True, "merge_adapter": True, "use_dora": True, "use_rslora": True},
        {"use_peft": True, "merge_adapter": True, "lora_modules_to_save": ["norm"]},
    ],
    ids=["full", "lora", "dora", "modules_to_save"],
)
def test_exports_load_plainly_and_give_the_loss_of_training(tmp_path, adapter):  # C41
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = runs.train(
        tmp_path,
        UNEVEN,
        eval_dataset_name=str(tmp_path / "rows.jsonl"),
        global_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        **adapter,
    )
    expected = launcher.column(launcher.read_metrics(out), "eval/loss")[-1]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected|newly initialized).*")
        if adapter:
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
            assert mean_loss(PeftModel.from_pretrained(base, out / "model"), UNEVEN) == pytest.approx(
                expected, rel=1e-5
            )
            weights = launcher.read_tensors(out / "model")
            size = (out / "model" / "adapter_model.safetensors").stat().st_size
            assert size == pytest.approx(sum(t.numel() for t in weights.values()) * 4, rel=0.1)
            final = out / "merged"
        else:
            final = out / "model"
        assert loss_of(final, UNEVEN) == pytest.approx(expected, rel=1e-5)
    names = set(launcher.read_tensors(final))
    assert names == {name for name, _ in tiny.tiny_model(len(tiny.tokenizer())).named_parameters()}
    assert all(torch.isfinite(t).all() for t in launcher.read_tensors(final).values())
    tokenizer = AutoTokenizer.from_pretrained(final)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((final / name).read_text())["eos_token_id"] == tokenizer.eos_token_id, name
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
    assert json.loads((final / "config.json").read_text()).get("use_cache", True) is True


def test_untied_head_is_exported(tmp_path):  # C41
    tiny.save(tmp_path / "tiny", tie=False)
    out = runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=2)
    assert "lm_head.weight" in launcher.read_tensors(out / "model")


def test_export_that_differs_from_the_model_is_found(tmp_path, monkeypatch):  # C41
    from oneloop import export

    original = export._write

    def write_damaged(module, tensors, *rest):
        name = sorted(tensors)[0]
        original(module, tensors | {name: tensors[name] + 1}, *rest)

    monkeypatch.setattr(export, "_write", write_damaged)
    with pytest.raises(RuntimeError, match="differs from the model"):
        runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=1)
    assert not (tmp_path / "run" / "model").exists()


def test_experts_are_exported_as_their_checkpoints_store_them(tmp_path):  # C41
    """transformers 5 fuses experts in memory and splits them again when it saves."""
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    text = tiny.tokenizer()
    config = MixtralConfig(
        vocab_size=len(text),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        eos_token_id=text.eos_token_id,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "tiny")
    text.save_pretrained(tmp_path / "tiny")
    out = runs.train(tmp_path, UNEVEN, eval_dataset_name=str(tmp_path / "rows.jsonl"), global_batch_size=4, max_steps=2)
    assert set(launcher.read_tensors(out / "model")) == set(launcher.read_tensors(tmp_path / "tiny"))
    loaded = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    expected = launcher.column(launcher.read_metrics(out), "eval/loss")[-1]
    assert mean_loss(loaded, UNEVEN) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("adapter", [{}, {"use_peft": True, "merge_adapter": True}], ids=["full", "lora"])
def test_sampling_values_of_a_greedy_checkpoint_do_not_cost_the_run(tmp_path, capsys, adapter):  # C46
    tiny.save(tmp_path / "tiny")
    path = tmp_path / "tiny" / "generation_config.json"
    ids = {"eos_token_id": tiny.tokenizer().eos_token_id, "pad_token_id": tiny.tokenizer().pad_token_id}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.7, "top_p": 0.5, **ids}))
    out = runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=1, **adapter)
    final = out / ("merged" if adapter else "model")
    assert launcher.read_tensors(final)
    assert "temperature" in capsys.readouterr().out
    assert "temperature" not in json.loads((final / "generation_config.json").read_text())


def test_logged_metrics_cover_the_whole_interval(tmp_path):  # C49
    def losses(folder, **changes):
        out = runs.train(tmp_path / folder, UNEVEN * 2, global_batch_size=4, learning_rate=1e-9, max_steps=4, **changes)
        return launcher.read_metrics(out)

    each, every_third = losses("each"), losses("third", logging_steps=3)
    assert launcher.column(each, "train/loss") == pytest.approx(launcher.column(each, "train/loss")[:1] * 4, rel=1e-6)
    assert [line["step"] for line in every_third] == [3, 4], "the last, shorter interval is logged too"
    assert launcher.column(every_third, "train/loss")[0] == pytest.approx(
        launcher.column(each, "train/loss")[0], rel=1e-6
    )
    assert launcher.column(every_third, "train/tokens_seen")[-1] == launcher.column(each, "train/tokens_seen")[-1]


def test_share_gpt_rows_are_kept_or_counted(tmp_path, capsys):  # C17
    talk = [
        {"conversations": [{"from": "human", "value": "Tea?"}, {"from": "gpt", "value": "Tea."}]},
        {"conversations": [{"from": "human", "value": "No reply follows."}]},
        {"conversations": []},
        {"conversations": [{"from": "human", "value": "Rate it."}, {"from": "tiny-lm-v2", "value": "Nine."}]},
    ]
    with pytest.raises(ValueError, match="on_bad_row: skip") as refused:
        runs.train(tmp_path / "stop", talk, global_batch_size=1, max_steps=1)
    assert "rows.jsonl:2" in str(refused.value) and "tiny-lm-v2" in str(refused.value)
    runs.train(tmp_path / "skip", talk, global_batch_size=1, max_steps=1, on_bad_row="skip")
    assert "read 4, kept 1" in capsys.readouterr().out


def test_wrong_model_names_are_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="model_name_or_path.*no-such-folder"):
        runs.train(tmp_path, UNEVEN, model_name_or_path=str(tmp_path / "no-such-folder"), global_batch_size=1)
    with pytest.raises(ValueError, match="lora_target_modules"):
        runs.train(tmp_path, UNEVEN, global_batch_size=1, use_peft=True, lora_target_modules=["no_such_layer"])


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"use_peft": True, "lora_target_modules": ["q_proj", "vproj"]}, "lora_target_modules: 'vproj'.*did you mean"),
        ({"use_peft": True, "lora_modules_to_save": ["lmhead"]}, "lora_modules_to_save: 'lmhead'"),
        ({"use_peft": True, "lora_modules_to_save": ["embed_tokens"]}, "'embed_tokens' shares its weights"),
        ({"max_steps": 4, "warmup_steps": 4}, "4 steps of warm-up in a run of 4"),
        ({"attn_implementation": "no_such_kernel"}, "model_name_or_path: cannot load.*no_such_kernel"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, expected):
    with pytest.raises(ValueError, match=expected):
        runs.train(tmp_path, UNEVEN, **{"global_batch_size": 4, "max_steps": 1} | changes)
    assert not (tmp_path / "run" / "model").exists()


def damage(folder: Path, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "pointer":
        path.write_text("version of a pointer file\n")
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no weights":
        path.unlink()
    else:
        tensors = load_file(path)
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["cut off", "pointer", "no config", "no weights", "a tensor is missing"])
def test_damaged_checkpoint_is_one_clear_error(tmp_path, kind):
    tiny.save(tmp_path / "tiny")
    damage(tmp_path / "tiny", kind)
    expected = "self_attn.q_proj.weight.*random values" if kind == "a tensor is missing" else "cannot load"
    with pytest.raises(ValueError, match=f"model_name_or_path.*{expected}"):
        runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=1)


def test_damaged_adapter_is_one_clear_error(tmp_path):  # C39
    from safetensors.torch import load_file, save_file

    first = runs.train(tmp_path / "first", UNEVEN, use_peft=True, lora_r=4, global_batch_size=4, max_steps=1)
    path = first / "model" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, path, metadata={"format": "pt"})
    options = {"model_name_or_path": str(first / "model"), "global_batch_size": 4, "max_steps": 1}
    with pytest.raises(ValueError, match="model_name_or_path: cannot load.*the adapter lacks"):
        runs.train(tmp_path / "second", UNEVEN, **options)
    settings = first / "model" / "adapter_config.json"
    settings.write_text(settings.read_text()[:20])
    with pytest.raises(ValueError, match="adapter_config.json is no adapter configuration"):
        runs.train(tmp_path / "third", UNEVEN, **options)


def test_tokenizer_of_another_model_is_refused(tmp_path):
    tiny.save(tmp_path / "tiny")
    tiny.tiny_model(300).save_pretrained(tmp_path / "tiny")
    with pytest.raises(ValueError, match="the model knows 300 tokens"):
        runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=1)


def test_export_never_replaces_what_it_needs_or_did_not_write(tmp_path):
    options = {"global_batch_size": 4, "max_steps": 1}
    out = runs.train(tmp_path, UNEVEN, **options)
    base = digest(out / "model")
    with pytest.raises(ValueError, match="output_dir.*is the base model of the adapter"):
        runs.train(tmp_path, UNEVEN, use_peft=True, model_name_or_path=str(out / "model"), **options)
    assert digest(out / "model") == base
    runs.train(tmp_path, UNEVEN, learning_rate=2e-3, resume="none", **options)
    assert digest(out / "model.1") == base, "the earlier export is kept under another name"
    (tmp_path / "mine" / "model").mkdir(parents=True)
    with pytest.raises(ValueError, match="output_dir.*not of an earlier run"):
        runs.train(tmp_path, UNEVEN, output_dir=str(tmp_path / "mine"), **options)


def test_merged_model_of_an_earlier_adapter_does_not_stay(tmp_path):
    options = {"global_batch_size": 4, "max_steps": 1, "use_peft": True}
    out = runs.train(tmp_path, UNEVEN, merge_adapter=True, **options)
    runs.train(tmp_path, UNEVEN, seed=7, resume="none", **options)
    assert not (out / "merged").exists() and (out / "merged.1").is_dir()


def test_output_folder_that_cannot_be_written_is_found_first(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below", "x" * 300):
        with pytest.raises(ValueError, match="output_dir.*cannot be written"):
            runs.train(tmp_path, UNEVEN, output_dir=str(tmp_path / name), global_batch_size=4, max_steps=1)


def test_diverged_training_is_called_so(tmp_path):
    with pytest.raises(RuntimeError, match="not finite: the training has diverged"):
        runs.train(tmp_path, UNEVEN, global_batch_size=4, max_steps=3, learning_rate=1e38)


@pytest.mark.skipif(not runs.SHARED_CASES.is_dir(), reason="the folder of reported faults is not beside this checkout")
def test_reported_files_train(tmp_path):
    for name in (
        "C01_uneven_lengths.jsonl",
        "C10_short_answers.jsonl",
        "C14_multiturn.jsonl",
        "C22_control_text.jsonl",
    ):
        out = runs.train(tmp_path / name, str(runs.SHARED_CASES / name), global_batch_size=2, max_steps=1)
        assert launcher.column(launcher.read_metrics(out), "train/loss")[0] > 0


def test_compiled_layers_train_the_same(tmp_path):
    """The flag compiles the layers that are trained: a graph is made, and the losses are those without it."""
    from torch._dynamo.utils import counters

    rows = UNEVEN[:1] * 8  # one length, so one graph
    changes = {"global_batch_size": 4, "per_device_batch_size": 4, "max_steps": 3}
    plain = launcher.read_metrics(runs.train(tmp_path / "plain", rows, **changes))
    counters.clear()
    compiled = launcher.read_metrics(runs.train(tmp_path / "compiled", rows, **changes, torch_compile=True))
    assert counters["stats"]["unique_graphs"] >= 1
    losses, expected = (launcher.column(metrics, "train/loss") for metrics in (compiled, plain))
    assert losses == pytest.approx(expected, rel=1e-6) and len(losses) == 3
