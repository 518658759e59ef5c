"""`numerics.tap`: the same gradients with and without, and what is counted, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap
from torch.utils.checkpoint import checkpoint

from funcamp.numerics import Record, probe, stats, tap
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import compiled, eager

Params = dict[str, Tensor]
Probes = dict[str, Record]
both_ways = pytest.mark.parametrize("run", [eager, compiled], ids=["eager", "compiled"])


def inputs() -> tuple[Params, Probes, Tensor]:
    params = {"w": torch.randn(6, 8) * 0.3, "v": torch.randn(8, 4) * 0.3}
    return params, {"h": probe(), "y": probe()}, torch.randn(5, 6)


def plain(p: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"]) @ p["v"] * 0.1).square().mean()


def tapped(p: Params, q: Probes, x: Tensor) -> Tensor:
    hidden = torch.tanh(tap(x @ p["w"], q["h"]))
    return (tap(hidden @ p["v"], q["y"]) * 0.1).square().mean()


def in_half(p: Params, q: Probes, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return tapped(p, q, x).float()


def assert_same_records(found: Any, expected: Any) -> None:
    """The same counts; the sums but for rounding."""
    assert found.keys() == expected.keys()
    for name in expected:
        for side in ("forward", "backward"):
            one, other = (getattr(records[name], side).row for records in (found, expected))
            assert one[..., 0].max() > 0, f"{name} was dropped"
            assert_same(one[..., 3:], other[..., 3:])
            assert_close(one[..., :3], other[..., :3], 1e-5)


def test_records_are_those_of_both_passes() -> None:
    p, q, x = inputs()
    grads, found = grad(tapped, argnums=(0, 1))(p, q, x)
    assert_same(grads, grad(plain)(p, x))
    h = (x @ p["w"]).requires_grad_()
    y = torch.tanh(h) @ p["v"]
    both = torch.autograd.grad((y * 0.1).square().mean(), (h, y))
    assert_same_records(found, {name: Record(*map(stats, pair)) for name, pair in zip("hy", zip((h, y), both))})


#: The records of a tapped loss, of the batch or of each sample.
TRANSFORMED: dict[str, Callable[[Params, Probes, Tensor], Any]] = {
    "params and probes": lambda p, q, x: grad(tapped, argnums=(0, 1))(p, q, x)[1],
    "probes only": lambda p, q, x: grad(tapped, argnums=1)(p, q, x),
    "autocast": lambda p, q, x: grad(in_half, argnums=(0, 1))(p, q, x)[1],
    "vmap(grad)": lambda p, q, x: vmap(grad(tapped, argnums=1), (None, None, 0))(p, q, x[:, None]),
    "grad(vmap)": lambda p, q, x: grad(lambda q: vmap(tapped, (None, None, 0))(p, q, x[:, None]).mean())(q),
    "vjp": lambda p, q, x: vjp(lambda q: tapped(p, q, x), q)[1](torch.ones(()))[0],
    "used twice": lambda p, q, x: grad(lambda q: tapped(p, q, x) + tapped(p, q, x))(q),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("name", TRANSFORMED)
def test_compiled_records_are_the_eager_ones(name: str) -> None:
    fn, args = TRANSFORMED[name], inputs()
    assert_same_records(compiled(fn)(*args), fn(*args))


def test_samples_add_up_to_the_batch() -> None:
    args = inputs()
    mean, samples, twice = (TRANSFORMED[name](*args) for name in ("probes only", "vmap(grad)", "used twice"))
    assert_same_records(TRANSFORMED["grad(vmap)"](*args), mean)
    assert samples["h"].forward.count.tolist() == [8.0] * 5
    assert_same(samples["h"].total().forward.row[3:], mean["h"].forward.row[3:])
    assert_same(twice["y"].total().backward.row[3:], (mean["y"] + mean["y"]).backward.row[3:])


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@both_ways
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpoint"])
def test_records_of_autograd_and_of_a_checkpoint_are_those_of_torch_func(run: Any, again: bool) -> None:
    p, q, x = inputs()
    leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
    rows = [side.row.requires_grad_() for record in q.values() for side in (record.forward, record.backward)]

    def loss(leaves: Params, q: Probes, x: Tensor) -> Any:
        return checkpoint(tapped, leaves, q, x, use_reentrant=False) if again else tapped(leaves, q, x)

    run(loss)(leaves, q, x).backward()
    assert_close({name: leaf.grad for name, leaf in leaves.items()}, grad(plain)(p, x), 1e-6)
    expected = grad(tapped, argnums=1)(p, {"h": probe(), "y": probe()}, x)
    found = [row.grad[3:] for row in rows if row.grad is not None]
    assert_same(found, [side.row[3:] for record in expected.values() for side in (record.forward, record.backward)])


@pytest.mark.compiled
@both_ways
def test_double_backward(run: Any) -> None:
    p, q, x = inputs()

    def penalty(loss: Callable[..., Tensor], p: Params, *rest: Any) -> Tensor:
        return torch.stack([g.square().sum() for g in grad(loss)(p, *rest).values()]).sum()

    expected = grad(lambda p: penalty(plain, p, x))(p)
    assert_close(run(grad(lambda p: penalty(tapped, p, q, x)))(p), expected, 1e-6)


def test_what_the_loss_does_not_depend_on_has_count_zero() -> None:
    def loss(q: Record, x: Tensor) -> Tensor:
        tap(x, q)
        return x.sum() + q.forward.row.sum() * 0

    assert grad(loss)(probe(), torch.ones(2)).forward.count == 0
    record = grad(lambda q: tap(torch.randn(0, 4).bfloat16(), q, sample=64).sum().float())(probe())
    assert record.forward.count == record.backward.count == 0


def test_gradients_are_counted_in_their_own_dtype() -> None:
    def loss(q: Record, x: Tensor) -> Tensor:
        return (tap(x.half(), q) * 2.0**-12).float().sum() * 2.0**-14

    assert grad(loss)(probe(), torch.ones(4)).backward.poszero == 4  # 2^-26 in float16


def test_a_record_shows_merges_and_is_unscaled() -> None:
    def counted(scale: float) -> Any:
        return grad(lambda q, x: (tap(x, q) * x).sum() * scale)(probe(), torch.tensor([1.0, 3.0]))

    record = counted(1.0)
    assert [str(record), str(probe())] == ["(-> 1.41, <- 1.41)", "(-> n/a, <- n/a)"]
    assert str(counted(torch.inf)) == "(-> 1.41, <- n/a (2 inf of 2))"
    assert (record + record).forward.count == 4
    assert_same(counted(2.0**10).unscale(torch.tensor(2.0**10)), record)


@pytest.mark.compiled
@both_ways
def test_what_is_tapped_may_be_written_in_place(run: Any) -> None:
    def loss(w: Tensor, q: Record, x: Tensor) -> Any:
        return tap(x * w, q).mul_(2.0).relu_().sum()

    gradient, record = run(grad(loss, argnums=(0, 1)))(torch.ones(3), probe(), torch.tensor([1.0, -1.0, 3.0]))
    assert gradient.tolist() == [2.0, 0.0, 6.0]
    assert (record.forward.sum, record.backward.sum) == (3, 4)
