"""What PyTorch's own tests ask of a gradient scaler, asked of funcamp's in every mode.

The cases are those of pytorch/pytorch: test/test_torch.py (`test_grad_scaling_*`), test/distributed/fsdp/
test_fsdp_sharded_grad_scaler.py (on one process), and test/distributed/_composable/fsdp/
test_fully_shard_grad_scaler.py (tests/distributed/ranks/loops.py).
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import GradScaler

BATCHES, SKIPPED = 4, 2
Run = Callable[[torch.nn.Sequential, torch.optim.Optimizer, Any], None]


@pytest.fixture(params=[None, "host", "select"])
def scaler_of(request: pytest.FixtureRequest) -> Callable[..., GradScaler]:
    return lambda **options: GradScaler("cpu", skip=request.param, **options)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)) for _ in range(BATCHES)]


def models() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    torch.manual_seed(1)
    first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return first, copy.deepcopy(first)


def spoil(model: torch.nn.Sequential) -> None:
    grad = list(model.parameters())[2].grad
    assert grad is not None
    grad.fill_(math.inf)


mse = torch.nn.functional.mse_loss


# one call


def test_outputs_in_nested_containers(scaler_of: Any) -> None:
    scaler = scaler_of(init_scale=2.0)
    a, b = torch.full((1,), 4.0), torch.full((1,), 8.0)
    scaled = scaler.scale([b.clone(), (a.clone(), b.clone()), [a.clone(), (b.clone(), a.clone())]])
    assert [scaled[0], *scaled[1], scaled[2][0], *scaled[2][1]] == [16.0, 8.0, 16.0, 8.0, 16.0, 8.0]
    assert scaler._scale.device == a.device


@pytest.mark.parametrize("culprit", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_unscaling_many_kinds_of_gradients(scaler_of: Any, culprit: int | None, bad: float) -> None:
    """Contiguous, strided, transposed and float16 gradients, with a scale and a flag of one element."""
    whole = torch.full((20, 20), 4.0)
    grads = [whole.clone(), whole.clone()[:, :5], whole.clone().t(), whole.half()]
    params = [torch.empty_like(grad) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad
    if culprit is not None:
        grads[culprit][2, 2] = bad
    inv_scale, found_inf = torch.full((1,), 0.25), torch.full((1,), 0.0)
    flags = scaler_of()._unscale_grads_(torch.optim.SGD(params, lr=1.0), inv_scale, found_inf, True)
    assert sum(flag.item() for flag in flags.values()) == float(culprit is not None)
    assert all(flag.shape == (1,) for flag in flags.values())
    assert found_inf == 0.0
    if culprit is None:
        assert all((param.grad == 1.0).all() for param in params if param.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("values", "expected"), [((16.0, 32.0, 64.0), 0.0), ((16.0, 32.0, math.inf), 1.0), ((16.0, 32.0, math.nan), 1.0)]
)
def test_sparse_gradients_are_unscaled_and_checked(
    scaler_of: Any, values: tuple[float, ...], expected: float, dtype: torch.dtype
) -> None:
    place = torch.tensor([[0, 1, 1], [2, 0, 2]])
    sparse = torch.sparse_coo_tensor(place, torch.tensor(values), (2, 3), dtype=dtype, check_invariants=False)
    param = sparse.clone()
    param.grad = sparse.clone()
    flags = scaler_of()._unscale_grads_(
        torch.optim.SGD([param], lr=1.0), torch.full((1,), 0.25), torch.full((1,), 0.0), dtype == torch.float16
    )
    assert flags[param.device] == expected
    if not expected:
        assert torch.equal(param.grad.to_dense(), sparse.to_dense() / 4)


def test_duplicates_that_overflow_float16_when_summed(scaler_of: Any) -> None:
    place, values = torch.tensor([[0, 1, 0], [2, 0, 2]]), torch.tensor([64000.0, 32.0, 64000.0]).half()
    param = torch.sparse_coo_tensor(place, values, (2, 3), check_invariants=False)
    param.grad = param.clone()
    flags = scaler_of()._unscale_grads_(
        torch.optim.SGD([param], lr=1.0), torch.full((1,), 0.25), torch.full((1,), 0.0), True
    )
    assert flags[param.device] == 1.0


def test_a_step_on_an_infinite_gradient_returns_none(scaler_of: Any) -> None:
    param = torch.tensor([math.inf])
    param.grad = param.clone()
    scaler = scaler_of(init_scale=2.0)
    scaler.scale(torch.full((1,), 4.0))
    assert scaler.step(torch.optim.SGD([param], lr=1.0)) is None


@pytest.mark.parametrize("lazy", [True, False])
def test_a_loaded_state_dict_has_every_number_lazy_or_not(scaler_of: Any, lazy: bool) -> None:
    first, second = scaler_of(init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2), scaler_of()
    first._init_growth_tracker = 7
    if not lazy:
        second.scale(torch.zeros(()))
    second.load_state_dict(first.state_dict())
    assert second.get_scale() == 3.0
    assert (second.get_growth_factor(), second.get_backoff_factor(), second.get_growth_interval()) == (4.0, 0.5, 2)
    assert second._get_growth_tracker() == 7
    if lazy:
        second.scale(torch.zeros(()))
    assert (second._scale, second._growth_tracker) == (3.0, 7)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_pickled_scaler_goes_on_lazy_or_not(scaler_of: Any, lazy: bool) -> None:
    scaler = scaler_of(init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    if not lazy:
        scaler.scale(torch.zeros(()))
        scaler._growth_tracker.fill_(1)
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == scaler.state_dict()
    assert again._skip == scaler._skip
    again.scale(torch.zeros(()))
    assert (again._scale, again._growth_tracker) == (3.0, 0 if lazy else 1)


def test_growth_stops_before_infinity(scaler_of: Any) -> None:
    model, scaler = torch.nn.Linear(5, 1), scaler_of(init_scale=1e38, growth_factor=2.0**4, growth_interval=1)
    adam = torch.optim.Adam(model.parameters())
    scaler.scale((model(torch.randn(1, 5)) - 1e-30 * torch.randn(1, 1)).square().mean() * 1e-30).backward()
    scaler.step(adam)
    scaler.update()
    assert math.isfinite(scaler.get_scale())


def test_an_optimizer_is_given_the_scaler_or_its_tensors(scaler_of: Any) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self._step_supports_amp_scaling = True

    class WithScaler(Own):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
            assert isinstance(grad_scaler, torch.amp.GradScaler)
            assert not hasattr(self, "grad_scale")
            assert not hasattr(self, "found_inf")

    class WithTensors(Own):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert isinstance(self.grad_scale, Tensor)  # type: ignore[attr-defined]
            assert isinstance(self.found_inf, Tensor)  # type: ignore[attr-defined]

    model, scaler = torch.nn.Linear(4, 1), scaler_of(init_scale=2.0)
    scaler.scale(model(torch.randn(4, 4)).mean()).backward()
    given, tensors = WithScaler(model.parameters()), WithTensors(model.parameters())  # known by their ids: both live
    with pytest.warns(FutureWarning, match="going to stop passing itself"):
        scaler.step(given)
    scaler.step(tensors)
    scaler.update()


# loops, beside the same loop without a scaler


def plain(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, scaler: Any, run: str) -> None:
    """One run of the batches, in float32; a scaler of None skips the batch that a scaler would."""
    for index, (x, y) in enumerate(batches()):
        if run != "accumulation" or index % 2 == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=run == "autocast" and scaler is not None):
            loss = mse(model(x).float(), y)
        if run == "penalty":
            scaled = loss if scaler is None else scaler.scale(loss)
            grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
            norm: Any = sum(grad.square().sum() for grad in grads)
            loss = loss + norm.sqrt() / (1.0 if scaler is None else scaler.get_scale())
        if run == "accumulation":
            loss = loss / 2
        (loss if scaler is None else scaler.scale(loss)).backward()
        if run == "accumulation":
            if index % 2 == 0:
                continue
        elif index == SKIPPED and (scaler is None or scaler.is_enabled()):
            if scaler is None:
                continue
            spoil(model)
        if run == "clipping" and scaler is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())
        if run == "separate unscale" and scaler is not None:
            scaler.unscale_(optimizer)
        if run == "separate unscale" or (run == "clipping" and scaler is None):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1.0, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "Adam fused amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("run", ["plain", "autocast", "clipping", "separate unscale", "penalty", "accumulation"])
def test_a_loop_is_the_one_without_a_scaler(scaler_of: Any, run: str, name: str) -> None:
    control, scaled = models()
    without, optimizer = OPTIMIZERS[name](control.parameters()), OPTIMIZERS[name](scaled.parameters())
    scaler = scaler_of(init_scale=128.0, growth_interval=1)
    plain(control, without, None, run)
    plain(scaled, optimizer, scaler, run)
    steps, skips = (2, 0) if run == "accumulation" else (3, 1)
    assert scaler.get_scale() == 128.0 * 2.0**steps * 0.5**skips
    tolerance = 0.05 if run == "autocast" else 1e-4
    for c, s in zip(control.parameters(), scaled.parameters()):
        torch.testing.assert_close(s, c, atol=tolerance, rtol=tolerance)
        for key, value in without.state[c].items():
            torch.testing.assert_close(optimizer.state[s][key], value, atol=tolerance, rtol=tolerance)


def test_a_disabled_scaler_changes_nothing(scaler_of: Any) -> None:
    control, scaled = models()
    sgd, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (control, scaled))
    scaler = scaler_of(enabled=False)
    for x, y in batches():
        for model, optimizer in ((control, sgd), (scaled, other)):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            (scaler.scale(loss) if model is scaled else loss).backward()
        sgd.step()
        scaler.step(other)
        scaler.update()
    assert scaler.get_scale() == 1.0
    assert all(torch.equal(c, s) for c, s in zip(control.parameters(), scaled.parameters()))


def test_two_models_and_two_optimizers_of_two_losses(scaler_of: Any) -> None:
    """The second's gradient overflows once: it skips, the first does not."""
    pairs = [models(), models()]
    optimizers = [[torch.optim.SGD(model.parameters(), lr=0.5) for model in pair] for pair in pairs]
    scaler = scaler_of(init_scale=128.0, growth_interval=1)
    for side in (0, 1):
        first, second = pairs[0][side], pairs[1][side]
        for index, (x, y) in enumerate(batches()):
            for pair in optimizers:
                pair[side].zero_grad()
            one, two = first(x), second(x)
            losses = mse(0.3 * one + 0.7 * two, y), mse(0.6 * one - 0.4 * two, y)
            for position, loss in enumerate(losses):
                (scaler.scale(loss) if side else loss).backward(retain_graph=position == 0)
            if not side:
                optimizers[0][0].step()
                if index != SKIPPED:
                    optimizers[1][0].step()
                continue
            if index == SKIPPED:
                spoil(second)
            scaler.unscale_(optimizers[0][1])
            scaler.step(optimizers[0][1])
            scaler.step(optimizers[1][1])
            scaler.update()
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    for control, scaled in pairs:
        for c, s in zip(control.parameters(), scaled.parameters()):
            torch.testing.assert_close(s, c, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_gradients_that_are_spoiled_after_unscaling_spoil_the_parameters(
    scaler_of: Any, cls: Any, options: dict[str, bool]
) -> None:
    model, _ = models()
    optimizer, scaler = cls(model.parameters(), lr=1.0, **options), scaler_of(init_scale=128.0)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(mse(model(x), y)).backward()
        scaler.unscale_(optimizer)
        for index, param in enumerate(model.parameters()):
            assert param.grad is not None
            param.grad.fill_(math.inf if index % 2 else math.nan)
        scaler.step(optimizer)
        scaler.update()
    assert all(not param.isfinite().all() for param in model.parameters())
