"""Run inside four ranks: a model sharded over two of them and copied to the other two, as hybrid sharding does.

    hybrid.py FOLDER

Trains a step, and writes what the first rank needs to compare: the ranges that every rank would write, and whole
tensors. Then puts other numbers into the live views and writes the whole tensors again.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from oneloop.sharding import placement, ranges  # noqa: E402
from oneloop.state import writer  # noqa: E402
from tests import tiny  # noqa: E402


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"param/{name}"] = parameter.full_tensor().detach().clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[f"{kind}/{name}"] = optimizer.state[parameter][kind].full_tensor().clone()
    return tensors


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = tiny.tiny_model(403)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(12)[None] + dist.get_rank(), labels=torch.arange(12)[None]).loss.backward()
    optimizer.step()

    placement._reshard(model)
    places = [one for name, parameter in model.named_parameters() for one in placement._of_shard(name, parameter)]
    held, scalars = ranges.held(places, optimizer)
    share = writer.share_of(held, scalars)
    group = writer.Group.new(dist.get_rank(), dist.get_world_size())
    written = group.to_first({key: view.clone() for key, view in share.views.items()})
    before = whole(model, optimizer)
    for one in held:
        one.view.copy_(torch.arange(one.start, one.start + one.view.numel()))
    after = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"written": written, "before": before, "after": after}, folder / "seen.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
