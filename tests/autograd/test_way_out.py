"""What cannot work in a step says why, and what to do instead: eager where it fails there, and under jit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from funcamp import (
    ScalerConfig,
    TrainStep,
    init,
    jit,
    loss,
    make_train_step,
    module_loss,
    scaled_grad_and_value,
    stateless,
)
from tests.support.helpers import assert_close, assert_same, clone

SGD = stateless(torch.optim.SGD, lr=0.5)
Loss = Callable[[dict[str, Tensor], Tensor], Tensor]


class TakesCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def checkpointed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda w: (w * x).sin(), p["w"], use_reentrant=False)
    return out.sum()


def takes_ctx(p: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = TakesCtx.apply(p["w"])
    return (out * x).sum()


def masks(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (p["w"] * x)[x > 0].sum()


def unique(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return p["w"].sum() * len(torch.unique(x))


def slices(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return p["w"][: int(x.sum())].sum()


def branches(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return p["w"].sum() * (2 if x.sum() > 0 else 1)


def step_of(function: Loss, **options: Any) -> TrainStep:
    return make_train_step(loss(function, **options), stateless(torch.optim.SGD, lr=0.5), ScalerConfig(8.0))


def call(step: Any, loss_step: TrainStep) -> Any:
    return step(loss_step.init({"w": torch.ones(4)}), torch.ones(4))


CHECKPOINT = "torch.func does not take torch.utils.checkpoint .*; pass engine='autograd'"
CTX = "torch.func does not take an autograd.Function whose forward takes ctx .*; override its setup_context"


@pytest.mark.parametrize(("function", "text"), [(checkpointed, CHECKPOINT), (takes_ctx, CTX)])
def test_torch_func_does_not_take_it(function: Loss, text: str) -> None:
    step = step_of(function, engine="func")
    for run in (step, jit(step, backend="eager")):
        with pytest.raises(RuntimeError, match=f"(step|jit): {text}"):
            call(run, step)
    assert torch.equal(checkpointed({"w": torch.ones(2)}, torch.ones(2)), 2 * torch.ones(()).sin())  # as before


@pytest.mark.parametrize("engine", [None, "autograd"])
@pytest.mark.parametrize("function", [checkpointed, takes_ctx])
def test_that_way_out_works(function: Loss, engine: Any) -> None:
    step = step_of(function, engine=engine)
    expected = torch.ones(4) - 0.5 * (torch.ones(4).cos() if function is checkpointed else 2.0)
    for run in (step, jit(step, backend="eager")):
        assert torch.equal(call(run, step)[0].params.tree()["w"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("function", [unique, slices, branches])
def test_number_or_branch_that_follows_from_values(function: Loss) -> None:
    step = step_of(function)
    call(step, step)
    text = r"step must not read a tensor's value on the host .* does: take torch.where or a mask of fixed shape instead"
    with pytest.raises(RuntimeError, match=text):
        call(jit(step, backend="eager"), step)


def test_vmap_over_the_autograd_engine() -> None:
    step = step_of(lambda p, x: (p["w"] * x).sum(), engine="autograd")
    with pytest.raises(RuntimeError, match=r"step: engine='autograd' does not nest .*; pass engine='func'"):
        torch.func.vmap(step, (None, 0))(step.init({"w": torch.ones(4)}), torch.ones(3, 4))


def test_engine_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match="loss: engine must be 'func', 'autograd' or None; got 'tape'"):
        step_of(masks, engine="tape")


class Checkpointed(torch.nn.Module):
    """The same layer, computed again with its own parameters or with those that it was given."""

    def __init__(self, right: bool) -> None:
        super().__init__()
        self.body, self.right = torch.nn.Linear(4, 1), right

    def forward(self, x: Tensor) -> Any:
        if not self.right:
            return checkpoint(self.body, x, use_reentrant=False)
        own = dict(self.body.named_parameters())
        return checkpoint(functional_call, self.body, own, x, use_reentrant=False)


@pytest.mark.parametrize("right", [True, False])
def test_module_that_is_computed_again_with_other_parameters(right: bool) -> None:
    model = Checkpointed(right)
    params = {name: value.detach() + 1 for name, value in model.named_parameters()}

    def function(p: Any, x: Tensor) -> Any:
        return functional_call(model, p, x).tanh().sum()

    of_a_module = make_train_step(module_loss(model, lambda out, _: out.tanh().sum(), engine="autograd"), SGD)
    expected = of_a_module(of_a_module.init(params), (torch.ones(2, 4), None))[0].params.tree()
    step = make_train_step(loss(function, engine="autograd"), SGD)
    x = torch.ones(2, 4)
    refused = pytest.raises(RuntimeError, match="Linear must be computed again with")
    for run in (step, jit(step, backend="eager")):
        with contextlib.nullcontext() if right else refused:
            assert_same(run(step.init(params), x)[0].params.tree(), expected)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_module_that_was_called_with_two_sets_of_parameters_before() -> None:
    model = Checkpointed(right=False)

    def function(p: Any, x: Tensor) -> Any:
        with torch.no_grad():
            teacher = model(x)
        return (functional_call(model, p, x).tanh() - teacher).square().sum()

    step = make_train_step(loss(function, engine="autograd"), SGD)
    params = {name: value.detach() + 1 for name, value in model.named_parameters()}
    with pytest.raises(RuntimeError, match="Linear must be computed again with"):
        step(step.init(params), torch.ones(2, 4))


@pytest.mark.compiled
def test_a_checkpoint_works_after_a_compilation_that_left_the_hooks_off() -> None:
    tape: Any = torch._C._autograd
    step = step_of(checkpointed, engine="autograd")
    tape._saved_tensors_hooks_disable("left by a failure")
    try:
        state, _ = call(step, step)
    finally:
        tape._saved_tensors_hooks_enable()
    assert torch.equal(state.params.tree()["w"], torch.ones(4) - 0.5 * torch.ones(4).cos())


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.BatchNorm1d])
def test_norms_of_two_dtypes_under_vmap_are_refused_with_the_fix(norm: Any, policy: str) -> None:
    class InFloat(norm):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.float())

    for cls in (norm, InFloat):
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), cls(8), torch.nn.Linear(8, 4))
        step = make_train_step(module_loss(model, mse_loss), SGD, policy=policy)
        states = torch.utils._pytree.tree_map(lambda leaf: torch.stack([leaf] * 2), step.init(flat=False))
        batch = (torch.randn(2, 3, 4), torch.randn(2, 3, 4))
        if cls is InFloat:
            torch.func.vmap(step)(states, batch)
            continue
        with pytest.raises(
            RuntimeError, match=r"under vmap torch cannot differentiate LayerNorm.*give the layer x.float"
        ):
            torch.func.vmap(step)(states, batch)


def test_a_reentrant_checkpoint_is_refused() -> None:
    step = step_of(lambda p, x: checkpoint(torch.sin, p["w"] * x, use_reentrant=True).sum(), engine="autograd")
    with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
        call(step, step)


class Adapted(torch.nn.Module):
    """A reentrant checkpoint behind a frozen layer."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.frozen, self.block, self.head = (torch.nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.block.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(x).requires_grad_()
        out: Tensor = self.head(checkpoint(self.block, hidden, use_reentrant=True))
        return out


