"""`track_scales`: taps behind the layers of a loss's module, without changing the module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._types import Args, Tree
from funcamp.numerics.counting import check_sample, has_values
from funcamp.numerics.record import Record, Taps
from funcamp.numerics.taps import tap

#: The key of a tap among the hooks of a layer; torch's own are numbers.
_KEY = "funcamp"

#: The modules: their paths, or a predicate of path and module.
Chosen = Iterable[str] | Callable[[str, nn.Module], bool] | None


class TrackedLoss(ModuleLoss):
    """A loss of `module_loss` with taps: `(params, probes, batch) -> loss`, and likewise with buffers.

    Made by `track_scales`. A step has the records in its metrics.
    """

    def __init__(self, loss_fn: ModuleLoss, chosen: Chosen, sample: int | None) -> None:
        # Everything that the loss knows of its module stays as it is. `__init__` would look at the module again, which
        # may have the tensors of a state by now.
        vars(self).update(vars(loss_fn))
        self.taps = Taps(_choose(loss_fn.model, chosen))
        self._sample = sample

    def __repr__(self) -> str:
        return f"track_scales({super().__repr__()}, {len(self.probes)} modules)"

    @contextlib.contextmanager
    def called(
        self, region: AbstractContextManager[object], params: dict[str, Tensor], *probes_and_arguments: Tree
    ) -> Iterator[Tree]:
        """Context manager: yield the loss; the layers have hooks meanwhile, which tap their outputs."""
        if not probes_and_arguments or not isinstance(probes_and_arguments[0], Mapping):
            raise TypeError(f"{self!r}: must be called with params, probes and the arguments of module_loss")
        probes, *arguments = probes_and_arguments
        _check_uncompiled(self.model)
        for path in self.probes:
            if not isinstance(probes.get(path), Record):
                raise ValueError(
                    f"track_scales: probes must hold a Record for every tapped module; got none for {path!r}"
                )
        with self.lock():
            is_traced_by_dynamo = torch.compiler.is_dynamo_compiling()
            layers: list[Any] = [self.model.get_submodule(path) for path in self.probes]
            hooks_before = [layer._forward_hooks for layer in layers]
            for layer, path in zip(layers, self.probes):
                tap_outputs = functools.partial(_tap_outputs, probes[path], self._sample)
                if is_traced_by_dynamo:  # it traces no register_forward_hook, and does not write into this dict
                    layer._forward_hooks = OrderedDict({**layer._forward_hooks, _KEY: tap_outputs})
                else:  # so that hooks that the forward pass registers or removes are so afterwards
                    layer._forward_hooks[_KEY] = tap_outputs
            try:
                with super().called(region, params, *arguments) as returned:
                    yield returned
            finally:
                for layer, hooks in zip(layers, hooks_before):
                    if is_traced_by_dynamo:
                        layer._forward_hooks = hooks
                    else:
                        layer._forward_hooks.pop(_KEY, None)  # the forward pass may have removed all


def track_scales(loss_fn: ModuleLoss, modules: Chosen = None, *, sample: int | None = 4096) -> TrackedLoss:
    """Tap the outputs of the layers of a loss's module, by hooks during a call of the loss.

    Give the tracked loss to `make_train_step`, whose metrics then have a `Record` per layer path, of the layer's
    outputs and their gradients. To track every n-th step, call two steps, one of them tracked, on one state. Without a
    step, the gradient with respect to the probes has them. The gradients of the parameters are bit for bit unchanged. A
    layer that is called several times, or has several outputs, has one record of them all. A layer that is not called,
    or that the loss does not depend on, has count 0. No sync.

    Args:
        loss_fn: a loss of `module_loss`.
        modules: the layers: paths, or a predicate of path and module; by default those without children, and
            torch.nn.MultiheadAttention.
        sample: count about this many elements of each tensor, evenly spread; None for all. With 4,096 a fraction is
            accurate to 0.016 (two standard errors) and a standard deviation to some percent. Rare values, such as a
            single NaN, can be missed (`found_inf_by_leaf` finds them).

    Returns:
        A `TrackedLoss`: `(params, probes, batch) -> loss`, with the probes of `tape(device)`.

    Raises:
        TypeError: loss_fn is something else, or its module or a layer of it is compiled, or it is scripted; sample is
            not an integer.
        ValueError: loss_fn is tracked already, a path is not in the module, no layer is selected, or sample is below 1.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        >>> loss_fn = track_scales(module_loss(model, torch.nn.functional.mse_loss))
        >>> step = make_train_step(loss_fn, stateless(torch.optim.SGD))
        >>> _, metrics = step(step.init(), (torch.ones(2, 4), torch.ones(2, 4)))
        >>> {name: record.backward.count.item() for name, record in metrics.records.items()}
        {'0': 8.0, '1': 8.0}

    References:
        The idea: `ScaleTracker` of unit-scaling, 0.3 (`unit_scaling/utils.py`).
    """
    check_sample("track_scales", sample)
    if not isinstance(loss_fn, ModuleLoss):
        raise TypeError(f"track_scales: loss_fn must be a loss of module_loss; got {loss_fn!r}")
    if isinstance(loss_fn, TrackedLoss):
        raise ValueError("track_scales: loss_fn must not be tracked already; got one with taps")
    _check_uncompiled(loss_fn.model)
    return TrackedLoss(loss_fn, modules, sample)


def _check_uncompiled(module: nn.Module) -> None:
    """Raise TypeError if a hook may have no effect: compiled and scripted code does not look for new ones."""
    for part in module.modules():
        # Recognized by attributes, because importing the class of compiled modules imports Dynamo, which takes seconds.
        is_compiled = hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        if is_compiled or isinstance(part, torch.jit.ScriptModule):
            raise TypeError(
                "track_scales: loss_fn must be of the module itself, compiled afterwards with what calls it; "
                f"got a {type(part).__name__}"
            )


def _choose(module: nn.Module, chosen: Chosen) -> tuple[str, ...]:
    """Return the paths of the modules to tap.

    Raises:
        TypeError: chosen is neither paths nor a predicate.
        ValueError: a path is not in the module, or given twice; none is chosen.
    """
    modules = dict(module.named_modules())
    if chosen is None:
        paths = [path for path in _layer_paths(module) if path in modules]
    elif not callable(chosen) and not isinstance(chosen, Iterable):
        raise TypeError(f"track_scales: modules must be paths or a predicate; got {chosen!r}")
    elif callable(chosen):
        paths = [path for path, submodule in modules.items() if chosen(path, submodule)]
    else:
        paths = [chosen] if isinstance(chosen, str) else list(chosen)
        for path in paths:
            if path not in modules:
                raise ValueError(f"track_scales: modules must be paths in the module; got {path!r}")
    if len(set(paths)) < len(paths):
        raise ValueError(f"track_scales: modules must differ; got {paths}")
    if not paths:
        raise ValueError(f"track_scales: modules must choose a module at least; got none of {len(modules)}")
    return tuple(paths)


def _layer_paths(module: nn.Module, path: str = "") -> Iterator[str]:
    """Yield the paths of the layers that are tapped by default, a module with several names under each.

    What is inside of a layer (a projection, a parametrization) is not called, or computes its weight.
    """
    children = dict(module.named_children())
    if isinstance(module, nn.MultiheadAttention) or children.keys() <= {"parametrizations"}:
        yield path
        return
    for name, child in children.items():
        yield from _layer_paths(child, f"{path}.{name}" if path else name)


def _tap_outputs(record: Record, sample: int | None, _: nn.Module, __: Args, outputs: Tree) -> Tree:
    """Forward hook of a tapped module: return its outputs with all their tensors tapped."""
    return _tapped(outputs, record, sample)


def _tapped(outputs: Tree, record: Record, sample: int | None) -> Tree:
    """Return a pytree with all its tensors tapped, also those in dataclasses."""

    def tapped(leaf: Any) -> Any:
        if has_values(leaf):
            return tap(leaf, record, sample=sample)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):  # a pytree leaf unless registered
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
            return dataclasses.replace(leaf, **_tapped(fields, record, sample))
        return leaf

    return _tree.map_leaves(tapped, *_tree.flatten(outputs))
