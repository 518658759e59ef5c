"""`numerics.tap`: the same gradients with and without, and what is counted, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from funcamp.numerics import Record, probe, stats, tap
from tests.support.helpers import assert_close, assert_same

Params = dict[str, Tensor]
Probes = dict[str, Record]


def params() -> Params:
    return {"w": torch.randn(6, 8) * 0.3, "v": torch.randn(8, 4) * 0.3}


def probes() -> Probes:
    return {"h": probe(), "y": probe()}


def plain(p: Params, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"]) @ p["v"] * 0.1).square().mean()


def tapped(p: Params, q: Probes, x: Tensor) -> Tensor:
    hidden = torch.tanh(tap(x @ p["w"], q["h"]))
    return (tap(hidden @ p["v"], q["y"]) * 0.1).square().mean()


def in_half(p: Params, q: Probes, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return tapped(p, q, x).float()


def records_by_hand(p: Params, x: Tensor) -> Probes:
    """The same records from tensors that autograd retains."""
    h = (x @ p["w"]).requires_grad_()
    y = torch.tanh(h) @ p["v"]
    y.retain_grad()
    (y * 0.1).square().mean().backward()
    assert h.grad is not None
    assert y.grad is not None
    return {"h": Record(stats(h), stats(h.grad)), "y": Record(stats(y), stats(y.grad))}


def assert_same_records(found: Probes, wanted: Probes) -> None:
    """The same counts; the sums but for rounding."""
    for name in wanted:
        for a, b in ((found[name].forward, wanted[name].forward), (found[name].backward, wanted[name].backward)):
            assert a.count.max() > 0, f"{name} was dropped"
            assert_same(a.row[..., 3:], b.row[..., 3:])
            assert_close(a.row[..., :3], b.row[..., :3], 1e-5)


def test_records_are_those_of_both_passes() -> None:
    p, x = params(), torch.randn(5, 6)
    grads, found = grad(tapped, argnums=(0, 1))(p, probes(), x)
    assert_same_records(found, records_by_hand(p, x))
    assert_same(grads, grad(plain)(p, x))


def single(x: Tensor) -> Tensor:
    return x[:, None]


TRANSFORMED: dict[str, Callable[[Params, Probes, Tensor], Probes]] = {
    "params and probes": lambda p, q, x: grad(tapped, argnums=(0, 1))(p, q, x)[1],
    "probes only": lambda p, q, x: grad(tapped, argnums=1)(p, q, x),
    "grad_and_value": lambda p, q, x: grad_and_value(tapped, argnums=1)(p, q, x)[0],
    "autocast": lambda p, q, x: grad(in_half, argnums=(0, 1))(p, q, x)[1],
    "vmap(grad)": lambda p, q, x: vmap(grad(tapped, argnums=1), (None, None, 0))(p, q, single(x)),
    "vmap(grad) of both": lambda p, q, x: vmap(grad(tapped, argnums=(0, 1)), (None, None, 0))(p, q, single(x))[1],
    "grad(vmap)": lambda p, q, x: grad(lambda q: vmap(tapped, (None, None, 0))(p, q, single(x)).mean())(q),
    "vjp": lambda p, q, x: vjp(lambda q: tapped(p, q, x), q)[1](torch.ones(()))[0],
    "jacrev": lambda p, q, x: jacrev(lambda q: tapped(p, q, x))(q),
    "probe closed over twice": lambda p, q, x: grad(lambda q: tapped(p, q, x) + tapped(p, q, x))(q),
    "no_grad around": torch.no_grad()(lambda p, q, x: grad(tapped, argnums=1)(p, q, x)),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("name", TRANSFORMED)
def test_compiled_records_are_the_eager_ones(name: str) -> None:
    fn, p, q, x = TRANSFORMED[name], params(), probes(), torch.randn(5, 6)
    assert_same_records(torch.compile(fn, fullgraph=True, backend="aot_eager")(p, q, x), fn(p, q, x))


@pytest.mark.inductor
def test_inductors_records_are_the_eager_ones() -> None:
    fn, p, q, x = TRANSFORMED["params and probes"], params(), probes(), torch.randn(5, 6)
    found, wanted = torch.compile(fn, fullgraph=True)(p, q, x), fn(p, q, x)
    for name in wanted:
        assert (
            found[name].backward.count == wanted[name].backward.count == stats(x @ p["w"]).count // (1 + (name == "y"))
        )
        assert_close(
            [found[name].forward.std, found[name].backward.std],
            [wanted[name].forward.std, wanted[name].backward.std],
            1e-5,
        )


def test_samples_add_up_to_the_batch() -> None:
    p, x = params(), torch.randn(5, 6)
    mean = grad(tapped, argnums=1)(p, probes(), x)
    assert_same_records(TRANSFORMED["grad(vmap)"](p, probes(), x), mean)
    samples = TRANSFORMED["vmap(grad)"](p, probes(), x)
    assert samples["h"].forward.count.tolist() == [8.0] * 5
    assert_same(samples["h"].forward.total().row[3:], mean["h"].forward.row[3:])
    twice = TRANSFORMED["probe closed over twice"](p, probes(), x)
    assert_same(twice["y"].total().backward.row[3:], (mean["y"] + mean["y"]).backward.row[3:])


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpoint"])
def test_records_of_autograd_and_of_a_checkpoint_are_those_of_torch_func(compiled: bool, again: bool) -> None:
    p, x = params(), torch.randn(5, 6)
    leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
    q = probes()
    rows = [side.row.requires_grad_() for record in q.values() for side in (record.forward, record.backward)]

    def loss(leaves: Params, q: Probes, x: Tensor) -> Any:
        return checkpoint(tapped, leaves, q, x, use_reentrant=False) if again else tapped(leaves, q, x)

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    run(leaves, q, x).backward()
    assert_close({name: leaf.grad for name, leaf in leaves.items()}, grad(plain)(p, x), 1e-6)
    wanted = grad(tapped, argnums=1)(p, probes(), x)
    both = [side.row for record in wanted.values() for side in (record.forward, record.backward)]
    for found, row in zip(rows, both):
        assert found.grad is not None
        assert_same(found.grad[3:], row[3:])


def penalty(loss: Callable[..., Tensor], p: Params, *rest: Any) -> Tensor:
    return sum((g.square().sum() for g in grad(loss)(p, *rest).values()), torch.zeros(()))


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_double_backward(compiled: bool) -> None:
    p, q, x = params(), probes(), torch.randn(5, 6)
    run = grad(lambda p: penalty(tapped, p, q, x))
    wanted = grad(lambda p: penalty(plain, p, x))(p)
    assert_close((torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(p), wanted, 1e-6)


def test_forward_mode_is_refused() -> None:
    with pytest.raises(RuntimeError, match="jvp"):
        jvp(lambda x: tap(x, probe()), (torch.ones(2),), (torch.ones(2),))


def test_what_the_loss_does_not_depend_on_has_count_zero() -> None:
    def loss(q: Record, x: Tensor) -> Tensor:
        tap(x, q)
        return x.sum() + q.forward.row.sum() * 0

    assert grad(loss)(probe(), torch.ones(2)).forward.count == 0


def test_gradients_are_counted_in_their_own_dtype() -> None:
    def loss(q: Record, x: Tensor) -> Tensor:
        return (tap(x.half(), q) * 2.0**-12).float().sum() * 2.0**-14

    record = grad(loss)(probe(), torch.ones(4))
    assert record.backward.poszero == 4  # 2^-26 in float16


def test_record_tells_and_merges() -> None:
    record = grad(lambda q, x: (tap(x, q) * x).sum())(probe(), torch.tensor([1.0, 3.0]))
    assert str(record) == "(-> 1.41, <- 1.41)"
    assert str(probe()) == "(-> n/a, <- n/a)"
    assert (record + record).forward.count == 4
    scaled = grad(lambda q, x: (tap(x, q) * x).sum() * 2.0**10)(probe(), torch.tensor([1.0, 3.0]))
    assert_same(scaled.unscale(torch.tensor(2.0**10)), record)
    assert "float64" in repr(record)


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_is_tapped_may_be_written_in_place(compiled: bool) -> None:
    def loss(w: Tensor, q: Record, x: Tensor) -> Any:
        return tap(x * w, q).mul_(2.0).relu_().sum()

    run = (
        torch.compile(grad(loss, argnums=(0, 1)), fullgraph=True, backend="aot_eager")
        if compiled
        else grad(loss, (0, 1))
    )
    gradient, record = run(torch.ones(3), probe(), torch.tensor([1.0, -1.0, 3.0]))
    assert gradient.tolist() == [2.0, 0.0, 6.0]
    assert (record.forward.sum, record.backward.sum) == (3, 4)


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="tap: probe must be a Record, as probe"):
        tap(torch.ones(1), torch.zeros(2, 568))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"tap: x must be a strided floating-point .* torch.int64"):
        tap(torch.ones(1, dtype=torch.int64), probe())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sample_of_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(0, 4).to(dtype)
    record = grad(lambda q: tap(x, q, sample=64).sum().float())(probe())
    assert record.forward.count == record.backward.count == 0
