"""The last layer and its loss in one: a causal language model that answers with a loss sum instead of logits.

`attach` teaches a model to take labels and the positions that carry a loss, and to return
{"loss_sum": scalar fp32, "num_correct": scalar int64}. The loss is computed inside the head's own forward pass, where
a sharded weight is whole for as long as that lasts; positions without a label are left out before it. Without labels
the model answers as ever.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch

from oneloop import loss_kernel, losses, sharding
from oneloop.loss_kernel import ASK, Case

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Give a causal language model, with adapters or without, the loss described above.

    A head that is no plain linear layer (an adapter other than LoRA on it, a class of its own) keeps its logits; so
    does a model that `verify` finds to treat them in a way unknown here.
    """
    causal = _causal_model(model)
    head = causal.get_output_embeddings()
    causal.loss_head_fuses = head is not None and _teach(head, accelerator)
    causal.loss_kernel = losses.linear_cross_entropy_sum
    _replace_forward(causal, _loss_or_logits)
    if getattr(causal.config.get_text_config(), "output_router_logits", False):
        accelerator.print(
            "loss: the checkpoint's config asks for an auxiliary loss of its routers (output_router_logits). It is not "
            "part of the objective and is left out."
        )


def _causal_model(model: torch.nn.Module):
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _loss_or_logits(causal, original, *args, target_positions=None, labels=None, **kwargs):
    if target_positions is None:
        return original(*args, **kwargs) if labels is None else original(*args, labels=labels, **kwargs)
    if causal.loss_head_fuses:
        hidden = causal.base_model(*args, **kwargs).last_hidden_state.flatten(0, 1)[target_positions]
        targets = labels.flatten()[target_positions + 1]
        head = causal.get_output_embeddings()
        loss_sum, num_correct = head(hidden, targets, kernel=causal.loss_kernel, **_treatment(causal))
    else:
        logits = original(*args, **kwargs).logits
        loss_sum, num_correct = losses.cross_entropy_sum(logits, labels), losses.num_correct(logits, labels)
    return {"loss_sum": loss_sum, "num_correct": num_correct}


def _treatment(causal) -> dict[str, float | None]:
    """What a model does to its logits after the head, as its config names it: Gemma 2 and 3 cap them softly, Cohere and
    Falcon H1 multiply, Granite divides. `verify` makes sure that this is all."""
    config = causal.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale *= getattr(config, "lm_head_multiplier", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return {"scale": scale, "softcap": getattr(config, "final_logit_softcapping", None)}


def _replace_forward(module: torch.nn.Module, replacement) -> None:
    """Let `replacement(module, original, ...)` run as the module's forward.

    Both are bound as arguments, not in a closure, for a deep copy of the module to run on its own weights. Generation
    reads the signature, which stays that of the original.
    """
    original = module.forward
    module.forward = functools.wraps(original)(functools.partial(replacement, module, original))


# --- the head --------------------------------------------------------------------------------------------------------


def _teach(head: torch.nn.Module, accelerator: Accelerator) -> bool:
    """Let a head's forward take labels; whether it can."""
    if type(head) is torch.nn.Linear:
        _replace_forward(head, _linear_loss)
        return True
    # Not before: peft takes seconds to import, and a run without adapters has no other need of it.
    from peft.tuners.lora import Linear as LoraLinear
    from peft.utils import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):
        # Calls the copy that is trained, or the original while adapters are switched off, with whatever it was given.
        return all([_teach(inner, accelerator) for inner in (*head.modules_to_save.values(), head.original_module)])
    if isinstance(head, LoraLinear) and type(head.base_layer) is torch.nn.Linear and _is_plain(head):
        sharding.gather_together(accelerator, head)  # its loss reads the weights of the layers inside
        _replace_forward(head, _lora_loss)
        return True
    return False


def _is_plain(head) -> bool:
    """Whether a LoRA layer is what `_lora_loss` computes: one adapter, no DoRA or other variant, no bias of its own."""
    return len(head.lora_A) == 1 and not head.lora_variant and not any(head.lora_bias.values())


def _linear_loss(head, original, *args, kernel=None, **kwargs):
    if kernel is None:
        return original(*args, **kwargs)
    hidden, targets = args
    return kernel(hidden, head.weight, targets, head.bias, **kwargs)


def _lora_loss(head, original, *args, kernel=None, **kwargs):
    """The logits of peft 0.21's `lora.Linear.forward`: base(x) + scaling * B(A(dropout(x)))."""
    if kernel is None:
        return original(*args, **kwargs)
    hidden, targets = args
    low_rank = None
    active = [name for name in head.active_adapters if name in head.lora_A]
    if active and not head.disable_adapters and not head.merged:
        (name,) = active
        down = head.lora_A[name]
        reduced = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * head.scaling[name]
        low_rank = (reduced, head.lora_B[name].weight)
    base = head.base_layer
    return kernel(hidden, base.weight, targets, base.bias, low_rank=low_rank, **kwargs)


