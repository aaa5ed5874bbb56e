"""Hybrid sharding, a shard within a node and copies across: its ranges are written once, and read back everywhere."""

from pathlib import Path

import torch

from tests.equivalence import launcher


def test_copies_share_the_writing(tmp_path):
    script = Path(__file__).with_name("hybrid.py")
    launcher.launch("cpu", 4, script, str(tmp_path), ONELOOP_ALLOW_OVERSUBSCRIBE="1", OMP_NUM_THREADS="1")
    seen = torch.load(tmp_path / "seen.pt", weights_only=True)
    assert len(seen["before"]) == 60 and len(seen["written"]) == 4
    filled = {key: torch.full((tensor.numel(),), float("nan")) for key, tensor in seen["before"].items()}
    for of_rank in seen["written"]:
        assert of_rank, "every rank writes something"
        for key, values in of_rank.items():
            kind, start, name = key.split("/", 2)
            part = filled[f"{kind}/{name}"][int(start) : int(start) + len(values)]
            assert bool(part.isnan().all()), f"{key} is written twice"
            part.copy_(values)
    for key, tensor in seen["before"].items():
        assert torch.equal(filled[key].view_as(tensor), tensor), key
    for key, tensor in seen["after"].items():
        assert torch.equal(tensor.flatten(), torch.arange(tensor.numel(), dtype=torch.float32)), key
