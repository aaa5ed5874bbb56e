"""Run inside the ranks of one launch: trains each case through the real recipe and records the bytes that tensors hold.

rank.py CASES.json    a list of {mixed_precision, config, result}; every rank writes RESULT.<rank>.json
"""

import gc
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import subjects  # noqa: E402

MEASURED_STEP = 2
"""The first step has no optimizer state before its end."""


def live_bytes() -> int:
    """Bytes of all storages that a tensor of this process can be found for, each counted once.

    Gradients are asked for by name: their Python objects exist only while somebody looks.
    """
    import torch

    gc.collect()
    storages: dict[int, int] = {}

    def count(tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if local.device.type != "meta":
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            count(found)
            if found.is_leaf and found.grad is not None:
                count(found.grad)
    return sum(storages.values())


def watched(found: dict[str, int]) -> None:
    """Put the measurements into Accelerate's backward pass and behind the recipe's step."""
    from accelerate import Accelerator

    from oneloop.data import loaders

    backward, advance = Accelerator.backward, loaders.TrainLoader.advance

    def measured_backward(self, loss, **kwargs):
        wrapper = getattr(self, "deepspeed_engine_wrapped", None)
        if wrapper is None:
            backward(self, loss, **kwargs)
            found["after backward"] = live_bytes()
            return
        step = wrapper.engine.step  # the wrapper's backward ends with the optimizer's step

        def measured_step(*args, **kwargs):
            found["after backward"] = live_bytes()
            step(*args, **kwargs)

        wrapper.engine.step = measured_step
        try:
            backward(self, loss, **kwargs)
        finally:
            wrapper.engine.step = step

    def measured_advance(self, progress):
        advance(self, progress)
        if progress.step == MEASURED_STEP:
            found["after step"] = live_bytes()

    Accelerator.backward, loaders.TrainLoader.advance = measured_backward, measured_advance


def main(cases_path: str) -> None:
    import torch

    from oneloop import launch, sharding

    torch.set_num_threads(1)
    found: dict[str, int] = {}
    watched(found)
    prepare = launch.prepare

    def counted_prepare(accelerator, config, model, optimizer):
        prepared = prepare(accelerator, config, model, optimizer)
        module = accelerator.unwrap_model(prepared[0])
        found["parameters"] = sum(sharding.num_elements(p) for p in module.parameters())
        return prepared

    launch.prepare = counted_prepare
    for case in json.loads(Path(cases_path).read_text()):
        os.environ["ACCELERATE_MIXED_PRECISION"] = case["mixed_precision"]
        # DeepSpeed keeps parts of an earlier run alive (0.19.8, ZeRO-3); they are not this one's.
        before = live_bytes()
        recipe = subjects.load_recipe("sft")
        recipe.main(recipe.SFTConfig(**case["config"]))
        result = {name: value - (0 if name == "parameters" else before) for name, value in found.items()}
        Path(f"{case['result']}.{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
