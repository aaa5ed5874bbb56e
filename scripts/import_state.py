"""Turns a checkpoint of another tool into a training state, so that a run can move here in the middle.

    python scripts/import_state.py CHECKPOINT OUT_DIR --config RECIPE_YAML [--step N] [--trust_checkpoint]
    accelerate launch ... recipes/sft.py --config RECIPE_YAML --output_dir OUT_DIR --resume auto

CHECKPOINT is what DeepSpeed's `save_checkpoint`, Accelerate's `save_state` or transformers' Trainer has written. The
fp32 weights, both moments and the step go on exactly. A checkpoint is code until proven otherwise: its pickles are
read by readers that know tensors and plain values alone. What is taken over, and what cannot be: docs/import.md.
"""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent / "src")]

# The folder of this name, which Python prefers to a file beside it.
from import_state.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
