"""Preparing that takes longer than any time limit of the ranks: the others wait, and all train on the same rows."""

from pathlib import Path

from tests.equivalence import launcher
from tests.recipes import runs

ROWS = [runs.turns(f"What is {i}?", f"It is {i}.") for i in range(40)]


def test_ranks_wait_as_long_as_one_prepares(tmp_path):  # C27
    settings = runs.settings(tmp_path, ROWS, global_batch_size=8, max_steps=2, save_every=0)
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    script = Path(__file__).with_name("slow_data.py")
    result = launcher.launch("cpu", 2, script, "0.5", *flags, ONELOOP_TIMEOUT_SECONDS="8", ONELOOP_TRACEBACK="1")
    assert result.stdout.count("tokenises 40 rows") == 1 and "rank 0 tokenises 40 rows" in result.stdout
    assert len(launcher.column(launcher.read_metrics(settings["output_dir"]), "train/loss")) == 2
    # Bad rows end all ranks alike, with one message.
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 3}\n')
    index = flags.index("--dataset_name") + 1
    flags = [*flags[:index], str(bad), *flags[index + 1 :]]
    result = launcher.launch("cpu", 2, script, "0", *flags, check=False)
    assert result.returncode != 0
    assert result.stdout.count("bad.jsonl:1: ") == 1 and "has rows that cannot be used" in result.stdout
