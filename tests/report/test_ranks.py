"""Gradients that are summed over ranks, as one process sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from tests.report.loops.parts import batches, model_and_optimizer, one_process, scaler_of

distributed: Any = torch.distributed
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
DDP: Any = nn.parallel.DistributedDataParallel


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    one_process()
    yield
    distributed.destroy_process_group()


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def train(
    forward: Callable[[Any, Tensor], Tensor],
    reduce: Callable[[nn.Module], None],
    *,
    unscale: bool,
    ignored: tuple[str, ...] = (),
) -> list[str]:
    """Steps of a DDP model whose gradients are reduced by hand, and what the auditor finds, with its lines."""
    auditor = Auditor()
    with auditor.watching():
        plain_model, optimizer = model_and_optimizer()
        DDP._set_params_and_buffers_to_ignore_for_model(plain_model, ignored)
        model = DDP(plain_model)
        scaler = scaler_of()
        for x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = mse_loss(forward(model, x), y)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            reduce(plain_model)
            scaler.step(optimizer)
            scaler.update()
    return [f"{finding.rule.name}, {finding.line.text}" for finding in auditor.findings()]


def of_ddp(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output


def of_its_module(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model.module(x)
    return output


def of_checkpoints(model: Any, x: Tensor) -> Tensor:
    """Its layers in checkpoints, each of which has a backward pass within the backward pass."""
    layers = model.module
    if not isinstance(layers[0], Checkpointed):
        layers[0], layers[2] = Checkpointed(layers[0]), Checkpointed(layers[2])
    output: Tensor = model(x.requires_grad_())
    return output


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)


def reduce_nothing(_: nn.Module) -> None:
    pass


def reduce_each(model: nn.Module) -> None:
    for gradient in gradients_of(model):
        distributed.reduce(gradient, 0)


def reduce_all_but_first(model: nn.Module) -> None:
    for gradient in gradients_of(model)[1:]:
        distributed.all_reduce(gradient)


def reduce_together(model: nn.Module) -> None:
    gradients = gradients_of(model)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts):
        gradient.copy_(part.view_as(gradient))


def reduce_copies(model: nn.Module) -> None:
    gradients = gradients_of(model)
    copies = [gradient.double() for gradient in gradients]
    for copy in copies:
        distributed.all_reduce(copy)
    torch._foreach_copy_(gradients, copies)


def reduce_and_replace(model: nn.Module) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients_of(model)])
    distributed.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, part in zip(model.parameters(), parts):
        parameter.grad = part.view_as(parameter)


def reduce_norm(model: nn.Module) -> None:
    squares = torch.stack([gradient.square().sum() for gradient in gradients_of(model)]).sum()
    distributed.all_reduce(squares)


def gather_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        gathered = [torch.zeros_like(parameter)]
        distributed.all_gather(gathered, parameter.grad)
        parameter.grad = torch.stack(gathered).mean(0)


def scatter_together(model: nn.Module) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients_of(model)])
    part = torch.zeros_like(flat)
    distributed.reduce_scatter_tensor(part, flat)
    parts = part.split([parameter.numel() for parameter in model.parameters()])
    for gradient, summed in zip(gradients_of(model), parts):
        gradient.copy_(summed.view_as(gradient))


REDUCTIONS = [reduce_each, reduce_together, reduce_copies, reduce_and_replace, gather_each, scatter_together]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_reduction_after_unscale_is_named_in_every_form(reduce: Callable[[nn.Module], None]) -> None:
    (found,) = train(of_its_module, reduce, unscale=True)
    assert found.startswith("reduced-after-unscale, distributed.")
    assert train(of_its_module, reduce, unscale=False) == []


def test_a_norm_that_is_reduced_after_unscale_is_no_finding() -> None:
    assert train(of_ddp, reduce_norm, unscale=True) == []


def test_a_norm_that_is_gathered_after_unscale_is_no_finding() -> None:
    def gather_norms(model: nn.Module) -> None:
        norm = torch.stack([gradient.norm() for gradient in gradients_of(model)]).norm().reshape(1)
        distributed.all_gather_into_tensor(output_tensor=torch.zeros(1), input_tensor=norm)
        distributed.all_gather([torch.zeros(1)], norm)

    assert train(of_ddp, gather_norms, unscale=True) == []


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning", "ignore:.*FSDP:FutureWarning")
@pytest.mark.parametrize(("unscales", "expected"), [(False, ["clip-before-unscale"]), (True, [])])
def test_the_clipping_of_fsdp_is_seen(unscales: bool, expected: list[str]) -> None:
    auditor = Auditor()
    with auditor.watching():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        plain_model, _ = model_and_optimizer()
        model = FullyShardedDataParallel(plain_model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
        for x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = mse_loss(model(x), y)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
    assert [finding.rule.name for finding in auditor.findings()] == expected


def test_gradients_of_a_ddp_model_whose_module_is_called_must_be_reduced_by_the_loop() -> None:
    (found,) = train(of_its_module, reduce_nothing, unscale=False)
    assert found == "ddp-not-synced, scaler.scale(loss).backward()"
    assert train(of_ddp, reduce_nothing, unscale=True) == []
    assert train(of_its_module, reduce_and_replace, unscale=False) == []


def test_a_parameter_that_ddp_ignores_needs_no_reduction() -> None:
    assert train(of_its_module, reduce_all_but_first, unscale=False, ignored=("0.weight",)) == []
    (found,) = train(of_its_module, reduce_all_but_first, unscale=False)
    assert found.startswith("ddp-not-synced")


@pytest.mark.filterwarnings("ignore:.*reentrant:UserWarning")
def test_gradients_of_backward_passes_inside_the_backward_pass_are_reduced_by_ddp() -> None:
    assert train(of_checkpoints, reduce_nothing, unscale=False) == []


@pytest.mark.parametrize("last_is_synced", [True, False])
def test_a_window_is_summed_if_its_last_pass_is(last_is_synced: bool) -> None:
    auditor = Auditor()
    with auditor.watching():
        plain_model, optimizer = model_and_optimizer()
        model, scaler = DDP(plain_model), scaler_of()
        for number, (x, y) in enumerate(batches()):
            with contextlib.nullcontext() if number % 2 == last_is_synced else model.no_sync():
                scaler.scale(mse_loss(model(x), y) / 2).backward()
            if number % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert [finding.rule.name for finding in auditor.findings()] == ["ddp-not-synced"] * (not last_is_synced)
