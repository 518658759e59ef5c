"""What a step refuses: what is called, and words that the error must have. A refused call changes nothing.

Wrong types and numbers of the arguments are in tests/test_bad_input.py, mistakes of a first day in tests/test_first_day.py.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_map

from funcamp import loss, make_train_step, module_loss, presets, ravel, stateless
from tests.support.helpers import assert_refused, assert_same, clone
from tests.support.masked import masked
from tests.support.steps import SGD

Call = Callable[[], object]
W, X = {"w": torch.ones(4)}, torch.ones(4)
ANY: Any = None


def plain(params: Any, x: Any) -> Any:
    return (params["w"] * x).sum()


STEP = make_train_step(plain, SGD)
START = STEP.init(W)
LINEAR = nn.Linear(4, 1)


def weighted(weight: Any) -> Call:
    """A step whose weight returns something."""
    batch = (torch.ones(2, 8, 4), torch.ones(2, 8))
    return lambda: make_train_step(masked, SGD, accumulate=2, weight=weight)(START, batch)


def beside(returned: Callable[[Any], Any], has_aux: bool = False) -> Call:
    """A step whose loss returns something of its buffers beside."""
    described = loss(lambda p, b, x: (plain(p, x), returned(b["n"])), has_buffers=True, has_aux=has_aux)
    step = make_train_step(described, SGD)
    return lambda: step(step.init(W, {"n": torch.zeros(())}), X)


class Deletes(nn.BatchNorm1d):
    """Deletes a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        del self.running_mean
        return out


def deleting() -> None:
    step, rows = make_train_step(module_loss(Deletes(2), mse_loss), SGD), torch.ones(2, 2)
    step(step.init(), (rows, rows))


def entered(region: Callable[[], Any]) -> Call:
    def enter() -> None:
        with region():
            pass

    return enter


TORCH = torch.optim.AdamW(LINEAR.parameters(), lr=0.01)
mse_loss(LINEAR(X), X[:1]).backward()
TORCH.step()
SAVED, SCALER = TORCH.state_dict(), torch.amp.GradScaler("cpu").state_dict()
ADAMW = make_train_step(module_loss(LINEAR, mse_loss), stateless(torch.optim.AdamW, lr=0.01))
LIKE = ADAMW.init()
HALF: Any = 2.5
DECAY = {"weight_decay": 0.01, "decoupled_weight_decay": True}
NADAM = make_train_step(module_loss(LINEAR, mse_loss), stateless(torch.optim.NAdam, lr=0.01, **DECAY))
OF_SGD = make_train_step(module_loss(LINEAR, mse_loss), SGD).init()
OTHER = make_train_step(module_loss(nn.Linear(3, 1), mse_loss), stateless(torch.optim.AdamW, lr=0.01))
OF_OTHER = OTHER.init()


def from_torch(scaler: Any = None, state: Any = None, **group: Any) -> Call:
    """`from_torch` with a scaler; or with torch's optimizer, whose group and first state have something else."""
    saved = None
    if scaler is None:
        saved = copy.deepcopy(SAVED)
        saved["param_groups"][0] |= group
        saved["state"][0] |= state or {}
    return lambda: ADAMW.from_torch(LIKE, optimizer=saved, scaler=scaler)


def of_stacked(call: Callable[[Any], object]) -> Call:
    """A call with stacked parameters, as those of an ensemble, after a step on others in the same layout."""
    state = ADAMW.init(flat=False)
    stacked = state._replace(params=tree_map(lambda param: torch.stack([param, param]), state.params))

    def take_and_call() -> object:
        ADAMW(state, (X, X[:1]))
        return call(stacked)

    return take_and_call


def inside_evaluating(call: Call) -> Call:
    def evaluate() -> None:
        with ADAMW.evaluating(LIKE):
            with ADAMW.evaluating(LIKE):
                pass
            call()

    return evaluate


