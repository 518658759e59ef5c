"""The claim: a policy with float8 multiplies in float8 in the layers it names, however the step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import funcamp
from funcamp import Policy, ScalerConfig, float8, jit, make_train_step, module_loss, stateless
from tests.float8.models import CONFIG, Net, batch, net, trained
from tests.support.helpers import assert_close, assert_same

ADAMW = stateless(torch.optim.AdamW, lr=1e-2)


def seen(policy: str | Policy, model: nn.Module | None = None) -> dict[str, torch.dtype]:
    """The dtypes that the loss gets, by name."""
    step = make_train_step(module_loss(model or net(), F.cross_entropy), ADAMW, policy=policy)
    return {name: value.dtype for name, value in step.compute_params(step.init()).items()}


def test_linear_layers_that_fit_have_no_copy_and_the_repr_says_why_others_are_not_in_float8() -> None:
    low = {name for name, dtype in seen("float8").items() if dtype == torch.bfloat16}
    assert low == {"first.bias", "middle.bias", "conv.weight", "conv.bias", "odd.weight", "odd.bias", "head.bias"}
    kept = seen("float8,keep=head.*,copy=middle.weight")
    assert (kept["head.weight"], kept["head.bias"], kept["middle.weight"]) == (*[torch.float32] * 2, torch.bfloat16)
    model = net()
    model.middle.weight.requires_grad_(False)
    loss = module_loss(model, F.cross_entropy)
    step = make_train_step(loss, ADAMW, policy="float8,keep=head.*")
    assert repr(step).endswith(
        "policy=bfloat16,keep=head.*,float8=current; float8 in 1 of 4 linear layers, not middle.weight: it is frozen, "
        "not odd.weight: its sizes (16, 24) are not multiples of 16, not head.weight: the policy's keep names it)"
    )
    assert "float8" not in repr(make_train_step(loss, ADAMW, policy="bfloat16"))
    model.middle.weight.requires_grad_()
    del model.head  # init refuses such a module
    assert "float8 in 1 of 3 linear layers" in repr(step)


def test_a_policy_in_text() -> None:
    assert Policy("float8") == Policy.parse("float8") == Policy(torch.bfloat16, float8=CONFIG)
    delayed = Policy(torch.float16, keep=("a",), float8=float8.transformer_engine(2, 16, "most_recent", emulate=True))
    assert str(delayed) == "float16,keep=a,float8=delayed|history=16|amax=most_recent|margin=2|emulate=True"
    for policy in (delayed, Policy("float8"), Policy("float8", float8=float8.torchao("rowwise"))):
        assert Policy.parse(str(policy)) == policy
    assert Policy.parse("float8,float8=delayed") == Policy("float8", float8=float8.transformer_engine())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float8,float8=late", "scaling must be 'current' or 'delayed'"),
        ("float8,float8=delayed|history=x", "a valid value, once at most; got 'history=x'"),
        ("float8,float8=delayed|history=0", "history must be 1 to"),
        ("float8,float8=delayed|emulate=yes", "once at most; got 'emulate=yes'"),
        ("float8,float8=delayed|size=3", "text must give each of scaling, granularity.* got 'size=3'"),
        ("bfloat16,float8=current,float8=current", "float8= once each"),
    ],
)
def test_a_wrong_text_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)


def test_no_layer_in_float8_is_an_error() -> None:
    step = make_train_step(module_loss(nn.Linear(8, 8), F.cross_entropy), ADAMW, policy="float8")
    with pytest.raises(ValueError, match=r"a layer to multiply in it; got .* none: .*not weight: its sizes \(8, 8\)"):
        step.init()
    with pytest.raises(TypeError, match="float8 must be a Float8Config or None; got 'current'"):
        Policy(float8="current")  # type: ignore[arg-type]


class ByHand(Net):
    """The model with its layers in float8 written out."""

    def forward(self, x: Tensor) -> Tensor:
        def linear(layer: nn.Linear, x: Tensor) -> Tensor:
            y = float8.scaled_mm(x, layer.weight)
            return y + layer.bias.to(y.dtype)

        x = linear(self.middle, F.gelu(linear(self.first, x)))
        x = self.norm(linear(self.middle, self.conv(x[..., None])[..., 0]))
        out: Tensor = linear(self.head, x + self.odd(x[..., :24]).repeat(1, 2))
        return out


def test_a_step_is_the_model_with_its_products_written_out() -> None:
    expected = trained("bfloat16,keep=*.weight", model=net(ByHand))
    found = trained("float8,keep=conv.weight|odd.weight")
    assert_same(found, expected)
    assert trained("bfloat16")[1] != found[1]


def wrap_jit(step: Any) -> Any:
    return jit(step, backend="eager")


def compiled(step: Any) -> Any:
    return torch.compile(step, fullgraph=True, backend="aot_eager")


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize("policy", ["float8", "float8,float8=current|power_of_two=True|emulate=True"])
@pytest.mark.parametrize("wrap", [wrap_jit, compiled])
@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_every_way_to_run_a_step_is_the_eager_one_compiled(
    policy: str, wrap: Callable[[Any], Any], engine: Any
) -> None:
    options = {"engine": engine, "max_norm": 1.0, "ema_decay": 0.9}
    with torch._dynamo.config.patch(trace_autograd_ops=engine == "autograd"):
        assert_close(trained(policy, wrap, **options), trained(policy, **options), 1e-6)


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
def test_jitted_micro_batches_equal_the_eager_ones() -> None:
    policy = "float8,float8=delayed|history=3"
    assert_close(trained(policy, wrap_jit, accumulate=2), trained(policy, accumulate=2), 1e-6)


class Casts(TorchDispatchMode):
    """How many tensors of a shape are cast to a dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype, self.count = torch.Size(shape), dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == self.dtype and out.shape == self.shape:
            self.count += 1
        return out


