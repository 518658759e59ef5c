"""What a module's own parameters have besides values: their class, attributes, hooks on gradients, identity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)
BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4))


class Asks(nn.Module):
    """Asks its parameters and a buffer for more than values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer, self.scale = what, nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))
        self.table: Any
        self.register_buffer("table", torch.ones(4))
        weight: Any = self.layer.weight
        weight.gain = 2.0
        self.table.gain = 3.0

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        weight: Any = self.layer.weight
        if self.what == "class":
            return out * (self.scale.exp() if isinstance(self.scale, nn.Parameter) else self.scale)
        if self.what == "attribute":
            return out * weight.gain
        if self.what == "buffer's attribute":
            return out * self.table.gain * self.table
        weight.calls = getattr(weight, "calls", 0) + 1
        return out * weight.calls


def losses_of_torch(model: nn.Module, dtype: torch.dtype | None = None, scale: float = 1.0) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.mse_loss(model(BATCH[0]), BATCH[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


def losses_of_step(model: nn.Module, compiled: bool, consume: bool = False, **options: Any) -> list[Tensor]:
    engine = options.pop("engine", None)
    scale = options.pop("scale", 1.0)
    step = make_train_step(module_loss(model, F.mse_loss, engine=engine), SGD, ScalerConfig(scale), **options)
    run: Any = jit(step, backend="eager") if compiled else step
    state, losses = step.init(consume=consume), []
    for _ in range(3):
        state, metrics = run(state, BATCH)
        losses.append(metrics.loss)
    return losses


def made(what: str) -> nn.Module:
    torch.manual_seed(0)
    return Asks(what)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("what", ["class", "attribute", "buffer's attribute"])
def test_a_value_is_like_the_modules_own_tensor(what: str, compiled: bool, consume: bool) -> None:
    model = made(what)
    assert_same(losses_of_step(model, compiled, consume), losses_of_torch(made(what)))


@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_an_attribute_that_the_forward_pass_sets_stays(engine: str) -> None:
    model = made("calls")
    assert_same(losses_of_step(model, compiled=False, engine=engine), losses_of_torch(made("calls")))
    weight: Any = model.get_parameter("layer.weight")
    assert weight.calls == 3
    with pytest.raises(RuntimeError, match=r"model.layer.weight.calls changed from nothing to 1"):
        losses_of_step(made("calls"), compiled=True)


def test_the_callers_tensors_get_no_attributes_and_no_hooks() -> None:
    model = made("class")
    calls: list[int] = []
    model.get_parameter("scale").register_hook(lambda grad: calls.append(1))
    loss_fn = module_loss(model, F.mse_loss)
    values = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    buffers = loss_fn.buffers()
    for _ in range(2):
        loss_fn(values, buffers, BATCH)[0].backward()
    assert calls == [1, 1]
    assert not any(vars(value) for value in (*values.values(), *buffers.values()))


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda grad: grad * (torch.arange(4.0) > 1)[:, None],
    "small": lambda grad: grad * 1e-6,  # below float16's range
    "normalized": lambda grad: grad / grad.norm(),
    "nothing": lambda grad: None,
}


class Tied(nn.Module):
    """A layer that is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.layer(x).relu())
        return out


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("how", ["eager", "func", "jit"])
@pytest.mark.parametrize("policy", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_a_parameter_changes_the_gradient_as_in_torch(name: str, policy: str | None, how: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    expected = copy.deepcopy(model)
    for each in (model, expected):
        each.layer.weight.register_hook(HOOKS[name])
    dtype = None if policy is None else getattr(torch, policy)
    losses = losses_of_torch(expected, dtype, 2.0**10)
    engine = "func" if how == "func" else None
    assert_same(losses_of_step(model, how == "jit", scale=2.0**10, policy=policy, engine=engine), losses)


def test_a_hook_after_the_loss_was_made_and_one_that_is_removed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    step = make_train_step(module_loss(model, F.mse_loss), SGD, policy="bfloat16")
    state = step.init()
    plain, _ = step(state, BATCH)
    hook = model.weight.register_hook(lambda grad: grad * 0)
    frozen, _ = step(state, BATCH)
    assert_same(frozen.params["weight"], state.params["weight"])
    hook.remove()
    again, _ = step(state, BATCH)
    assert_same(again.params, plain.params)


def halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def replaced(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * (parameter.detach() > 0)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("policy", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("hook", [halved, replaced])
def test_a_hook_after_accumulation_changes_the_gradient_as_in_torch(hook: Any, policy: str | None, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    expected = copy.deepcopy(model)
    for each in (model, expected):
        each.get_parameter("0.weight").register_post_accumulate_grad_hook(hook)
    dtype = None if policy is None else getattr(torch, policy)
    losses = losses_of_torch(expected, dtype, 2.0**10)
    assert_same(losses_of_step(model, how == "jit", scale=2.0**10, policy=policy), losses)


def in_the_backward_pass(model: nn.Linear) -> Callable[[Tensor], None]:
    optimizers: dict[Any, Any] = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()

    return step


def dropped(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (lambda model: dropped, "drops the gradient"),
        (lambda model: lambda p: p.mul_(0.5), "writes the parameter"),
        (in_the_backward_pass, "looks the parameter up"),
    ],
)
def test_a_hook_after_accumulation_that_does_more_is_refused(hook: Any, reason: str) -> None:
    model = nn.Linear(4, 4)
    loss_fn = module_loss(model, F.mse_loss)
    step = make_train_step(loss_fn, SGD)
    model.bias.register_post_accumulate_grad_hook(hook(model))
    with pytest.raises(ValueError, match=rf"hook of register_post_accumulate_grad_hook .* that of 'bias' {reason}"):
        step(step.init(), BATCH)


def test_a_hook_after_accumulation_is_refused_with_micro_batches() -> None:
    model = nn.Linear(4, 4)
    step = make_train_step(module_loss(model, F.mse_loss), SGD, accumulate=2)
    model.bias.register_post_accumulate_grad_hook(halved)
    with pytest.raises(ValueError, match=r"accumulate above 1, .* got one on 'bias'"):
        step(step.init(), [torch.stack([leaf, leaf]) for leaf in BATCH])


@pytest.mark.parametrize(
    "keep",
    [
        lambda model: {id(p): 1.0 for p in model.parameters()},
        lambda model: {model.weight: 1.0},
        lambda model: {model.bias},
        lambda model: [id(model.bias)],
    ],
    ids=["id as key", "parameter as key", "set", "id in a list"],
)
def test_a_parameter_known_by_its_identity_is_refused(keep: Callable[[Any], Any]) -> None:
    model = nn.Linear(4, 4)
    table = keep(model)
    with pytest.raises(ValueError, match=r"must not know a parameter by its identity .* got '\w+' in criterion.table"):
        module_loss(model, lambda out, y: F.mse_loss(out, y) * len(table))


class Clipped(nn.Linear):
    """Writes its weight through `.data` or a view in the forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "item":
            self.weight.data[0] = 0
        elif self.how == "out":
            torch.clamp(self.weight.data, -0.1, 0.1, out=self.weight.data)
        elif self.how == "operator":
            self.weight.data *= 0.5
        elif self.how == "list":
            torch._foreach_mul_([self.bias.data, self.weight.data], 0.5)
        else:
            self.weight.detach()[1:].zero_()
        return super().forward(x)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", [None, "bfloat16"])
@pytest.mark.parametrize("how", ["data", "item", "out", "operator", "list", "view"])
def test_a_write_through_data_is_refused(how: str, policy: str | None, compiled: bool) -> None:
    with pytest.raises(ValueError, match=r"must not write to its parameters in the forward pass; it wrote to '\w+'"):
        losses_of_step(Clipped(how), compiled, policy=policy)