#: What is called, the error, and its words.
REFUSED: dict[str, tuple[Call, type[Exception], str]] = {
    # the loss
    "loss of the module": (lambda: make_train_step(lambda p, x: LINEAR(x).sum(), SGD)(START, X), ValueError, "step: .*parameters it is given; it uses none.*module_loss"),
    "loss described twice": (lambda: loss(functools.partial(loss(plain, engine="func"))), TypeError, "loss: function must not be a loss already"),
    "keep_buffers": (lambda: loss(plain, keep_buffers=True), ValueError, "loss: keep_buffers must be False without has_buffers"),
    "criterion": (lambda: module_loss(LINEAR, loss(lambda out, y: out.sum())), TypeError, "module_loss: criterion must be a plain function"),
    "aux forgotten": (beside(lambda n: {"n": n}, has_aux=True), TypeError, r"step: loss_fn must return \(loss, \(buffers, aux\)\) with both; got a dict"),
    "a buffer less": (beside(lambda n: {}), ValueError, "step: .* 'n' was .*, is None"),
    "dtype of a buffer": (beside(lambda n: {"n": n.double()}), ValueError, "step: .* 'n' was .*float32.* is .*float64"),
    "shape of a buffer": (beside(lambda n: {"n": n.expand(2)}), ValueError, r"step: .* 'n' was .*\(\).* is .*\(2,\).*: call a model .* once before init"),
    "a lazy module": (lambda: module_loss(nn.Sequential(nn.LazyLinear(3)), mse_loss), ValueError, "model must have its shapes; '0.weight' is lazy: call the model on a batch"),
    "a buffer that is deleted": (deleting, ValueError, "must keep its buffers; .* deleted 'running_mean'"),
    # options
    "weight returns a vector": (weighted(lambda batch: batch[1]), ValueError, r"step: weight must return a tensor of shape \(\); got a torch.float32 tensor of shape \(8,\)"),
    "weight is negative": (weighted(lambda _: -1), ValueError, "step: weight must return 0 or a positive number; got -1"),
    "weight is nothing": (weighted(lambda _: None), TypeError, r"step: weight must return a number or a tensor of shape \(\); got None"),
    # the state
    "buffers of a loss without": (lambda: STEP.init(W, {"n": X}), ValueError, "init: buffers must be None for a loss without"),
    "names of buffers": (lambda: make_train_step(module_loss(nn.BatchNorm1d(2), mse_loss), SGD).init(buffers={"running_mean": X}), ValueError, "init: buffers .*differ in 'num_batches_tracked'"),
    "saved as an object": (lambda: torch.save({"state": START}, io.BytesIO()), TypeError, r"torch.save: a TrainState must be saved by its tensors.*step.state_dict"),
    "evaluating without a module": (entered(lambda: STEP.evaluating(START)), TypeError, "evaluating: the step must have a loss of module_loss"),
    "stacked parameters": (of_stacked(lambda state: ADAMW(state, (X, X[:1]))), ValueError, r"step: params\['weight'\] must have the shape of the module's, \(1, 4\); got \(2, 1, 4\)"),
    "stacked, for another network": (of_stacked(ADAMW.compute_params), ValueError, r"compute_params: params\['weight'\] must have the shape"),
    "a state of another rule": (lambda: make_train_step(plain, SGD, presets.megatron())(START, X), TypeError, "step: state must count hysteresis_tracker"),
    "another step of a module that is evaluated": (inside_evaluating(lambda: NADAM(NADAM.init(), (X, X[:1]))), RuntimeError, "step: it must be called outside of `with step.evaluating"),
    "consume of a module that is evaluated": (inside_evaluating(lambda: ADAMW.init(consume=True)), RuntimeError, "init: it must be called outside of"),
    "consume of a scripted layer": (lambda: make_train_step(module_loss(nn.Sequential(torch.jit.script(nn.Linear(4, 1))), mse_loss), SGD).init(consume=True), TypeError, "init: consume must be False .* scripted; got True, and '0' is"),
    "consume without a module": (lambda: STEP.init(W, consume=True), TypeError, "init: consume must be False for a loss that module_loss did not make"),
    "consume what is given": (lambda: ADAMW.init(dict(LINEAR.named_parameters()), consume=True), ValueError, "init: consume must be False if .*got True and params="),
    "consume with buffers": (lambda: ADAMW.init(buffers={}, consume=True), ValueError, "init: consume must be False if .*got True and buffers="),
    "load without a module": (lambda: STEP.load_state_dict(STEP.state_dict(START), START, consume=True), TypeError, "load_state_dict: consume must be False for a loss that"),
    "state_dict of a state": (lambda: module_loss(LINEAR, mse_loss).state_dict(ANY), TypeError, "state_dict: params must be tensors by name, as state.params; got None"),
    "state_dict without buffers": (lambda: module_loss(nn.BatchNorm1d(2, affine=False), mse_loss).state_dict({}), TypeError, "state_dict: buffers must be given for a module that saves 'num_batches_tracked'"),
    "no bias": (lambda: ADAMW(LIKE._replace(params=ravel({"weight": LINEAR.weight, "bias": None})), X), ValueError, r"step: params\['bias'\] must have the shape of the module's, \(1,\); got None"),
    "like another model's": (lambda: ADAMW.load_state_dict(OTHER.state_dict(OF_OTHER), like=OF_OTHER, consume=True), ValueError, r"load_state_dict: params\['weight'\] must .*; got \(1, 3\)"),
    # to_torch
    "another model's": (lambda: ADAMW.to_torch(OF_OTHER), ValueError, r"to_torch: params\['weight'\] must .*; got \(1, 3\)"),
    "another optimizer's": (lambda: ADAMW.to_torch(OF_SGD), ValueError, r"to_torch: state must be one of this step, with the entries that .*AdamW.* keeps; odd is 'opt_state\.state\.exp_avg\.bias'"),
    "of an optimizer with more": (lambda: make_train_step(module_loss(LINEAR, mse_loss), SGD).to_torch(LIKE), ValueError, r"to_torch: state must be one of this step"),
    # from_torch
    "another rate": (from_torch(lr=0.5), ValueError, "from_torch: optimizer must have the step's lr, 0.01; got 0.5 for 'weight'"),
    "another class": (from_torch(state={"max_exp_avg_sq": X}), ValueError, "from_torch: optimizer must be of the step's class.* got .*'max_exp_avg_sq'"),
    "a class that keeps more": (lambda: NADAM.from_torch(NADAM.init(), optimizer=SAVED), ValueError, "from_torch: optimizer must be of the step's class, which keeps .*'mu_product'"),
    "other names": (from_torch(param_names=["other", "bias"]), ValueError, r"from_torch: .*the step's parameters; .*param_names are \(other, bias"),
    "fewer parameters": (from_torch(params=[0]), ValueError, "from_torch: .*the step's parameters; it has 1 in 1 groups"),
    "a part of a step": (lambda: ADAMW.from_torch(LIKE, steps=HALF), TypeError, "from_torch: steps must be an integer; got 2.5"),
    "steps before the first": (lambda: ADAMW.from_torch(LIKE, steps=-1), ValueError, "from_torch: steps must be 0 or more; got -1"),
    "another scaler": (from_torch(SCALER | {"growth_interval": 7}), ValueError, r"from_torch: scaler must have .*growth_interval=2000.*; got .*growth_interval=7"),
    "a scale of 0": (from_torch(SCALER | {"scale": 0.0}), ValueError, r"from_torch: saved\['scaler.scale'\] must be above 0"),
    "like is no state": (lambda: ADAMW.from_torch(ANY, optimizer=SAVED), TypeError, "from_torch: like must be a TrainState, as init makes it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_rule_and_the_value(name: str) -> None:
    before = clone((START, LIKE, [*LINEAR.parameters()]))
    assert_refused(*REFUSED[name])
    assert_same((START, LIKE, [*LINEAR.parameters()]), before)
