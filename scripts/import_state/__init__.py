"""The parts of scripts/import_state.py: readers of other tools' checkpoints, and the writer of ours."""