def test_reentrant_checkpoint_that_no_parameter_stands_before() -> None:
    """torch.autograd.grad would pass over it, and its parameters would get no gradient."""
    step = make_train_step(module_loss(Adapted(trained=True), mse_loss), SGD)
    frozen = make_train_step(module_loss(Adapted(trained=False), mse_loss), SGD)
    for wrap in (lambda step: step, lambda step: jit(step, backend="eager")):
        wrap(frozen)(frozen.init(), (torch.ones(2, 4), torch.ones(2, 4)))
        run: Any = wrap(step)
        with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
            run(step.init(), (torch.ones(2, 4), torch.ones(2, 4)))


def test_reentrant_checkpoint_in_a_function() -> None:
    block = torch.nn.Linear(4, 4)

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            out: Tensor = functional_call(block, {"weight": p["w"].expand(4, 4)}, x)
            return out

        out: Tensor = checkpoint(inner, x.clone().requires_grad_(), use_reentrant=True) + p["b"]
        return out.sum()

    step = step_of(function)
    for run in (step, jit(step, backend="eager")):
        with pytest.raises(RuntimeError, match="pass use_reentrant=False"):
            run(step.init({"w": torch.ones(4), "b": torch.ones(())}), torch.ones(2, 4))


class Recomputed(torch.autograd.Function):
    """A layer that its backward pass computes again, as reversible networks do, and differentiates by backward()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer, ctx.name = layer, "recomputed"  # not the node's name()
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: Tensor = layer(x)
            return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.layer(x)
        torch.autograd.backward(out, g)
        return x.grad, None


class Reversible(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Recomputed.apply(self.first(x), self.middle)
        out: Tensor = self.last(hidden) + self.middle(x)
        return out


@pytest.mark.parametrize("accumulate", [1, 2])
def test_function_whose_backward_pass_calls_backward(accumulate: int) -> None:
    model = Reversible()
    twin = copy.deepcopy(model)
    step = make_train_step(module_loss(model, mse_loss), SGD, ScalerConfig(8.0), accumulate=accumulate)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    batch = (x, y) if accumulate == 1 else (x.view(2, 3, 4), y.view(2, 3, 4))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    mse_loss(twin(x), y).backward()
    optimizer.step()
    for run in (step, jit(step, backend="eager")):
        state, _ = run(step.init(), batch)
        assert_close(dict(state.params.tree()), dict(twin.named_parameters()), 1e-6)
    assert all(leaf.grad is None for leaf in model.parameters())


class Normalizing(torch.nn.Linear):
    """Normalizes its own weight in the forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            new = self.weight / self.weight.norm()
            if self.how == "copy_":
                self.weight.copy_(new)
            else:
                self.weight.data = new
        return super().forward(x)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("how", ["copy_", "data"])
