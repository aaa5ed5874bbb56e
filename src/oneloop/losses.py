"""Training objectives as pure functions on tensors that return *sums*, so that the one division happens where both
the sum and the count are global (over micro-batches and ranks).

Letters in shapes: B rows, T tokens in a row (padded), V vocabulary, N positions, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
"""Label of a position that carries no loss; the value that `torch.nn.functional.cross_entropy` ignores by default."""


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    """Count the positions that the next-token loss is a mean over.

    labels: (B, T) int64, `IGNORE_INDEX` where nothing is learnt. Returns a scalar int64 on the same device.
    The first column never counts: no position predicts it.
    """
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over supervised positions of -log p(token t+1 | tokens <= t), in fp32.

    logits: (B, T, V) float; labels: (B, T) int64. Returns a scalar fp32. A batch without any target gives 0 with
    zero gradients (not NaN), so a rank that has run out of rows can take part in the collective backward pass.
    """
    flat_logits = logits[:, :-1].reshape(-1, logits.size(-1)).float()
    return F.cross_entropy(flat_logits, labels[:, 1:].reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum")


@torch.no_grad()
def num_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count the supervised positions whose most likely token is the label.

    logits: (B, T, V) float; labels: (B, T) int64. Returns a scalar int64.
    """
    return (logits[:, :-1].argmax(-1) == labels[:, 1:]).sum()


# --- without the logits ----------------------------------------------------------------------------------------------

CHUNK_BYTES = {"cpu": 32 << 20, "default": 512 << 20}
"""Device type -> size of the fp32 logits of one chunk: little on a CPU, enough to keep a GPU busy elsewhere."""


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of a linear head without ever holding the logits of all positions.

    With logits = scale * (hidden weight^T + bias), or softcap * tanh of that / softcap, this is what
    `cross_entropy_sum` and `num_correct` give. It walks through chunks of positions and computes their gradients right
    away, since d loss / d logits = softmax - one-hot is known as soon as a chunk's logits are; the backward pass only
    multiplies. (The idea: Wijmans et al., arXiv 2411.09009; Hsu et al., arXiv 2410.10989.) Products run in the dtype
    of autocast, or else of `hidden`; softmax and the weight's gradient are fp32, since chunks that were rounded before
    they are added bias the head.

    hidden: (N, D) float; weight: (V, D) float; labels: (N,) int64, `IGNORE_INDEX` for positions that do not count;
    bias: (V,) or None; low_rank: an adapter on the head, (hidden of rank r, (N, r); its matrix, (V, r)), whose product
    adds to the logits. Returns the sum, a scalar fp32, and the number of labels that were the most likely token, a
    scalar int64. Can be differentiated once.
    """
    pairs = [(hidden, weight)] + ([low_rank] if low_rank is not None else [])
    flat = [tensor for pair in pairs for tensor in pair]
    # Asked here: inside, gradients are switched off, and an evaluation would compute them all the same.
    return _LinearCrossEntropy.apply(torch.is_grad_enabled(), labels, bias, scale, softcap, *flat)


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype that matrix products of `hidden` run in: that of autocast, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wants_grad, labels, bias, scale, softcap, *flat):
        hiddens, weights = flat[0::2], flat[1::2]
        dtype = product_dtype(hiddens[0])
        needs_bias, needs = ctx.needs_input_grad[2], ctx.needs_input_grad[5:]
        with torch.autocast(labels.device.type, enabled=False):
            loss_sum, num_correct, grads = _walk_chunks(
                [hidden.detach().to(dtype) for hidden in hiddens],
                [weight.detach().to(dtype) for weight in weights],
                None if bias is None else bias.detach().float(),
                labels,
                scale,
                softcap,
                needs_hidden=[wants_grad and need for need in needs[0::2]],
                needs_weight=[wants_grad and need for need in needs[1::2]],
                needs_bias=wants_grad and needs_bias,
            )
        ctx.grads = grads
        ctx.dtypes = [None if bias is None else bias.dtype] + [tensor.dtype for tensor in flat]
        ctx.mark_non_differentiable(num_correct)
        return loss_sum, num_correct

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_sum, _):
        assert ctx.grads is not None, "the backward pass of linear_cross_entropy_sum can run only once"
        grads = [None if grad is None else grad.mul_(grad_sum) for grad in ctx.grads]
        ctx.grads = None  # the largest tensors of a step; and multiplying them again would be wrong
        grad_bias, *rest = [
            None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return None, None, grad_bias, None, None, *rest


def _walk_chunks(
    hiddens, weights, bias, labels, scale, softcap, *, needs_hidden, needs_weight, needs_bias
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Sum, number of right guesses, and the gradients [bias, hidden, weight, hidden, weight...] of that sum."""
    num_positions, vocabulary = len(labels), len(weights[0])
    device, dtype = labels.device, hiddens[0].dtype
    wants_grad = any(needs_hidden) or any(needs_weight) or needs_bias
    boost = 2.0**12 if dtype == torch.float16 else 1.0  # lifts small probabilities into fp16's range
    size = max(1, CHUNK_BYTES.get(device.type, CHUNK_BYTES["default"]) // (4 * vocabulary))
    # Small probabilities times a loss scale that comes later would vanish in fp16.
    hidden_dtype = torch.float32 if dtype == torch.float16 else dtype
    grad_hidden = [
        torch.empty(h.shape, device=device, dtype=hidden_dtype) if need else None
        for h, need in zip(hiddens, needs_hidden, strict=True)
    ]
    grad_weight = [
        torch.zeros(w.shape, device=device, dtype=torch.float32) if need else None
        for w, need in zip(weights, needs_weight, strict=True)
    ]
    grad_bias = torch.zeros(vocabulary, device=device) if needs_bias else None
    loss_sum = torch.zeros((), device=device, dtype=torch.float32)
    num_correct = torch.zeros((), device=device, dtype=torch.int64)
    buffer = torch.empty((min(size, num_positions), vocabulary), device=device, dtype=torch.float32)
    for start in range(0, num_positions, size):
        chunk = slice(start, min(start + size, num_positions))
        logits = _logits([h[chunk] for h in hiddens], weights, buffer[: chunk.stop - start])
        if bias is not None:
            logits += bias
        if scale != 1.0:
            logits *= scale
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        wanted = labels[chunk]
        counts = wanted != IGNORE_INDEX
        index = wanted.clamp(min=0)[:, None]
        picked = logits.gather(1, index)[:, 0]
        slope = (logits / softcap).square_().neg_().add_(1) if softcap is not None and wants_grad else None
        highest, best = logits.max(1)
        normaliser = logits.sub_(highest[:, None]).exp_().sum(1)
        losses = normaliser.log() + highest - picked
        loss_sum += torch.where(counts, losses, 0).sum()
        num_correct += ((best == wanted) & counts).sum()
        if not wants_grad:
            continue
        # In place, from exp(logit - highest) to the gradient of the loss by the logit.
        factor = torch.where(counts, boost * scale / normaliser, 0)[:, None]
        grad = logits.mul_(factor)
        grad.scatter_add_(1, index, torch.where(counts, -boost * scale, 0)[:, None].to(grad.dtype))
        if slope is not None:
            grad *= slope
        rounded = grad.to(dtype)
        for hidden, weight, by_hidden, by_weight in zip(hiddens, weights, grad_hidden, grad_weight, strict=True):
            if by_hidden is not None:
                by_hidden[chunk] = rounded @ weight
            if by_weight is not None:
                _add_product(by_weight, rounded, hidden[chunk])
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        del rounded, slope  # each the size of a chunk, or they would live beside those of the next
    grads = [grad_bias]
    for by_hidden, by_weight in zip(grad_hidden, grad_weight, strict=True):
        grads += [by_hidden, by_weight]
    if boost != 1.0:
        grads = [None if g is None else g.div_(boost) for g in grads]
    return loss_sum, num_correct, grads


def _logits(hiddens, weights, out: torch.Tensor) -> torch.Tensor:
    """Sum of hidden weight^T over the pairs, (N, V) fp32, in `out`."""
    for i, (hidden, weight) in enumerate(zip(hiddens, weights, strict=True)):
        if i == 0 and hidden.dtype == torch.float32:
            torch.mm(hidden, weight.T, out=out)
        elif i == 0:
            out.copy_(hidden @ weight.T)
        else:
            out += hidden @ weight.T
    return out


def _add_product(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """total (V, D) fp32 += grad (N, V)^T hidden (N, D), without rounding the product to 16 bits first."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.T, hidden)
        return
    try:
        torch.addmm(total, grad.T, hidden, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError):  # only some devices have it (torch 2.15: not the CPU)
        total.addmm_(grad.T.float(), hidden.float())
