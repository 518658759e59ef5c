"""The tutorials: models learn, a resumed run equals one without interruption, the cause found is the planted one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import funcamp
from tests.support.helpers import assert_same
from tests.support.programs import add_folder
from tests.support.steps import traced

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "tutorials"
TUTORIALS = sorted(file.stem for file in FOLDER.glob("*.py"))
for folder in ("benchmarks", "examples/tutorials"):
    add_folder(folder)

pytestmark = pytest.mark.usefixtures("one_thread")


def tutorial(name: str) -> ModuleType:
    with importlib.import_module("_public").without_operators():
        return importlib.import_module(name)


@pytest.mark.thorough
@pytest.mark.models
def test_huggingface_model_learns_and_skips_the_steps_of_a_scale_that_is_too_high(tmp_path: Path) -> None:
    numbers = tutorial("huggingface").main(file=tmp_path / "saved.pt", wrap=traced)
    assert numbers["loss_after"] < 0.75 * numbers["loss_before"]
    assert numbers["accuracy"] > 0.75
    assert numbers["skipped"] >= 1
    assert numbers["scale"] == 2.0 ** (20 - numbers["skipped"])


@pytest.mark.models
def test_huggingface_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    main = tutorial("huggingface").main
    straight = main(10, tmp_path / "straight.pt", wrap=traced)
    main(5, tmp_path / "cut.pt", wrap=traced)
    resumed = main(10, tmp_path / "cut.pt", resume=True, wrap=traced)
    assert_same(funcamp.load(tmp_path / "cut.pt"), funcamp.load(tmp_path / "straight.pt"))
    assert resumed["loss_before"] != straight["loss_before"]  # it starts from the saved weights
    assert resumed["loss_after"] == straight["loss_after"]


@pytest.mark.thorough
@pytest.mark.models
def test_timm_model_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    module = tutorial("timm_images")
    straight = module.main(file=tmp_path / "straight.pt", wrap=traced)
    assert [round(row["lr"], 9) for row in straight] == [0.003] * 4 + [0.0003] * 2
    assert straight[-1]["loss"] < straight[0]["loss"] / 4
    assert min(straight[-1]["accuracy"], straight[-1]["accuracy_ema"]) > 0.9
    first = module.main(3, tmp_path / "cut.pt", wrap=traced)
    rest = module.main(file=tmp_path / "cut.pt", resume=True, wrap=traced)
    assert [*first, *rest] == straight
    assert_same(funcamp.load(tmp_path / "cut.pt"), funcamp.load(tmp_path / "straight.pt"))


@pytest.mark.thorough
@pytest.mark.compiled
@pytest.mark.models
@pytest.mark.inductor
def test_tutorials_compile_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = tutorial("huggingface").main(5, tmp_path / "huggingface.pt")
    assert numbers["loss_after"] != numbers["loss_before"]
    module = tutorial("timm_images")
    monkeypatch.setattr(module, "STEPS", 2)
    assert len(module.main(1, tmp_path / "timm.pt")) == 1


@pytest.mark.slow
def test_numerics_finds_the_planted_cause() -> None:
    module = tutorial("numerics")
    found = module.main()
    assert (found["operation"], found["module"]) == ("bmm", "attention")
    source = Path(module.__file__ or "").read_text().splitlines()
    assert "q @ k" in source[found["line"] - 1]
    assert 60 < found["bad"] < 100
    assert found["skipped"] >= module.STEPS - found["bad"]
    assert found["scale"] < 2.0**-20
    assert (found["fixed_bad"], found["fixed_skipped"]) == (None, 0)
    assert found["fixed_loss"] < 0.45
    assert found["recommended"] >= 2.0**10


@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_is_short_and_has_a_page(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 120
    assert f"python examples/tutorials/{name}.py" in text
    (page,) = (ROOT / "docs" / "tutorials").glob(f"{name.removesuffix('_images')}.md")
    assert f"<!-- file: examples/tutorials/{name}.py#" in page.read_text()
