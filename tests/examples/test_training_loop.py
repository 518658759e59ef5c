"""The example of a loop: each of its parts, and a run that is cut anywhere and resumed, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import funcamp
from tests.support.helpers import assert_same, clone, one_thread, values_of
from tests.support.programs import import_example
from tests.support.steps import eager, eager_and_traced

example = import_example("training_loop")

BATCHES = 14  # an epoch's; the last has 5 lines


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(example, "EPOCHS", 2)
    monkeypatch.setattr(example, "LAYERS", 1)
    monkeypatch.setattr(example.batches, "__defaults__", (0, 0))  # no worker processes
    with one_thread():
        yield


def saved(folder: Path) -> Any:
    return funcamp.load(folder / "last.pt")


@pytest.mark.thorough(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("cut", [5, BATCHES, BATCHES + 4], ids=["frozen", "between", "all"])
def test_run_is_resumed_in_the_middle_of_an_epoch_bit_for_bit(cut: int, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    last = BATCHES + 8
    rows = example.main(last, out=whole, wrap=eager)
    example.main(cut, out=parts, wrap=eager)
    assert example.main(last, resume=True, out=parts, wrap=eager) == rows
    assert_same(saved(parts), saved(whole))
    assert saved(whole)["now"]["batch"] == 8
    assert 0 < saved(whole)["state"]["skipped"] < BATCHES


@pytest.mark.slow
def test_loop_stops_when_the_loss_no_longer_falls_and_keeps_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, averages = iter([3.0, 2.0, 2.5, 2.1, 1.0]), []

    def evaluate(step: Any, state: Any, *_: Any) -> float:
        averages.append(clone(step.loss_fn.state_dict(state.ema)))
        return next(losses)

    monkeypatch.setattr(example, "evaluate", evaluate)
    monkeypatch.setattr(example, "EPOCHS", 8)
    model, lines = example.make_model("cpu"), example.load_lines()
    lines["train"] = lines["train"][:70]
    rows = example.train(model, lines, 0, False, tmp_path, eager)
    assert [row["loss"] for row in rows] == [3.0, 2.0, 2.5, 2.1]
    assert_same(dict(model.state_dict()), averages[1])


def one_batch(size: int = 53) -> Any:
    """Four micro-batches, of which the last is partial."""
    return example.collate(example.load_lines()["train"][:size])


def test_parameters_decay_by_name_and_learn_by_depth() -> None:
    expected = {
        "bytes.weight": "0 plain",
        "positions.weight": "0 plain",
        "blocks.0.qkv.weight": "1 decay",
        "blocks.0.norm2.weight": "1 plain",
        "blocks.0.down.bias": "1 plain",
        "norm.bias": "2 plain",
        "head.weight": "2 decay",
    }
    model = example.make_model("cpu")
    labels = {name: example.group(name, value) for name, value in model.named_parameters()}
    assert {name: labels[name] for name in expected} == expected
    step = example.make_step(model)
    _, metrics = step(step.init(), one_batch())
    rates = [metrics.lr[f"{depth} decay"].item() for depth in range(3)]
    assert rates == sorted(set(rates))
    for label, optimizer in step.optimizer.optimizers.items():
        assert f"weight_decay={0.1 if 'decay' in label else 0.0}" in repr(optimizer)


def test_evaluation_is_of_the_average() -> None:
    model, lines = example.make_model("cpu"), example.load_lines()["test"][:70]
    step = example.make_step(model)
    state = step.init()
    for _ in range(4):
        state, _ = step(state, one_batch())
    found = example.evaluate(step, state, lines, "cpu")
    inputs, labels = (leaf.flatten(0, 1) for leaf in example.collate(lines))
    losses = []
    for params in (state.ema, state.params):
        model.load_state_dict(step.loss_fn.state_dict(params))
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            losses.append(example.criterion(model.eval()(inputs), labels).item())
    assert found == pytest.approx(losses[0], rel=1e-4)
    assert abs(found - losses[1]) > 10 * abs(found - losses[0])


@pytest.mark.slow
def test_unfrozen_parameters_begin_and_the_head_continues(tmp_path: Path) -> None:
    begun = example.make_model("cpu").state_dict()
    example.main(BATCHES - 1, out=tmp_path, wrap=eager)
    before = saved(tmp_path)["state"]
    assert {name for name in before if name.startswith("params.")} == {"params.head.weight", "params.head.bias"}
    example.main(BATCHES + 3, resume=True, out=tmp_path, wrap=eager)
    after = saved(tmp_path)["state"]
    assert {name.removeprefix("params.") for name in after if name.startswith("params.")} == set(begun)
    counts = {name: after[name].item() for name in after if ".state.step." in name}
    applied = after["step"].item() - after["skipped"].item()
    assert {count for name, count in counts.items() if "head" in name} == {applied}
    assert {count for name, count in counts.items() if "head" not in name} == {3}
    assert after["opt_state.1 decay.applied"] == applied  # the schedule's count, for all


@pytest.mark.compiled
@eager_and_traced
def test_adapters_are_trained_on_a_base_that_is_shared(wrap: Any) -> None:
    model = example.make_model("cpu")
    before = {name: (value.data_ptr(), value.clone()) for name, value in values_of(model).items()}
    adapters, losses = example.adapt(model, example.load_lines()["prose"][:128], wrap)
    assert len(adapters) == 2 * 4 * example.LAYERS
    assert all(".down." in name or ".up." in name for name in adapters)
    assert all(adapters[name].abs().max() > 0 for name in adapters if ".up." in name)
    after = {name.replace(".base", ""): value for name, value in values_of(model).items() if name not in adapters}
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    assert losses[-1] < losses[0]


@pytest.mark.thorough
@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.inductor
def test_example_compiles_as_it_is_written(tmp_path: Path) -> None:
    example.main(2, out=tmp_path)
    assert saved(tmp_path)["state"]["step"] == 2


@pytest.mark.slow
def test_example_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = example.main(out=tmp_path, wrap=eager)
    assert [row["epoch"] for row in rows] == [0, 1]
    assert rows[1]["loss"] < 0.8 * rows[0]["loss"]
    assert {file.name for file in tmp_path.iterdir()} == {"best.pt", "adapters.pt"}
    assert "adapters: loss" in capsys.readouterr().out
