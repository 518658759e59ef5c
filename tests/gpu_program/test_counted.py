"""What the GPU's program does in one call, and what its kernels become: launches, bytes, allocations, registers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from funcamp import float8, stateless
from funcamp._jit.passes import options
from tests.gpu_program.steps import step_of
from tests.support.gpu_program import Program, program_of
from tests.support.models import Block, cross_entropy
from tests.support.ptxas import compiled

pytestmark = pytest.mark.inductor  # for the C++ compiler

WIDTH, WORDS, CONTEXT = 128, 64, 8
BY_TENSOR = float8.Float8Config()
#: Joined kernels have no names that say what they do.
APART = ("combo_kernels",)

adamw = stateless(torch.optim.AdamW)


class Gpt(nn.Module):
    """With a head of its own."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.positions)))
        return logits


@functools.cache
def gpt(blocks: int) -> Program:
    step = step_of(Gpt(blocks), cross_entropy, adamw, max_norm=1.0)
    tokens = torch.zeros(4, CONTEXT, dtype=torch.int64)
    return program_of(step, step.init(), (tokens, tokens), without=APART)


@functools.cache
def mlp(
    policy: str | None,
    layers: int = 10,
    without: tuple[str, ...] = APART,
    in_float8: float8.Float8Config | None = None,
) -> Program:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers)))
    if in_float8 is not None:
        float8.convert(model, in_float8)
    step = step_of(model, cross_entropy, adamw, policy, max_norm=1.0)
    batch = torch.zeros(8, 256), torch.zeros(8, dtype=torch.int64)
    return program_of(step, step.init(), batch, without=without)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpt": lambda: gpt(3),
    "mlp": lambda: mlp("float16"),
    "mlp in float32": lambda: mlp(None),
    "mlp in float8": lambda: mlp("bfloat16", 2, in_float8=BY_TENSOR),
}


def bytes_an_element(program: Program) -> tuple[set[float], set[float]]:
    """Of the kernels that check gradients and of those that update parameters, both ways; small groups apart."""
    kinds = [
        [kernel for kernel in program.of(*names) if kernel.elements >= 2**16] for names in (["abs", "sum"], ["lerp"])
    ]
    check, update = ({round(sum(kernel.traffic) / kernel.elements, 2) for kernel in kind} for kind in kinds)
    return check, update


@pytest.mark.thorough
def test_small_kernels_are_joined_where_no_tensor_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    apart, joined = mlp("float16", 2), mlp("float16", 2, without=())
    assert "pid_offset" not in apart.code
    assert "pid_offset" in joined.code
    assert joined.launches < 0.8 * apart.launches
    monkeypatch.setattr(options, "LARGE", 256 * 256)  # a weight has as many elements
    assert mlp.__wrapped__("float16", 2, without=()).launches == apart.launches


@pytest.mark.thorough
def test_nothing_is_on_the_host_and_gradients_of_matrices_are_written_in_place() -> None:
    """Four products a block and the head's; the embedding's gradient is a scatter."""
    program = gpt(3)
    assert program.on_host == []
    assert program.products_in_place == 4 * 3 + 1
    assert program.libraries["mm"] + program.libraries["addmm"] == 12 * 3 + 3
    assert [kernel.name for kernel in program.of("triton_poi_fused", "cat") if "lerp" not in kernel.name] == []


@pytest.mark.thorough
def test_a_block_is_so_many_launches_and_the_rest_is_the_same_at_any_depth() -> None:
    small, large = gpt(2), gpt(3)
    block = large.launches - small.launches
    assert block <= 17
    assert small.launches - 2 * block <= 36
    updates = [sum(kernel.launches for kernel in program.of("lerp")) for program in (small, large)]
    assert updates[0] == updates[1] <= 5


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "check", "update"), [("gpt", 2, 26), ("mlp", 2, 26), ("mlp in float32", 4, 28)])
def test_check_and_update_move_so_many_bytes_a_parameter(name: str, check: float, update: float) -> None:
    """A gradient is read twice; parameter and moments are read and written. The next step casts (6 more)."""
    assert bytes_an_element(PROGRAMS[name]()) == ({check}, {update})


@pytest.mark.thorough
def test_ten_layers_are_so_many_launches_and_allocations() -> None:
    program = mlp("float16")
    assert program.products_in_place == 10
    assert program.launches <= 30
    assert program.allocations <= 60


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt", "mlp", "mlp in float32", "mlp in float8"])
def test_no_kernel_spills_registers(name: str) -> None:
    made = {kernel.name: compiled(kernel) for kernel in PROGRAMS[name]().kernels}
    assert [name for name, one in made.items() if one.spilled] == []


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["float16", None])
def test_a_large_update_reads_and_writes_128_bits_at_a_time(policy: str | None) -> None:
    """But for its few scalars."""
    (update,) = [kernel for kernel in mlp(policy).of("lerp") if kernel.elements >= 2**16]
    accesses = compiled(update).accesses
    assert accesses[16] >= 8, accesses
    assert sum(count for size, count in accesses.items() if size < 16) < 8, accesses


@pytest.mark.thorough
@pytest.mark.parametrize("config", [BY_TENSOR, float8.Float8Config("row")])
def test_float8_products_are_the_devices_and_read_nothing_on_the_host(config: float8.Float8Config) -> None:
    """Three a layer, but for the gradient of the batch."""
    program = mlp("bfloat16", 2, in_float8=config)
    assert program.on_host == []
    assert program.libraries["_scaled_mm"] == 3 * 2 - 1
    assert program.libraries["mm"] == program.libraries["addmm"] == 0