# --- the proof -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def verify(accelerator: Accelerator, model: torch.nn.Module, num_positions: int = 8192) -> str:
    """Make sure of the wrapped model that its loss is the one its own logits would give, choose what computes it, and
    say that in a few words.

    A model may do something to its hidden states before the head, or to the logits after it, that only its own code
    knows; `_difference` looks. Where it finds something, the loss is taken from the model's own logits.

    num_positions: how many positions a micro-batch may have, for the choice of the faster kernel. Raises ValueError for
    a kernel that `ONELOOP_LOSS_KERNEL` names and that cannot be had. Collective.
    """
    from accelerate.utils import broadcast_object_list, gather_object

    (asked,) = broadcast_object_list([os.environ.get(ASK) or None])
    if asked not in (None, "liger", "chunks"):
        raise ValueError(f"{ASK} is {asked!r}: give liger or chunks, or unset it to have the faster one.")
    causal = _causal_model(accelerator.unwrap_model(model, keep_torch_compile=False))
    difference, case = "the head is no plain linear layer", None
    if causal.loss_head_fuses:
        difference, case = _difference(accelerator, model, causal)
        difference = next(filter(None, gather_object([difference])), None)
    if difference is not None:
        causal.loss_head_fuses = False
        if asked:
            raise ValueError(f"{ASK} is {asked!r}, but this model's loss needs whole logits: {difference}. Unset it.")
        return f"from whole logits ({difference})"
    causal.loss_kernel, how = loss_kernel.choose(accelerator, case, num_positions, asked)
    return how


def _difference(accelerator: Accelerator, model, causal) -> tuple[str | None, Case | None]:
    """How a model's loss differs from the one assumed here, if it does; and what the loss is computed from.

    The model runs twice: to give logits, with its head's input and output recorded and the output replaced by known
    logits, and to give a loss. Hidden states, what becomes of the known logits, and the loss must be as assumed.
    """
    inputs, outputs, cases = [], [], []

    def record(_, args, output):
        inputs.extend(hidden.detach().flatten(0, -2) for hidden in args[:1])
        if len(args) != 1:
            return None
        outputs.append(output.detach().flatten(0, -2).float())
        # Large enough to tell a cap of 30 from none; in fp32 whatever the head computes in, to be compared closely.
        return torch.linspace(-40, 40, output.size(-1), device=output.device).expand(output.shape).clone()

    def note_case(hidden, weight, labels, bias=None, **kwargs):
        cases.append(Case.of(hidden, weight, bias, **kwargs))
        return losses.linear_cross_entropy_sum(hidden, weight, labels, bias, **kwargs)

    ids = torch.arange(8, device=accelerator.device)[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    was_training, kernel = model.training, causal.loss_kernel
    handle = causal.get_output_embeddings().register_forward_hook(record)
    causal.loss_kernel = note_case
    model.eval()
    try:
        got = model(**batch).logits.flatten(0, 1)
        loss_sum = model(**batch, labels=ids, target_positions=ids[0, :-1])["loss_sum"]
    except AttributeError as error:  # a model with a plan of its own: no `last_hidden_state`, say
        return f"{type(causal).__name__} is built in a way of its own: {error}", None
    finally:
        handle.remove()
        causal.loss_kernel = kernel
        model.train(was_training)
    if len(inputs) != 2 or len(outputs) != 1:
        return f"{type(causal).__name__} calls its head in a way of its own", None
    own, assumed = inputs
    known = torch.linspace(-40, 40, got.size(-1), device=got.device)
    wanted = _treated(known, **_treatment(causal)).expand(got.shape)
    own_loss = losses.cross_entropy_sum(_treated(outputs[0], **_treatment(causal))[None], ids)
    coarse = 1e-4 if cases[0].compute_dtype == torch.float32 else 0.02
    if not _close(own[:-1], assumed, 0, coarse):
        return f"{type(causal).__name__} treats hidden states in a way of its own", None
    if not _close(got, wanted, coarse, 1e-4):  # each logit by itself: rounding is relative, and a shift is not
        return f"{type(causal).__name__} treats logits in a way of its own", None
    if not abs(loss_sum - own_loss) <= coarse * (own_loss + len(assumed)):
        return f"the head of {type(causal).__name__} computes in a way of its own", None
    return None, cases[0]


def _treated(logits: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _close(got: torch.Tensor, wanted: torch.Tensor, relative: float, absolute: float) -> bool:
    """Whether two tensors are equal but for a share of each element, and a share of the largest."""
    got, wanted = got.float(), wanted.float()
    limit = relative * wanted.abs() + absolute * wanted.abs().max()
    return got.shape == wanted.shape and bool(((got - wanted).abs() <= limit).all())