@pytest.mark.parametrize("policy", ["float8", "float8,float8=delayed|history=2"])
def test_a_weight_is_cast_once_a_step_for_both_passes_of_all_micro_batches(policy: str) -> None:
    with Casts((48, 32), torch.float8_e4m3fn) as casts:
        trained(policy, accumulate=3, steps=1)
    assert casts.count == 1


def test_emulation_is_the_same_run() -> None:
    assert_same(trained("float8,float8=current|emulate=True"), trained("float8"))


def test_evaluation_is_in_float8() -> None:
    step = make_train_step(module_loss(net(), F.cross_entropy), ADAMW, ScalerConfig(1.0), policy="float8")
    state = step.init()
    loss = step.loss(state, batch(0))
    assert_same(loss, step(state, batch(0))[1].loss)
    other = make_train_step(module_loss(net(), F.cross_entropy), ADAMW, ScalerConfig(1.0), policy="bfloat16")
    assert other.loss(other.init(), batch(0)) != loss


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("policy", ["float8", "float8,float8=delayed|history=2"])
def test_activation_checkpoints_multiply_in_float8_again(policy: str) -> None:
    class Saving(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    assert_same(trained(policy, model=net(Saving)), trained(policy))
    assert_close(trained(policy, wrap_jit, model=net(Saving)), trained(policy), 1e-6)


def test_a_loss_of_ones_own_calls_the_product() -> None:
    with pytest.raises(ValueError, match=r"only for a loss of module_loss.*call float8.scaled_mm in a function"):
        make_train_step(lambda params, x: params["w"].sum(), ADAMW, policy="float8")


def test_attention_that_reads_its_weights_is_not_in_float8() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.after = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.after(self.attention(x, x, x, need_weights=False)[0])
            return out

    step = make_train_step(module_loss(Model(), F.mse_loss), ADAMW, policy="float8")
    assert repr(step).endswith("; float8 in 1 of 1 linear layers)")
    x = torch.randn(2, 3, 16)
    assert step(step.init(), (x, x))[1].found_inf == 0


def test_a_tied_weight_is_one_tensor_in_both_uses() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.words(tokens))
            return out

    torch.manual_seed(0)
    step = make_train_step(module_loss(Model(), F.cross_entropy), ADAMW, policy="float8,float8=delayed|history=2")
    state = step.init()
    assert state.float8.scale.shape == (1, 3)
    state, metrics = step(state, (torch.arange(4), torch.arange(4)))
    assert metrics.found_inf == 0
    assert (state.float8.history[0] > 0).all()


@pytest.mark.parametrize("policy", ["float8", "float8,float8=delayed|history=2"])
def test_an_ensemble_under_vmap_is_its_members(policy: str) -> None:
    torch.manual_seed(0)
    # No norm and no convolution: torch's backward pass of these fails under vmap with autocast.
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 48))
    loss = module_loss(model, F.cross_entropy, engine="func")
    step = make_train_step(loss, ADAMW, ScalerConfig(1.0), policy=policy)
    members = [{name: value * factor for name, value in loss.params().items()} for factor in (1.0, 0.5, 2.0)]
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    state = torch.func.vmap(step.init)(stacked)
    single = [step.init(member) for member in members]
    for number in range(2):
        state, metrics = torch.func.vmap(step, in_dims=(0, None))(state, batch(number))
        for place in range(3):
            single[place], alone = step(single[place], batch(number))
            assert_close(metrics.loss[place], alone.loss, 1e-2)
            for found, expected in zip(state.float8, single[place].float8):
                assert_close(found[place], expected, 5e-2)


def test_a_module_that_is_one_layer_and_a_layer_with_two_names() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, 16)

    def out(model: nn.Module, keep: str = "") -> Tensor:
        loss = module_loss(model, lambda y, _: y.sum())
        step = make_train_step(loss, ADAMW, policy=f"float8{keep}")
        found: Tensor = step.loss(step.init(), (x, x))
        return found

    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    once = float8.scaled_mm(x.bfloat16(), weight)
    assert_same(out(layer), once.sum())
    assert_same(out(nn.Sequential(layer, layer)), float8.scaled_mm(once, weight).sum())
    assert type(layer) is nn.Linear
    assert "forward" not in vars(layer)


def test_hooks_of_a_layer_and_taps_run() -> None:
    model, calls = net(), []
    model.first.register_forward_hook(lambda layer, args, out: calls.append(out.dtype))
    loss = funcamp.numerics.track_scales(module_loss(model, F.cross_entropy))
    step = make_train_step(loss, ADAMW, policy="float8")
    _, metrics = step(step.init(), batch(0))
    assert metrics.records["middle"].forward.count == 2 * 6 * 32
    plain = make_train_step(module_loss(model, F.cross_entropy), ADAMW, policy="float8")
    assert_same(plain(plain.init(), batch(0))[1].loss, metrics.loss)
    assert set(calls) == {torch.bfloat16}


def test_an_overflow_skips_the_step() -> None:
    step = make_train_step(module_loss(net(), F.cross_entropy), ADAMW, ScalerConfig(2.0**127), policy="float8")
    state = step.init()
    after, metrics = step(state, batch(0))
    assert metrics.found_inf == 1
    assert_same(after.params, state.params)
    x, y = batch(0)
    _, metrics = step(
        state._replace(scaler=funcamp.init(ScalerConfig(1.0))), (x.index_fill(0, torch.tensor(2), torch.inf), y)
    )
    assert metrics.found_inf == 1
