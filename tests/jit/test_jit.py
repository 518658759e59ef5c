"""`jit` runs the step it is given: one program a batch signature, clear refusals, nothing lost by bad input."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from funcamp import Params, ScalerConfig, TrainState, clone, jit, stateless
from funcamp._jit import compile as compiler
from funcamp._jit import executable
from funcamp._jit.session import CompileSession
from tests.support.helpers import assert_same
from tests.support.models import cnn, mlp
from tests.support.steps import build

Step = Callable[[Any, Any], Any]


def eager_backend(step: Step, **options: Any) -> Any:
    return jit(step, backend="eager", **options)


def add(state: Any, batch: Any) -> Any:
    """Adds the batch to the state; reports both."""
    total = state["total"] + batch["x"].sum() * batch.get("times", 1)
    return {**state, "total": total}, {"total": total, "name": "sum", "nothing": None}


def start() -> dict[str, Any]:
    return {"total": torch.zeros(()), "rest": [torch.ones(2, 2), None]}


def trained(steps: int, run: Any, state: Any, task: Any) -> tuple[Any, list[Any]]:
    rows = []
    for index in range(steps):
        state, metrics = run(state, task.batch(index))
        rows.append(metrics)
    return state, rows


CONFIG = ScalerConfig(2.0**24, growth_interval=5)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("flat", [True, False])
def test_a_training_step_is_the_eager_one(make: Any, flat: bool) -> None:
    task = make()
    step = build(task, stateless(torch.optim.SGD, lr=0.05, momentum=0.9), config=CONFIG, policy="float16")
    expected, rows = trained(20, step, step.init(flat=flat), task)
    run = eager_backend(step)
    state, found = trained(20, run, step.init(flat=flat), task)
    assert_same(state, expected)
    assert_same(found, rows)
    assert {0.0, 1.0} == {row.found_inf.item() for row in found}
    assert run.programs == 1


def test_a_thousand_steps_compile_once() -> None:
    calls: list[int] = []
    state: Any = {"x": torch.zeros(2), "lr": torch.tensor(0.5)}

    def step(state: Any, batch: Tensor) -> Any:
        calls.append(1)
        return {"x": state["x"] + state["lr"] * batch, "lr": state["lr"] * 0.999}, batch.sum()

    run = eager_backend(step)
    for index in range(1000):
        state, _ = run(state, torch.full((2,), float(index)))
    assert run.programs == 1
    assert len(calls) == 2  # its Python ran once, and once more because it changed a list


def test_metrics_keep_their_structure_and_their_constants() -> None:
    state, metrics = eager_backend(add)(start(), {"x": torch.ones(3), "times": 2})
    assert state["total"] == 6
    assert metrics == {"total": 6, "name": "sum", "nothing": None}
    assert state["rest"][1] is None


def test_the_state_passed_in_is_consumed_and_clone_keeps_one() -> None:
    run, first = eager_backend(add), start()
    kept = clone(first)
    second, _ = run(first, {"x": torch.ones(1)})
    assert second is first
    third, _ = run(second, {"x": torch.ones(1)})
    assert first["total"] == third["total"] == 2
    assert kept["total"] == 0
    assert run(kept, {"x": torch.ones(1)})[0]["total"] == 1
    assert third["total"] == 2  # another state's step leaves this one alone
    assert run(third, {"x": torch.ones(1)})[0]["total"] == 3


def test_without_donation_the_state_stays() -> None:
    run, first = eager_backend(add, donate=False), start()
    second, _ = run(first, {"x": torch.ones(1)})
    third, _ = run(second, {"x": torch.ones(1)})
    assert [s["total"].item() for s in (first, second, third)] == [0, 1, 2]
    again, _ = run(first, {"x": torch.ones(1)})
    assert again["total"] == 1


def test_a_leaf_put_into_the_state_between_calls_is_used() -> None:
    run, state = eager_backend(add), start()
    state, _ = run(state, {"x": torch.ones(1)})
    state["total"] = torch.tensor(10.0)
    state, _ = run(state, {"x": torch.ones(1)})
    assert state["total"] == 11
    state["total"].fill_(20.0)
    assert run(state, {"x": torch.ones(1)})[0]["total"] == 21


def test_a_checkpoint_goes_on_where_it_was_saved() -> None:
    task = mlp()
    step = build(task, stateless(torch.optim.AdamW, lr=1e-2), policy="float16", ema_decay=0.9)
    run = eager_backend(step)
    state, _ = trained(3, run, step.init(), task)
    saved = step.state_dict(state)
    state, rows = trained(3, run, state, task)
    expected = clone(state)
    loaded, again = trained(3, run, step.load_state_dict(saved, like=step.init()), task)
    assert_same((loaded, again), (expected, rows))
    assert run.programs == 1


def test_steps_in_one_call_are_as_many_calls() -> None:
    task = mlp()
    step = build(task, stateless(torch.optim.AdamW, lr=1e-2), policy="float16", config=CONFIG)
    expected, rows = trained(6, eager_backend(step), step.init(), task)
    run, state, found = eager_backend(step, unroll=3), step.init(), []
    for index in (0, 3):
        pieces = [task.batch(index + part) for part in range(3)]
        state, metrics = run(state, tuple(torch.stack(column) for column in zip(*pieces)))
        found += [type(metrics)(*(torch.utils._pytree.tree_map(lambda m, i=i: m[i], metrics))) for i in range(3)]
    assert_same((state, found), (expected, rows))


def test_steps_in_one_call_without_donation() -> None:
    run, first = eager_backend(add, donate=False, unroll=4), start()
    state, metrics = run(first, {"x": torch.ones(4, 2)})
    assert state["total"] == 8
    assert metrics["total"].tolist() == [2, 4, 6, 8]
    assert first["total"] == 0


def test_a_tensor_the_step_reads_of_its_own_is_read_at_every_call() -> None:
    rate = torch.tensor(1.0)

    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + rate * batch}, rate * 1

    run, state = eager_backend(step), {"x": torch.zeros(())}
    state, _ = run(state, torch.tensor(1.0))
    rate.fill_(10.0)
    state, metric = run(state, torch.tensor(1.0))
    assert (state["x"].item(), metric.item()) == (11.0, 10.0)


def test_one_tensor_twice_in_a_batch_is_two_inputs() -> None:
    def step(state: Any, batch: Any) -> Any:
        return {"x": state["x"] + batch[0] - batch[1]}, batch[0].sum()

    run, state, x = eager_backend(step), {"x": torch.zeros(2)}, torch.ones(2)
    state, _ = run(state, (x, x))
    state, _ = run(state, (x, x * 3))
    assert state["x"].tolist() == [-2.0, -2.0]
    both = torch.arange(3.0)
    state, _ = run(state, (both[:-1], both[1:]))
    assert state["x"].tolist() == [-3.0, -3.0]
    assert run.programs == 1


def test_a_batch_in_other_strides_is_no_other_signature() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + batch}, batch[0, 1] * 1

    run, state = eager_backend(step), {"x": torch.zeros(3, 3)}
    matrix = torch.arange(9.0).view(3, 3)
    for batch in (matrix.t(), matrix, matrix[:1].expand(3, 3)):
        before = state["x"].clone()
        state, metric = run(state, batch)
        assert_same((state["x"], metric), (before + batch, batch[0, 1]))
    assert run.programs == 1


def test_dropout_follows_the_generator_and_the_eager_step() -> None:
    task = mlp(dropout=0.5)
    step = build(task, stateless(torch.optim.SGD, lr=0.1))
    torch.manual_seed(3)
    expected, _ = trained(4, step, step.init(), task)
    torch.manual_seed(3)
    state, _ = trained(4, eager_backend(step), step.init(), task)
    assert_same(state, expected)


def test_equal_constants_of_other_types_are_other_programs() -> None:
    def average(state: Any, batch: Any) -> Any:
        return state, {"half": batch["x"] * batch["times"]}

    run, x = eager_backend(average), torch.ones(2, dtype=torch.int32)
    _, whole = run(start(), {"x": x, "times": 1})
    _, real = run(start(), {"x": x, "times": 1.0})
    assert whole["half"].dtype == torch.int32
    assert real["half"].dtype == torch.float32
    _, zero = run(start(), {"x": torch.ones(2), "times": 0.0})
    _, minus = run(start(), {"x": torch.ones(2), "times": -0.0})
    assert not zero["half"].signbit().any()
    assert minus["half"].signbit().all()
    for nan in (float("nan"), float("nan")):
        run(start(), {"x": x, "times": nan})
    assert run.programs == 5


class Table:
    """Made at its first use, as many position encodings are."""

    cosines: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.cosines is None:
            self.cosines = torch.arange(3.0).cos()
        return x * self.cosines


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_what_a_step_makes_once_is_a_real_tensor(backend: str) -> None:
    def step_with(table: Table) -> Step:
        return lambda state, batch: ({"x": state["x"] + table(batch).sum()}, table(batch))

    made, used = Table(), Table()
    step, run = step_with(made), jit(step_with(used), backend=backend)
    expected, state = ({"x": torch.zeros(())} for _ in range(2))
    for _ in range(3):
        expected, metric = step(expected, torch.ones(3))
        state, found = run(state, torch.ones(3))
        torch.testing.assert_close((state, found), (expected, metric))
    assert used.cosines is not None
    assert type(used.cosines) is Tensor


REPLACED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "dtype": (lambda s: s.update(a=torch.zeros((), dtype=torch.int32)), r"at \['a'\] it has a torch.int32"),
    "shape": (lambda s: s.update(b=torch.zeros(2)), r"at \['b'\] it has .* shape \(2,\)"),
    "another leaf": (lambda s: s.update(c=torch.zeros(())), "they part at leaf 2"),
    "no leaf": (lambda s: s.pop("a"), "they part at leaf 0"),
    "other order": (lambda s: s.update(a=s.pop("a")), "they part at leaf 0"),
    "keys swapped": (lambda s: s.update(x=s.pop("a"), y=s.pop("b")), "they part at leaf 0"),
}


@pytest.mark.parametrize("change", REPLACED)
def test_a_state_changed_in_place_is_checked_like_a_new_one(change: str) -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {name: leaf + batch for name, leaf in state.items()}, None

    run, act, message = eager_backend(step), *REPLACED[change]
    state, _ = run({"a": torch.zeros(()), "b": torch.ones(())}, torch.ones(()))
    act(state)
    with pytest.raises(ValueError, match=message):
        run(state, torch.ones(()))
    state, _ = run({"a": torch.zeros(()), "b": torch.ones(())}, torch.ones(()))
    assert [leaf.item() for leaf in state.values()] == [1, 2]


def test_a_first_call_that_fails_binds_nothing() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {**state, "x": state["x"] + state["y"] * batch.sum()}, None

    run = eager_backend(step)
    with pytest.raises((KeyError, RuntimeError), match="y"):
        run({"x": torch.zeros(())}, torch.ones(2))
    state, _ = run({"x": torch.zeros(()), "y": torch.ones(())}, torch.ones(2))
    assert state["x"].item() == 2


def test_an_autocast_around_the_call_counts_as_in_eager_code() -> None:
    weight = torch.randn(8, 8)

    def step(state: Any, batch: Tensor) -> Any:
        return state, torch.nn.functional.linear(batch, weight)

    run, x = eager_backend(step), torch.randn(2, 8)
    for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        with around:
            assert_same(run(start(), x)[1], step(start(), x)[1])


def test_a_failure_at_work_is_no_matter_of_compilation() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"] + 1}, torch.nn.functional.embedding(batch, state["w"])

    run, state = eager_backend(step), {"w": torch.zeros(3, 2)}
    with pytest.raises(IndexError, match="out of range"):
        run(state, torch.tensor([7]))
    assert state["w"].sum().item() == 0


@pytest.mark.inductor
def test_an_index_out_of_range_says_which_operation() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"] + 1}, torch.nn.functional.embedding(batch, state["w"])

    run = jit(step)
    with pytest.raises(RuntimeError, match=r"embedding.*index out of bounds"):
        run({"w": torch.zeros(3, 2)}, torch.tensor([7]))


def test_grad_mode_is_none_of_a_batchs_business() -> None:
    run = eager_backend(add)
    leaf = torch.ones(2, requires_grad=True)
    for x in (leaf, leaf * 2):
        state, metrics = run(start(), {"x": x})
        assert not state["total"].requires_grad
        assert not metrics["total"].requires_grad


def test_a_state_made_in_inference_mode_is_taken_over() -> None:
    with torch.inference_mode():
        state = start()
    after, _ = eager_backend(add)(state, X)
    assert after["total"].item() == 2
    assert not after["total"].is_inference()


@pytest.mark.inductor
def test_a_program_rounds_to_float16_where_the_eager_step_does() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        grown = state["x"] * batch  # beyond float16, or below it, between two products
        return {"x": grown / batch}, grown.isinf().sum()

    start, batch = torch.tensor([60000.0, 1e-7, 3.0], dtype=torch.float16), torch.tensor(4.0, dtype=torch.float16)
    expected = step({"x": start}, batch)[0]["x"]
    for exact in (False, True):
        assert_same(jit(step, exact=exact)({"x": start.clone()}, batch)[0]["x"], expected)
    unrounded = jit(step, without=("emulate_precision_casts",))({"x": start.clone()}, batch)[0]["x"]
    assert not torch.equal(unrounded, expected)


def host_item(state: Any, batch: Any) -> Any:
    return state, {"total": state["total"].item()}


def host_numpy(state: Any, batch: Any) -> Any:
    return state, float(batch["x"].numpy()[0])


def backward(state: Any, batch: Any) -> Any:
    (state["total"] * batch["x"].sum()).backward()
    return state, None


def host_branch(state: Any, batch: Any) -> Any:
    if state["total"] > 1:
        return state, None
    return state, batch


def moves(state: Any, batch: Any) -> Any:
    return state, state["total"].to("meta")


def widens(state: Any, batch: Any) -> Any:
    return {**state, "total": state["total"].double()}, None


def loses(state: Any, batch: Any) -> Any:
    return {"total": state["total"]}, None


X = {"x": torch.ones(2)}
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "step": (lambda: jit(3), TypeError, "jit: step must be callable; got 3"),  # type: ignore[arg-type]
    "donate": (lambda: jit(add, donate=1), TypeError, "jit: donate must be True or False; got 1"),  # type: ignore[arg-type]
    "unroll": (lambda: jit(add, unroll=0), ValueError, "unroll must be 1 or more; got 0"),
    "unroll kind": (lambda: jit(add, unroll=1.5), TypeError, "unroll must be an integer; got 1.5"),  # type: ignore[arg-type]
    "backend": (lambda: jit(add, backend=None), TypeError, "backend must be a string; got None"),  # type: ignore[arg-type]
    "jit of jit": (lambda: jit(eager_backend(add)), TypeError, r"compiled already"),
    "array": (lambda: eager_backend(add)(start(), {"x": [numpy.zeros(2)]}), TypeError, r"batch\['x'\]\[0\] must be a tensor, or a constant"),
    "sparse": (lambda: eager_backend(add)(start(), {"x": torch.eye(2).to_sparse()}), TypeError, r"batch\['x'\] must be strided; got layout torch.sparse_coo"),
    "numpy": (lambda: eager_backend(host_numpy)(start(), X), RuntimeError, r"must not read .*test_jit.py:\d+ \(return .*numpy\(\).*\) does"),
    "backward": (lambda: eager_backend(backward)(start(), X), RuntimeError, "state's tensors do not require gradients; differentiate with scaled_grad_and_value"),
    "item": (lambda: eager_backend(host_item)(start(), X), RuntimeError, r"must not read .*test_jit.py:\d+ \(return state, .*item\(\).*\) does"),
    "branch": (lambda: eager_backend(host_branch)(start(), X), RuntimeError, r"must not read .*\(if state\[\"total\"\] > 1:\) does"),
    "moves": (lambda: eager_backend(moves)(start(), X), RuntimeError, r"one type of device; .*to\(\"meta\"\).* moves a tensor to meta"),
    "widens": (lambda: eager_backend(widens)(start(), X), ValueError, r"new state must have .* at \['total'\] it has a torch.float64 .* for a torch.float32"),
    "loses": (lambda: eager_backend(loses)(start(), X), ValueError, "one tree structure"),
    "no pair": (lambda: eager_backend(lambda s, b: s)(start(), X), TypeError, r"must return the pair \(state, metrics\); got dict"),
    "number in the state": (lambda: eager_backend(add)({"total": 1.0}, X), TypeError, r"state\['total'\] must be a tensor or None; got 1.0"),
    "sparse state": (lambda: eager_backend(add)({"total": torch.eye(2).to_sparse()}, X), TypeError, "must be strided"),
    "unroll length": (lambda: eager_backend(add, unroll=3)(start(), X), ValueError, r"batch\['x'\] must hold 3 steps along its first dimension"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusal_names_the_argument_the_rule_and_the_value(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=f"(?s)jit: .*{message.removeprefix('jit: ')}"):
        call()


def test_a_refused_call_loses_nothing() -> None:
    run, state = eager_backend(add, max_signatures=2), start()
    state, _ = run(state, X)
    before = clone(state)
    other: dict[str, Any] = {"total": torch.zeros(2), "rest": state["rest"]}
    with pytest.raises(ValueError, match=r"jit: state must have .* at \['total'\] it has .*shape \(2,\)"):
        run(other, X)
    with pytest.raises(ValueError, match="one tree structure"):
        run({"total": torch.zeros(())}, X)
    run(state, {"x": torch.ones(3)})
    with pytest.raises(
        ValueError, match=r"at most 2 signatures.*batch\['x'\] changed from .*\(3,\) on cpu to .*\(4,\)"
    ):
        run(state, {"x": torch.ones(4)})
    with pytest.raises(ValueError, match=r"its structure changed"):
        run(state, [torch.ones(4)])
    state, _ = run(state, X)
    assert state["total"] == before["total"] + 5


@pytest.mark.parametrize("value", [1, True])
def test_a_constant_that_changes_often_drops_the_programs(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    run, state = eager_backend(add, max_signatures=2), start()
    for times in (value, type(value)(0), 2, value, 3):
        expected = state["total"] + 2 * times
        state, _ = run(state, {"x": torch.ones(2), "times": times})
        assert state["total"] == expected
        assert run.programs <= 2
    dropped = [record.getMessage() for record in caplog.records if "at most 2 programs" in record.getMessage()]
    assert len(dropped) == 2
    assert f"batch['times'] changed from {type(value)(0)} to 2" in dropped[0]


def test_without_a_compiler_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler on a CPU.*install it"):
        jit(add)(start(), X)


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_flat_step_by_inductor_follows_the_eager_one() -> None:
    task = mlp()
    # With eps, as a gradient of nearly zero is rounding, of which Adam makes whole steps.
    adamw = stateless(torch.optim.AdamW, lr=1e-2, eps=1e-2)
    step = build(task, adamw, policy="bfloat16", max_norm=1.0, config=CONFIG)
    expected, rows = trained(10, step, step.init(), task)
    run = jit(step)
    state, found = trained(10, run, step.init(), task)
    assert isinstance(state, TrainState)
    assert isinstance(state.params, Params)
    assert [row.scale.item() for row in found] == [row.scale.item() for row in rows]
    torch.testing.assert_close(state.params.groups, expected.params.groups, rtol=0.05, atol=1e-3)


def test_a_step_that_computes_nothing() -> None:
    run = eager_backend(lambda state, batch: (state, batch))
    state, metrics = run({"a": torch.ones(2)}, torch.zeros(3))
    state, metrics = run(state, torch.ones(3))
    assert_same((state, metrics), ({"a": torch.ones(2)}, torch.ones(3)))


def test_a_step_of_no_tensor_makes_its_own() -> None:
    run = eager_backend(lambda state, batch: (state, {"ones": torch.ones(2), "sum": torch.ones(2).sum()}))
    _, metrics = run((), ())
    assert_same(metrics, {"ones": torch.ones(2), "sum": torch.tensor(2.0)})


def test_make_train_step_is_not_needed() -> None:
    def step(state: list[Tensor], batch: Tensor) -> Any:
        return [state[0] + batch, *state[1:]], ()

    state, metrics = eager_backend(step)([torch.zeros(1), torch.ones(1)], torch.ones(1))
    assert metrics == ()
    assert_same(state, [torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("donate", [True, False])
def test_no_tensor_of_a_call_is_kept(donate: bool, backend: str) -> None:
    def storages(tree: Any) -> list[StorageWeakRef]:
        return [StorageWeakRef(leaf.untyped_storage()) for leaf in _pytree.tree_leaves(tree)]

    def add_and_count(state: Any, batch: Tensor) -> Any:
        return {"sum": state["sum"] + batch}, {"double": 2 * batch, "same": batch}

    run, state, dropped = jit(add_and_count, donate=donate, backend=backend), {"sum": torch.zeros(8)}, []
    for index in range(3):
        batch = torch.full((8,), float(index))
        before = storages(batch) if donate else storages((state, batch))
        state, metrics = run(state, batch)
        dropped += before + storages(metrics)
        del batch, metrics
    assert all(storage.expired() for storage in dropped)
    last = storages(state)
    del state, run
    torch._dynamo.reset()
    gc.collect()
    assert all(storage.expired() for storage in last)


class Backends:
    """Counts what graphs are given to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []

        def compile_graph(graph: Any, target: Any, *_: Any, **__: Any) -> Any:
            self.asked.append(target.backend)
            return compiler.compile_graph(graph, target._replace(backend="eager"))

        monkeypatch.setattr(executable, "compile_graph", compile_graph)


