"""`numerics.track_scales`: taps in an unmodified module and in a training step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, _tree, jit, loss, make_train_step, module_loss, stateless
from funcamp.numerics import Record, Records, probe, stats, tap, track_scales
from tests.support.helpers import assert_close, assert_same
from tests.support.models import Task, cnn, mlp, tied

SGD = stateless(torch.optim.SGD, lr=0.1)
CONFIG = ScalerConfig(2.0**10)
TASKS = {"mlp": mlp, "cnn": cnn, "tied": tied}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def by_hooks(task: Task, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Outputs of the layers without children and their gradients, by ordinary hooks."""
    forward: dict[str, list[Tensor]] = {}
    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: forward.setdefault(name, []).append(out))
        for name, part in task.model.named_modules()
        if not list(part.children())
    ]
    loss = task.criterion(task.model(batch[0]), batch[1])
    found = iter(torch.autograd.grad(loss, [out for outs in forward.values() for out in outs]))
    for handle in handles:
        handle.remove()
    return forward, {name: [next(found) for _ in outs] for name, outs in forward.items()}


@pytest.mark.parametrize("name", TASKS)
def test_records_are_those_of_hooks_and_gradients_are_untouched(name: str) -> None:
    task = TASKS[name]()
    batch = task.batch(0)
    tracked = track_scales(task.model)
    params = values_of(task.model)
    buffers = {name: value.clone() for name, value in task.model.named_buffers()}

    def loss(params: Any, probes: Any) -> Tensor:
        fresh = {name: value.clone() for name, value in buffers.items()}
        return task.criterion(tracked({**params, **fresh}, probes, batch[0]), batch[1])

    def plain(params: Any) -> Tensor:
        fresh = {name: value.clone() for name, value in buffers.items()}
        return task.criterion(functional_call(task.model, {**params, **fresh}, (batch[0],)), batch[1])

    grads, records = grad(loss, argnums=(0, 1))(params, tracked.probes())
    assert_same(grads, grad(plain)(params))
    forward, backward = by_hooks(task, batch)
    assert set(records) == set(forward)
    for layer, record in records.items():
        for found, wanted in ((record.forward, forward[layer]), (record.backward, backward[layer])):
            expected = stats(torch.cat([part.flatten() for part in wanted]))
            assert expected.count > 0
            assert_same(found.row[3:], expected.row[3:])
            assert_close(found.row[:3], expected.row[:3], 1e-5)
    assert not any(part._forward_hooks or "_funcamp_forward" in part._buffers for part in task.model.modules())


