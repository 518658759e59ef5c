"""What the public functions refuse: what is called, the error, and words that it must have. Nothing is changed by it.

Of rows that ask for one rule there is one. What a new user gets wrong is in test_first_day.py; what `jit` refuses, in
jit/test_refusals.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import funcamp
from funcamp import (
    ScalerConfig,
    ScalerState,
    all_finite,
    by_group,
    clip_grad_norm,
    clip_grad_value,
    ema_update,
    init,
    jit,
    loss,
    make_train_step,
    merge,
    module_loss,
    presets,
    ravel,
    scale,
    scaled_grad_and_value,
    skip_step,
    stateless,
    unscale_and_check,
    update,
)
from funcamp._optim.optimizer import OptState
from funcamp.rules.fairseq import Fairseq
from funcamp.rules.jmp import Jmp
from funcamp.rules.megatron import Megatron
from tests.support.helpers import assert_same, clone
from tests.support.steps import SGD

STATE = init()
W = torch.ones(2)
MOMENTUM = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = stateless(torch.optim.Adam)
CSR = torch.eye(2).to_sparse().coalesce()
DOUBLE = ScalerState(STATE.scale.double(), STATE.growth_tracker, STATE.found_inf)
BATCHED = ScalerState(*(leaf.expand(3) for leaf in STATE))
META = init(device="meta")


def LOSS(params: Any, batch: Any) -> Tensor:
    total: Tensor = (params["w"] * batch).sum()
    return total


STEP = make_train_step(LOSS, SGD)
START = STEP.init({"w": W})
WINDOW = make_train_step(LOSS, SGD, accumulate=2)
BUFFERED = module_loss(torch.nn.BatchNorm1d(2), torch.nn.functional.mse_loss)
SPARSE = make_train_step(module_loss(torch.nn.Embedding(3, 2, sparse=True), torch.nn.functional.mse_loss), SGD)
LINEAR = torch.nn.Linear(2, 2)
MODULE = module_loss(LINEAR, torch.nn.functional.mse_loss)
NO_AUX = make_train_step(module_loss(LINEAR, torch.nn.functional.mse_loss, has_aux=True), SGD)
NO_BUFFERS = make_train_step(loss(lambda params, buffers, batch: LOSS(params, batch), has_buffers=True), SGD)
NUMBERED = make_train_step(LOSS, SGD, observe={"f": lambda grads: {"t": grads["w"], "n": 2}})


ADAMW = torch.optim.AdamW([torch.ones(1, requires_grad=True)], lr=3e-4, betas=(0.9, 0.95))


def loss_of(value: Any) -> Callable[..., Any]:
    return lambda w: value(w)


#: What is called, the error, and its words.
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # the configuration
    "init_scale nan": (lambda: ScalerConfig(math.nan), ValueError, "init_scale must be positive.*got nan"),
    "init_scale beyond float32": (lambda: ScalerConfig(1e39), ValueError, "init_scale .*finite in float32.*got 1e\\+39"),
    "init_scale tensor": (lambda: ScalerConfig(W[0]), TypeError, "init_scale must be a Python number; got a torch.float32 tensor"),  # type: ignore[arg-type]
    "growth_factor below one": (lambda: ScalerConfig(growth_factor=0.9), ValueError, r"growth_factor must be 1 or more.*got 0\.9"),
    "backoff_factor of a division": (lambda: ScalerConfig(rule=Jmp(), backoff_factor=0.3), ValueError, "must be 1 / growth_factor for the rule Jmp,.*got 0.3"),
    "jmp factor": (lambda: presets.jmp(factor=0), ValueError, "factor must be above 1; got 0"),
    "growth_interval zero": (lambda: ScalerConfig(growth_interval=0), ValueError, "ScalerConfig: growth_interval must be 1 to 2147483647; got 0"),
    "min above max": (lambda: ScalerConfig(min_scale=8.0, max_scale=4.0), ValueError, "min_scale must not be above max_scale"),
    "init below min": (lambda: ScalerConfig(2.0, min_scale=4.0), ValueError, "init_scale must be within .*got 2.0"),
    "hysteresis": (lambda: Megatron(hysteresis=0), ValueError, "Megatron: hysteresis must be 1 to 2147483647; got 0"),
    "tolerance": (lambda: Fairseq(tolerance=1.5), ValueError, r"Fairseq: tolerance must be from 0 to 1; got 1\.5"),
    "rule": (lambda: ScalerConfig(rule="fast"), TypeError, "rule must be a Rule; got 'fast': funcamp.presets has"),  # type: ignore[arg-type]
    "enabled text": (lambda: presets.torch(enabled="False"), TypeError, "presets.torch: enabled must be True or False; got 'False'"),  # type: ignore[arg-type]
    # the state
    "init config": (lambda: init({"init_scale": 2}), TypeError, "init: config must be a ScalerConfig; got a dict with 'init_scale'"),  # type: ignore[arg-type]
    "state pair": (lambda: scale((STATE, W), W), TypeError, "scale: state must be a ScalerState.*got a tuple of a ScalerState, "),  # type: ignore[arg-type]
    "state dtype": (lambda: update(DOUBLE), TypeError, "state.scale must be a torch.float32 tensor; got a torch.float64 tensor"),
    "state shape": (lambda: unscale_and_check(BATCHED, W), ValueError, r"state.scale must have shape \(\); got \(3,\).*vmap"),
    # trees
    "scale number": (lambda: scale(STATE, 3.0), TypeError, "scale: outputs must be a tensor or None; got 3.0 of type float"),
    "scale device": (lambda: scale(META, W), ValueError, r"outputs must be on .* meta \(make the state with init"),
    "integer gradient": (lambda: unscale_and_check(STATE, [W, W.int()]), TypeError, r"grads\[1\] must be a strided or sparse COO floating-point.*int32"),
    "reduce shape": (lambda: unscale_and_check(STATE, W, reduce=lambda f: f[None]), ValueError, r"reduce must return .*\(1,\)"),
    "clone module": (lambda: funcamp.clone({"model": torch.nn.Linear(1, 1)}), TypeError, r"clone: tree .* got a Linear: write copy\.deepcopy"),
    # update and merge
    "new_scale zero": (lambda: update(STATE, new_scale=0.0), ValueError, "new_scale must be positive.*got 0.0"),
    "new_scale 0 in float32": (lambda: update(STATE, new_scale=1e-50), ValueError, "new_scale must be .*got 1e-50"),
    "new_scale dtype": (lambda: update(STATE, new_scale=W[0].double()), TypeError, "new_scale must be a float32.*float64"),
    "new_scale shape": (lambda: update(STATE, new_scale=W), ValueError, r"new_scale must have one element.*\(2,\)"),
    "merge nothing": (lambda: merge(), TypeError, "merge: states must be one scaler state or more; got none"),
    "merge tensor": (lambda: merge(STATE, W), TypeError, "merge: states must be of one type; got ScalerState and"),  # type: ignore[arg-type]
    # skip_step
    "skip structure": (lambda: skip_step(STATE, new={"a": W, "b": W}, old={"a": W}), ValueError, r"new\['b'\] against no leaf"),
    "skip shape": (lambda: skip_step(STATE, new=[W], old=[W[:1]]), ValueError, r"new\[0\] must have the shape.*\(2,\).*\(1,\)"),
    "skip value": (lambda: skip_step(STATE, new=[1], old=[2]), TypeError, r"new\[0\] must be a tensor in both trees, or an equal"),
    "skip array": (lambda: skip_step(STATE, new={"k": W.numpy()}, old={"k": W.numpy().copy()}), TypeError, r"skip_step: new\['k'\] must be a tensor in both trees, or an equal value; got a ndarray against a ndarray in old"),
    "skip sparse": (lambda: skip_step(STATE, new=CSR, old=CSR.clone()), TypeError, "new must be strided; got layout"),
    # scaled_grad_and_value
    "loss_fn": (lambda: scaled_grad_and_value(3), TypeError, "loss_fn must be callable; got 3"),  # type: ignore[arg-type]
    "loss integer": (lambda: scaled_grad_and_value(loss_of(lambda w: (w > 0).sum()))(STATE, W), TypeError, "as loss; got a torch.int64"),
    "aux number": (lambda: scaled_grad_and_value(loss_of(lambda w: (w.sum(), {"n": 1})), has_aux=True)(STATE, W), TypeError, r"aux\['n'\]"),
    # clipping
    "max_norm zero": (lambda: clip_grad_norm(W, 0.0), ValueError, "max_norm must be positive; got 0.0"),
    "clip integer": (lambda: clip_grad_norm([W.int()], 1.0), TypeError, r"grads\[0\] must be a strided floating-point"),
    # optimizers
    "optimizer integer": (lambda: SGD.init({"n": W.int()}), TypeError, r"init: params\['n'\] must be a strided floating"),
    "optimizer tree": (lambda: SGD.update({"a": W}, {"b": W}, SGD.init({"a": W})), ValueError, r"params\['a'\] against grads\['b'\]"),
    "optimizer shape": (lambda: SGD.update([W], [W[:1]], SGD.init([W])), ValueError, r"grads\[0\] must have its parameter's shape"),
    "optimizer state foreign": (lambda: ADAM.update(W, W, SGD.init(W)), ValueError, r"must hold the entries .*exp_avg.*got \[\]"),
    # flat storage, policy, groups
    "ravel label": (lambda: ravel([W], group=lambda name, leaf: 1), TypeError, "ravel: group must return a string; got 1"),  # type: ignore[arg-type, return-value]
    "ravel tied": (lambda: ravel({"a": W, "b": W}, group=lambda name, leaf: name), ValueError, "got 'a' and 'b' for 'b'"),
    "flat ravel shape": (lambda: ravel([W]).ravel([W[:1]]), ValueError, r"ravel: tree\[0\] must have shape \(2,\); got .*\(1,\)"),
    "flat and dict": (lambda: skip_step(STATE, new=ravel({"w": W}), old={"w": W}), ValueError, "new and old must have one tree structure"),
    "state_dict names": (lambda: ravel({"a.b": W, "a": {"b": W + 1}}).state_dict(), ValueError, "unique dotted name; got 'a.b' twice"),
    "by_group empty": (lambda: by_group({}), TypeError, "optimizers must be a mapping.*got {}"),
    "by_group label": (lambda: by_group({"matrix": SGD}).init({"w": W}), ValueError, r"one of \['matrix'\]; got 'vector'"),
    "by_group state": (lambda: by_group({"vector": SGD}).update(W, W, {}), TypeError, "opt_state must hold a state for each"),
    "module_loss criterion": (lambda: module_loss(torch.nn.Linear(1, 1), 3), TypeError, "criterion must be callable; got 3"),  # type: ignore[arg-type]
    # the step
    "step policy": (lambda: make_train_step(LOSS, SGD, policy=16), TypeError, "policy must be a string, a torch.dtype or None; got 16"),  # type: ignore[arg-type]
    "step policy dtype": (lambda: make_train_step(LOSS, SGD, policy=torch.int8), ValueError, "policy must be one of float16.*got torch.int8"),
    "step policy true": (lambda: make_train_step(LOSS, SGD, policy="16-true"), ValueError, "make_train_step: policy must be one of float16, bfloat16, float32; got '16-true'"),
    "step module": (lambda: make_train_step(torch.nn.Linear(1, 1), SGD), TypeError, r"write module_loss\(model, criterion\).*got the module Linear itself"),
    "step torch optimizer": (lambda: make_train_step(LOSS, ADAMW), TypeError, r"optimizer must be a pure optimizer with init and update; got an AdamW: write stateless\(torch.optim.AdamW, lr=...\)"),
    "step max_norm": (lambda: make_train_step(LOSS, SGD, max_norm=0.0), ValueError, "max_norm must be positive; got 0.0"),
    "step limits": (lambda: make_train_step(LOSS, SGD, max_norm=1.0, max_value=1.0), ValueError, "must not both be given"),
    "step accumulate": (lambda: make_train_step(LOSS, SGD, accumulate=0), ValueError, "accumulate must be 1 or more; got 0"),
    "step ema": (lambda: make_train_step(LOSS, SGD, ema_decay=1.5), ValueError, "ema_decay must be from 0 to 1; got 1.5"),
    "step weight": (lambda: make_train_step(LOSS, SGD, weight=3), TypeError, "weight must be a function of a micro-batch; got 3"),  # type: ignore[arg-type]
    "step observe": (lambda: make_train_step(LOSS, SGD, observe=all_finite), TypeError, "observe must be a dict of names to functions; got <function all_finite"),  # type: ignore[arg-type]
    "step observe function": (lambda: make_train_step(LOSS, SGD, observe={"f": True}), TypeError, "observe must be a dict of names to functions; got a dict with 'f'"),  # type: ignore[dict-item]
    "step observe number": (lambda: NUMBERED(START, W), TypeError, r"step: observe\['f'\]\['n'\] must return tensors; got 2"),
    # the loss
    "loss of a module": (lambda: loss(torch.nn.Linear(1, 1)), TypeError, r"loss: function must be .* write module_loss\(model, criterion\).*got the module Linear itself"),
    "loss has_aux": (lambda: loss(LOSS, has_aux="yes"), TypeError, "loss: has_aux must be True or False; got 'yes'"),  # type: ignore[arg-type]
    "loss engine": (lambda: loss(LOSS, engine="tape"), ValueError, "loss: engine must be 'func', 'autograd' or None; got 'tape'"),  # type: ignore[arg-type]
    "loss probe": (lambda: loss(LOSS, probes=[1]), TypeError, "loss: probes must be names; got 1"),  # type: ignore[list-item]
    "loss probes": (lambda: loss(LOSS, probes=["a", "a"]), ValueError, r"loss: probes must differ; got \('a', 'a'\)"),
    "module_loss has_aux": (lambda: module_loss(LINEAR, has_aux=True), ValueError, "module_loss: has_aux must be False without a criterion, which returns aux; got True"),
    "module_loss no aux": (lambda: NO_AUX(NO_AUX.init(), (W, W)), TypeError, r"module_loss: criterion must return a pair: \(loss, aux\), .*; got a torch.float32 tensor"),
    "init group of a tree": (lambda: STEP.init({"w": W}, flat=False, group=lambda name, leaf: name), ValueError, "init: flat must be True with a group; got False"),
    "init nothing": (lambda: STEP.init(), TypeError, "params must be given.*got None"),
    "module_loss criterion class": (lambda: module_loss(LINEAR, torch.nn.MSELoss), TypeError, r"criterion must be a function or an object; got the class MSELoss: pass MSELoss\(\)"),
    "init module": (lambda: STEP.init(LINEAR), TypeError, r"init: params must be a pytree of tensors.*; got Linear: .* init\(\)"),
    "init sparse buffers": (lambda: STEP.init({"w": W}, {"b": W.to_sparse()}), TypeError, r"buffers\['b'\] must be strided"),
    "init buffers": (lambda: STEP.init({"w": W}, {"b": 1}), TypeError, "buffers must be a dict of tensors"),  # type: ignore[dict-item]
    "init names": (lambda: make_train_step(MODULE, SGD).init({"weight": W}), ValueError, "must have the names .* differ in 'bias'"),
    "loss without aux": (lambda: make_train_step(loss(LOSS, has_aux=True), SGD).loss(START, W), TypeError, r"loss: loss_fn must return a pair: \(loss, aux\), .*; got a torch.float32 tensor"),
    "step without buffers": (lambda: NO_BUFFERS(NO_BUFFERS.init({"w": W}, {"b": W}), W), TypeError, r"step: loss_fn must return a pair: .*\(loss, buffers\) .*; got a torch.float32 tensor"),
    "state_dict state": (lambda: STEP.state_dict(3), TypeError, "^state_dict: state must be a TrainState.*got 3"),  # type: ignore[arg-type]
    "flat name": (lambda: START.params["v"], KeyError, "'v' must be in .tree\\(\\), a dict with 'w'"),
    "flat index": (lambda: ravel([W, {"b": W}])[2], IndexError, r"2 must be in .tree\(\), a list of a torch.float32 tensor"),
    "flat batch": (lambda: torch.func.vmap(STEP.init)({"w": torch.ones(3, 2)}).params.tree(), ValueError, r"no batch dimension; got \(3, \d+\): take the tree under vmap"),
    "flat iteration": (lambda: list(START.params), TypeError, r"must not be iterated over: .tree\(\) is the pytree of its tensors"),
    "flat attribute": (lambda: START.params.items(), AttributeError, r"has no attribute 'items': .tree\(\) is the pytree"),  # type: ignore[attr-defined]
    "jit module": (lambda: jit(torch.nn.Linear(1, 1)), TypeError, r"step must be a function \(state, batch\).*got a Linear: write jit\(make_train_step"),
    "jit loss": (lambda: jit(MODULE), TypeError, "got a ModuleLoss: write jit"),
    "jit class": (lambda: jit(torch.nn.Linear), TypeError, "got the class Linear: write jit"),  # type: ignore[arg-type]
    "init one name twice": (lambda: STEP.init({"w.b": W, "w": {"b": W + 1}}), ValueError, "a unique dotted name; got 'w.b' twice"),
    "module_loss call": (lambda: BUFFERED({}, (W, W)), TypeError, "called with params, buffers and batch; got 2 arguments"),
    "module_loss max_norm": (lambda: module_loss(torch.nn.Embedding(3, 2, max_norm=1.0), torch.nn.functional.mse_loss), ValueError, "write its parameters in the forward pass; got max_norm=1.0"),
    "step sparse": (lambda: SPARSE(SPARSE.init(), (torch.arange(3), torch.ones(3, 2))), TypeError, "gradients must be dense.*sparse_coo"),
    "step window": (lambda: WINDOW(START, torch.ones(3, 2)), ValueError, r"1 to 2 micro-batches.*got \[\(3, 2\)\]"),
    "step window ragged": (lambda: WINDOW(START, (W, torch.ones(1))), ValueError, r"all the same number.*: stack them, \[torch.stack"),
    "step assigned": (lambda: setattr(STEP, "max_norm", 1.0), AttributeError, "max_norm cannot be assigned.*; got 1.0. Call make_train_step with another max_norm"),
    "jit assigned": (lambda: setattr(jit(STEP), "donate", False), AttributeError, "donate cannot be assigned.* Call jit with donate=False"),
    "jit generator": (lambda: jit(STEP)(START, torch.Generator()), TypeError, "must be a tensor, or a constant .*; got a Generator"),
    "ema tree": (lambda: ema_update({"a": W}, {"b": W}, 0.5), ValueError, "average and params must have one tree structure"),
    "ema shape": (lambda: ema_update({"a": W[:, None]}, {"a": W}, 0.5), ValueError, r"ema_update: params\['a'\] must have the shape, dtype and device of average; got .*\(2,\) .*against .*\(2, 1\)"),
    "ema decay": (lambda: ema_update(W, W, -0.1), ValueError, "decay must be from 0 to 1; got -0.1"),
    "clip value": (lambda: clip_grad_value(W, 0.0), ValueError, "max_value must be positive; got 0.0"),
    "clip value complex": (lambda: clip_grad_value([W + 1j], 1.0), RuntimeError, "clamp is not supported for complex"),
    "optimizer state tree": (lambda: MOMENTUM.update(W, W, OptState(W[0], {"momentum_buffer": [W]})), ValueError, r"params and opt_state.state\['momentum_buffer'\] must have one tree"),
}  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_the_argument_is_named_with_the_rule_and_the_value(name: str) -> None:
    call, error, text = CASES[name]
    before = clone((STATE, W))
    with pytest.raises(error, match=f"(?s){text}"):
        call()
    assert_same((STATE, W), before)


def test_a_config_is_frozen_hashable_and_a_constant() -> None:
    config = ScalerConfig(init_scale=8)
    assert config == ScalerConfig(init_scale=8.0)
    assert hash(config) == hash(ScalerConfig(init_scale=8.0))
    assert isinstance(config.init_scale, float)
    with pytest.raises(AttributeError):
        config.init_scale = 2.0  # type: ignore[misc]


def test_presets_are_these_configurations() -> None:
    assert presets.torch() == ScalerConfig()
    assert presets.torch(4.0, 3.0, 0.1, 7) == ScalerConfig(4.0, 3.0, 0.1, 7)
    assert presets.torch(enabled=False) == presets.disabled() == presets.static(1.0)


@pytest.mark.compiled
def test_a_compiled_function_has_the_same_message() -> None:
    # Dynamo wraps an exception of the traced code in one of its own; the text must survive.
    def call(w: Tensor) -> object:
        return unscale_and_check(STATE, {"n": w.int()})

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"grads\[.*n.*\] must be a strided or sparse COO"):
        torch.compile(call, fullgraph=True, backend="eager")(W)