def test_module_that_writes_its_own_parameters(how: str, policy: str | None) -> None:
    step = make_train_step(module_loss(Normalizing(how), mse_loss), SGD, policy=policy)
    state, batch = step.init(), (torch.ones(2, 4), torch.ones(2, 4))
    calls: list[Any] = [jit(step, backend="eager", donate=False), step.loss, step, jit(step, backend="eager")]
    for run in calls:
        with pytest.raises(ValueError, match=r"must not write to its parameters in the forward pass; .* 'weight'"):
            run(state, batch)


def test_hessian_under_vmap_has_another_form() -> None:
    def penalty(hessian: Any) -> Loss:
        def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.vmap(hessian(lambda row: (p["w"] * row).sin().prod()))(x)
            return out.square().sum()

        return function

    step = step_of(penalty(torch.func.hessian))
    state, batch = step.init({"w": torch.ones(4)}), torch.ones(2, 4)
    expected, _ = step(state, batch)
    with pytest.raises(RuntimeError, match=r"vmap\(hessian\(f\)\): take vmap\(jacrev\(jacrev\(f\)\)\)"):
        jit(step, backend="eager", donate=False)(state, batch)
    step = step_of(penalty(lambda f: torch.func.jacrev(torch.func.jacrev(f))))
    found, _ = jit(step, backend="eager", donate=False)(state, batch)
    assert_close(found.params, expected.params, 1e-6)


def test_number_in_a_text() -> None:
    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        out = (p["w"] * x).sum()
        assert f"{out:.3f}"
        return out

    step = step_of(function)
    call(step, step)
    with pytest.raises(RuntimeError, match=r"not read a tensor's value on the host .*\(assert f"):
        call(jit(step, backend="eager"), step)


def test_function_that_reads_a_tensor_besides_its_arguments() -> None:
    constant = torch.ones(4)

    class Reads(TakesCtx):
        @staticmethod
        def forward(x: Tensor) -> Tensor:  # type: ignore[override]
            return x * constant

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

    step = step_of(lambda p, x: Reads.apply(p["w"]).sum())
    run, state = jit(step, backend="eager"), step.init({"w": torch.ones(4)})
    for value in (1.0, 3.0):
        constant.fill_(value)
        _, expected = step(state, torch.ones(4))
        assert_same(run(clone(state), torch.ones(4))[1].loss, expected.loss)


@pytest.mark.compiled
@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_loss_of_no_parameter_and_inference_mode(engine: Any, compiled: bool) -> None:
    step = step_of(lambda p, x: x.sum(), engine=engine)
    with pytest.raises(ValueError, match=r"step: loss_fn must return a loss that depends on the parameters"):
        call(jit(step, backend="eager") if compiled else step, step)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"must not be differentiated under torch.inference"):
        call(step, step)


