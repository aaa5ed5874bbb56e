"""Which kernel computes a model's loss: chunks in plain torch (`losses.linear_cross_entropy_sum`), or Liger's where the
optional package liger-kernel is installed and faster for the shape (Hsu et al., arXiv 2410.10989).

Not known beforehand, since it depends on vocabulary, width, number of positions and device; so both are timed, once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import math
import time
from typing import TYPE_CHECKING

import torch

from oneloop import losses

if TYPE_CHECKING:
    from accelerate import Accelerator

ASK = "ONELOOP_LOSS_KERNEL"
"""Environment variable: `liger` or `chunks`, to have that kernel; unset, the faster one."""
WITHOUT_TRITON = ("cpu", "mps")
"""Kinds of device that Liger's kernel cannot run on."""
_CHUNKS = "in chunks, without whole logits"
_ABSENT = "liger-kernel is not installed"


@dataclasses.dataclass(frozen=True)
class Case:
    """What a model's loss is computed from, as far as the speed of a kernel depends on it."""

    hidden_size: int
    vocabulary: int
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    trains_weight: bool
    has_bias: bool
    has_adapter: bool
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, hidden, weight, bias, *, low_rank=None, scale=1.0, softcap=None) -> Case:
        return cls(
            hidden_size=weight.size(1),
            vocabulary=weight.size(0),
            hidden_dtype=hidden.dtype,
            weight_dtype=weight.dtype,
            compute_dtype=losses.product_dtype(hidden),
            trains_weight=weight.requires_grad,
            has_bias=bias is not None,
            has_adapter=low_rank is not None,
            scale=scale,
            softcap=softcap,
        )


def liger_cross_entropy_sum(hidden, weight, labels, bias=None, *, low_rank=None, scale=1.0, softcap=None):
    """`losses.linear_cross_entropy_sum`, the same arguments and results, by the kernel of liger-kernel 0.8.

    It adds the head's gradient up in fp32 and rounds it once, to the dtype of the products. An adapter on the head is
    beyond it.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    assert low_rank is None
    if not len(labels):  # it divides by the number of positions
        return losses.linear_cross_entropy_sum(hidden, weight, labels, bias, scale=scale, softcap=softcap)
    if torch.is_grad_enabled() and weight.requires_grad and not hidden.requires_grad:
        # Or it leaves the weight's gradient out (ops/fused_linear_cross_entropy.py, `input_requires_grad`).
        hidden = hidden.detach().requires_grad_()
    dtype = losses.product_dtype(hidden)
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if scale != 1.0:
        hidden, bias = hidden * scale, None if bias is None else bias * scale
    with torch.autocast(hidden.device.type, enabled=False):  # it would cast the weight again for every chunk
        output = liger_fused_linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias,
            ignore_index=losses.IGNORE_INDEX,
            reduction="sum",
            softcap=softcap,
            accum_dtype=torch.float32,
            return_predicted_tokens=True,
        )
    return output.loss, (output.predicted_tokens == labels).sum()


def choose(accelerator: Accelerator, case: Case, num_positions: int, asked: str | None):
    """(function, a few words): Liger's kernel where it is installed, can be used, and is faster; else the chunks.

    The first rank tries both, and all ranks use what it found. Raises ValueError where Liger's is asked for in vain.
    """
    from accelerate.utils import broadcast_object_list, gather_object

    if asked == "chunks":
        return losses.linear_cross_entropy_sum, f"{_CHUNKS} ({ASK})"
    obstacle, seconds = _obstacle(accelerator.device, case), None
    obstacle = next(filter(None, gather_object([obstacle])), None)
    if obstacle is None:
        found = _trial(accelerator.device, case, min(num_positions, 32768)) if accelerator.is_main_process else None
        obstacle, seconds = broadcast_object_list([found])[0]
    if asked and obstacle:
        raise ValueError(f"{ASK} is liger, but {obstacle}. Unset it.")
    if obstacle:
        return losses.linear_cross_entropy_sum, _CHUNKS if obstacle == _ABSENT else f"{_CHUNKS} ({obstacle})"
    ours, ligers = seconds
    times = f"{1e3 * ligers:.3g} ms by Liger's kernel, {1e3 * ours:.3g} ms in chunks"
    if asked or ligers < ours:
        return liger_cross_entropy_sum, f"by Liger's kernel, without whole logits ({times})"
    return losses.linear_cross_entropy_sum, f"{_CHUNKS} ({times})"


def _obstacle(device: torch.device, case: Case) -> str | None:
    """Why Liger's kernel cannot compute this case, if it cannot."""
    if importlib.util.find_spec("liger_kernel") is None:
        return _ABSENT
    if device.type in WITHOUT_TRITON:
        return f"liger-kernel does not run on {device.type}"
    if case.has_adapter:
        return "liger-kernel knows no adapter on the head"
    if case.compute_dtype == torch.float16:
        return "liger-kernel would round small gradients to 0 in fp16"
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        return f"liger-kernel cannot be imported: {error}"
    if "return_predicted_tokens" not in inspect.signature(liger_fused_linear_cross_entropy).parameters:
        return "liger-kernel is older than 0.8"
    return None


