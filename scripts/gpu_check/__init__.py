"""The parts of scripts/gpu_check.py: one module a bar, and what they share."""
