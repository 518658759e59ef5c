"""The checks of a module's loss that run in its first call, in training and in eval mode, and in every trace.

They cost a mode of torch around the call and walks through Python's objects, and depend only on the code of model and
criterion. Later calls run without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from funcamp._autograd.first_call_watch import FirstCallWatch, written_error
from funcamp._autograd.module_checks import CriterionTensor, check_no_other_is_trained
from funcamp._autograd.module_tensors import ModuleTensors
from funcamp._autograd.named_storages import MemoryMark, NamedStorages, memory_of
from funcamp._autograd.scaled_grad import nodes
from funcamp._autograd.tensor_swap import Holder, recurrent_layers
from funcamp._trace.python_state import survey
from funcamp._trace.tracing import running
from funcamp._types import Tree

_Returned = TypeVar("_Returned")


class FirstCalls:
    """The checks of the first calls of one loss, and which calls there were.

    Args:
        tensors: the module's tensors.
        at_creation: where these were in memory when the loss was made.
        criterion_tensors: trainable tensors that the criterion reaches. No call must find them in the loss's graph,
            because no step trains them.
        python_parts: the objects whose Python the loss runs, by name.
    """

    def __init__(
        self,
        tensors: ModuleTensors,
        at_creation: NamedStorages,
        criterion_tensors: dict[int, CriterionTensor],
        python_parts: Mapping[str, object],
    ) -> None:
        self._tensors = tensors
        self._at_creation = at_creation
        self._criterion_tensors = criterion_tensors
        self._python_parts = python_parts
        self._modes_checked_in_forward: set[bool] = set()
        """The values of model.training with which an eager call was checked."""
        self._modes_checked_in_backward: set[bool] = set()
        """The same for a backward pass."""
        self._kept_tensors: dict[str, Tensor] = {}
        """Tensors in the memory of the last call's parameters, which the next call must not read."""

    def restarted(self, python_parts: Mapping[str, object]) -> FirstCalls:
        """Return the checks of a loss that runs other objects, before its first call."""
        return FirstCalls(self._tensors, self._at_creation, self._criterion_tensors, python_parts)

    def forward_is_checked(self, *, training: bool) -> bool:
        """Return whether a call in this mode was checked before."""
        return training in self._modes_checked_in_forward and running() is None and not self._kept_tensors

    def backward_is_checked(self, *, training: bool) -> bool:
        """Return whether a backward pass in this mode was checked before."""
        return training in self._modes_checked_in_backward and running() is None

    def check_forward(
        self,
        holder: Holder,
        evaluate: Callable[[], Tree],
        params: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        batch: Tree,
    ) -> Tree:
        """Return what `evaluate` returns.

        Args:
            holder: the modules that `evaluate` calls.
            evaluate: computes the loss.
            params: the parameters as they are passed to the loss.
            values: parameters and buffers by the module's names.
            batch: the batch.

        Raises:
            ValueError: the call reads a parameter or buffer through a tensor from before the call, or a trainable
                tensor of the criterion; it writes or freezes a parameter.
        """
        buffers = {name: values[name] for name in self._tensors.buffer_names}
        watched_tensors = {**self._tensors.in_module(), **self._kept_tensors}
        watch = FirstCallWatch(watched_tensors, self._at_creation, params, buffers)
        marks_before = {name: memory_of(value) for name, value in params.items()}
        trained_names = [name for name, value in params.items() if value.requires_grad]
        training = holder.model.training
        in_trace = running() is not None

        # A mode makes Dynamo compile once more what it has compiled, so there only the graph is looked at.
        if not in_trace and _has_compiled_module(holder):
            returned = evaluate()
            watch.check_graph(returned, (values, batch))
        else:
            with watch.mode(in_trace=in_trace):
                returned = evaluate()

        _refuse_frozen(trained_names, params)
        if self._criterion_tensors:
            loss = returned[0] if isinstance(returned, tuple) else returned
            graph = nodes(getattr(loss, "grad_fn", None))
            check_no_other_is_trained(graph, self._criterion_tensors, self._python_parts["criterion"])
        # flatten_parameters gives a recurrent layer's parameters other memory with the same values.
        _refuse_written(params, marks_before, may_move=bool(recurrent_layers(holder)))
        # A trace runs once: what it leaves behind, jit compares itself.
        if not in_trace:
            is_first_in_mode = training not in self._modes_checked_in_forward
            self._kept_tensors = self._tensors_kept_of(params) if is_first_in_mode else {}
            self._modes_checked_in_forward.add(training)
        return returned

    def _tensors_kept_of(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors, by path, that model and criterion have kept in the memory of the values passed.

        They are the parameters of one call. In torch's loop they would follow the parameters, so the next call is
        watched for reading them.
        """
        storages = NamedStorages(params)
        own_ids = set(map(id, self._tensors.in_module().values()))
        kept_tensors: dict[str, Tensor] = {}
        for path, slot in survey(self._python_parts).items():
            tensor = slot.value
            if not isinstance(tensor, Tensor) or id(tensor) in own_ids:
                continue
            if storages.name_of(tensor) is not None:
                kept_tensors[path] = tensor
        return kept_tensors

    def check_backward(self, holder: Holder, run: Callable[[], _Returned], values: Mapping[str, Tensor]) -> _Returned:
        """Return what `run` returns.

        Args:
            holder: the modules.
            run: runs the backward pass while the modules have these values, and writes those into them that the modules
                have at the end.
            values: parameters and buffers by the module's names.

        Raises:
            ValueError: a hook writes a buffer, and the step's buffers are those after the forward pass.
        """
        buffers_before = {name: values[name] for name in self._tensors.buffer_names}
        marks_before = {name: memory_of(buffer) for name, buffer in buffers_before.items()}
        training = holder.model.training
        # Only a global hook of torch sees every call of a module.
        called_modules: list[nn.Module] = []
        handle = register_module_forward_pre_hook(lambda module, _: called_modules.append(module))
        try:
            returned = run()
        finally:
            handle.remove()
        # A checkpoint calls modules again, which write their buffers as in the forward pass.
        if not called_modules:
            for name, buffer in buffers_before.items():
                is_replaced = values[name] is not buffer
                if is_replaced or memory_of(buffer) != marks_before[name]:
                    raise ValueError(
                        "module_loss: model must not write its buffers in the backward pass, because the step's "
                        f"buffers are those after the forward pass; a hook wrote {name!r}: keep it in a tensor that "
                        "is a plain attribute and not a buffer"
                    )
        if running() is None:
            self._modes_checked_in_backward.add(training)
        return returned


def _refuse_frozen(trained_names: Iterable[str], params: Mapping[str, Tensor]) -> None:
    """Raise ValueError if one of these parameters no longer requires a gradient."""
    for name in trained_names:
        if not params[name].requires_grad:
            raise ValueError(
                "module_loss: model must not freeze a parameter in the forward pass, because the step trains it; got "
                f"requires_grad=False on {name!r}: freeze it before module_loss is called, or take p.detach() in "
                "the forward pass"
            )


def _refuse_written(params: Mapping[str, Tensor], marks_before: Mapping[str, MemoryMark], *, may_move: bool) -> None:
    """Raise ValueError if parameters were written inside of a function of torch, or by `.data = value`.

    Args:
        params: the parameters.
        marks_before: their marks before the call.
        may_move: whether they may be in other memory now.
    """
    for name, value in params.items():
        mark = memory_of(value)
        mark_before = marks_before[name]
        is_written = mark.version != mark_before.version
        is_moved = mark.storage != mark_before.storage
        if is_written or (is_moved and not may_move):
            raise written_error(name)


def _has_compiled_module(holder: Holder) -> bool:
    """Return whether torch.compile compiles a module or a part of it (recognized without importing Dynamo)."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in holder.modules())
