"""`numerics.track_scales`: taps in an unmodified module and in a training step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, _tree, jit, loss, make_train_step, module_loss
from funcamp.numerics import Record, Records, tap, track_scales
from funcamp.report import numerics_report
from tests.support.helpers import assert_close, assert_same
from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import SGD, eager

CONFIG = ScalerConfig(2.0**10)


def without_donation(step: Any) -> Any:
    return jit(step, donate=False, backend="eager")


def made(loss_fn: Any, **options: Any) -> Any:
    return make_train_step(loss_fn, SGD, CONFIG, **options)


def records_of(loss_fn: Any, batch: Any) -> dict[str, Record]:
    """The records of a step, without the scale."""
    step = made(loss_fn)
    _, metrics = step(step.init(), batch)
    return {name: record.unscale(CONFIG.init_scale) for name, record in metrics.records.items()}


def counts_of(records: Any) -> dict[str, float]:
    """How many numbers of the backward pass each record has; as many as of the forward pass, or none."""
    assert all(record.backward.count in (0, record.forward.count) for record in records.values())
    return {name: record.backward.count.item() for name, record in records.items()}


@pytest.mark.parametrize("make", [mlp, cnn, tied])
def test_records_are_those_of_a_report(make: Any) -> None:
    """The report counts every output of a module whole, and its gradient in a hook."""
    task: Task = make()
    x, y = task.batch(0)
    expected = numerics_report(lambda: task.criterion(task.model(x), y), module=task.model).records
    tracked = track_scales(module_loss(task.model, task.criterion), lambda *_: True)
    if tracked.has_buffers:
        records = records_of(tracked, (x, y))
    else:  # without a step
        records = grad(tracked, argnums=1)(tracked.params(), tracked.tape(x.device), (x, y))
    assert set(records) == set(expected)
    for path, record in records.items():
        for side in ("forward", "backward"):
            found, counted = (getattr(one, side).row for one in (record, expected[path]))
            assert counted[0] > 0
            assert_same(found[3:], counted[3:])
            assert_close(found[:3], counted[:3], 1e-5)
    assert not any(part._forward_hooks for part in task.model.modules())


def test_layers_are_chosen_by_path_or_predicate() -> None:
    def chosen(model: nn.Module, *modules: Any) -> tuple[str, ...]:
        return track_scales(module_loss(model, F.mse_loss), *modules).probes

    model = tied().model
    assert chosen(model, ["block", "head"]) == ("block", "head")
    assert chosen(model, "block.up") == ("block.up",)
    linear = chosen(model, lambda _, part: isinstance(part, nn.Linear))
    assert set(linear) == {"block.qkv", "block.out", "block.up", "block.down", "head"}
    assert chosen(nn.Linear(2, 2)) == ("",)
    assert chosen(nn.TransformerEncoderLayer(4, 2, 8))[:2] == ("self_attn", "linear1")
    assert chosen(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.ReLU())) == ("0", "1")
    assert "module_loss(Linear), 1 modules" in repr(track_scales(module_loss(nn.Linear(2, 2))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.attend = nn.LSTM(3, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.cell(x)
        return self.attend(h, h, h)[0].sum()  # type: ignore[no-any-return]


def test_several_outputs_and_layers_that_are_not_called() -> None:
    found = records_of(track_scales(module_loss(Recurrent())), torch.randn(2, 5, 3))
    # states and attention weights, which the loss does not read, do not count
    assert counts_of(found) == {"cell": 40.0, "attend": 40.0, "unused": 0.0}


@dataclasses.dataclass
class Output:
    hidden: Tensor
    parts: list[Tensor]
    name: str = "output"


class ReturnsDataclass(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(2 * x, [3 * x])


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), ReturnsDataclass()

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x))
        assert out.name == "output"
        return out.hidden + out.parts[0]  # type: ignore[no-any-return]


class CheckpointedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        return self.second(x)


@pytest.mark.compiled
@pytest.mark.parametrize("run", [eager, without_donation])
@pytest.mark.parametrize(
    ("model", "expected"),
    [(TakesDataclass, {"first": 12, "second": 24}), (CheckpointedTwice, {"first": 24, "second": 12})],
)
def test_outputs_in_a_dataclass_count_and_layers_that_are_computed_again_count_once(
    model: Any, expected: dict[str, float], run: Any
) -> None:
    step = made(track_scales(module_loss(model(), F.mse_loss)))
    assert counts_of(run(step)(step.init(), (torch.randn(3, 4), torch.randn(3, 4)))[1].records) == expected


def in_place() -> Task:
    """A model whose layers write into what is before them."""
    layers = cnn().model.children()
    return cnn()._replace(model=nn.Sequential(*[nn.ReLU(True) if type(m) is nn.GELU else m for m in layers]))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"policy": "float16"},
    "accumulate": {"accumulate": 2},
    "autograd": {"engine": "autograd", "task": in_place},
    "func": {"engine": "func", "task": in_place},
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("run", [eager, without_donation])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_taps_is_the_step_without(name: str, run: Any) -> None:
    options = dict(OPTIONS[name])
    task = options.pop("task", cnn)()
    loss_fn = module_loss(task.model, task.criterion, engine=options.pop("engine", None))
    x, y = task.batch(0)
    batch = (torch.stack([x, x]), torch.stack([y, y])) if "accumulate" in options else (x, y)
    step, look = (made(each, **options) for each in (loss_fn, track_scales(loss_fn)))
    state = step.init()
    after, metrics = run(step)(state, batch)
    after_look, seen = run(look)(state, batch)
    assert_same(after_look, after)
    assert_same(seen._replace(records={}), metrics)
    assert min(counts_of(seen.records).values()) > 0
    # the gradients that the backward pass held, of the scaled loss
    records = look(state, batch)[1].records
    for name, record in seen.records.items():
        assert_close(record.backward.std, records[name].backward.std, 1e-2)


@pytest.mark.compiled
def test_torch_compile_takes_a_tracked_step() -> None:
    task = mlp()
    step = made(track_scales(module_loss(task.model, task.criterion)))
    _, expected = step(step.init(), task.batch(0))
    _, found = torch.compile(step, fullgraph=True, backend="eager")(step.init(), task.batch(0))
    assert_same(found.records.rows[..., 3:], expected.records.rows[..., 3:])


@pytest.mark.compiled
@pytest.mark.parametrize("run", [eager, without_donation])
def test_a_loss_taps_what_it_wants(run: Any) -> None:
    def tapped(params: dict[str, Tensor], probes: dict[str, Record], x: Tensor) -> Tensor:
        return tap(params["w"] * x, probes["product"]).square().sum()

    step = made(loss(tapped, probes=["product"]))
    state = step.init({"w": torch.tensor([1.0, 2.0])})
    assert step.loss(state, torch.ones(2)) == 5
    metrics = run(step)(state, torch.ones(2))[1]
    record = metrics.records["product"].unscale(metrics.scale)
    assert [record.forward.sum.item(), record.backward.sum.item()] == [3.0, 6.0]


class ChangesHooks(nn.Module):
    """Replaces the hook of its layer in the first forward pass, after the layer has run once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.handle = self.layer.register_forward_hook(lambda _, __, output: 2 * output)
        self.is_first = True

    def forward(self, x: Tensor) -> Any:
        hidden = self.layer(x)
        if self.is_first:
            self.is_first = False
            self.handle.remove()
            self.layer.register_forward_hook(lambda _, __, output: output - 1)
        return self.layer(hidden)


