"""The claim: a step of each of torch's modules is torch's loop, bit for bit, on the inputs that torch tests it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import funcamp
from tests.databases.known import KNOWN_MODULES
from tests.support.databases import SEED, is_float, is_same, modules, refusal, weighted_sum
from tests.support.torch_loop import AmpLoop

pytestmark = [
    pytest.mark.compiled,
    # Some modules are deprecated, and some inputs ask for a warning.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("one_thread"),
]
#: How many inputs of a module are tried with each policy.
INPUTS = {None: 8, "float16": 3, "bfloat16": 1}
STEPS, LR, MOMENTUM = 2, 0.05, 0.9
CONFIG = funcamp.ScalerConfig(init_scale=2.0**10, growth_interval=2)


class OnLeaves(nn.Module):
    """A module whose arguments are a list of leaves; a trainable factor of the input has a gradient through the module.

    Not of all leaves: some losses have no gradient with respect to the target.
    """

    def __init__(self, module: nn.Module, spec: Any, input_place: int | None) -> None:
        super().__init__()
        self.module, self.spec, self.input_place = module, spec, input_place
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, *leaves: Any) -> Any:
        scaled = list(leaves)
        if self.input_place is not None:
            scaled[self.input_place] = leaves[self.input_place] * self.factor
        positional, keywords = _pytree.tree_unflatten(scaled, self.spec)
        return self.module(*positional, **keywords)


class Trained(NamedTuple):
    """What a run leaves."""

    losses: list[Tensor]
    scale: float
    values: dict[str, Any]


def loss_of(output: Any, _: Tensor) -> Tensor:
    """Return a weighted sum of all numbers of an output, whatever its structure is."""
    total = weighted_sum(_pytree.tree_leaves(output))
    assert total is not None
    return total


def inputs_of(info: Any) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    return found


def built(info: Any, number: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a fresh module of the same numbers, and a batch."""
    given = inputs_of(info)[number]
    torch.manual_seed(1)
    module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).train()
    leaves, spec = _pytree.tree_flatten((given.forward_input.args, given.forward_input.kwargs))
    batch = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    floats = [place for place, leaf in enumerate(batch) if is_float(leaf)]
    model = OnLeaves(module, spec, floats[0] if floats else None)
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        with torch.no_grad():
            model(*batch)
    return model, (*batch, torch.zeros(()))


def by_torch(model: nn.Module, batch: tuple[Any, ...], dtype: str | None) -> Trained:
    trainable = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LR, momentum=MOMENTUM)
    loop = AmpLoop(model, loss_of, optimizer, CONFIG, None if dtype is None else getattr(torch, dtype))
    torch.manual_seed(SEED)
    losses = [loop.step(batch)[0] for _ in range(STEPS)]
    return Trained(losses, loop.scaler.get_scale(), dict(model.state_dict()))


def by_step(model: nn.Module, batch: tuple[Any, ...], dtype: str | None, transform: Callable[[Any], Any]) -> Trained:
    loss = funcamp.module_loss(model, loss_of, keep_buffers=True)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    step = funcamp.make_train_step(loss, sgd, CONFIG, policy=dtype)
    state, run = step.init(), transform(step)
    losses = []
    torch.manual_seed(SEED)
    for _ in range(STEPS):
        state, metrics = run(state, batch)
        losses.append(metrics.loss.clone())
    return Trained(losses, state.scaler.scale.item(), loss.state_dict(state.params, state.buffers))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda step: step,
    "jit": lambda step: funcamp.jit(step, backend="eager"),
}


def outcome(info: Any, number: int, dtype: str | None, transform: str) -> str:
    """Return "equal", or what differs between a step and torch's loop."""
    try:
        expected = by_torch(*built(info, number), dtype)
    except Exception:
        return "fails in torch's loop"
    try:
        found = by_step(*built(info, number), dtype, TRANSFORMS[transform])
    except Exception as error:
        return f"{transform} {refusal(error)}"
    if found.scale != expected.scale or not all(map(is_same, found.losses, expected.losses)):
        return f"{transform} differs: losses or scale"
    same = [is_same(found.values[name], value) for name, value in expected.values.items()]
    return "equal" if all(same) and len(found.values) == len(same) else f"{transform} differs: parameters"


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", modules())
def test_two_steps_on_its_inputs_are_those_of_torchs_loop(name: str, transform: str) -> None:
    info = modules()[name]
    outcomes: Counter[str] = Counter()
    for dtype, count in INPUTS.items():
        for number in range(len(inputs_of(info)[:count])):
            outcomes[outcome(info, number, dtype, transform)] += 1
    usual = ("equal", "fails in torch's loop")
    unusual = {text: count for text, count in outcomes.items() if text not in usual}
    assert unusual == KNOWN_MODULES.get(f"{name} {transform}", {})