def test_layers_are_chosen_by_path_or_predicate() -> None:
    model = tied().model
    assert track_scales(model, ["block", "head"]).names == ("block", "head")
    assert track_scales(model, "block.up").names == ("block.up",)
    linear = track_scales(model, lambda _, part: isinstance(part, nn.Linear)).names
    assert set(linear) == {"block.qkv", "block.out", "block.up", "block.down", "head"}
    assert track_scales(nn.Linear(2, 2)).names == ("",)
    names = track_scales(nn.TransformerEncoderLayer(4, 2, 8)).names
    assert names[:2] == ("self_attn", "linear1")
    assert track_scales(nn.MultiheadAttention(4, 2)).names == ("",)
    weighted = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.ReLU())
    assert track_scales(weighted).names == ("0", "1")
    assert "Tied, 9 modules" in repr(track_scales(model))


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_layers_behind_a_tap_may_write_in_place(engine: Any) -> None:
    loss_fn = module_loss(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), F.mse_loss, engine=engine
    )
    batch = (torch.randn(3, 4), torch.randn(3, 2))
    step, look = (make_train_step(each, SGD, CONFIG) for each in (loss_fn, track_scales(loss_fn)))
    after, metrics = look(look.init(), batch)
    assert_same(after, step(step.init(), batch)[0])
    assert {record.forward.count.item() for record in metrics.records.values()} == {24.0, 6.0}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.attend = nn.LSTM(3, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.cell(x)
        return self.attend(h, h, h)[0].sum()  # type: ignore[no-any-return]


def test_several_outputs_and_layers_that_are_not_called() -> None:
    model = Recurrent()
    tracked = track_scales(model)
    found = grad(lambda q: tracked(values_of(model), q, torch.randn(2, 5, 3)))(tracked.probes())
    # states and attention weights, which the loss does not read, do not count
    assert {name: record.backward.count.item() for name, record in found.items()} == {
        "cell": 40.0,
        "attend": 40.0,
        "unused": 0.0,
    }


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


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_tensors_in_a_dataclass_are_tapped(compiled: bool) -> None:
    step = make_train_step(track_scales(module_loss(TakesDataclass(), F.mse_loss)), SGD, CONFIG)
    batch = (torch.randn(3, 4), torch.randn(3, 4))
    metrics = (jit(step, donate=False, backend="eager") if compiled else step)(step.init(), batch)[1]
    assert {name: record.backward.count.item() for name, record in metrics.records.items()} == {
        "first": 12,
        "second": 24,
    }


def test_samples_have_records_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    tracked, params, x = track_scales(model), values_of(model), torch.randn(5, 3)
    each = vmap(grad(lambda q, x: tracked(params, q, x).sum()), (None, 0))(tracked.probes(), x)
    whole = grad(lambda q: tracked(params, q, x).sum())(tracked.probes())
    assert each["0"].forward.count.tolist() == [4.0] * 5
    assert_same(each["0"].total().forward.row[3:], whole["0"].forward.row[3:])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"policy": "float16"},
    "accumulate": {"accumulate": 2},
    "autograd": {"engine": "autograd"},
    "func": {"engine": "func"},
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OPTIONS)
def test_step_with_taps_is_the_step_without(name: str, compiled: bool) -> None:
    options = dict(OPTIONS[name])
    engine, task = options.pop("engine", None), cnn()
    loss_fn = module_loss(task.model, task.criterion, engine=engine)
    batch = task.batch(0)
    if "accumulate" in options:
        batch = tuple(torch.stack([leaf, leaf + 0]) for leaf in batch)  # type: ignore[assignment]
    step, look = (make_train_step(each, SGD, CONFIG, **options) for each in (loss_fn, track_scales(loss_fn)))
    state = step.init()
    after, metrics = (jit(step, donate=False, backend="eager") if compiled else step)(state, batch)
    after_look, seen = (jit(look, donate=False, backend="eager") if compiled else look)(state, batch)
    assert_same(after_look, after)
    assert_same(seen._replace(records={}), metrics)
    counts = {record.backward.count.item() for record in seen.records.values()}
    assert min(counts) > 0
    # the gradients that the backward pass held, of the scaled loss
    eager = make_train_step(track_scales(loss_fn), SGD, CONFIG, **options)(state, batch)[1]
    assert_close(
        [record.backward.std for record in seen.records.values()],
        [record.backward.std for record in eager.records.values()],
        1e-2,
    )


@pytest.mark.slow
def test_two_steps_on_one_state_track_at_a_cadence() -> None:
    task = mlp()
    loss_fn = module_loss(task.model, task.criterion)
    pure = make_train_step(loss_fn, SGD, CONFIG)
    look = jit(make_train_step(track_scales(loss_fn), SGD, CONFIG), backend="eager")
    step, alone = jit(pure, backend="eager"), jit(pure, backend="eager")
    state, other = pure.init(), pure.init()
    for index in range(6):
        state, metrics = (look if index % 3 == 0 else step)(state, task.batch(index))
        other, _ = alone(other, task.batch(index))
        assert bool(metrics.records) == (index % 3 == 0)
    assert_close(state.params.tree(), other.params.tree(), 1e-6)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))


class CheckpointedTwice(Checkpointed):
    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        return self.second(x)


def test_layers_that_are_computed_again_count_once() -> None:
    loss_fn = module_loss(Checkpointed(), F.mse_loss, engine="autograd")
    step = make_train_step(track_scales(loss_fn), SGD, CONFIG)
    batch = (torch.randn(3, 4), torch.randn(3, 2))
    after, metrics = step(step.init(), batch)
    assert {name: record.forward.count.item() for name, record in metrics.records.items()} == {"first": 12, "second": 6}
    plain = make_train_step(loss_fn, SGD, CONFIG)
    assert_same(after, plain(plain.init(), batch)[0])


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_taps_in_several_checkpoints(compiled: bool) -> None:
    loss_fn = track_scales(module_loss(CheckpointedTwice(), F.mse_loss))
    step = make_train_step(loss_fn, SGD, CONFIG)
    batch = (torch.randn(3, 4), torch.randn(3, 2))
    run = jit(step, donate=False, backend="eager") if compiled else step
    seen = run(step.init(), batch)[1]
    assert {name: record.forward.count.item() for name, record in seen.records.items()} == {"first": 24, "second": 6}


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_loss_taps_what_it_wants(compiled: bool) -> None:
    def tapped(params: dict[str, Tensor], probes: dict[str, Record], x: Tensor) -> Tensor:
        return tap(params["w"] * x, probes["product"]).square().sum()

    step = make_train_step(loss(tapped, probes=["product"]), SGD, CONFIG)
    state = step.init({"w": torch.tensor([1.0, 2.0])})
    assert step.loss(state, torch.ones(2)) == 5
    metrics = (jit(step, donate=False, backend="eager") if compiled else step)(state, torch.ones(2))[1]
    record = metrics.records["product"].unscale(metrics.scale)
    assert [record.forward.sum.item(), record.backward.sum.item()] == [3.0, 6.0]


