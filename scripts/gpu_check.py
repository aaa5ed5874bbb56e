"""Measures, on one GPU and within minutes, what only a GPU can tell: speed, memory and the planner's accuracy.

    python scripts/gpu_check.py [--only G1,G3] [--minutes 8] [--output runs/gpu_check.json]
    python scripts/gpu_check.py --toy      every part at toy size, without a GPU too; judges nothing

Each part runs in a process of its own and is ended when its time is up. The results file is written after every part.
The exit code is 0 only if every bar that was judged holds. What it measures, and how: docs/gpu-check.md.
"""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent / "src")]

# The folder of this name, which Python prefers to a file beside it.
from gpu_check.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