@pytest.mark.parametrize("unroll", [None, 2])
@pytest.mark.parametrize("donate", [True, False])
def test_a_further_signature_is_compiled_when_it_has_come_often(
    monkeypatch: pytest.MonkeyPatch, donate: bool, unroll: int | None
) -> None:
    backends = Backends(monkeypatch)
    run = jit(add, backend="inductor", compile_after=2, donate=donate, unroll=unroll)
    state: Any = {"total": torch.zeros(())}
    rest, expected = (unroll or 1), 0.0
    lead = () if unroll is None else (unroll,)
    for size in (4, 4, 3, 3, 3, 3, 4, 5):
        state, metrics = run(state, {"x": torch.ones(*lead, size)})
        expected += rest * size
        assert state["total"] == expected == metrics["total"].flatten()[-1]
    assert backends.asked == ["inductor", "eager", "inductor", "eager"]
    assert run.programs == 3


@pytest.mark.parametrize("compile_after", [3, 0])
def test_a_program_that_is_not_compiled_yet_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compile_after: int
) -> None:
    def maybe(state: Tensor, batch: Any) -> Any:
        x, doubled = batch
        return state + (2 * x if doubled else x).sum(), None

    tasks: list[str] = []

    class Session(CompileSession):
        def __init__(self, task: str) -> None:
            tasks.append(task)
            super().__init__(task)

    Backends(monkeypatch)
    monkeypatch.setattr(executable, "CompileSession", Session)  # of a later compilation
    run, state = jit(maybe, compile_after=compile_after), torch.zeros(())
    with caplog.at_level("INFO", "funcamp"):
        for doubled in (False, True, False, True, True, True):
            state, _ = run(state, (torch.ones(2), doubled))
    lines = [(record.levelname, text) for record in caplog.records if "one by one" in (text := record.getMessage())]
    assert state == 2 + 4 + 2 + 4 + 4 + 4
    if not compile_after:
        assert not lines
        assert not tasks
        return
    [(level, text)] = lines
    assert level == "INFO"
    assert text == (
        "jit: this program's operations run one by one, as in eager mode, for its first 3 calls; it is compiled at the "
        "next one. jit(step, compile_after=0) compiles each program at its first call: maybe for a batch of float32[2]; "
        "batch[1] changed from False to True"
    )
    [task] = tasks
    assert task.endswith("changed from False to True; it ran one by one for 3 calls (compile_after)")