def test_records_of_a_step_are_one_tensor() -> None:
    task = mlp()
    step = make_train_step(track_scales(module_loss(task.model, task.criterion)), SGD, CONFIG)
    records = step(step.init(), task.batch(0))[1].records
    assert isinstance(records, Records)
    assert _tree.leaves(records) == [records.rows]
    leaves, spec = _tree.flatten(records)
    assert_same(_tree.unflatten(leaves, spec)["0"], records["0"])
    assert list(records) == list(dict(records)) == list(step.loss_fn.probes)
    assert_same(Records.of(records).rows, records.rows)
    assert (records + records)["0"].forward.count == 2 * records["0"].forward.count
    both = Records(records.names, torch.stack([records.rows, records.rows]))
    assert_same(both["0"].backward.row[1], records["0"].backward.row)
    assert_same(both.total().rows, (records + records).rows)
    assert "nowhere" not in records
    assert len({records, records, both}) == 2
    assert isinstance(track_scales(task.model)(values_of(task.model), records, task.batch(0)[0]), Tensor)
    with pytest.raises(TypeError, match="unsupported operand"):
        records + dict(records)  # type: ignore[operator]
    with pytest.raises(ValueError, match="records must hold one"):
        Records.of({})
    with pytest.raises(KeyError, match="nowhere"):
        records["nowhere"]
    with pytest.raises(ValueError, match=r"Records: names must be the same.*'other'"):
        records + Records(("other",), records.rows[:1])


def test_a_sample_of_each_tensor() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh())
    x, params = torch.randn(512, 16), values_of(model)
    exact, some = (
        grad(lambda q, t=track_scales(model, sample=sample): t(params, q, x).square().mean())(
            {name: probe() for name in ("0", "1")}
        )
        for sample in (None, 4096)
    )
    for name in exact:
        for wanted, found in ((exact[name].forward, some[name].forward), (exact[name].backward, some[name].backward)):
            assert wanted.count == 512 * 64
            assert 3500 < found.count <= 4096
            assert_close(found.std, wanted.std, 0.05)
    small = grad(lambda q: track_scales(model)(params, q, x[:2]).sum())({name: probe() for name in ("0", "1")})
    assert small["0"].forward.count == 128
    # every column of a matrix has its turn
    columns = torch.arange(64.0).expand(1024, 64)
    seen = grad(lambda q: tap(columns, q, sample=1024).sum())(probe()).forward
    assert_close(seen.mean, columns.mean(), 0.02)


def test_bad_input_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"track_scales: module must be a torch\.nn\.Module"):
        track_scales(torch.ones(1))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"track_scales: module must be the module itself.*OptimizedModule"):
        track_scales(torch.compile(model))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="modules must be paths in the module; got 'no'"):
        track_scales(model, ["no"])
    with pytest.raises(ValueError, match="track_scales: sample must be 1 or more; got 0"):
        track_scales(model, sample=0)
    with pytest.raises(TypeError, match=r"tap: sample must be an integer or None; got 1.5"):
        tap(torch.ones(1), probe(), sample=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="modules must differ"):
        track_scales(tied().model, ["head", "head"])
    with pytest.raises(ValueError, match="must not be tracked already"):
        track_scales(track_scales(model).skeleton)
    with pytest.raises(TypeError, match="modules must be paths or a predicate; got 5"):
        track_scales(model, 5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="must choose a module"):
        track_scales(model, lambda *_: False)
    with pytest.raises(ValueError, match="probes must hold a Record for every tapped module; got none for ''"):
        track_scales(model)(values_of(model), {}, torch.ones(2, 2))
    loss_fn = module_loss(model, F.mse_loss)
    with pytest.raises(TypeError, match="must be called with params, probes"):
        track_scales(loss_fn)({}, (torch.ones(1, 2), torch.ones(1, 2)))
    for probes, message in (([1], "loss: probes must be names; got 1"), (["a", "a"], "loss: probes must differ")):
        with pytest.raises((TypeError, ValueError), match=message):
            loss(values_of, probes=probes)  # type: ignore[arg-type]
    for described in (loss_fn, track_scales(loss_fn)):
        with pytest.raises(TypeError, match="loss: function must not be a loss already"):
            loss(described, probes=["a"])
    assert probe("meta").forward.row.device.type == "meta"