@torch.enable_grad()
def _trial(device: torch.device, case: Case, num_positions: int) -> tuple[str | None, tuple[float, float] | None]:
    """Let the chunks and Liger's kernel compute the same loss, on random values.

    Returns why Liger's cannot be used, if so: it fails, or gives other numbers; and the seconds that both took.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.vocabulary, case.hidden_size)
    weight = torch.randn(shape, generator=generator, device=device).mul_(2 / case.hidden_size**0.5)
    labels = torch.randint(case.vocabulary, (num_positions,), generator=generator, device=device)
    hidden = torch.randn((num_positions, case.hidden_size), generator=generator, device=device)
    hidden += 2.4 * weight[labels]  # for some of the labels to be the most likely token
    hidden = hidden.to(case.hidden_dtype).requires_grad_()
    weight = weight.to(case.weight_dtype).requires_grad_(case.trains_weight)
    bias = torch.zeros(case.vocabulary, device=device) if case.has_bias else None

    def run(kernel):
        hidden.grad = weight.grad = None
        casts = case.compute_dtype != case.hidden_dtype
        with torch.autocast(device.type, case.compute_dtype if casts else None, enabled=casts):
            loss_sum, num_correct = kernel(hidden, weight, labels, bias, scale=case.scale, softcap=case.softcap)
        loss_sum.backward()
        return loss_sum.item(), num_correct.item()  # has waited for the device

    def sample(tensor):
        return torch.zeros(()) if tensor.grad is None else tensor.grad[:: max(1, len(tensor) // 256)].float()

    try:
        results, seconds = [], [math.inf, math.inf]
        for kernel in (losses.linear_cross_entropy_sum, liger_cross_entropy_sum):
            results.append((*run(kernel), sample(hidden).clone(), sample(weight).clone()))
        for _ in range(3):
            for i, kernel in enumerate((losses.linear_cross_entropy_sum, liger_cross_entropy_sum)):
                began = time.perf_counter()
                run(kernel)
                seconds[i] = min(seconds[i], time.perf_counter() - began)
    except Exception as error:  # whatever a compiler or a device may raise; the chunks need neither
        return f"liger-kernel fails: {type(error).__name__}: {str(error).strip().splitlines()[0]}", None
    finally:
        hidden.grad = weight.grad = None
        if device.type != "cpu":  # what this took is no memory of the run
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(device)
    (loss, correct, *grads), (ligers_loss, ligers_correct, *ligers_grads) = results
    same = abs(ligers_loss - loss) <= 0.01 * loss and abs(ligers_correct - correct) <= 0.01 * num_positions + 1
    for grad, ligers_grad in zip(grads, ligers_grads, strict=True):
        same &= bool((ligers_grad - grad).norm() <= 0.03 * grad.norm())
    return (None, tuple(seconds)) if same else ("liger-kernel gives other numbers than the chunks", None)
