"""Learning rate and batch arithmetic against values worked out by hand."""

from types import SimpleNamespace

import pytest

from oneloop import schedule

TEN = {"learning_rate": 1e-3, "warmup_steps": 2, "total_steps": 10}


def curve(kind, **changes):
    settings = {**TEN, **changes}
    return [schedule.lr_at(step, lr_scheduler_type=kind, **settings) for step in range(settings["total_steps"])]


def test_linear_curve_of_ten_updates():
    expected = [0, 5e-4, 1e-3, 8.75e-4, 7.5e-4, 6.25e-4, 5e-4, 3.75e-4, 2.5e-4, 1.25e-4]
    assert curve("linear") == pytest.approx(expected, rel=1e-12, abs=0)


def test_cosine_curve_of_ten_updates():
    expected = [0, 5e-4, 1e-3, 9.6194e-4, 8.53553e-4, 6.91342e-4, 5e-4, 3.08658e-4, 1.46447e-4, 3.806e-5]
    assert curve("cosine") == pytest.approx(expected, rel=1e-5, abs=0)


def test_constant_keeps_its_warm_up():
    assert curve("constant") == pytest.approx([0, 5e-4] + [1e-3] * 8)


def test_warmup_stable_decay_falls_over_the_last_tenth():
    rates = curve("warmup_stable_decay", total_steps=40)
    assert rates[:3] == pytest.approx([0, 5e-4, 1e-3])
    assert rates[3:37] == [1e-3] * 34
    assert rates[37:] == pytest.approx([7.5e-4, 5e-4, 2.5e-4])


def test_warmup_stable_decay_starts_from_the_peak_even_if_warm_up_takes_nearly_all():
    rates = curve("warmup_stable_decay", warmup_steps=9)
    assert rates[8:] == pytest.approx([1e-3 * 8 / 9, 1e-3])


@pytest.mark.parametrize("kind", ["linear", "cosine", "warmup_stable_decay"])
def test_past_the_end_the_rate_is_zero(kind):
    assert [schedule.lr_at(step, lr_scheduler_type=kind, **TEN) for step in (10, 11, 19, 25)] == pytest.approx([0] * 4)


def test_no_warm_up_starts_at_the_peak():
    assert curve("linear", warmup_steps=0)[0] == 1e-3


def test_unknown_curve_is_refused():
    with pytest.raises(ValueError, match="lr_scheduler_type is 'polynomial'"):
        schedule.lr_at(5, lr_scheduler_type="polynomial", **TEN)


@pytest.mark.parametrize(
    ("steps", "ratio", "total", "expected"),
    [(0, 0.0, 10, 0), (3, 0.0, 10, 3), (0, 0.2, 10, 2), (0, 0.21, 10, 3), (0, 0.07, 100, 7), (0, 0.03, 1000, 30)],
)
def test_warm_up_length(steps, ratio, total, expected):
    assert schedule.warmup_steps(SimpleNamespace(warmup_steps=steps, warmup_ratio=ratio), total) == expected


def test_accumulation_covers_the_global_batch():
    assert schedule.accumulation_steps(32, 4, 2) == 4
    assert schedule.accumulation_steps(8, 8, 1) == 1


@pytest.mark.parametrize(("size", "near"), [(10, "8 or 12"), (3, "4"), (13, "12 or 16")])
def test_a_global_batch_that_does_not_divide_names_its_numbers_and_sizes_that_work(size, near):
    with pytest.raises(ValueError) as error:
        schedule.accumulation_steps(size, 2, 2)
    assert f"global_batch_size {size} is not a multiple of per_device_batch_size 2 x 2 processes = 4" in str(
        error.value
    )
    assert f"use global_batch_size {near}," in str(error.value)


def test_steps_of_an_epoch_and_of_a_run():
    assert [schedule.steps_per_epoch(rows, 8) for rows in (1, 8, 9, 80)] == [1, 1, 2, 10]
    assert schedule.total_steps(-1, 1.0, 10) == 10
    assert schedule.total_steps(-1, 0.25, 10) == 3
    assert schedule.total_steps(-1, 1.1, 10) == 11
    assert schedule.total_steps(-1, 0.001, 10) == 1
    assert schedule.total_steps(7, 3.0, 10) == 7
