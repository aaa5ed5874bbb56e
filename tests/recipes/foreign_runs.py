"""Run inside the ranks of one launch: trains a tiny model with plain Accelerate, as somebody does who does not use
this project yet, and leaves its checkpoints beside what their fp32 weights and moments truly are."""

import os
import sys
from pathlib import Path

import torch

NUM_STEPS = 3
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def train(folder: Path, adapter: bool) -> None:
    from transformers import AutoModelForCausalLM

    from oneloop import launch
    from tests.equivalence.scenario import ROOT, load_recipe

    recipe = load_recipe(ROOT / "recipes" / "sft.py")
    config = recipe.SFTConfig(
        model_name_or_path=str(folder / "model"),
        dataset_name=str(folder / "rows.jsonl"),
        output_dir=str(folder / "unused"),
        global_batch_size=2 * int(os.environ["WORLD_SIZE"]),
        per_device_batch_size=2,
    )
    accelerator = launch.start(config)  # brings the strategy up where there is no accelerator, too
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(NUM_STEPS):
        input_ids = torch.randint(0, 300, (2, 12), generator=generator)
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=input_ids, labels=input_ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    target = folder / ("lora" if adapter else "full")
    accelerator.save_state(str(target / "accelerate"))
    if hasattr(model, "save_checkpoint"):
        model.save_checkpoint(str(target / "engine"))
    if accelerator.is_fsdp2:
        accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        accelerator.save_state(str(target / "gathered"))
    engine_optimizer = getattr(model, "optimizer", None)
    if hasattr(engine_optimizer, "_hp_optimizer_states_linked"):
        # deepspeed 0.19.8 (stage_1_and_2.py, `_optimizer_step`) links the moments of all groups once the first group
        # has some, and never again.
        engine_optimizer._hp_optimizer_states_linked = False
        engine_optimizer._lazy_init_hp_params_optimizer_state()
    truth = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for kind, tensor in true_values(parameter, optimizer).items():
                truth[f"{kind}/{name.removeprefix('module.')}"] = tensor.detach().float().contiguous().clone()
    if accelerator.is_main_process:
        from safetensors.torch import save_file

        save_file(truth, target / "truth.safetensors")
    accelerator.wait_for_everyone()
    accelerator.free_memory()


def true_values(parameter, optimizer) -> dict:
    """The whole fp32 weight and its moments, by the backend's own means; all ranks take part."""
    kinds = ("exp_avg", "exp_avg_sq")
    if hasattr(parameter, "full_tensor"):
        state = optimizer.state[parameter]
        return {"param": parameter.full_tensor()} | {kind: state[kind].full_tensor() for kind in kinds}
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        return {"param": safe_get_full_fp32_param(parameter)} | {
            kind: safe_get_full_optimizer_state(parameter, kind) for kind in kinds
        }
    state = optimizer.state[parameter]
    return {"param": parameter} | {kind: state[kind] for kind in kinds}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    for adapter in (False, True):
        train(Path(sys.argv[1]), adapter)
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # the destructors of a process group may wait for ranks that are gone
