"""What a new user gets wrong on the first day: each mistake is an error with its fix, or harmless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import funcamp
from funcamp import GradScaler, init, jit, make_train_step, module_loss, skip_step, stateless, unscale_and_check
from tests.support.helpers import assert_same, clone, values_of
from tests.support.steps import SGD

X, Y = torch.linspace(-1, 1, 64).reshape(16, 4), torch.ones(16, 1)
WEIGHTS = {"w": torch.ones(2, 2)}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)


MODEL = make_model()
ADAM = torch.optim.Adam(MODEL.parameters(), lr=0.1)
STEP: Any = make_train_step(module_loss(MODEL, mse_loss), SGD, policy="float16")
START = STEP.init()
PLAIN: Any = make_train_step(lambda params, batch: (params["w"] * batch).sum(), SGD)
PLAIN_START = PLAIN.init(WEIGHTS)
LOADER: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
HALF = make_model(torch.float16)
FROZEN = make_model().requires_grad_(False)
TALL = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
SCALED = torch.amp.GradScaler("cpu").state_dict()
MODEL_DICT: Any = MODEL.state_dict()
LOOP = {"model": MODEL_DICT, "optimizer": ADAM.state_dict(), "scaler": SCALED, "epoch": 3}
COSINE = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD(MODEL.parameters(), lr=0.1), 10)
SCHEDULE: Any = torch.optim.lr_scheduler


def loss_of(criterion: Callable[[Any, Any], Any], batch: Any = (X, Y), model: nn.Module = MODEL) -> Any:
    step = make_train_step(module_loss(model, criterion), SGD)
    return step(step.init(), batch)


def run(step: Any, state: Any, *batch: Any) -> Any:
    return jit(step, backend="eager")(state, *batch)


def missing_grads() -> Any:
    return {name: param.grad for name, param in make_model().named_parameters()}


def what_stays() -> Any:
    """What a refused call must leave: a state, the values of two modules, and where the second has its memory."""
    return START, values_of(MODEL), values_of(HALF), [value.data_ptr() for value in HALF.parameters()]


#: What is called, the error, and its words.
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # float16 parameters
    "half module": (
        # contract: "float16 is refused"
        lambda: make_train_step(module_loss(HALF, mse_loss), SGD, policy="float16").init(consume=True), TypeError, r"init: params\['0.weight'\] must not be float16, .*; got a torch.float16 tensor of shape \(8, 4\) on cpu: keep it in float32, model.float\(\).*autocast casts"
    ),
    "half state": (lambda: PLAIN(PLAIN_START._replace(params=PLAIN_START.params.ravel({"w": WEIGHTS["w"].half()})), X), TypeError, r"step: params\['w'\] must not be float16"),
    # the call of a step
    "dict as params": (lambda: PLAIN(PLAIN_START._replace(params=WEIGHTS), X), TypeError, r"step: state.params must be Params, as init makes them; got a dict with .*state.params.ravel\(tree\)"),
    "pair as state": (lambda: STEP(STEP(START, (X, Y)), (X, Y)), TypeError, "step: state must be a TrainState.*got a tuple of a TrainState, a Metrics"),
    "forgotten init": (lambda: STEP(MODEL, (X, Y)), TypeError, r"step: state must be a TrainState.*got a Sequential"),
    "init of jit": (lambda: jit(STEP, backend="eager").init(), AttributeError, r"jit\(.*\): has no 'init': it is the step's that it was made of, step.init"),  # type: ignore[attr-defined]
    "loader": (lambda: STEP(START, LOADER), TypeError, r"step: batch must be one batch; got a DataLoader of them: write for batch in loader"),
    # the loss
    "vector": (lambda: loss_of(lambda out, y: (out - y).square()), ValueError, r"loss of shape \(\); got \(16, 1\): take its mean\(\) or sum\(\)"),
    "pair": (lambda: loss_of(lambda out, y: (mse_loss(out, y), out)), TypeError, "as loss; got a tuple.*has_aux=True"),
    "dict": (lambda: loss_of(lambda out, y: {"loss": mse_loss(out, y)}), TypeError, r"as loss; got a dict with 'loss'"),
    "criterion as model": (lambda: module_loss(mse_loss, MODEL), TypeError, r"model must be a torch.nn.Module; got <function mse_loss.*"),  # type: ignore[arg-type]
    "optimizer as loss": (lambda: make_train_step(SGD, module_loss(MODEL, mse_loss)), TypeError, "loss_fn must be callable; got stateless"),  # type: ignore[arg-type]
    "policy as config": (lambda: make_train_step(PLAIN.loss_fn, SGD, "float16"), TypeError, "config must be a ScalerConfig; got 'float16': write ScalerConfig"),  # type: ignore[arg-type]
    "frozen": (lambda: make_train_step(module_loss(FROZEN, mse_loss), SGD).init(), ValueError, r"params must hold a tensor; got {} \(a module's frozen parameters are not"),
    "other shapes": (lambda: STEP.init({name: value[:1] for name, value in values_of(MODEL).items()}), ValueError, r"init: params\['0.weight'\] must have the shape of the module's, \(8, 4\); got \(1, 4\)"),
    "another model's state": (lambda: make_train_step(module_loss(TALL, mse_loss), SGD, policy="float16")(START, (X, Y)), ValueError, r"step: params\['0.weight'\] must have the shape of the module's, \(16, 4\); got \(8, 4\)"),
    # optimizers
    "parameters": (lambda: stateless(torch.optim.AdamW, MODEL.parameters(), lr=0.1), TypeError, r"stateless: hyperparameters must be given by name, and parameters must not be given, as they are in the state; got <generator.*: write stateless\(torch.optim.AdamW, lr=...\)"),  # type: ignore[arg-type]
    "instance": (lambda: stateless(ADAM), TypeError, r"stateless: optimizer must be a subclass of torch.optim.Optimizer; got an Adam: write stateless"),  # type: ignore[arg-type]
    "learning_rate": (lambda: stateless(torch.optim.AdamW, learning_rate=0.1), TypeError, "AdamW has no hyperparameter learning_rate; got learning_rate=0.1: it has lr, betas, eps"),
    "rate text": (lambda: stateless(torch.optim.AdamW, lr="1e-3"), TypeError, r"AdamW refuses its hyperparameters: .*; got lr='1e-3'"),
    "scheduler": (lambda: stateless(torch.optim.SGD, lr=COSINE), TypeError, r"stateless: lr must be a number, a tensor or a schedule; got .*CosineAnnealingLR.*: write funcamp.schedule"),
    "LambdaLR": (lambda: SCHEDULE.LambdaLR(SGD, lambda n: 1.0), AttributeError, "has no 'param_groups': it is no torch.optim.Optimizer; call update, and funcamp.schedule for a scheduler of torch"),
    # checkpoints
    "module's dict": (lambda: STEP.load_state_dict(MODEL_DICT, START), ValueError, r"it lacks 'params.0.bias': .*from_torch\(step.init\(\), optimizer=..., scaler=...\)"),
    "loop's dict": (lambda: STEP.load_state_dict(LOOP, START), ValueError, "load_state_dict: saved .*from_torch"),
    "step's dict without": (lambda: STEP.load_state_dict({k: v for k, v in STEP.state_dict(START).items() if k != "skipped"}, START), ValueError, r"it lacks 'skipped'; 1 of \d+ names differ. To take those that both have: {"),
    "GradScaler, module's dict": (lambda: GradScaler("cpu").load_state_dict(MODEL_DICT), KeyError, "GradScaler.load_state_dict: state_dict must have 'scale', as scaler.state_dict.. has; got an OrderedDict with '0.weight', "),
    "GradScaler, no dict": (lambda: GradScaler("cpu").load_state_dict(None), TypeError, "GradScaler.load_state_dict: state_dict must be a dict; got None"),  # type: ignore[arg-type]
    "from_torch, instance": (lambda: STEP.from_torch(START, optimizer=ADAM), TypeError, r"from_torch: optimizer must be the state_dict\(\) .*; got an? Adam"),
    "from_torch, scaler": (lambda: STEP.from_torch(START, scaler=GradScaler("cpu")), TypeError, r"saved must be a dict; got .*GradScaler"),
    # GradScaler
    "GradScaler text": (lambda: GradScaler("cpu", growth_factor="2"), TypeError, "growth_factor must be a Python number; got '2'"),  # type: ignore[arg-type]
    # functions
    "no gradients": (lambda: unscale_and_check(init(), missing_grads()), ValueError, r"unscale_and_check: grads must hold a gradient; got None for all of its 4 leaves: call backward\(\) before"),
}  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_fix(name: str) -> None:
    call, error, text = CASES[name]
    before = clone(what_stays())
    with pytest.raises(error, match=f"(?s){text}"):
        call()
    assert_same(what_stays(), before)


def test_the_text_of_torchs_schedulers_is_a_heading_of_the_questions() -> None:
    with pytest.raises(TypeError) as raised:  # torch asks for the class first
        SCHEDULE.StepLR(SGD, 10)
    text = Path("docs/questions.md").read_text()
    assert "`funcamp.schedule`" in text.partition(f'## "{raised.value}"')[2].partition("\n## ")[0]


def test_frozen_float16_parameters_are_allowed() -> None:
    model = make_model()
    model[0].half().requires_grad_(False)
    step = make_train_step(module_loss(model, mse_loss), SGD, policy="float16")
    state, metrics = step(step.init(), (X, Y))
    assert list(state.params.tree()) == ["2.weight", "2.bias"]
    assert metrics.loss.isfinite()


def test_parameters_of_a_module_make_no_graph_in_a_loop_of_functions() -> None:
    model = make_model()
    params: Any = dict(model.named_parameters())
    opt_state, scaler, average = SGD.init(params), init(), params
    grad_fn = funcamp.scaled_grad_and_value(lambda params, x: torch.func.functional_call(model, params, x).sum())
    for _ in range(3):
        (grads, scaler), _ = grad_fn(scaler, params, X)
        new = SGD.update(params, grads, opt_state)
        params, opt_state = skip_step(scaler, new=new, old=(params, opt_state))
        average = funcamp.ema_update(average, dict(model.named_parameters()), 0.9)
        scaler = funcamp.update(scaler)
        assert not any(leaf.requires_grad for leaf in (*params.values(), *average.values(), *scaler))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_gradient_flows_through_a_selected_step_that_has_one(found_inf: float) -> None:
    """The inner loop of MAML, by autograd and by torch.func."""
    state = init()._replace(found_inf=torch.tensor(found_inf))

    def loss(old: Tensor) -> Tensor:
        total: Tensor = skip_step(state, new=old - 0.25 * 2 * old, old=old).sum()
        return total

    old = torch.ones(2, requires_grad=True)
    expected = torch.full((2,), 1.0 if found_inf else 0.5)
    assert_same(torch.autograd.grad(loss(old), old)[0], expected)
    assert_same(torch.func.grad(loss)(old.detach()), expected)


def test_an_old_value_keeps_its_gradient_in_a_transform() -> None:
    state = init()._replace(found_inf=torch.tensor(1.0))
    skipped = torch.func.grad(lambda old: skip_step(state, new=torch.zeros(2), old=old).sum())
    assert_same(skipped(torch.ones(2)), torch.ones(2))


def test_a_device_object_is_a_device() -> None:
    scaler = GradScaler(torch.device("cpu"))  # type: ignore[arg-type]
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(8.0))
    assert scaler.get_scale() == 8.0
