"""Packing: nothing lost or doubled, few blocks, and the loss of a block is that of its rows alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneloop.data import batches, packing
from tests import tiny

LENGTHS = st.lists(st.integers(1, 64), max_size=60).map(lambda values: np.array(values, np.int64))


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(64, 200))
def test_every_row_is_in_one_block(lengths, capacity):
    blocks = packing.best_fit(lengths, capacity)
    assert sorted(int(row) for block in blocks for row in block) == list(range(len(lengths)))
    fills = [int(lengths[block].sum()) for block in blocks]
    assert all(0 < fill <= capacity for fill in fills)
    # Of any two blocks not both are at most half full, or their rows would share one.
    assert sum(fill <= capacity // 2 for fill in fills) <= 1


@settings(deadline=None, max_examples=150)
@given(LENGTHS, st.integers(64, 200), st.integers(1, 7))
def test_blocks_of_a_step_are_even(lengths, capacity, multiple):
    blocks = packing.balanced(lengths, capacity, multiple)
    assert len(blocks) % multiple == 0
    assert sorted(int(row) for block in blocks for row in block) == list(range(len(lengths)))
    assert all(int(lengths[block].sum()) <= capacity for block in blocks)
    if len(lengths):
        assert len(blocks) <= multiple * -(-len(packing.best_fit(lengths, capacity)) // multiple)


def test_long_row_is_refused():
    for pack in (lambda: packing.best_fit(np.array([3, 9]), 8), lambda: packing.balanced(np.array([3, 9]), 8, 2)):
        with pytest.raises(ValueError, match="row 1 has 9 tokens, a block holds 8"):
            pack()


def test_lognormal_rows_fill_the_blocks():  # C4
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(220), 0.9, 20_000), 4, 2048).astype(np.int64)
    blocks = packing.best_fit(lengths, 2048)
    assert len(blocks) <= 1.002 * -(-int(lengths.sum()) // 2048)
    assert sum(int(lengths[block].sum()) for block in blocks) == int(lengths.sum())


# --- the model's side -------------------------------------------------------------------------------------------------


def random_rows(lengths, generator) -> list[dict]:
    rows = []
    for length in lengths:
        ids = torch.randint(5, 390, (length,), generator=generator).tolist()
        learnt = torch.rand(length, generator=generator) < 0.7
        rows.append({"input_ids": ids, "labels": [i if on else -100 for i, on in zip(ids, learnt, strict=True)]})
    return rows


def losses_of(model, batch) -> torch.Tensor:
    """Sum of the losses of a batch, by the model's plain logits."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
    logits = model(**inputs, use_cache=False).logits
    targets = batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), targets.flatten(), ignore_index=-100, reduction="sum"
    )


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_loss_of_a_block_is_that_of_its_rows(kernel, flat):  # C24
    torch.manual_seed(0)
    model = tiny.tiny_model(400)
    model.set_attn_implementation(kernel)
    model.train()
    rows = random_rows([7, 1, 12, 5, 3], torch.Generator().manual_seed(1))
    blocks = [[rows[0], rows[1], rows[2]], [rows[3], rows[4]]]
    model.requires_grad_(kernel != "flex_attention")  # which has no backward pass on a CPU (torch 2.15)
    alone = sum(losses_of(model, batches.collate([row], 0)) for row in rows if len(row["input_ids"]) > 1)
    packed = losses_of(model, batches.collate_packed(blocks, 0, flat))
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-5)
    if kernel != "flex_attention":
        parameters = list(model.parameters())
        for one, other in zip(*(torch.autograd.grad(loss, parameters) for loss in (packed, alone)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_other_rows_of_a_block_change_nothing():  # C24
    torch.manual_seed(0)
    model = tiny.tiny_model(400)
    generator = torch.Generator().manual_seed(2)
    (first, other, second) = random_rows([9, 9, 6], generator)
    logits = [
        model(**{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits[0, 9:]
        for batch in (batches.collate_packed([[row, second]], 0, False) for row in (first, other))
    ]
    assert torch.equal(logits[0], logits[1])
    alone = model(input_ids=torch.tensor([second["input_ids"]]), use_cache=False).logits[0]
    torch.testing.assert_close(logits[0], alone, rtol=0, atol=1e-5)


def test_a_packed_batch():
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}]
    batch = batches.collate_packed([rows, [rows[1]], []], 0, False)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [8, 9, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 9, -100, -100, -100]]
    assert batch["target_positions"].tolist() == [0, 1, 3, 5]
    assert batch["lengths"].tolist() == [3, 2, 2]
    flat = batches.collate_packed([rows, [rows[1]]], 0, True)
    assert flat["input_ids"].tolist() == [[5, 6, 7, 8, 9, 8, 9]]
    assert flat["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    empty = batches.collate_packed([[], []], 3, False)
    assert empty["input_ids"].tolist() == [[3]] and empty["lengths"].tolist() == [0]
    assert empty["target_positions"].tolist() == []
