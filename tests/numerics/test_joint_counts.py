"""The samples of a compiled step are counted by one kernel for each kind: the records that each would have alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import vmap

from funcamp import jit, make_train_step, module_loss
from funcamp.numerics import counting_pass, track_scales
from tests.support.helpers import assert_close, assert_same
from tests.support.steps import SGD


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.again(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does that
@pytest.mark.parametrize(("engine", "options"), [("autograd", {"accumulate": 2}), (None, {"policy": "bfloat16"})])
def test_a_compiled_step_has_the_records_of_the_eager_one(
    engine: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scatters: list[int] = []

    class Noting(counting_pass.JointCounts):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            scatters.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.scatter_add.default)))

        def uuid(self) -> Any:
            return None  # no cache: the pass is to run

    monkeypatch.setattr(counting_pass, "JointCounts", Noting)
    step = make_train_step(track_scales(module_loss(Twice(), F.mse_loss, engine=engine), sample=64), SGD, **options)
    many = (2,) if "accumulate" in options else ()
    batch = (torch.randn(*many, 32, 4), torch.randn(*many, 32, 16))
    found, traced = (
        jit(step, donate=False, backend=backend)(step.init(), batch)[1].records for backend in ("inductor", "eager")
    )
    expected = step(step.init(), batch)[1].records
    assert scatters == [1]
    assert_same(traced, expected)
    for name, uses in (("first", 1), ("again", 2)):
        for side in ("forward", "backward"):
            ours, theirs = (getattr(records[name], side) for records in (found, expected))
            assert ours.count == 64 * uses * (len(many) + 1)
            assert_close(ours.std, theirs.std, 2e-2)
            assert (ours.histogram - theirs.histogram).abs().sum() <= 0.05 * ours.count


def test_samples_of_vmap_are_counted_each() -> None:
    x, y = torch.randn(3, 2, 40).bfloat16(), torch.randn(1, 40).bfloat16()
    found = vmap(lambda part: counting_pass.count_jointly([part, y]))(x)
    assert_same(found[..., 3:], torch.stack([counting_pass.count_jointly([part, y]) for part in x])[..., 3:])