class Frozen(torch.nn.Module):
    """A BatchNorm that reads its statistics, in a checkpointed block; another that writes them."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps, self.writes, self.reads = keeps, torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).eval()
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.writes(x)
        return self.head(x + (checkpoint(self.reads, x, use_reentrant=False) if self.keeps else self.reads(x)).tanh())


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_block_that_is_computed_again_reads_the_buffers_of_the_state(compiled: bool) -> None:
    torch.manual_seed(0)
    x, found = torch.randn(16, 4), []
    for keeps, engine in ((False, "func"), (True, "autograd")):
        torch.manual_seed(1)
        loss_fn = module_loss(Frozen(keeps), lambda out, _: out.square().mean(), engine=engine)  # type: ignore[arg-type]
        buffers = {name: value + 1 if value.is_floating_point() else value for name, value in loss_fn.buffers().items()}
        step = make_train_step(loss_fn, SGD)
        run, state = jit(step, backend="eager") if compiled else step, step.init(None, buffers)
        for _ in range(2):
            state, _ = run(state, (x, None))
        found.append((state.params.tree(), state.buffers))
        assert torch.equal(loss_fn.model.get_buffer("reads.running_mean"), torch.zeros(4))
    assert_close(found[1], found[0], 1e-6)


class Beside(torch.autograd.Function):
    """Calls a function in another thread, in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        in_another_thread(lambda: call(1.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        in_another_thread(lambda: ctx.call(2.0))
        return grads[0], None


def in_another_thread(call: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


@pytest.mark.parametrize("own", [True, False], ids=["own", "module_loss"])
def test_modules_of_another_thread_are_its_own_affair(own: bool) -> None:
    model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    params = {name: value.detach() for name, value in model.named_parameters()}

    def beside(factor: float) -> None:
        functional_call(other, {name: value * factor for name, value in params.items()}, torch.ones(1, 4))

    def criterion(out: Tensor, _: Any) -> Tensor:
        moved: Tensor = Beside.apply(out, beside)
        return moved.sum()

    loss_fn = (lambda p, x: criterion(functional_call(model, p, x[0]), None)) if own else module_loss(model, criterion)
    step = make_train_step(loss_fn, SGD)
    _, metrics = step(step.init(params), (torch.ones(2, 4), None))
    assert metrics.grad_norm > 0


class Part(torch.nn.Linear):
    """A layer whose forward is not torch's own, which Dynamo would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Compiled(torch.nn.Module):
    """A model with a part that torch.compile compiled."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.first, self.last = Part(4, 8), torch.nn.Linear(8, 1)
        self.first.compile(backend=count)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).tanh())


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["own", "part", "whole"])
def test_eager_step_over_a_compiled_model(kind: str) -> None:
    count = CompileCounter()
    torch.manual_seed(0)
    model: Any = Compiled(count)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), model.last)
    plain[0].load_state_dict(model.first.state_dict())
    plain_step = make_train_step(module_loss(copy.deepcopy(plain), mse_loss), SGD)
    if kind == "whole":
        model = torch.compile(copy.deepcopy(plain), backend=count)

    def own(params: Any, batch: Any) -> Tensor:
        return mse_loss(functional_call(model, params, batch[0]), batch[1])

    step = make_train_step(own if kind == "own" else module_loss(model, mse_loss), SGD)
    state = step.init({name: value.detach() for name, value in model.named_parameters()})
    expected, batch = plain_step.init(), (torch.randn(2, 4), torch.randn(2, 1))
    frames = 0
    for _ in range(4):
        state, metrics = step(state, batch)
        expected, expected_metrics = plain_step(expected, batch)
        assert_same((metrics.loss, metrics.grad_norm), (expected_metrics.loss, expected_metrics.grad_norm))
        frames = frames or count.frame_count
        assert count.frame_count == frames > 0


