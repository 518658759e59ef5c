"""torch's own databases of operations and modules, and a step made of one of their samples.

Nobody here wrote these samples: torch tests every operation and every module with them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import math
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import funcamp
from funcamp._trace.trace import trace
from funcamp._trace.tracing import HostError
from tests.support.helpers import clone

#: Samples of an operation in float32, and in a dtype that autocast does not cast.
SAMPLES, OTHER_SAMPLES = 4, 1


class Autocast(NamedTuple):
    """How a step is called."""

    inside: torch.dtype | None = None
    """The dtype of an autocast around the operation."""
    around: torch.dtype | None = None
    """The dtype of an autocast around the call of the step, and so around the derivatives too."""
    samples: int = 2


AUTOCAST = {
    "plain": Autocast(samples=SAMPLES),
    "float16 inside": Autocast(inside=torch.float16),
    "bfloat16 around": Autocast(around=torch.bfloat16),
}
SEED = 7
#: How many operations are one program.
TOGETHER = 25


@contextlib.contextmanager
def _without_traces() -> Iterator[None]:
    """Context manager: import torch's test modules without what they do to the process of the other tests.

    They need expecttest for a base class, select a profile of hypothesis, forbid changes of torch.backends, and
    replace the call of scripted functions.
    """
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    replaced = {"expecttest": stand_in, "hypothesis": None}
    before = {name: sys.modules.get(name) for name in replaced}
    scripted: Any = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    calls = [kind.__call__ for kind in scripted]
    forbid: object = torch.backends.disable_global_flags
    backends: Any = torch.backends
    sys.modules.update(replaced)
    backends.disable_global_flags = lambda: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        backends.disable_global_flags = forbid
        for kind, call in zip(scripted, calls):
            kind.__call__ = call
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def internal(name: str) -> Any:
    """Import one of torch's test modules."""
    with _without_traces():
        return importlib.import_module(f"torch.testing._internal.{name}")


@functools.cache
def operations() -> dict[str, Any]:
    """Return torch's operations by name."""
    methods = internal("common_methods_invocations")
    # It seeds torch's default generator, which a step must not do; a test seeds it before.
    methods.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    database = methods.op_db
    names = [".".join(filter(None, (one.name, one.variant_test_name))) for one in database]
    return dict(zip(names, database))


def programs(left_out: Set[str]) -> list[list[str]]:
    """Return the names of operations, those of one program in a list: together they compile in seconds."""
    names = sorted(operations().keys() - left_out)
    return [names[first : first + TOGETHER] for first in range(0, len(names), TOGETHER)]


@functools.cache
def modules() -> dict[str, object]:
    """Return torch's modules by name."""
    return {one.name: one for one in internal("common_modules").module_db}


class Case(NamedTuple):
    """A step of one sample, its first state and its batch."""

    step: Callable[[Any, Any], tuple[object, object]]
    state: list[Tensor]
    batch: list[Tensor]


def dtypes_of(operation: Any) -> dict[torch.dtype, int]:
    """Return the dtypes to try, and how many samples of each."""
    counts = {torch.float32: SAMPLES, torch.complex64: OTHER_SAMPLES}
    found = {dtype: count for dtype, count in counts.items() if dtype in operation.dtypes}
    if found:
        return found
    return {dtype: OTHER_SAMPLES for dtype in (torch.int64, torch.bool) if dtype in operation.dtypes}


