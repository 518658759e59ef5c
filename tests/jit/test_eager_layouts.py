"""Operations whose results lie in memory otherwise than a trace without values expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss
from tests.support.steps import SGD, assert_as_eager


@torch.library.custom_op("funcamp_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@pytest.mark.parametrize("turn", [(0, 2, 1), (1, 2, 0)], ids=str)
def test_what_follows_a_batch_norm_of_a_transposed_input_draws_and_sums_in_eagers_order(
    turn: tuple[int, int, int],
) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.inner = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(self.norm(self.first(x).permute(turn))).relu()
            return out.permute(*sorted(range(3), key=turn.__getitem__))

    step, x = make_train_step(module_loss(Turned(), F.mse_loss), SGD, policy="bfloat16"), torch.randn(6, 4, 6)
    assert_as_eager(step, jit(step, backend="eager"), step.init(), [(x, x.exp())] * 2)


#: Operations whose gradient is torch's own kernel, and inputs of other layouts.
OF_LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "padding in 2 dimensions": (
        lambda x: F.pad(x, [1] * 4, "replicate"),
        torch.arange(96.0).view(2, 4, 4, 3).movedim(-1, 1),
    ),
    "padding in 3 dimensions": (
        lambda x: F.pad(x, [1] * 6, "replicate"),
        torch.arange(384.0).view(2, 4, 4, 4, 3).movedim(-1, 1),
    ),
    "pool in 3 dimensions": (lambda x: F.max_pool3d(x.sin(), 3, 2), torch.arange(750.0).view(2, 3, 5, 5, 5).mT),
    "smooth loss": (lambda x: F.smooth_l1_loss(x.sin(), x.cos(), reduction="none"), torch.arange(12.0).view(3, 4).mT),
}


@pytest.mark.inductor
@pytest.mark.parametrize("name", OF_LAYOUTS)
def test_gradient_of_an_input_of_another_layout(name: str) -> None:
    operation, x = OF_LAYOUTS[name]

    def gradient(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        out = operation(x)
        weights = torch.arange(1.0, out.numel() + 1).view_as(out)
        return state + 1, torch.autograd.grad((out * weights).sum(), x)[0].sin()

    assert_as_eager(gradient, jit(gradient), torch.ones(()), [x], 1e-6)


def test_operation_that_promised_another_layout() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state + 1, (turned(x) * state).view(-1) + turned(x).view(3, 2, 2).sum(1).view(-1).sum()

    x = torch.arange(12.0).view(3, 4)
    _, out = jit(step, backend="eager")(torch.ones(()), x)
    assert torch.equal(out, x.view(-1) + x.sum())


def normed(x: Tensor) -> Tensor:
    return F.batch_norm(
        x.sin().view(2, 2, 6).transpose(1, 2).reshape(2, 6, 2).transpose(1, 2), None, None, training=True
    )


#: Views that read the memory of a computed tensor: offsets count from its begin.
OF_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "the whole": lambda x: x.sin().as_strided((3, 2), (6, 1)),
    "of a part with gaps": lambda x: x.sin()[:, :4].as_strided((3, 2), (6, 1)),
    "beyond the part": lambda x: x.sin()[1:, 2:].as_strided((2, 6), (6, 1)),
    "at an offset": lambda x: x.sin()[2:].as_strided((2, 2), (6, 1), 1),
    "of an expanded column": lambda x: x.sin()[:, :1].expand(4, 6).as_strided((2, 2), (6, 1)),
    "of a transposed one": lambda x: x.t().contiguous().cos().t().as_strided((3, 2), (1, 4)),
    "of one of several results": lambda x: x.sort(1).values.t().as_strided((2, 2), (6, 1)),
    "twice": lambda x: x.sin()[1:].as_strided((3, 2), (6, 1)).as_strided((2,), (6,)),
    "other bits": lambda x: (x * 2)[1:, :4].view(torch.int32),
    "written by out=": lambda x: torch.add(x, 1, out=torch.empty(4, 6)).view(-1)[::2].mul_(3),
    "a row as complex numbers": lambda x: torch.view_as_complex(normed(x)[0, 0].view(3, 2)[1]).abs(),
    "other bits of an expanded one": lambda x: (x * 2)[:1].expand(4, 6).view(torch.int16),
    "an expanded complex one": lambda x: torch.view_as_complex((x * 2).view(4, 3, 2)[:1].expand(4, 3, 2)).abs(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.sin().view(4, 3, 2))[1:]),
}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_a_view_of_memory_reads_that_of_the_trace(backend: str) -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return state + 1, {name: view(x).clone() for name, view in OF_MEMORY.items()}

    x = torch.arange(24.0).view(4, 6)
    _, found = jit(step, backend=backend)(torch.ones(()), x)
    for name, view in OF_MEMORY.items():
        assert torch.allclose(found[name], view(x)), f"{name}: {found[name]} for {view(x)}"


@pytest.mark.inductor
def test_a_layer_in_place_after_a_batch_norm_of_a_transposed_input() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(40, 1)
            self.inner = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.inner(self.norm(self.first(x).transpose(1, 2))).flatten(1))

    step, batch = make_train_step(module_loss(Turned(), F.mse_loss), SGD), (torch.randn(4, 5, 6), torch.randn(4, 1))
    assert_as_eager(step, jit(step), step.init(), [batch] * 2, 1e-4)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_what_is_written_through_a_view_is_written_into_the_tensor(backend: str) -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        norm = F.batch_norm(x.transpose(1, 2), None, None, training=True).reshape(x.shape[0], -1)
        copy = norm.clone()
        copy.view(-1)[::2] *= 3
        return state + 1, [copy, norm]

    x = torch.randn(3, 4, 5)
    for order in ((0, 1, 2), (2, 1, 0)):
        turned_input = x.permute(order).contiguous().permute(order)
        assert_as_eager(step, jit(step, backend=backend), torch.ones(()), [turned_input], 1e-5)


def test_a_tensor_with_gaps_keeps_them() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.empty_strided((4, 6), (8, 1)).copy_(x)
        rows.view(4, 2, 3)[:, 0].mul_(2)
        return state + 1, rows.as_strided((3, 2), (8, 1)).clone()

    assert_as_eager(step, jit(step, backend="eager"), torch.ones(()), [torch.arange(24.0).view(4, 6)])


def test_a_view_of_memory_reads_what_an_operation_promised() -> None:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return state + 1, [turned(x)[1:].as_strided((2, 2), (6, 1)).clone(), turned(x)[1:].view(torch.int32).clone()]

    x = torch.arange(24.0).view(4, 6)
    _, (part, bits) = jit(step, backend="eager")(torch.ones(()), x)
    assert torch.equal(part, x[1:3, :2])
    assert torch.equal(bits, x[1:].view(torch.int32))


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_a_batch_keeps_the_order_of_its_dimensions(order: tuple[int, ...]) -> None:
    # A sum follows the order in memory, and so rounds as in eager code.
    orders = []

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        orders.append(sorted(range(3), key=batch.stride, reverse=True))
        return state, (batch * state).exp().sum()

    whole = torch.randn(9, 8, 14).permute(order)
    assert_as_eager(step, jit(step, backend="eager"), torch.full((), 0.7), [whole, whole[:, 1:]])
    assert len(set(map(tuple, orders))) == 1
