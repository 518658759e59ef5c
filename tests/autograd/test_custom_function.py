"""`custom_function` against torch's own: an eager autograd.Function with custom_fwd and custom_bwd, and `backward()`.

What works as it is, without the decorator, and what does not, stands at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from funcamp import (
    ScalerConfig,
    custom_function,
    init,
    jit,
    make_train_step,
    module_loss,
    scaled_grad_and_value,
    stateless,
)
from funcamp._upstream import autograd_function
from tests.support.helpers import assert_close, assert_same

X, W = torch.randn(3, 4), torch.randn(4, 5)


class Plain(Function):
    """The style of most Functions; its gradient is 7 times the true one, so that a lost backward shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, power: float = 2.0) -> Tensor:
        y = x @ w
        ctx.save_for_backward(x, w, y)
        ctx.power = power
        return y.abs() ** power

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        gy = 7 * g * ctx.power * y.abs() ** (ctx.power - 1) * y.sign()
        return (gy @ w.T if ctx.needs_input_grad[0] else None), x.T @ gy, None


class Amp(Plain):
    """With torch's decorators."""

    forward = staticmethod(custom_fwd(Plain.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Plain.backward, device_type="cpu"))


class AmpCast(Plain):
    forward = staticmethod(custom_fwd(Plain.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(Plain.backward, device_type="cpu"))


class SetUp(Function):
    """The style that torch.func wants, two outputs."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, power: float = 2.0) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y.abs() ** power, y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.power = inputs
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        gx, gw, _ = Plain.backward(ctx, g)
        return gx, gw, None


def first(out: Any) -> Tensor:
    value: Tensor = out[0] if isinstance(out, tuple) else out
    return value


def loss_of(function: Any, dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return first(function.apply(x, w)).float().sum()

    return loss


def torch_grad(loss: Any, w: Tensor, x: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    loss(w, x).backward()
    assert w.grad is not None
    return w.grad


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "backward": lambda loss: lambda w, x: torch_grad(loss, w, x),
    "grad": lambda loss: grad(loss),
    "vmap of grad": lambda loss: lambda w, x: vmap(grad(loss), (None, 0))(w, x[:, None]).sum(0),
    "grad of vmap": lambda loss: grad(lambda w, x: vmap(loss, (None, 0))(w, x[:, None]).sum()),
    "compiled grad": lambda loss: compiled(grad(loss)),
    "compiled vmap of grad": lambda loss: compiled(lambda w, x: vmap(grad(loss), (None, 0))(w, x[:, None]).sum(0)),
}


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(Amp, custom_function(Plain), id="ctx"),
        pytest.param(Amp, custom_function(Amp), id="ctx with custom_fwd"),
        pytest.param(Amp, custom_function(SetUp), id="setup_context"),
        pytest.param(AmpCast, custom_function(AmpCast), id="custom_fwd that casts"),
        pytest.param(AmpCast, custom_function(Plain, cast_inputs=torch.float32), id="ctx, cast"),
        pytest.param(AmpCast, custom_function(SetUp, cast_inputs=torch.float32), id="setup_context, cast"),
    ],
)
def test_gradient_is_that_of_torchs_decorators(theirs: Any, ours: Any, dtype: Any, transform: str) -> None:
    expected = torch_grad(loss_of(theirs, dtype), W, X)
    found = TRANSFORMS[transform](loss_of(ours, dtype))(W, X)
    if "vmap" in transform:  # sums in another order
        assert_close(found, expected, 2.0**-6 if dtype is not None and theirs is Amp else 1e-6)
    else:
        assert_same(found, expected)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("transform", [lambda fn: fn, compiled], ids=["eager", "compiled"])
def test_second_derivative_is_torchs(transform: Any, dtype: Any) -> None:
    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 5 * x**2 * g

    ours = custom_function(Cube)

    def twice(function: Any, x: Tensor) -> Any:
        return grad(lambda x: grad(lambda x: loss_of_one(function, x))(x).sum())(x)

    def loss_of_one(function: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return function.apply(x).float().sum()

    x = torch.randn(6, requires_grad=True)
    (once,) = torch.autograd.grad(loss_of_one(Cube, x), x, create_graph=True)
    (expected,) = torch.autograd.grad(once.sum(), x)
    assert_same(transform(lambda x: twice(ours, x))(x.detach()), expected)
    assert_close(expected, 10 * x, 1e-6)


def test_everything_that_ctx_offers() -> None:
    class Odd(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, offset: Any, *, _unused: int = 0) -> Any:
            raise AssertionError

    class All(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor, name: str, nothing: None) -> Any:
            values = x.sin()
            order = values.argsort()
            ctx.save_for_backward(x, None, values, index)
            ctx.mark_non_differentiable(order)
            ctx.set_materialize_grads(False)
            ctx.name, ctx.kept, ctx.needed = name, values * 2, ctx.needs_input_grad
            return values, order, x * 2

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, g: Tensor | None, order: None, unused: Tensor | None) -> Any:
            x, nothing, values, index = ctx.saved_tensors
            assert (nothing, order, unused, ctx.name) == (None, None, None, "n")
            assert ctx.needed == (True, False, False, False)
            assert_same(ctx.kept, values * 2)
            assert g is not None
            return g * x.cos() * index, None, None, None

    index = torch.tensor([1, 2, 3])
    x = torch.randn(3)
    ours = custom_function(All)
    out = ours.apply(x, index, "n", nothing=None)
    assert_same(out, (x.sin(), x.sin().argsort(), x * 2))
    assert_same(grad(lambda x: ours.apply(x, index, "n", None)[0].sum())(x), x.cos() * index)
    assert_same(torch_grad(lambda w, _: ours.apply(w, index, "n", None)[0].sum(), x, x), x.cos() * index)
    with pytest.raises(TypeError, match="keyword-only arguments"):
        custom_function(Odd).apply(x, 1, _unused=1)
    with pytest.raises(TypeError, match="too many positional"):
        ours.apply(x, index, "n", None, 5)


def test_rules_of_ones_own_for_vmap_and_jvp() -> None:
    calls = []

    class Own(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.exp()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(output)
            ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return 7 * ctx.saved_tensors[0] * g

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Any:
            return 7 * ctx.saved_tensors[0] * tangent

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
            calls.append(in_dims)
            return x.exp(), in_dims[0]

    ours, x = custom_function(Own), torch.randn(3)
    assert_same(vmap(ours.apply)(x), x.exp())
    assert calls == [(0,)]
    assert_same(torch.func.jvp(ours.apply, (x,), (torch.ones(3),))[1], 7 * x.exp())


def test_float64_and_integers_are_not_cast() -> None:
    seen: list[Any] = []

    class See(Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            seen.append([tensor.dtype for tensor in (*tensors[:3], *tensors[3])])
            seen.append(torch.is_autocast_enabled("cpu"))
            return tensors[0] * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return g * 2, None, None, None

    ours = custom_function(See, cast_inputs=torch.float32)
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    inputs = (x, torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64), [torch.ones(1).half()])
    with torch.autocast("cpu", torch.bfloat16):
        ours.apply(*inputs).sum().backward()
    f16, f32, f64, i64 = torch.float16, torch.float32, torch.float64, torch.int64
    assert seen == [[f32, f64, i64, f32], False, False]
    assert x.grad is not None
    assert x.grad.dtype == f16
    seen.clear()
    ours.apply(*inputs)
    assert seen == [[f16, f64, i64, f16], False]


def test_name_doc_and_errors() -> None:
    class Reads(Plain):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
            return ctx.saved_tensors

    ours = custom_function(Plain)
    assert (ours.__name__, ours.__qualname__, ours.__doc__) == (Plain.__name__, Plain.__qualname__, Plain.__doc__)
    assert issubclass(ours, Plain)
    with pytest.raises(TypeError, match=r"cls must be a subclass of torch.autograd.Function; got 3"):
        custom_function(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"cast_inputs must be a floating-point dtype or None; got torch.int32"):
        custom_function(Plain, cast_inputs=torch.int32)
    with pytest.raises(AttributeError, match="ctx has no 'saved_tensors' in a forward"):
        grad(custom_function(Reads).apply)(X)


# What works without the decorator. A step may hold Functions that nobody decorated: their backward is never lost.


class Undecorated(SetUp):
    generate_vmap_rule = True


class Reciprocal(Function):
    """One input, a direct one of the loss, and a backward that is 7 times the true one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 1 / x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -7 * ctx.saved_tensors[0] ** 2 * g


@torch.no_grad()
def without_grad(x: Tensor) -> Any:
    return Reciprocal.apply(x).sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "direct": lambda p, x: Reciprocal.apply(p["w"]).sum(),
    "intermediate": lambda p, x: Reciprocal.apply(p["w"] * x).sum(),
    "with a constant": lambda p, x: Undecorated.apply(x[None], p["w"].expand(3, 3) + torch.eye(3))[0].sum(),
    "vmap": lambda p, x: vmap(lambda w: Reciprocal.apply(w))(p["w"]).sum(),
    "grad in the loss": lambda p, x: grad(lambda w: Reciprocal.apply(w).sum())(p["w"]).square().sum(),
    "vmap of grad in the loss": lambda p, x: vmap(grad(lambda w: Reciprocal.apply(w)))(p["w"]).square().sum(),
    "under no_grad too": lambda p, x: Reciprocal.apply(p["w"]).sum() * without_grad(x),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_backward_is_not_lost_in_a_step(name: str) -> None:
    step = make_train_step(LOSSES[name], stateless(torch.optim.SGD, lr=0.1), ScalerConfig(8.0))
    params, x = {"w": torch.tensor([1.0, 2.0, 4.0])}, torch.tensor([1.0, 0.5, 2.0])
    expected = step(step.init(params), x)
    assert_same(jit(step, backend="eager")(step.init(params), x), expected)
    assert_same(compiled(step)(step.init(params), x), expected)


@pytest.mark.compiled
@pytest.mark.parametrize("name", LOSSES)
def test_backward_is_not_lost_in_a_compiled_core_loop(name: str) -> None:
    fn = scaled_grad_and_value(LOSSES[name])
    args = init(ScalerConfig(8.0)), {"w": torch.tensor([1.0, 2.0, 4.0])}, torch.tensor([1.0, 0.5, 2.0])
    expected = fn(*args)
    assert_same(compiled(fn)(*args), expected)
    if name == "direct":
        assert_close(expected[0][0]["w"], -7 / args[1]["w"] ** 2, 1e-6)


def test_backward_is_not_lost_in_a_step_that_differentiates_by_itself() -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        return state - grad(lambda w: (Reciprocal.apply(w) * x).sum())(state), {}

    assert_same(jit(step, backend="eager")(torch.ones(3), torch.ones(3))[0], torch.full((3,), 8.0))


def test_dynamo_is_as_it_was_afterwards() -> None:
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    before = AutogradFunctionVariable.call_method
    compiled(scaled_grad_and_value(LOSSES["direct"]))(init(), {"w": torch.ones(3)}, torch.ones(3))
    jit(lambda state, batch: (state * 2, {}), backend="eager")(torch.ones(3), torch.ones(3))
    with pytest.raises(Exception, match="planted"):
        compiled(scaled_grad_and_value(_raises))(init(), {"w": torch.ones(3)}, torch.ones(3))
    assert AutogradFunctionVariable.call_method is before


def _raises(params: Any, x: Tensor) -> Tensor:
    raise ValueError("planted")


# Dynamo's own, for a forward that takes ctx.
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("transform", [lambda fn: fn, compiled], ids=["eager", "compiled"])
def test_forward_that_takes_ctx_works_as_it_is_only_with_autograd(transform: Any) -> None:
    def grads_of(function: Any, engine: Any) -> Tensor:
        fn = scaled_grad_and_value(lambda p, x: loss_of(function, torch.bfloat16)(p["w"], x), engine=engine)
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            (grads, _), _ = transform(fn)(init(ScalerConfig(8.0)), {"w": W}, X)
        found: Tensor = grads["w"]
        return found

    expected = torch_grad(loss_of(Amp, torch.bfloat16), W, X)
    assert_same(grads_of(Amp, "autograd"), expected)
    with pytest.raises(Exception, match=r"must override the setup_context|takes ctx .*decorate it"):
        grads_of(Amp, "func")
    for engine in ("autograd", "func"):
        assert_same(grads_of(custom_function(Amp), engine), expected)


# What a reader of another's code found.


class TakesList(Function):
    """Saves what is inside of an argument, and reads which inputs need a gradient from the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: list[Tensor], scale: float = 2.0) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.held, ctx.scale = {"x": (x,)}, scale
        return x * weights[0] * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        assert torch.equal(ctx.held["x"][0], ctx.saved_tensors[0])
        return 7 * g * ctx.saved_tensors[1] * ctx.scale, *[None] * (len(ctx.needs_input_grad) - 1)


def test_tensors_inside_of_arguments_stay_what_they_are() -> None:
    ours, w = custom_function(TakesList), torch.nn.Parameter(torch.ones(3))
    hidden = w * 2
    x = torch.ones(3, requires_grad=True)
    (ours.apply(x, [w, hidden]).sum() + (w * 3).sum() + hidden.sum()).backward()
    assert w.requires_grad
    assert_same(w.grad, torch.full((3,), 5.0))
    assert_same(x.grad, torch.full((3,), 14.0))
    found = grad(lambda x: ours.apply(x, [w, hidden]).sum() + (hidden * x).sum())(torch.ones(3))
    assert_same(found.detach(), torch.full((3,), 16.0))
    assert w.requires_grad
    assert hidden.requires_grad


@pytest.mark.parametrize("arguments", [2, 3])
def test_backward_sees_as_many_inputs_as_were_given(arguments: int) -> None:
    counts = []

    class Counts(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, scale: float = 2.0) -> Tensor:
            ctx.save_for_backward(x, w)
            counts.append(len(ctx.needs_input_grad))
            return x * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            counts.append(len(ctx.needs_input_grad))
            x, w = ctx.saved_tensors
            return (g * w, g * x, None)[:arguments]

    extra = (2.0,) * (arguments - 2)
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    custom_function(Counts).apply(x, w, *extra).sum().backward()
    assert_same((x.grad, w.grad), (w.detach(), x.detach()))
    found = grad(lambda x, w: custom_function(Counts).apply(x, w, *extra).sum(), (0, 1))(x.detach(), w.detach())
    assert_same(found, (w.detach(), x.detach()))
    assert counts == [arguments] * 4


def test_second_derivative_through_an_input_held_in_a_container() -> None:
    class Cube(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.held = ([x],)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return 3 * ctx.held[0][0] ** 2 * g

    ours, x = custom_function(Cube), torch.randn(3)
    twice = grad(lambda x: grad(lambda x: ours.apply(x).sum())(x).sum())
    assert_close(twice(x), 6 * x, 1e-6)
    assert_close(compiled(twice)(x), 6 * x, 1e-6)


def test_subclass_and_second_decoration() -> None:
    class Child(custom_function(Plain)):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            gx, gw, _ = Plain.backward(ctx, g)
            return gx, gw * 10, None

    expected = 10 * torch_grad(loss_of(Plain), W, X)
    for function in (Child, custom_function(Child), custom_function(custom_function(Child))):
        assert_same(torch_grad(loss_of(function), W, X), expected)
        assert_same(grad(loss_of(function))(W, X), expected)
        assert_same(compiled(grad(loss_of(function)))(W, X), expected)
    cast = custom_function(custom_function(Plain, cast_inputs=torch.float32))
    assert_same(grad(loss_of(cast, torch.bfloat16))(W, X), torch_grad(loss_of(AmpCast, torch.bfloat16), W, X))


def test_complex_inputs_and_a_graph_kept_on_ctx() -> None:
    class Kept(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if ctx.needs_input_grad[0]:
                with torch.enable_grad():
                    ctx.x = x.detach().requires_grad_()
                    ctx.y = (ctx.x * ctx.x).abs()
            return (x * x).abs().detach()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return torch.autograd.grad(ctx.y, ctx.x, g)[0]

    for dtype in (torch.float32, torch.complex64):
        x = torch.randn(3, dtype=dtype)
        expected = torch_grad(lambda x, _: (x * x).abs().sum(), x, x)
        assert_same(torch_grad(lambda x, _: custom_function(Kept).apply(x).sum(), x, x), expected)


# Dynamo's own, at a frame that takes a tensor with a graph.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_backward_is_not_lost_in_a_frame_after_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    # which stays changed then
    monkeypatch.setattr(AutogradFunctionVariable, "call_method", AutogradFunctionVariable.call_method)
    monkeypatch.setattr(autograd_function, "_compilations", 0)

    def loss(p: Any, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return (p["w"] * grad(lambda v: Reciprocal.apply(v).sum())(x)).sum()

    args = init(ScalerConfig(8.0)), {"w": torch.ones(3)}, torch.ones(3)
    for engine in ("autograd", "func"):
        fn = scaled_grad_and_value(loss, engine=engine)
        expected = fn(*args)
        assert_same(expected[0][0]["w"], torch.full((3,), -7.0))
        assert_same(torch.compile(fn, backend="aot_eager")(*args), expected)


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_apply_held_by_a_module_and_in_a_checkpoint(engine: Any) -> None:
    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.fn = torch.nn.Parameter(W.clone()), custom_function(Plain).apply

        def forward(self, x: Tensor) -> Any:
            if engine == "func":
                return self.fn(x, self.w)
            return checkpoint(self.fn, x, self.w, use_reentrant=False)

    loss = module_loss(Holds(), lambda out, _: out.sum(), engine=engine)
    step = make_train_step(loss, stateless(torch.optim.SGD, lr=0.1), ScalerConfig(8.0))
    eager = step(step.init(), (X, None))[0].params.tree()["w"]
    assert_close(eager, W - 0.1 * torch_grad(loss_of(Plain), W, X), 1e-6)
    found = jit(step, backend="eager")(step.init(), (X, None))[0].params.tree()["w"]
    assert_close(found, eager, 1e-6)