def samples_of(operation: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """Return the first samples of an operation; the same ones at every call."""
    torch.manual_seed(0)
    differentiable = operation.supports_autograd and dtype in operation.supported_backward_dtypes("cpu")
    return list(itertools.islice(operation.sample_inputs("cpu", dtype, requires_grad=differentiable), count))


def is_float(leaf: object) -> bool:
    """Return whether a leaf is a tensor of floating-point or complex numbers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def weighted_sum(leaves: list[Any]) -> Tensor | None:
    """Return a sum of all floating-point numbers, each with a different weight; None if there are none."""
    total: Tensor | None = None
    for leaf in filter(is_float, leaves):
        dense = leaf if leaf.layout == torch.strided else leaf.to_dense()
        for part in (dense.real, dense.imag) if dense.is_complex() else (dense,):
            # Half precision sums would overflow.
            numbers = part if part.dtype.itemsize >= 4 else part.float()
            weights = torch.arange(1, numbers.numel() + 1, dtype=numbers.dtype).sin().reshape(numbers.shape)
            value = (numbers * weights).sum()
            total = value if total is None else total + value
    return total


def case_of(
    function: Callable[..., object], sample: Any, inside: torch.dtype | None = None, *, copies: bool = False
) -> Case:
    """Return a step of a sample: its floating-point tensors are the state, its other tensors the batch.

    The step calls the function, differentiates a weighted sum of its results with respect to the state, and takes a
    step of gradient descent. It returns everything that it computed.

    Args:
        function: the operation.
        sample: from `samples_of`.
        inside: the dtype of an autocast around the operation.
        copies: give the operation copies, because it writes its arguments.
    """
    leaves, spec = _pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    state_places = [index for index, leaf in enumerate(leaves) if is_float(leaf)]
    batch_places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not is_float(leaf)]
    trainable = [leaves[place].requires_grad for place in state_places]
    # A generator of the sample's is replaced by torch's default one.
    constants = [None if isinstance(leaf, (Tensor, torch.Generator)) else leaf for leaf in leaves]

    def step(state: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], dict[str, object]]:
        inputs = [value.detach().requires_grad_(flag) for value, flag in zip(state, trainable)]
        arguments = list(constants)
        for place, value in zip(state_places, inputs):
            arguments[place] = value.clone() if copies else value
        for place, value in zip(batch_places, batch):
            arguments[place] = value.clone() if copies else value
        first, others, keywords = _pytree.tree_unflatten(arguments, spec)
        with torch.autocast("cpu", inside) if inside else contextlib.nullcontext():
            results = _pytree.tree_leaves(function(first, *others, **keywords))
        loss = weighted_sum(results)
        gradients: list[Tensor | None] = [None] * len(inputs)
        if loss is not None and loss.requires_grad:
            wanted = [place for place, flag in enumerate(trainable) if flag]
            found = torch.autograd.grad(loss, [inputs[place] for place in wanted], allow_unused=True)
            for place, gradient in zip(wanted, found):
                gradients[place] = gradient
        new = [
            value if gradient is None else (value - 0.125 * gradient.to_dense()).detach()
            for value, gradient in zip(state, gradients)
        ]
        kept = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in results]
        return new, {"results": kept, "gradients": gradients, "loss": None if loss is None else loss.detach()}

    return Case(step, [leaves[place].detach() for place in state_places], [leaves[place] for place in batch_places])


def is_same(one: object, other: object) -> bool:
    """Return whether two results have the same dtype, shape and bits; a NaN equals every NaN."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return torch.equal(one, other)
    same_number = (one == other) & (one.signbit() == other.signbit())
    return bool((same_number | (one.isnan() & other.isnan())).all())


def is_same_kind(one: object, other: object) -> bool:
    """Return whether two results have the same dtype and shape, whatever their values are."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    return (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)


#: What an error of a jitted step is about, by its text.
REFUSALS = {
    "reads a value": "must not read a tensor's value on the host",
    "casts inside": "under autocast, which casts inside of its kernel",
    "makes a sparse tensor": "must make no sparse tensor",
    "takes a shape from values": "must not take a shape from values",
}
FAILS = "fails in plain Python"


def refusal(error: Exception) -> str:
    """Return what an error is about, or its text."""
    text = f"{type(error).__name__}: {error}"
    reasons = [reason for reason, words in REFUSALS.items() if words in text]
    return f"refused: {reasons[0]}" if reasons else f"refused: {text}"


def outcome(
    function: Callable[..., object],
    sample: object,
    autocast: str,
    *,
    same: Callable[[Any, Any], bool] = is_same,
    in_place: bool = False,
) -> str:
    """Run a sample's step in plain Python and jitted; return "equal", or what is not."""
    inside, around, _ = AUTOCAST[autocast]

    def run(call: Callable[[Any, Any], object], case: Case) -> object:
        torch.manual_seed(SEED)
        with torch.autocast("cpu", around) if around else contextlib.nullcontext():
            return call(clone(case.state), clone(case.batch))

    # An operation in place needs copies, because it must write neither a leaf nor the batch.
    for copies in [True] if in_place else [False, True]:
        case = case_of(function, sample, inside, copies=copies)
        try:
            expected = run(case.step, case)
            break
        except Exception:
            continue
    else:
        return FAILS
    try:
        found = run(funcamp.jit(case.step, backend="eager"), case)
    except Exception as error:
        return refusal(error)
    paths, spec = _pytree.tree_flatten_with_path(expected)
    leaves, found_spec = _pytree.tree_flatten(found)
    if spec != found_spec:
        return "differs: structure"
    wrong = [path for (path, leaf), other in zip(paths, leaves) if not same(leaf, other)]
    if not wrong:
        return "equal"
    first: Any = wrong[0]
    return f"differs: {'new state' if first[0].idx == 0 else first[1].key}"


#: How far a compiled number may be from an eager one, in multiples of the eager one's own error.
LIMIT = 32.0
#: The same if that error is not known, because double precision draws other numbers: a wrong draw is beyond a million.
LIMIT_OF_RANDOM = 10_000.0


class Joined(NamedTuple):
    """Several cases as one step, so that one compilation is enough."""

    step: Callable[[Any, Any], tuple[object, object]]
    state: list[list[Tensor]]
    batch: list[list[Tensor]]


def joined(cases: list[Case]) -> Joined:
    """Return one step that takes the step of every case."""

    def step(state: list[object], batch: list[object]) -> tuple[object, object]:
        pairs = [case.step(values, inputs) for case, values, inputs in zip(cases, state, batch)]
        return [new for new, _ in pairs], [metrics for _, metrics in pairs]

    return Joined(step, [clone(case.state) for case in cases], [clone(case.batch) for case in cases])


def working_case(function: Callable[..., object], sample: object) -> Case | None:
    """Return a sample's case if its step runs in plain Python."""
    for copies in (False, True):
        case = case_of(function, sample, copies=copies)
        with contextlib.suppress(Exception):
            case.step(clone(case.state), clone(case.batch))
            return case
    return None


def in_double(sample: Any) -> object:
    """Return a sample with its numbers in double precision."""

    def double(leaf: Tensor) -> Tensor:
        if not is_float(leaf):
            return leaf
        dtype = torch.complex128 if leaf.is_complex() else torch.float64
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    leaves = _pytree.tree_map_only(Tensor, double, (sample.input, sample.args, sample.kwargs))
    return types.SimpleNamespace(input=leaves[0], args=leaves[1], kwargs=leaves[2])


def error_in_roundings(found: Any, expected: Any, reference: Any) -> float:
    """Return the largest error of a compiled result, in multiples of the rounding of the eager one; inf if it is wrong.

    A number may round otherwise if operations are fused. One rounding is the precision of the largest number of a
    result, or the eager result's distance from the one in double precision if that is more.
    """
    if not is_float(expected) or not is_same_kind(found, expected):
        return 0.0 if is_same(found, expected) else math.inf
    found, expected = (leaf.to_dense() if leaf.layout != torch.strided else leaf for leaf in (found, expected))
    finite = expected.isfinite()
    if not is_same(found.where(~finite, 0), expected.where(~finite, 0)):
        return math.inf
    if not finite.any():
        return 0.0
    found, expected = found.where(finite, 0), expected.where(finite, 0)
    rounding = torch.finfo(expected.dtype).eps * expected.abs().max().double().item()
    if is_float(reference) and reference.shape == expected.shape:
        exact = (reference.to_dense() if reference.layout != torch.strided else reference).where(finite, 0)
        distance = (expected - exact).abs().max().item()
        if distance < math.inf:
            rounding = max(rounding, distance)
    worst: float = (found - expected).abs().max().double().item()
    return worst if worst == 0.0 else worst / max(rounding, torch.finfo(expected.dtype).tiny)


def _wide_and_narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of two layers, of 8 features and of one: together they multiply by 1.02.

    Products of 16-bit numbers with them have so few digits that their sums in float32 are exact, in any order.
    """
    wide = torch.tensor([4, 5, 3, 6, 2, 4, 5, 3], dtype=x.dtype) / 4
    narrow = torch.tensor([9, 7, 8, 10, 6, 9, 7, 8], dtype=x.dtype) / 64
    return wide, narrow


def linear_layers(x: Tensor) -> Tensor:
    """Return a tensor after two linear layers, element by element; another dtype as it is."""
    if not x.is_floating_point():
        return x
    wide, narrow = _wide_and_narrow(x)
    return (x.reshape(-1, 1) @ wide[None] @ narrow[:, None]).reshape(x.shape)


def convolutions(x: Tensor) -> Tensor:
    """Return a tensor after two convolutions, element by element; another dtype as it is."""
    if not x.is_floating_point() or x.numel() == 0:
        return x
    wide, narrow = _wide_and_narrow(x)
    hidden = torch.nn.functional.conv1d(x.reshape(1, 1, -1), wide[:, None, None])
    return torch.nn.functional.conv1d(hidden, narrow[None, :, None]).reshape(x.shape)


#: By the number of dimensions; a matrix, a sequence and others are transposed.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def other_layout(x: Tensor) -> Tensor:
    """Return a tensor with the same elements in another order in memory."""
    if x.dim() < 2:
        return x
    if x.dim() in _CHANNELS_LAST:
        return x.contiguous(memory_format=_CHANNELS_LAST[x.dim()])
    return x.mT.contiguous().mT


class Setting(NamedTuple):
    """How operations are called and compiled, and how many samples of one are taken."""

    dtype: torch.dtype
    through: Callable[[Tensor], Tensor] | None = None
    """What the arguments go through in the same program."""
    samples: int = 1
    samples_of_nn: int = 1
    """Of a function of torch.nn, which has more arguments."""
    samples_of_several: int = 0
    """More samples of a reduction, each of more than one number."""
    exact: bool = False
    """Compiled with exact=True: then random numbers are compared too."""


def _after(through: Callable[[Tensor], Tensor], operation: Callable[..., object]) -> Callable[..., object]:
    """Return an operation on what its arguments go through."""

    def changed(leaf: Tensor) -> Tensor:
        return through(leaf) if leaf.layout == torch.strided else leaf

    def call(*args: object, **keywords: object) -> object:
        args, keywords = _pytree.tree_map_only(Tensor, changed, (args, keywords))
        return operation(*args, **keywords)

    return call


def is_compiled(case: Case) -> bool:
    """Return whether a compiler gets a case: `jit` does not refuse it, and no shape follows from values."""
    count = len(case.state)

    def on_leaves(leaves: list[Tensor]) -> tuple[list[Tensor], object]:
        new, metrics = case.step(leaves[:count], leaves[count:])
        return _pytree.tree_leaves(new), metrics

    try:
        graph = trace(on_leaves, clone(case.state + case.batch), {"cpu"}, state_count=count)
    except HostError:
        return False
    return graph.open_operation is None


class Compared(NamedTuple):
    """A case that is compiled, and what its numbers are compared by."""

    case: Case
    reference: object
    """What it computes in double precision; None if that fails, or if it draws random numbers."""
    is_random: bool


#: So many samples are looked at for those of several numbers: the first ones of most reductions are of one.
LOOKED_AT = 64
#: Reductions that torch's database has in no class of its own.
_OTHER_REDUCTIONS = {"max.reduction_no_dim", "max.reduction_with_dim", "norm", "logsumexp", "median"}


def _chosen(name: str, setting: Setting, count: int) -> list[tuple[int, Any]]:
    """Return the samples to compare, each with its place among all."""
    operation = operations()[name]
    is_reduction = name in _OTHER_REDUCTIONS or isinstance(operation, internal("opinfo.core").ReductionOpInfo)
    more = setting.samples_of_several if is_reduction else 0
    samples = list(enumerate(samples_of(operation, setting.dtype, LOOKED_AT if more else count)))
    several = [pair for pair in samples[count:] if pair[1].input.numel() > 1]
    return samples[:count] + several[:more]


def compared_of(name: str, setting: Setting) -> dict[str, Compared]:
    """Return the samples of an operation that run in plain Python and are compiled, by name."""
    operation = operations()[name]
    if setting.dtype not in operation.dtypes:
        return {}
    function: Callable[..., object] = operation.op
    if setting.through is not None:
        function = _after(setting.through, function)
    count = setting.samples_of_nn if name.startswith("nn.functional.") else setting.samples
    found = {}
    for number, sample in _chosen(name, setting, count):
        case = working_case(function, sample)
        if case is not None and is_compiled(case):
            is_random = _draws(case)
            exact = None if is_random else working_case(function, in_double(sample))
            found[f"{name} {number}"] = Compared(case, None if exact is None else _eagerly(exact), is_random)
    return found


def _eagerly(case: Case | Joined) -> Any:
    """Return what a step computes in plain Python."""
    torch.manual_seed(SEED)
    return case.step(clone(case.state), clone(case.batch))


def _draws(case: Case) -> bool:
    """Return whether a case draws random numbers."""
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    _eagerly(case)
    return not torch.equal(before, torch.get_rng_state())


def _without_loss(results: Any) -> object:
    """Return what a step computes but for its loss, a sum whose parts may cancel to fewer digits than they have."""
    new, metrics = results
    return new, {name: value for name, value in metrics.items() if name != "loss"}


def worst_error(found: object, expected: object, compared: Compared, *, exact: bool) -> float:
    """Return the largest error of a result in a step, in multiples of what it may be; inf if it is no number."""
    leaves, spec = _pytree.tree_flatten(_without_loss(found))
    right, right_spec = _pytree.tree_flatten(_without_loss(expected))
    if spec != right_spec:
        return math.inf
    if compared.is_random and not exact:
        return 0.0 if all(map(is_same_kind, leaves, right)) else math.inf
    references: list[object] = [None] * len(right)
    if compared.reference is not None:
        in_double, double_spec = _pytree.tree_flatten(_without_loss(compared.reference))
        references = in_double if double_spec == spec else references
    limit = LIMIT_OF_RANDOM if compared.is_random else LIMIT
    return max(map(error_in_roundings, leaves, right, references), default=0.0) / limit


def assert_compiled_right(
    names: Iterable[str], setting: Setting, left_out: Set[str], log: pytest.LogCaptureFixture
) -> None:
    """Assert that operations differ from eager code by rounding only if they are compiled, as one program."""
    cases: dict[str, Compared] = {}
    for name in names:
        cases |= compared_of(name, setting)
    for name in left_out & cases.keys():
        del cases[name]
    together = joined([compared.case for compared in cases.values()])
    expected = zip(*_eagerly(together))
    torch.manual_seed(SEED)
    with log.at_level(logging.WARNING, "funcamp"):
        found = zip(*funcamp.jit(together.step, exact=setting.exact)(together.state, together.batch))
    errors = {
        name: worst_error(pair, right, compared, exact=setting.exact)
        for (name, compared), pair, right in zip(cases.items(), found, expected)
    }
    wrong = {name: error for name, error in errors.items() if error > 1}
    assert not wrong, wrong
    assert "one by one" not in log.text  # then nothing was compiled


def outcomes_of(name: str, *, same: Callable[[Any, Any], bool] = is_same) -> Counter[str]:
    """Return the outcomes of an operation's samples, and how often each."""
    operation = operations()[name]
    outcomes: Counter[str] = Counter()
    for dtype, count in dtypes_of(operation).items():
        samples = samples_of(operation, dtype, count)
        for mode, autocast in AUTOCAST.items() if dtype is torch.float32 else [("plain", AUTOCAST["plain"])]:
            for sample in samples[: autocast.samples]:
                outcomes[outcome(operation.op, sample, mode, same=same)] += 1
        if operation.inplace_variant is not None and samples:
            outcomes[outcome(operation.inplace_variant, samples[0], "plain", same=same, in_place=True)] += 1
    return outcomes
