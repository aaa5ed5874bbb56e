"""Fold a LoRA adapter into its base model, and measure what that costs.

    python scripts/merge_adapter.py runs/demo/model merged
    python scripts/merge_adapter.py runs/qlora/model merged --base 16bit --dtype bf16 --eval_file rows.jsonl

An adapter that was trained over a base model in 4 or 8 bits has learnt beside its rounding, so there are two bases to
merge into: `dequantized` (the default), the values that the quantised layers computed with, and `16bit`, the original
weights, which are another model. Both are compared with the live adapter over the quantised base: logits, as a share
of what the adapter changes, and perplexity. The report is printed, and written as merge_report.json.

Never merges into 4-bit storage, which would round once more. The merged model is an ordinary one in 16 or 32 bits; it
is written one tensor at a time. Only the report loads whole models, one after the other; --no_report leaves it out.
"""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent / "src")]

# The folder of this name, which Python prefers to a file beside it.
from merge_adapter.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
