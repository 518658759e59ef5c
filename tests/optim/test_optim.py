"""`stateless(cls)` follows `cls` of torch.optim, in place and eager, over whole trajectories.

Eager they must be bit-equal but for those in ROUNDED, compiled those in EXACT. Tolerance of the others: 2e-7 of a
leaf's norm, a float32 rounding or two: torch's CPU adds a scaled gradient in one rounding, and a compiler may not.
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from funcamp import average, by_group, jit, make_train_step, skip_step, stateless
from funcamp._optim.optimizer import OptState
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from tests.support.helpers import assert_close, assert_same, clone, together
from tests.support.optimizers import CASES
from tests.support.oracle import state_of

optim = torch.optim
EXACT = {
    "SGD", "SGD-momentum", "SGD-nesterov", "SGD-dampening", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Muon",
}  # fmt: skip
ROUNDED = {"ASGD", "Adafactor", "Adafactor-clipped"}
STEPS = 12


def example() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    params = {"a": torch.randn(4, 3), "b": [torch.randn(3, 5)]}
    return params, [{"a": torch.randn(4, 3), "b": [torch.randn(3, 5)]} for _ in range(STEPS)]


def reference(cls: type[optim.Optimizer], arguments: dict[str, Any], lrs: list[float] | None = None) -> list[Any]:
    """The parameters after each step of the class itself."""
    params, grads = example()
    leaves = [params["a"].clone().requires_grad_(), params["b"][0].clone().requires_grad_()]
    optimizer = cls(leaves, **arguments)
    trajectory = []
    for step, grad in enumerate(grads):
        leaves[0].grad, leaves[1].grad = grad["a"].clone(), grad["b"][0].clone()
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.step()
        trajectory.append(clone({"a": leaves[0], "b": [leaves[1]]}))
    return trajectory


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_update_follows_torch(name: str, compiled: bool) -> None:
    cls, arguments = CASES[name]
    expected = reference(cls, arguments)
    torch.manual_seed(0)
    params, grads = example()
    torch.manual_seed(0)
    optimizer = stateless(cls, **arguments)
    opt_state = optimizer.init(params)
    update = torch.compile(optimizer.update, fullgraph=True, backend="aot_eager") if compiled else optimizer.update
    for step, grad in enumerate(grads):
        before = clone((params, grad, opt_state))
        new_params, new_state = update(params, grad, opt_state)
        assert_same((params, grad, opt_state), before)
        assert torch.utils._pytree.tree_structure(new_state) == torch.utils._pytree.tree_structure(opt_state)
        params, opt_state = new_params, new_state
        if name in EXACT if compiled else name not in ROUNDED:
            assert_same(params, expected[step])
        else:
            assert_close(params, expected[step], 2e-7)
    assert opt_state.applied == STEPS


LONG = 300
SHAPES = ((4, 3), (3, 5), (37,))


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_three_hundred_steps_with_skips_follow_torch(name: str, dtype: torch.dtype) -> None:
    """Gradients of all sizes; in about every fifth step they are infinite, and the step is skipped."""
    cls, arguments = CASES[name]
    if cls is not optim.Muon:  # which has no foreach
        arguments = {**arguments, "foreach": False}
    if dtype == torch.float16 and cls in (optim.Adam, optim.AdamW, optim.NAdam):
        arguments = {**arguments, "eps": 1e-3}  # the default is 0 in float16
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in (SHAPES[:2] if cls is optim.Muon else SHAPES)]
    eager, optimizer = cls(leaves, **arguments), stateless(cls, **arguments)
    params = [leaf.detach().clone() for leaf in leaves]
    opt_state = optimizer.init(params)
    for step in range(LONG):
        is_skipped = bool(torch.rand(()) < 0.2)
        size = torch.inf if is_skipped else 10.0 ** (step % 5 - 3)
        grads = [(torch.randn(leaf.shape) * size).to(dtype) for leaf in leaves]
        new = optimizer.update(params, grads, opt_state)
        params, opt_state = skip_step(state_of(8.0, found_inf=float(is_skipped)), new=new, old=(params, opt_state))
        if not is_skipped:
            for leaf, grad in zip(leaves, grads):
                leaf.grad = grad
            eager.step()
    expected = [leaf.detach() for leaf in leaves]
    if name not in ROUNDED:
        assert_same(params, expected)
    elif dtype == torch.float32:
        assert_close(params, expected, 1e-6)
    else:
        assert_close(params, expected, LONG * torch.finfo(dtype).eps)


@pytest.fixture(autouse=True)
def _same_data(_fresh: None) -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", ["schedule", "tensor"])
@pytest.mark.parametrize(
    "name", ["SGD-momentum", "AdamW", "NAdam", "RAdam", "Adagrad", "ASGD", "Rprop", "Adafactor", "Muon"]
)
def test_learning_rate_as_value_follows_torch(name: str, kind: str) -> None:
    cls, arguments = CASES[name]
    moves = kind == "schedule" and name != "Rprop"  # Rprop reads lr once, for its first step sizes
    lrs = [0.01 * (1 + step if moves else 1) for step in range(STEPS)]
    expected = reference(cls, {**arguments, "lr": lrs[0]}, lrs)
    torch.manual_seed(0)
    params, grads = example()
    lr = (
        (lambda applied: 0.01 * (1 + applied if moves else 1 + 0 * applied))
        if kind == "schedule"
        else torch.tensor(0.01)
    )
    optimizer = stateless(cls, **{**arguments, "lr": lr})
    opt_state = optimizer.init(params)
    for step, grad in enumerate(grads):
        params, opt_state = optimizer.update(params, grad, opt_state)
        assert_close(params, expected[step], 2e-7)


def test_schedule_inside_a_tuple_of_betas_follows_torch() -> None:
    expected = reference(optim.AdamW, {"betas": (0.8, 0.95)})
    torch.manual_seed(0)
    params, grads = example()
    optimizer = stateless(optim.AdamW, betas=(lambda applied: 0.8 + 0.0 * applied, 0.95))
    opt_state = optimizer.init(params)
    for step, grad in enumerate(grads):
        params, opt_state = optimizer.update(params, grad, opt_state)
        assert_close(params, expected[step], 2e-7)


def test_schedule_counts_applied_steps_only() -> None:
    seen: list[int] = []

    def schedule(applied: Tensor) -> Tensor:
        seen.append(int(applied))
        return 0.1 / (1 + applied)

    optimizer = stateless(optim.SGD, lr=schedule)
    params, grad = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    opt_state = optimizer.init(params)
    seen.clear()
    for found_inf in (0.0, 1.0, 1.0, 0.0, 0.0):
        new = optimizer.update(params, grad, opt_state)
        params, opt_state = skip_step(state_of(8.0, found_inf=found_inf), new=new, old=(params, opt_state))
    assert seen == [0, 1, 1, 1, 2]
    assert opt_state.applied == 3
    torch.testing.assert_close(params["w"], torch.full((2,), -(0.1 + 0.05 + 0.1 / 3)))


@pytest.mark.compiled
def test_tensor_hyperparameter_is_an_input_of_the_compiled_graph() -> None:
    lr = torch.tensor(0.5)
    optimizer = stateless(optim.SGD, lr=lr)
    update = torch.compile(optimizer.update, fullgraph=True, backend="aot_eager")
    params, grad = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    opt_state = optimizer.init(params)
    assert update(params, grad, opt_state)[0]["w"].item() == -0.5
    lr.fill_(0.25)
    assert update(params, grad, opt_state)[0]["w"].item() == -0.25


@pytest.mark.parametrize("name", CASES)
def test_vmap_of_an_ensemble_equals_each_member(name: str) -> None:
    cls, arguments = CASES[name]
    optimizer = stateless(cls, **arguments)
    params, grads = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    opt_state = torch.func.vmap(optimizer.init)(params)
    batched = torch.func.vmap(optimizer.update)(
        *torch.func.vmap(optimizer.update)(params, grads, opt_state)[:1], grads, opt_state
    )
    for member in range(3):
        alone = optimizer.init(params[member])
        moved, _ = optimizer.update(params[member], grads[member], alone)
        expected = optimizer.update(moved, grads[member], alone)
        row = torch.utils._pytree.tree_map(lambda leaf, member=member: leaf[member], batched)
        # A batched bfloat16 product may round otherwise than a single one: Muon; a sum of products, too: ASGD.
        assert_close(row[0], expected[0], {"Muon": 1e-2, "ASGD": 1e-7}.get(name, 0.0))


def test_none_gradient_leaves_parameter_and_state_alone() -> None:
    for name in ("AdamW", "SGD-dampening"):
        cls, arguments = CASES[name]
        optimizer = stateless(cls, **arguments)
        params = {"a": torch.randn(2, 2), "b": torch.randn(2, 2), "c": None}
        first = optimizer.init(params)
        moved, second = optimizer.update(params, {"a": torch.ones(2, 2), "b": None, "c": None}, first)
        assert moved["b"] is params["b"]
        for entry in first.state:
            assert second.state[entry]["b"] is first.state[entry]["b"]
        leaf = params["b"].clone().requires_grad_()
        eager = cls([leaf], **arguments)
        leaf.grad = torch.ones(2, 2)
        eager.step()
        late, _ = optimizer.update(moved, {"a": None, "b": torch.ones(2, 2), "c": None}, second)
        assert_close(late["b"], leaf.detach(), 1e-6)


def test_a_step_without_any_gradient_counts_and_changes_nothing_else() -> None:
    optimizer = stateless(optim.AdamW)
    params = {"w": torch.ones(2)}
    opt_state = optimizer.init(params)
    new, after = optimizer.update(params, {"w": None}, opt_state)
    assert_same((new, after.state), (params, opt_state.state))
    assert after.applied == 1


@pytest.mark.compiled
def test_two_optimizers_in_one_factory_do_not_share_a_compiled_graph() -> None:
    def compiled(lr: float) -> Any:
        optimizer = stateless(optim.SGD, lr=lr)

        def step(params: Tensor, grads: Tensor) -> Any:
            return optimizer.update(params, grads, OptState(torch.zeros((), dtype=torch.int64), {}))[0]

        return torch.compile(step, fullgraph=True, backend="aot_eager")

    steps = [compiled(lr) for lr in (0.5, 0.25, 0.125)]
    assert [step(torch.zeros(1), torch.ones(1)).item() for step in steps] == [-0.5, -0.25, -0.125]


def test_copy_and_pickle_give_an_equal_optimizer() -> None:
    optimizer = stateless(optim.AdamW, lr=0.1)
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    expected = optimizer.update(params, grads, optimizer.init(params))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert repr(other) == "stateless(torch.optim.adamw.AdamW, lr=0.1) [flat]"
        assert repr(stateless(torch.optim.Muon)).endswith("[per tensor]")
        assert_same(other.update(params, grads, other.init(params)), expected)


def test_narrow_parameters_take_float32_gradients() -> None:
    optimizer = stateless(optim.AdamW, lr=0.5)
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    new, _ = optimizer.update(params, {"w": torch.ones(3)}, optimizer.init(params))
    assert new["w"].dtype == torch.bfloat16
    assert (new["w"] < 1).all()


def test_threads_that_share_an_optimizer_all_get_its_result() -> None:
    optimizer = stateless(optim.AdamW)
    params = torch.ones(3, 2)
    results: list[Tensor] = []

    def work(_: int) -> None:
        value, opt_state = params, optimizer.init(params)
        for _ in range(30):
            value, opt_state = optimizer.update(value, params, opt_state)
        results.append(value)

    together(work, threads=4)
    for result in results:
        assert_same(result, results[0])


@pytest.mark.parametrize("name", ["SGD-momentum", "AdamW", "NAdam", "RAdam"])
def test_a_plain_optimizer_in_another_thread_is_not_touched(name: str) -> None:
    """Its step is taken while a stateless one is in the middle of its own, which set a flag of the process once."""
    cls, arguments = CASES[name]
    beside: list[Tensor] = []
    weight = torch.randn(4, 3, requires_grad=True)
    again = weight.detach().clone().requires_grad_()
    plain, expected = cls([weight], **arguments), cls([again], **arguments)

    class Slow(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            thread = threading.Thread(target=plain.step)
            if beside:
                thread.start()
                thread.join()
                assert not torch.compiler.is_compiling()
            super().step(closure)

    optimizer = stateless(Slow, lr=0.1)
    params = torch.ones(2)
    opt_state = optimizer.init(params)
    beside.append(weight)
    for _ in range(8):
        grad = torch.randn(4, 3)
        weight.grad, again.grad = grad.clone(), grad.clone()
        params, opt_state = optimizer.update(params, torch.ones(2), opt_state)
        expected.step()
        assert_same(weight.detach(), again.detach())


def test_only_dampening_makes_an_entry_that_torch_has_not() -> None:
    for name, (cls, arguments) in CASES.items():
        assert (APPLIED_ENTRY in stateless(cls, **arguments).init(torch.ones(2, 2)).state) == (name == "SGD-dampening")


def test_an_optimizer_is_the_same_under_all_defaults_and_modes() -> None:
    grad = {"w": torch.randn(3)}

    def stepped(optimizer: Any) -> Any:
        params = {"w": torch.ones(3)}
        return optimizer.update(params, grad, optimizer.init(params))

    expected = stepped(stateless(optim.AdamW))
    made = []
    with torch.device("meta"):
        made.append(stateless(optim.AdamW))
    with torch.inference_mode():
        made.append(stateless(optim.AdamW))
    with FakeTensorMode():
        made.append(stateless(optim.AdamW))
    for optimizer in made:
        assert_same(stepped(optimizer), expected)


def test_an_optimizer_can_be_made_and_used_under_fake_tensors() -> None:
    for name in ("SGD-dampening", "Adam", "Muon"):
        cls, arguments = CASES[name]
        with FakeTensorMode():
            optimizer = stateless(cls, **arguments)
            params = {"w": torch.ones(3, 2)}
            new, _ = optimizer.update(params, params, optimizer.init(params))
        assert new["w"].shape == (3, 2)
        real = {"w": torch.ones(3, 2)}
        assert_same(
            optimizer.update(real, real, optimizer.init(real)),
            stateless(cls, **arguments).update(real, real, stateless(cls, **arguments).init(real)),
        )


@pytest.mark.parametrize("name", CASES)
def test_torchs_warning_to_a_user_of_capturable_is_not_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[optim.Optimizer] = []
    cls, arguments = CASES[name]
    (params, grads), optimizer = example(), stateless(cls, **arguments)
    monkeypatch.setattr(optim.Optimizer, "_accelerator_graph_capture_health_check", checked.append)
    optimizer.update(params, grads[0], optimizer.init(params))
    assert checked == []  # this check would warn


def test_differentiating_through_a_step_is_refused() -> None:
    optimizer = stateless(optim.SGD, lr=0.1)

    def outer(w: Tensor) -> Tensor:
        moved: Tensor = optimizer.update(w, 2 * w, optimizer.init(torch.ones(2)))[0]
        return moved.sum()

    with pytest.raises(ValueError, match="no gradient flows through"):
        torch.func.grad(outer)(torch.ones(2))
    with pytest.raises(ValueError, match="no gradient flows through"):
        torch.func.grad(lambda w: torch.func.vmap(outer)(w).sum())(torch.ones(3, 2))


@pytest.mark.parametrize("name", ["lr", "hyperparameters", "param_groups"])
def test_assigning_to_an_optimizer_is_refused(name: str) -> None:
    optimizer = stateless(optim.SGD, lr=0.5)
    grouped = by_group({"matrix": optimizer, "vector": optimizer})
    for made in (optimizer, grouped):
        with pytest.raises(AttributeError, match=rf"{name} cannot be assigned.* Make another with {name}=0.1"):
            setattr(made, name, 0.1)
    with pytest.raises(AttributeError, match="group cannot be assigned"):
        grouped.group = lambda *_: "matrix"
    params = {"w": torch.ones(1)}
    assert optimizer.update(params, params, optimizer.init(params))[0]["w"] == 0.5


STATES: dict[str, Any] = {
    "sgd": stateless(torch.optim.SGD),
    "momentum": stateless(torch.optim.SGD, momentum=0.9),
    "adamw": stateless(torch.optim.AdamW),
    "amsgrad": stateless(torch.optim.AdamW, amsgrad=True),
    "adafactor": stateless(torch.optim.Adafactor),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("after", STATES)
def test_a_state_of_another_optimizer_is_refused(before: str, after: str) -> None:
    old, new = (make_train_step(lambda p, x: (p["w"] * x).sum(), STATES[name]) for name in (before, after))
    state, x = old.init({"w": torch.ones(2, 2)}), torch.ones(2, 2)
    for run in (new, jit(new, backend="eager", donate=False)):
        if before == after:
            run(state, x)
            continue
        with pytest.raises(ValueError, match="update: opt_state must hold the entries that"):
            run(state, x)
    new(state._replace(opt_state=new.optimizer.init(state.params)), x)
    new(new.load_state_dict(old.state_dict(state), like=new.init(state.params.tree()), strict=False), x)


def test_a_state_without_average_says_how_to_begin_one() -> None:
    steps = [make_train_step(lambda p, x: (p["w"] * x).sum(), STATES["sgd"], ema_decay=ema) for ema in (None, 0.5)]
    old, new = steps
    state = old.init({"w": torch.ones(2)})
    begin = r"ema_decay=0\.5; got a state without: begin one with state\._replace\(opt_state="
    with pytest.raises(ValueError, match=begin):
        new(state, torch.ones(2))
    begun = state._replace(opt_state=(state.opt_state, average(0.5).init(state.params)))
    after, _ = new(begun, torch.ones(2))
    assert_same(after.ema.tree()["w"], (after.params.tree()["w"] + 1) / 2)
