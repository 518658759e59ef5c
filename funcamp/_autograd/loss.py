"""`loss`: a loss function with a description of its inputs and outputs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Size, Tensor, nn

from funcamp import _tree
from funcamp._autograd.differentiate import Engine, check_engine, put_leaves_in_graphs
from funcamp._autograd.graph import refuse_hooks_beside
from funcamp._autograd.returned import loss_in_front
from funcamp._check import boolean
from funcamp._layers import layer
from funcamp._scaler.state import ScalerState
from funcamp._trace.tracing import compiling
from funcamp._types import Tree


class Taps(Protocol):
    """The taps of a loss, which it takes as an argument; `numerics` has them.

    Their tape is zeros that are differentiated together with the parameters, and whose gradients are records:

        d loss / d tape = a record        not a derivative: an operation inside the loss returns a record in its place

    So a backward pass returns what was seen in it, through checkpoints, transforms and compilers: the counts of taps
    (`numerics.tap`). autograd sums the records of several uses; those of micro-batches are summed too, and each rank
    keeps its own.
    """

    names: tuple[str, ...]

    def tape(self, device: torch.device) -> Tree:
        """Return empty records by name."""
        ...

    def collected(self, records: Tree) -> Mapping[str, object]:
        """Return the records in the form in which metrics have them."""
        ...


class Loss:
    """A loss function with a description of its inputs and outputs; made by `loss`."""

    has_module = False
    """Whether a module has the tensors of a call until the backward pass has ended."""
    param_shapes: dict[str, Size] | None = None
    """The shape of every parameter, by the name under which it is stored; None if the loss does not know them."""
    uncast_names: frozenset[str] = frozenset()
    """The stored names of the parameters that autocast does not cast, such as those of embeddings."""

    def __init__(
        self,
        function: Callable[..., object],
        *,
        has_aux: bool = False,
        has_buffers: bool = False,
        keep_buffers: bool = False,
        has_scaler: bool = False,
        taps: Taps | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.function = function
        self.has_aux = has_aux
        self.has_buffers = has_buffers
        self.keep_buffers = keep_buffers
        self.has_scaler = has_scaler
        self.taps = taps
        self.engine = engine
        self.graph_is_checked = False
        """Whether the graph of a call was looked at."""
        put_leaves_in_graphs()

    def __repr__(self) -> str:
        return f"loss({self.function!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        return self.function(*args, **kwargs)

    @contextlib.contextmanager
    def called(self, region: AbstractContextManager[object], *args: Any, **kwargs: Any) -> Iterator[Tree]:
        """Context manager: yield what a call in a region returns; a module has the tensors of the call meanwhile.

        `torch.utils.checkpoint` calls the module again in the backward pass, so that is a part of the block.
        """
        with region:
            returned = self(*args, **kwargs)
        yield returned

    def arguments(
        self, params: Tree, taps: Tree, buffers: dict[str, Tensor], scaler: ScalerState, batch: Tree
    ) -> list[Tree]:
        """Return those of these arguments that the loss takes, in its order."""
        arguments = [params]
        if self.probes:
            arguments.append(taps)
        if self.has_buffers:
            # A function may write them. A call of a module copies them itself.
            own_buffers = buffers if self.has_module else {name: value.clone() for name, value in buffers.items()}
            arguments.append(own_buffers)
        if self.has_scaler:
            arguments.append(scaler)
        arguments.append(batch)
        return arguments

    def check_graph(self, returned: Tree, inputs: list[Tensor]) -> None:
        """Raise RuntimeError if a part of the graph would not be differentiated: at the first call, and in every trace.

        Args:
            returned: what a call returned.
            inputs: the tensors with respect to which it is differentiated.
        """
        loss = loss_in_front(returned)
        if loss is not None and (compiling() or not self.graph_is_checked):
            refuse_hooks_beside("step", loss, inputs)
            self.graph_is_checked = True

    @property
    def probes(self) -> tuple[str, ...]:
        """Return the names of the taps."""
        return () if self.taps is None else self.taps.names

    def tape(self, device: torch.device) -> Tree:
        """Return the tape of the taps, empty records by name; `()` without taps."""
        return () if self.taps is None else self.taps.tape(device)

    def collected(self, records: Tree) -> Mapping[str, Any]:
        """Return the records of the tape for the metrics."""
        return {} if self.taps is None else self.taps.collected(records)

    def params(self) -> dict[str, Tensor]:
        """Return the initial parameters, if the loss knows them."""
        raise TypeError("init: params must be given, because the loss was not made by module_loss; got None")

    def buffers(self) -> dict[str, Tensor]:
        """Return the initial buffers."""
        return {}

    def module_parameters(self) -> dict[str, Tensor]:
        """Return the module's parameters themselves, frozen ones too, by name; none without a module."""
        return {}

    def state_dict(self, params: Tree, buffers: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the values of a state by name: the module's `state_dict`, or without a module the parameters."""
        values: dict[str, Tensor] = params.state_dict()
        return values

    def python_parts(self) -> dict[str, object]:
        """Return the objects that may keep state besides the loss's arguments, by name."""
        return {"loss": self.function}

    def state_was_made(self, *, shares_memory: bool) -> None:
        """Note that a state begins with the initial parameters, and whether in their memory."""

    def begin_step(self) -> None:
        """Note that the Python of a step runs."""

    def lock(self) -> AbstractContextManager[object]:
        """Return the lock with which no other thread has its tensors in the module; another one without a module."""
        return threading.Lock()

    def check_not_evaluated(self, call: str) -> None:
        """Raise RuntimeError if the module has the values of a state, in `with_values`."""

    def state_moves(self) -> None:
        """Note that the state is newer than the module from now on; `jit` calls this at every run of a program."""

    def eval_mode(self) -> AbstractContextManager[None]:
        """Context manager: dropout and similar layers are off, if the loss knows its module."""
        return contextlib.nullcontext()

    def with_values(
        self,
        params: Tree,  # noqa: ARG002
        buffers: dict[str, Tensor],  # noqa: ARG002
    ) -> AbstractContextManager[nn.Module]:
        """Context manager: the module has these values."""
        raise TypeError(f"evaluating: the step must have a loss of module_loss, whose module it yields; got {self!r}")


def loss(
    function: Callable[..., Any],
    *,
    has_aux: bool = False,
    has_buffers: bool = False,
    keep_buffers: bool = False,
    has_scaler: bool = False,
    probes: Iterable[str] = (),
    engine: Engine | None = None,
) -> Loss:
    """Describe a loss function whose inputs or outputs are more than `(params, batch) -> loss`.

    `make_train_step` accepts a function `(params, batch) -> loss` as it is; this describes any other. The function's
    arguments are `(params, probes, buffers, scaler, batch)`, without those that are not requested. No sync.

    Args:
        function: any function of a pytree of parameters and a batch. Dropout uses torch's default generator:
            `torch.manual_seed` makes a run reproducible, saving `torch.get_rng_state` lets it resume.
        has_aux: it returns `(loss, aux)`, or `(loss, (buffers, aux))`; aux is a pytree of tensors for the metrics.
        has_buffers: it takes a dict of buffers and returns `(loss, buffers)` with the new ones.
        keep_buffers: keep the buffers of a skipped step, as torch's loop does; they may be non-finite. By default they
            are reverted with the rest.
        has_scaler: it takes the `ScalerState` to scale further gradients (a gradient penalty, an inner loop): pass it
            to `scaled_grad_and_value`, or to `scale` and `unscale`.
        probes: names of tensors that it taps. It takes a dict of `numerics.Record` by these names, for `numerics.tap`,
            and the metrics contain the counts.
        engine: "autograd", "func" or None, as in `scaled_grad_and_value`. None is torch's autograd, unless the step
            runs inside a transform of torch.func, or a tensor of the state requires a gradient. Tensors of the batch
            may require one, for a penalty on it in the loss; "func" makes the results differentiable with respect to
            them.

    Returns:
        A `Loss`; calling it calls the function.

    Raises:
        TypeError: function is not callable, is a module, or is already a `Loss`; a flag is not a bool; a probe is not a
            string.
        ValueError: engine is another string; probes repeat a name.

    Example:
        >>> def with_error(params, x):
        ...     error = params["w"] * x - 1
        ...     return (error**2).sum(), {"error": error}
        >>> step = make_train_step(loss(with_error, has_aux=True), stateless(torch.optim.SGD))
        >>> state, metrics = step(step.init({"w": torch.ones(1)}), torch.tensor([3.0]))
        >>> metrics.loss, metrics.aux
        (tensor(4.), {'error': tensor([2.])})
    """
    call = "loss"
    check_function(call, function)
    if isinstance(function, Loss) or isinstance(getattr(function, "func", None), Loss):  # a functools.partial
        raise TypeError(f"{call}: function must not be a loss already: describe it where it is made; got {function!r}")
    flags = {"has_aux": has_aux, "has_buffers": has_buffers, "keep_buffers": keep_buffers, "has_scaler": has_scaler}
    checked_flags = {name: boolean(call, name, flag) for name, flag in flags.items()}
    if keep_buffers and not has_buffers:
        raise ValueError(f"{call}: keep_buffers must be False without has_buffers; got True")
    check_engine(call, engine)
    probe_names = _checked_names(call, probes)
    taps: Taps | None = layer("numerics.record").Taps(probe_names) if probe_names else None
    return Loss(function, **checked_flags, taps=taps, engine=engine)


def check_function(call: str, function: object) -> None:
    """Raise TypeError if this is not a function of parameters and batch.

    Args:
        call: the public function, for errors: `loss`, or one that takes a loss.
        function: its argument.
    """
    name = "function" if call == "loss" else "loss_fn"
    if not callable(function):
        raise TypeError(f"{call}: {name} must be callable; got {_tree.brief(function)}")
    if isinstance(function, nn.Module):
        raise TypeError(
            f"{call}: {name} must be a function of parameters and batch: write module_loss(model, criterion), or "
            f"module_loss(model) if the model returns its loss; got the module {type(function).__name__} itself"
        )


def _checked_names(call: str, probes: Iterable[str]) -> tuple[str, ...]:
    """Return the names of probes, of which one may be given as a string.

    Raises:
        TypeError: they are not strings.
        ValueError: a name is there twice.
    """
    if not isinstance(probes, Iterable):
        raise TypeError(f"{call}: probes must be names; got {_tree.brief(probes)}")
    names = (probes,) if isinstance(probes, str) else tuple(probes)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{call}: probes must be names; got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{call}: probes must differ; got {names}")
    return names
