"""Samples counted together in a compiled step: the records that each would have alone, and one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import vmap

from funcamp import jit, make_train_step, module_loss, stateless
from funcamp._jit.passes.table import Table
from funcamp.numerics import track_scales
from funcamp.numerics.counting_pass import _COUNTS, JointCounts, count_jointly
from tests.support.helpers import assert_close, assert_same

pytestmark = pytest.mark.inductor


def compiled(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, list[int]]:
    """What a function gives through the pass, and how many scatters each graph had after it."""
    scatters: list[int] = []

    class Noting(JointCounts):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            assert not graph.find_nodes(op="call_function", target=_COUNTS)
            scatters.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.scatter_add.default)))

        def uuid(self) -> Any:
            return None  # no cache: the pass is to run

    made = torch.compile(fn, fullgraph=True, options={"joint_custom_pre_pass": Noting(b"noting", Table())})(*args)
    return made, scatters


@pytest.mark.thorough
def test_samples_of_a_kind_are_counted_together() -> None:
    torch.manual_seed(0)
    singles, halves = [torch.randn(2, 64) for _ in range(3)], [torch.randn(1, 64).bfloat16() for _ in range(3)]
    odd = torch.randn(1, 5).half()

    def fn(singles: list[Tensor], halves: list[Tensor], odd: Tensor) -> list[Tensor]:
        return [
            _COUNTS([singles[0], singles[1] * 2]),
            _COUNTS([halves[0]]),
            _COUNTS([singles[2]]) + 1,
            _COUNTS([halves[1], halves[2]]),
            _COUNTS([odd]),
        ]

    found, scatters = compiled(fn, (singles, halves, odd))
    assert scatters == [3]
    for ours, theirs in zip(found, fn(singles, halves, odd)):
        assert_same(ours[:, 3:], theirs[:, 3:])
        assert_close(ours, theirs, 1e-12)


@pytest.mark.thorough
def test_a_count_that_follows_from_another_comes_after_it() -> None:
    x = torch.randn(1, 32)

    def fn(x: Tensor) -> Any:
        first = _COUNTS([x])
        second = _COUNTS([x + first[:, :1].float()])
        return first, second, _COUNTS([x * 2]), _COUNTS([second[:, :32].float()])

    found, scatters = compiled(fn, (x,))
    assert scatters == [3]
    for ours, theirs in zip(found, fn(x)):
        assert_close(ours, theirs, 1e-6)


def test_samples_of_vmap_are_counted_each() -> None:
    x, y = torch.randn(3, 2, 40).bfloat16(), torch.randn(1, 40).bfloat16()
    found = vmap(lambda part: count_jointly([part, y]))(x)
    assert_same(found[..., 3:], torch.stack([count_jointly([part, y]) for part in x])[..., 3:])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.again(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.thorough
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2, "engine": "autograd"}, {"policy": "bfloat16"}],
    ids=str,
)
def test_a_compiled_step_has_the_records_of_the_eager_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = dict(options)
    loss_fn = track_scales(module_loss(Twice(), F.mse_loss, engine=options.pop("engine", None)), sample=64)
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), **options)
    many = (2,) if "accumulate" in options else ()
    batch = (torch.randn(*many, 32, 4), torch.randn(*many, 32, 16))
    with mock.patch.object(JointCounts, "uuid", return_value=None):
        metrics = jit(step, donate=False)(step.init(), batch)[1]
    wanted = step(step.init(), batch)[1]
    assert list(metrics.records) == ["first", "again"]
    for name, record in metrics.records.items():
        uses = len(many) + 1
        assert record.forward.count == record.backward.count == 64 * uses * (2 if name == "again" else 1)
        other = wanted.records[name]
        for ours, theirs in ((record.forward, other.forward), (record.backward, other.backward)):
            assert_close(ours.std, theirs.std, 2e-2)
            assert (ours.histogram - theirs.histogram).abs().sum() <= 0.05 * ours.count


def test_a_trace_without_inductor_counts_exactly_like_the_eager_step() -> None:
    torch.manual_seed(0)
    step = make_train_step(
        track_scales(module_loss(Twice(), F.mse_loss), sample=64), stateless(torch.optim.SGD, lr=0.1)
    )
    batch = (torch.randn(32, 4), torch.randn(32, 16))
    found = jit(step, donate=False, backend="eager")(step.init(), batch)[1]
    assert_same(found.records, step(step.init(), batch)[1].records)


def test_nothing_is_joint_outside() -> None:
    x = torch.randn(1, 8)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: count_jointly([x]))(x).graph
    assert not graph.find_nodes(op="call_function", target=_COUNTS)
    torch.library.opcheck(_COUNTS, ([x],), test_utils=("test_schema", "test_faketensor"))