class Head(torch.nn.Module):
    """A part in a region without autocast, the usual way to compute it in float32."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.body, self.heads = torch.nn.Linear(4, 4), torch.nn.ModuleList([torch.nn.Identity(), part])

    def forward(self, x: Tensor) -> Any:
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.heads[1](h.float()[:, None, None]).mean((1, 2))


LAYERS = {
    "linear": lambda: torch.nn.Linear(4, 4),
    "no bias": lambda: torch.nn.Linear(4, 4, bias=False),
    "conv": lambda: torch.nn.Conv2d(1, 4, 1),
    "conv without bias": lambda: torch.nn.Conv2d(1, 4, 1, bias=False),
}


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_outside_of_autocast(name: str, policy: str) -> None:
    loss_fn, x = module_loss(Head(LAYERS[name]()), lambda out, _: out.sum()), torch.ones(2, 4)
    step = make_train_step(loss_fn, SGD, policy=policy)
    for run in (step, jit(step, backend="eager")):  # its weights are in float32, as its input
        _, metrics = run(step.init(), (x, x))
        assert metrics.loss.isfinite()


class Refuses(torch.nn.Linear):
    """A layer that raises what a convolution raises on some processors."""

    def __init__(self, text: str) -> None:
        super().__init__(4, 4)
        self.text = text

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(self.text)


@pytest.mark.parametrize(
    "text",
    [
        "Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same",
        (
            "Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same or input should be a "
            "MKLDNN tensor and weight is a dense tensor"
        ),
        "Input type (float) and bias type (c10::Half) should be the same",
        (
            "Input type (torch.FloatTensor) and bias type (torch.HalfTensor) should be the same or input should be a "
            "MKLDNN tensor and bias is a dense tensor"
        ),
    ],
)
def test_every_wording_of_two_precisions(text: str) -> None:
    """aten/src/ATen/native/Convolution.cpp, check_input_same_type_as_parameters."""
    policy = "bfloat16" if "BFloat16" in text else "float16"
    step = make_train_step(module_loss(Head(Refuses(text)), lambda out, _: out.sum()), SGD, policy=policy)
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"layer 'heads\.1' met an input and parameters of two dtypes.*x\.float\(\)"):
        step(step.init(), (x, x))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in LAYERS), *((name, torch.float16) for name in ("linear", "no bias", "conv"))],
)
def test_batch_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    loss_fn = module_loss(torch.nn.Sequential(LAYERS[name]()), lambda out, _: out.sum())
    step = make_train_step(loss_fn, SGD)
    x = torch.ones((2, 4) if "conv" not in name else (2, 1, 2, 2)).to(dtype)
    problem = r"step: layer '0' met an input and parameters of two dtypes, as torch says: .*; cast .* batch\.float\(\)"
    with pytest.raises(RuntimeError, match=problem):
        step(step.init(), (x, x))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64], ids=str)
def test_batch_of_another_dtype_under_jit(dtype: torch.dtype) -> None:
    step = make_train_step(module_loss(torch.nn.Linear(4, 4), lambda out, _: out.sum()), SGD)
    x = torch.ones(2, 4).to(dtype)
    for run, call in ((step, "step"), (jit(step, backend="eager"), "jit")):
        with pytest.raises(RuntimeError, match=rf"{call}: a layer met an input .* got \w+ and Float; cast") as caught:
            run(step.init(), (x, x))
        assert "policy" not in str(caught.value)
        assert str(caught.value).count("as torch says") == 1


@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_two_dtypes_without_a_step(engine: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    loss_fn = scaled_grad_and_value(lambda p, x: functional_call(layer, p, x).sum(), engine=engine)
    with pytest.raises(RuntimeError, match=r"scaled_grad_and_value: a layer met .* Double and Float"):
        loss_fn(init(), dict(layer.named_parameters()), torch.ones(2, 2, dtype=torch.float64))


def test_dtype_of_a_target_is_an_error_of_torch() -> None:
    step = make_train_step(module_loss(torch.nn.Linear(2, 2), torch.nn.functional.nll_loss), SGD)
    with pytest.raises(RuntimeError, match=r"^expected .* Long") as caught:
        step(step.init(), (torch.ones(2, 2), torch.ones(2)))
    assert "an input and parameters" not in str(caught.value)


@pytest.mark.compiled
@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_empty_batch_under_jit(engine: Any) -> None:
    """torch's decomposition of mse_loss's backward divides by the number of elements when it is traced."""
    step = make_train_step(module_loss(torch.nn.Linear(4, 1), mse_loss, engine=engine), SGD)
    empty = (torch.ones(0, 4), torch.ones(0, 1))
    assert step(step.init(), empty)[1].loss.isnan()
    with pytest.raises(RuntimeError, match=r"step: the batch must not be empty: .* leave a batch of 0 rows out"):
        jit(step, backend="eager")(step.init(), empty)


def test_division_by_zero_of_the_loss_itself_is_its_own() -> None:
    step = make_train_step(lambda p, x: p["w"].sum() * (1 / (x.shape[0] - 2)), SGD)
    for run in (step, jit(step, backend="eager")):
        with pytest.raises(ZeroDivisionError):
            run(step.init({"w": torch.ones(1)}), torch.ones(2))
