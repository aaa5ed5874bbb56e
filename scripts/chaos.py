"""Kills a training over and over, lets it go on, and compares its end with that of a training nobody disturbed.

    python scripts/chaos.py --kills 50 --config_file accelerate_configs/cpu.yaml --num_processes 2 -- \
        recipes/sft.py --config Y.yaml --save_every 5

The command after `--` runs once undisturbed. Then it runs in another folder and is killed (SIGKILL): one rank or all
of them, at a random moment or inside a save. The very same command starts it again each time, until it finishes;
that is a round, and rounds go on until all kills are done. Each round's exported weights, last training state and
metrics must be those of the undisturbed run, bit for bit. Without --config_file the words after `--` are run as they
are. The exit code is 0 only if nothing differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# The folder of this name, which Python prefers to a file beside it.
from chaos.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
