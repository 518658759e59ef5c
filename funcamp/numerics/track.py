"""`track_scales`: taps behind the layers of a loss's module, without changing the module."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.left_behind import hooks_in_copies
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._types import Args, Tree
from funcamp.numerics.counting import WIDTH, check_sample, has_values
from funcamp.numerics.record import Record, Taps
from funcamp.numerics.statistics import Stats
from funcamp.numerics.taps import tap

#: The buffers of a tapped module that have the rows of its record.
_FORWARD = "_funcamp_forward"
_BACKWARD = "_funcamp_backward"

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
        skeleton, names = _with_taps(loss_fn.model, chosen, sample)
        self.taps = Taps(names)
        self.call_copy(skeleton)

    def __repr__(self) -> str:
        return f"track_scales({super().__repr__()}, {len(self.probes)} modules)"

    @contextlib.contextmanager
    def called(
        self, region: AbstractContextManager[object], params: dict[str, Tensor], *probes_and_arguments: Tree
    ) -> Iterator[Tree]:
        """Context manager: yield the loss, with the records of the taps among the module's tensors."""
        if not probes_and_arguments or not isinstance(probes_and_arguments[0], Mapping):
            raise TypeError(f"{self!r}: must be called with params, probes and the arguments of module_loss")
        probes, *arguments = probes_and_arguments
        with super().called(region, {**params, **_probe_buffers(self.probes, probes)}, *arguments) as returned:
            yield returned


def track_scales(loss_fn: ModuleLoss, modules: Chosen = None, *, sample: int | None = 4096) -> TrackedLoss:
    """Tap the outputs of the layers of a loss's module, without a hook on the module.

    Give the tracked loss to `make_train_step`, whose metrics then have a `Record` per layer path, of the layer's
    outputs and their gradients. To track every n-th step, call two steps, one of them tracked, on one state. Without a
    step, the gradient with respect to the probes has them. The gradients of the parameters are bit for bit unchanged. A
    layer that is called several times, or has several outputs, has one record of them all. A layer that is not called,
    or that the loss does not depend on, has count 0. Works on a copy of the module's structure that shares its
    parameters and has its current training flags. No sync.

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
        TypeError: loss_fn is something else, or its module is compiled or scripted; sample is not an integer.
        ValueError: a path is not in the module, no layer is selected, or sample is below 1.

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
    return TrackedLoss(loss_fn, modules, sample)


def _with_taps(module: nn.Module, chosen: Chosen, sample: int | None) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of a module's structure that shares its tensors, and the paths of the tapped modules.

    Raises:
        TypeError: the module is compiled or scripted.
        ValueError: it has taps already, or the choice of modules is invalid.
    """
    # A compiled module is recognized by its attribute, because importing its class imports Dynamo, which takes seconds.
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise TypeError(
            "track_scales: loss_fn must be of the module itself, compiled afterwards with what calls it; "
            f"got a {type(module).__name__}"
        )
    if any(_FORWARD in submodule._buffers for submodule in module.modules()):
        raise ValueError("track_scales: loss_fn must not be tracked already; got one with taps")
    names = _choose(module, chosen)
    # deepcopy takes what its memo has under an object's id instead of a copy.
    skeleton = copy.deepcopy(module, _tensors_by_id(module) | hooks_in_copies(module))
    for name in names:
        layer = skeleton.get_submodule(name)
        for buffer_name in (_FORWARD, _BACKWARD):
            no_values = torch.zeros(WIDTH, dtype=torch.float64, device="meta")
            layer.register_buffer(buffer_name, no_values, persistent=False)
        layer.register_forward_hook(functools.partial(_tap_outputs, sample))
    return skeleton, names


def _tensors_by_id(module: nn.Module) -> dict[int, object]:
    """Return all parameters, buffers and plain attributes of a module's parts that are tensors, by their id."""
    tensors: dict[int, object] = {}
    for submodule in module.modules():
        for attributes in (submodule._parameters, submodule._buffers, vars(submodule)):
            for value in attributes.values():
                if isinstance(value, Tensor):
                    tensors[id(value)] = value
    return tensors


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


def _tap_outputs(sample: int | None, layer: nn.Module, _: Args, outputs: Tree) -> Tree:
    """Forward hook of a tapped module: tap its outputs with the record that its buffers hold."""
    forward = getattr(layer, _FORWARD)
    backward = getattr(layer, _BACKWARD)
    if forward.device.type == "meta":  # called outside of functional_call
        return outputs
    return _tap_tensors(outputs, Record(Stats(forward), Stats(backward)), sample)


def _tap_tensors(outputs: Tree, record: Record, sample: int | None) -> Tree:
    """Return a pytree with all its tensors tapped, also those in dataclasses."""
    leaves, spec = _tree.flatten(outputs)
    for index, leaf in enumerate(leaves):
        if has_values(leaf):
            leaves[index] = tap(leaf, record, sample=sample)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):  # a pytree leaf unless registered
            fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf) if field.init}
            leaves[index] = dataclasses.replace(leaf, **_tap_tensors(fields, record, sample))
    return _tree.unflatten(leaves, spec)


def _probe_buffers(paths: Iterable[str], probes: Mapping[str, Record]) -> dict[str, Tensor]:
    """Return the buffers that the taps read, by name."""
    buffers: dict[str, Tensor] = {}
    for path in paths:
        if not isinstance(probes.get(path), Record):
            raise ValueError(f"track_scales: probes must hold a Record for every tapped module; got none for {path!r}")
        prefix = f"{path}." if path else ""
        buffers[prefix + _FORWARD] = probes[path].forward.row
        buffers[prefix + _BACKWARD] = probes[path].backward.row
    return buffers
