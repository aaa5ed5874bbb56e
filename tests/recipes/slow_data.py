"""Run inside the ranks of one launch: the real recipe, with rows that take long to tokenise.

slow_data.py SECONDS_A_ROW [flags of the recipe]
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # a script's own folder is all that Python looks into by itself

from oneloop import process  # noqa: E402
from tests.equivalence.scenario import load_recipe  # noqa: E402

seconds = float(sys.argv.pop(1))
sft = load_recipe(ROOT / "recipes" / "sft.py")
healthy = sft.encode


def slowly(settings, tokenizer, examples, for_evaluation):
    print(f"rank {os.environ.get('RANK')} tokenises {len(examples)} rows", flush=True)
    time.sleep(seconds * len(examples))
    return healthy(settings, tokenizer, examples, for_evaluation)


sft.encode = slowly
if __name__ == "__main__":
    process.run(sft.main, sft.SFTConfig)
