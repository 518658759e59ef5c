"""Batches of `module_loss`: with a criterion, and of models that return their loss, as Hugging Face's do."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss, numerics, stateless
from tests.support.helpers import assert_same, clone

SGD = stateless(torch.optim.SGD, lr=0.1)
Encoding = collections.UserDict  # what transformers.BatchEncoding is


class Output(collections.OrderedDict[str, Any]):
    """transformers' ModelOutput: a dict whose entries are attributes, without those that are None."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@dataclasses.dataclass
class Returned:
    loss: Tensor


class Words(nn.Module):
    """A language model of Hugging Face's form."""

    def __init__(self, form: str = "output") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.words(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        logits = self.head(x)
        if labels is None:
            return Output(logits=logits) if self.form == "output" else logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        forms: dict[str, Any] = {
            "output": Output(loss=loss, logits=logits),
            "dict": {"loss": loss, "logits": logits},
            "attribute": Returned(loss),
            "scalar": loss,
            "tuple": (loss, logits),
            "vector": loss[None],
        }
        return forms[self.form]


def batch_of(kind: Callable[..., Any], index: int, *leading: int) -> Any:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(11, (*leading, 4, 5), generator=generator)
    return kind({"input_ids": ids, "attention_mask": torch.ones(*leading, 4, 5), "labels": ids})


@pytest.mark.parametrize(
    ("form", "kind", "compiled"),
    [
        ("output", dict, False),
        ("dict", Encoding, False),
        ("attribute", dict, False),
        ("scalar", Encoding, False),
        ("output", Encoding, True),
        ("scalar", dict, True),
    ],
)
def test_a_model_that_returns_its_loss_is_trained_as_by_torch(form: str, kind: Any, compiled: bool) -> None:
    model = Words(form)
    eager = copy.deepcopy(model)
    optimizer, scaler = torch.optim.SGD(eager.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_fn = module_loss(model)
    step = make_train_step(loss_fn, SGD, ScalerConfig(1024.0), policy="bfloat16")
    run, state = jit(step, backend="eager") if compiled else step, step.init()
    for index in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            returned = eager(**batch_of(dict, index))
        loss = returned["loss"] if isinstance(returned, dict) else getattr(returned, "loss", returned)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state, metrics = run(state, batch_of(kind, index))
        assert_same(metrics.loss, loss.detach())
    assert_same(loss_fn.state_dict(state.params), dict(clone(eager.state_dict())))


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_micro_batches_of_a_mapping(kind: Any) -> None:
    results = []
    for accumulate in (1, 2):
        step = make_train_step(module_loss(Words()), SGD, ScalerConfig(8.0), accumulate=accumulate)
        window = batch_of(kind, 0, 2)
        if accumulate == 1:
            window = kind({name: value.flatten(0, 1) for name, value in window.items()})
        results.append(step(step.init(), window)[1].loss)
    torch.testing.assert_close(results[0], results[1])


class Frozen(collections.UserDict[str, Any]):
    """A mapping that can be hashed: `jit` must not take it for a constant."""

    def __hash__(self) -> int:
        return 0


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [Encoding, Frozen])
def test_a_mapping_is_one_signature_of_jit(kind: Any) -> None:
    step = make_train_step(module_loss(Words()), SGD)
    run, state, losses = jit(step, backend="eager"), step.init(), []
    for index in range(3):
        state, metrics = run(state, batch_of(kind, index))
        losses.append(metrics.loss)
    assert run.programs == 1
    assert len({float(loss) for loss in losses}) == 3


def test_a_mapping_inside_a_batch() -> None:
    def loss(params: Any, batch: Any) -> Tensor:
        found: Tensor = (params["w"] * batch[0]["x"]).sum() * batch[1]
        return found

    step = make_train_step(loss, SGD)
    batch = (Encoding({"x": torch.ones(2)}), torch.tensor(3.0))
    for run in (step, jit(step, backend="eager")):
        assert run(step.init({"w": torch.ones(2)}), batch)[1].loss == 6


def test_positional_arguments_and_one_tensor() -> None:
    step = make_train_step(module_loss(Words("scalar")), SGD)
    ids = batch_of(dict, 0)["input_ids"]
    expected = step.loss(step.init(), {"input_ids": ids, "labels": ids})
    assert_same(step.loss(step.init(), (ids, None, ids)), expected)
    assert_same(step.loss(step.init(), [ids, None, ids]), expected)

    class Norm(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    own = make_train_step(module_loss(Norm(4, 4)), SGD)
    assert_same(own(own.init(), torch.ones(2, 4))[1].loss, own.loss(own.init(), (torch.ones(2, 4),)))


def test_a_tracked_loss_without_criterion() -> None:
    loss_fn = numerics.track_scales(module_loss(Words()))
    step = make_train_step(loss_fn, SGD)
    _, metrics = step(step.init(), batch_of(Encoding, 0))
    assert set(metrics.records) == {"words", "head"}
    assert repr(module_loss(Words())) == "module_loss(Words)"


class Item(NamedTuple):
    x: Tensor
    y: Tensor


def test_a_named_tuple_and_a_list_are_inputs_and_target() -> None:
    step = make_train_step(module_loss(nn.Linear(4, 4), F.mse_loss), SGD)
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    expected = step.loss(step.init(), (x, y))
    assert_same(step.loss(step.init(), Item(x, y)), expected)
    assert_same(step.loss(step.init(), [x, y]), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_criterion_reads_several_entries_of_a_mapping(compiled: bool) -> None:
    def weighted(output: Tensor, given: dict[str, Tensor]) -> Tensor:
        return (given["weight"] * (output - given["target"]).square()).mean()

    batch = {"observation": torch.randn(3, 4), "target": torch.randn(3, 2), "weight": torch.rand(3, 2)}
    model = nn.Linear(4, 2)
    expected = copy.deepcopy(model)
    weighted(expected(batch["observation"]), batch).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    loss_fn = module_loss(model, weighted)
    step = make_train_step(loss_fn, SGD, ScalerConfig(8.0))
    run = jit(step, backend="eager") if compiled else step
    state, _ = run(step.init(), (batch["observation"], batch))
    assert_same(loss_fn.state_dict(state.params), dict(expected.state_dict()))


IDS = torch.zeros(4, 5, dtype=torch.int64)
PLAIN, OWN = r"a tuple or list \(\*inputs, target\) with a criterion", "a mapping of keyword arguments, a tuple or list"
FORMS: dict[str, tuple[bool, Any, str]] = {
    "text": (True, "hello", f"batch must be {PLAIN}; got 'hello'"),
    "number": (True, 3, f"batch must be {PLAIN}; got 3"),
    "nothing": (True, None, f"batch must be {PLAIN}; got None"),
    "tensor": (True, torch.ones(2, 4), rf"batch must be {PLAIN}; got a torch.float32 tensor of shape \(2, 4\)"),
    "mapping": (True, {"input_ids": IDS, "labels": IDS}, f"{PLAIN}; got a dict with 'input_ids', 'labels'"),
    "one entry": (True, {0: IDS}, rf"{PLAIN}; got a dict with 0"),
    "no entry": (True, {}, rf"{PLAIN}; got {{}}"),
    "empty": (True, (), rf"{PLAIN}; got \(\)"),
    "no input": (True, (IDS,), rf"{PLAIN}, as Words.forward\(input_ids.*got a tuple of a torch.*missing 1 required"),
    "inputs": (True, (IDS,) * 5, r"as Words.forward\(input_ids.*got a tuple of .*takes from 2 to 4 positional"),
    "own text": (False, "hello", f"batch must be {OWN} of arguments, or a tensor; got 'hello'"),
    "own keys": (False, {1: IDS}, f"batch must be {OWN}.*; got a dict with 1"),
    "own argument": (False, {"ids": IDS}, rf"{OWN}.*, as Words.forward\(.*unexpected keyword argument 'ids'"),
    "own missing": (False, {"labels": IDS}, "got a dict with 'labels': .*missing 1 required positional.*'input_ids'"),
    "no loss": (False, {"input_ids": IDS}, "must return its loss.*got an Output with 'logits', its loss None"),
}  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "call"),
    [*[(name, call) for name in FORMS for call in ("step", "loss")], ("text", "jit"), ("own argument", "jit")],
)
def test_a_batch_of_the_wrong_form(name: str, call: str) -> None:
    has_criterion, batch, text = FORMS[name]
    step = make_train_step(module_loss(Words(), F.cross_entropy) if has_criterion else module_loss(Words()), SGD)
    run: Any = {"step": step, "loss": step.loss, "jit": jit(step, backend="eager")}[call]
    with pytest.raises(TypeError, match=f"(?s)^module_loss: .*{text}"):
        run(step.init(), batch)


@pytest.mark.parametrize(("form", "got"), [("tuple", "a tuple of a torch.float32 tensor"), ("vector", r"shape \(1,\)")])
def test_a_model_that_returns_no_loss(form: str, got: str) -> None:
    step = make_train_step(module_loss(Words(form)), SGD)
    with pytest.raises(TypeError, match=f"model must return its loss if there is no criterion.*got .*{got}"):
        step(step.init(), batch_of(dict, 0))


def test_an_error_inside_the_model_is_the_models_own() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("of its own")

    step = make_train_step(module_loss(Broken(4, 4), F.mse_loss), SGD)
    with pytest.raises(TypeError, match=r"^of its own$"):
        step(step.init(), (torch.ones(2, 4), torch.ones(2, 4)))
