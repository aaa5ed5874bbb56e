"""Measures what this project claims, against its peers and against its own formulas.

    python scripts/benchmark.py [NAME|all] [--quick] [--write-docs]

`loop`: time of a step; `loss-head`: memory and time of the fused loss; `startup`: time to the help page and the first
step; `memory`: bytes a rank against `oneloop.memory`; `saving`: time that training stands still for a checkpoint;
`resuming`: time to the first batch late in an epoch; `throughput`: label tokens a second on ragged conversations;
`packing`: blocks, losses and speed of putting rows side by side; `tokenising`: speed of preparing rows. The exit code
is 0 only when every target holds and, where something was timed, two copies of the same code came out alike. Each
benchmark prints one figure last.

TRL is a peer where it is installed (`pip install -e .[benchmark]`); without, it is left out with a word.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / ".cache" / "benchmark"
BENCHMARKS = {
    "loop": "loop",
    "loss-head": "loss_head",
    "startup": "startup",
    "memory": "ranks",
    "saving": "saving",
    "resuming": "resuming",
    "throughput": "throughput",
    "packing": "packing",
    "tokenising": "tokenising",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions"),
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Set before anything heavy is imported: one thread, no network."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="?", default="all", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="fewer steps, for a look; nothing is kept")
    parser.add_argument(
        "--write-docs", action="store_true", help="write docs/benchmarks.md from the newest result of each"
    )
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if arguments.which == "all":
        # Each in a process of its own: what one leaves behind is no part of the next.
        quick = ["--quick"] if arguments.quick else []
        codes = [subprocess.call([sys.executable, __file__, name, *quick]) for name in BENCHMARKS]
    else:
        outcome = importlib.import_module(f"benchmarks.{BENCHMARKS[arguments.which]}").run(arguments.quick)
        if not arguments.quick:
            outcome.save(RESULTS)
        print(outcome.text(), flush=True)
        codes = [0 if outcome.verdict == "holds" else 1]
    if arguments.write_docs:
        from benchmarks import page

        page.write(RESULTS, ROOT / "docs")
    return max(codes)


if __name__ == "__main__":
    # Threads of contenders that failed must not hold the process.
    code = main()
    sys.stdout.flush()
    os._exit(code)