@pytest.mark.parametrize("track", [lambda loss_fn: loss_fn, track_scales], ids=["plain", "tracked"])
def test_hooks_that_a_forward_pass_changes_stay_so(track: Any) -> None:
    model, batch = ChangesHooks(), (torch.randn(8, 4), torch.randn(8, 4))
    step = made(track(module_loss(model, F.mse_loss)))
    weight, bias = model.layer.weight, model.layer.bias
    first, second = 2 * F.linear(batch[0], weight, bias), F.linear(batch[0], weight, bias) - 1
    state = step.init()
    for hidden in (first, second):
        expected = F.mse_loss(F.linear(hidden, weight, bias) - 1, batch[1])
        assert_same(step(state, batch)[1].loss, expected.detach())
    assert len(model.layer._forward_hooks) == 1


def test_records_of_a_step_are_one_tensor_and_a_mapping() -> None:
    task = mlp()
    step = made(track_scales(module_loss(task.model, task.criterion)))
    records = step(step.init(), task.batch(0))[1].records
    leaves, spec = _tree.flatten(records)
    assert leaves == [records.rows]
    assert_same(_tree.unflatten(leaves, spec)["0"], records["0"])
    assert list(records) == list(dict(records)) == list(step.loss_fn.probes)
    assert_same(Records.of(records).rows, records.rows)
    assert_same((records + records)["0"], records["0"] + records["0"])
    both = Records(records.names, torch.stack([records.rows, records.rows]))
    assert_same(both["0"].backward.row[1], records["0"].backward.row)
    assert_same(both.total().rows, (records + records).rows)
    assert "nowhere" not in records
    assert len({records, records, both}) == 2