def test_a_further_signature_is_compiled_at_once_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = Backends(monkeypatch)
    run = jit(add, backend="inductor", compile_after=0)
    state: Any = {"total": torch.zeros(())}
    for size in (4, 3, 4):
        state, _ = run(state, {"x": torch.ones(size)})
    assert (backends.asked, state["total"]) == (["inductor", "inductor"], 11)


@pytest.mark.thorough
@pytest.mark.inductor
def test_the_last_batch_of_an_epoch_costs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    task = mlp()
    step = build(task, stateless(torch.optim.SGD, lr=0.05, momentum=0.9), config=CONFIG, policy="float16")
    sizes = [8, 8, 5] * 5
    batches = [tuple(leaf[:size] for leaf in task.batch(index)) for index, size in enumerate(sizes)]
    expected, rows = step.init(), []
    for batch in batches:
        expected, metrics = step(expected, batch)
        rows.append(metrics)
    run, state = jit(step, exact=True), step.init()
    generated = []
    for batch, row in zip(batches, rows):
        state, metrics = run(state, batch)
        torch.testing.assert_close(metrics.loss, row.loss, rtol=1e-3, atol=1e-3)
        assert (metrics.scale, metrics.found_inf) == (row.scale, row.found_inf)
        generated.append(torch._inductor.metrics.generated_kernel_count)
    assert len(set(generated)) == 1
    assert {row.found_inf.item() for row in rows} == {0.0, 1.0}
    torch.testing.assert_close(state.params.tree(), expected.params.tree(), rtol=1e-2, atol=1e-3)


def test_a_signature_that_is_compiled_later_keeps_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    Backends(monkeypatch)
    run = jit(add, backend="inductor", compile_after=2)
    state = start()
    for size in (4, 3):
        state, _ = run(state, {"x": torch.ones(size)})
    storage = StorageWeakRef(state["total"].untyped_storage())
    run(start(), {"x": torch.ones(4)})
    del state
    gc.collect()
    assert storage.expired()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("thresholds", [(700, 10, 10), (0, 10, 10)])
def test_garbage_is_collected_afterwards_as_before(frozen: bool, thresholds: tuple[int, int, int]) -> None:
    usual = gc.get_threshold()
    gc.unfreeze()
    try:
        gc.set_threshold(*thresholds)
        if frozen:
            gc.freeze()
        held, seen = gc.get_freeze_count(), []

        def step(state: Tensor, x: Tensor) -> tuple[Tensor, None]:
            seen.append((gc.get_freeze_count() > 0, gc.get_threshold()[0]))
            return state + x, None

        for wrong in (step, lambda state, _: state.missing):  # after an error too
            with contextlib.suppress(AttributeError):
                jit(wrong, backend="eager")(torch.zeros(2), torch.ones(2))
            assert (gc.get_freeze_count() > 0) == bool(held)
            assert gc.get_threshold() == thresholds
        assert set(seen) == {(True, 100_000 if thresholds[0] else 0)}
    finally:
        gc.freeze()
        gc.set_threshold(*usual)
