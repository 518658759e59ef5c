"""What every test shares: a fixed seed, no compiled code of another test, transforms to survive."""

from __future__ import annotations

import doctest
import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from funcamp._jit.session import with_large_stack
from tests.support import defects
from tests.support.helpers import assert_same, clone, one_thread

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

#: The longest files, which run first: each is one worker's, and at the end the other workers would wait for it.
LONG = (
    *("operations_compiled", "operations_in_16_bits", "operations_jit", "modules_jit"),
    *("executed", "distributed", "private_names", "counted", "elastic", "step_parity", "donation", "stats", "step"),
    *("joint_counts", "fusion"),
)
#: Folders and files whose tests all have this mark. A run that leaves it out does not import them.
MARKS = {
    "jit": "compiled",
    "cpu": "compiled",
    "databases": "compiled",
    "gpu_program": "inductor",
    "cuda": "cuda",
    "peers": "peers",
    **dict.fromkeys(("test_lightning", "test_lightning_step", "test_examples"), "slow"),  # they import Lightning
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what has no test to run, because `--doctest-modules` imports every file that is collected."""
    has_tests = collection_path.is_dir() or collection_path.name.startswith("test_")
    is_not_run = f"not {MARKS.get(collection_path.stem)}" in config.option.markexpr
    return True if is_not_run or not has_tests else None


def is_left_out(example: doctest.DocTest | None) -> bool:
    return example is not None and all(doctest.SKIP in line.options for line in example.examples)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # An example that needs a compiler is not run: it is no test.
    items[:] = [item for item in items if not (isinstance(item, pytest.DoctestItem) and is_left_out(item.dtest))]
    # `thorough(keep=n)`: all cases of a test but its first n are left to `make test-all`.
    seen: Counter[str] = Counter()
    for item in items:
        for name in (item.path.stem, item.path.parent.name):
            if name in MARKS:
                item.add_marker(MARKS[name])
        marker = item.get_closest_marker("thorough")
        if marker is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] >= marker.kwargs.get("keep", 0):
                item.add_marker("rest")
            seen[test] += 1
    order = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


# pytest attaches itself to loggers that do not propagate. Then torch would write out every graph.
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish() -> None:
    # What torch and the tests made by now stays: a tenth of the time went to looking through it again and again. And
    # little of what a compilation makes is garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    fixtures = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with_large_stack(lambda: pyfuncitem.obj(**fixtures))
    return True


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        if defects.SOURCE_ON_NONE:
            constant: Any = torch._dynamo.variables.constant
            constant.CONSTANT_VARIABLE_NONE.source = None


@pytest.fixture
def without_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo as it is before funcamp changes it for good (`_upstream/autograd_function.py`)."""
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    method = AutogradFunctionVariable.call_method
    monkeypatch.setattr(AutogradFunctionVariable, "call_method", getattr(method, "__wrapped__", method))


@pytest.fixture(name="one_thread")
def _one_thread() -> Iterator[None]:
    """One thread for a test; `tests.support.helpers` says why."""
    with one_thread():
        yield


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """One thread for a test with Accelerate, and nothing of its state for the next test."""
    from tests.support import accelerated  # only these tests need the package

    with one_thread():
        yield
    accelerated.forget()


def _compile(backend: str) -> Transform:
    return lambda fn: torch.compile(fn, fullgraph=True, backend=backend)


def _vmap(fn: Callable[..., Any], copies: int = 3) -> Callable[..., Any]:
    """The function under vmap, on a batch of copies of its arguments; the results must be one."""

    def batched(*args: Any) -> Any:
        stacked = torch.utils._pytree.tree_map(lambda leaf: torch.stack([leaf] * copies), args)
        out = torch.func.vmap(fn)(*stacked)
        first, *others = [torch.utils._pytree.tree_map(lambda leaf, row=row: leaf[row], out) for row in range(copies)]
        for other in others:
            assert_same(other, first)
        return first

    return batched


_TRANSFORMS: dict[str, Transform] = {
    "eager": lambda fn: fn,
    "compiled": _compile("eager"),
    "vmap": _vmap,
    "compiled-vmap": lambda fn: _compile("aot_eager")(_vmap(fn, copies=1)),
    "inductor": _compile("inductor"),
}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.inductor if name == "inductor" else ()) for name in _TRANSFORMS]
)
def transform(request: pytest.FixtureRequest) -> Transform:
    """Wraps a function of pytrees of tensors in a transform, and checks that it leaves its arguments as they were."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        inner = _TRANSFORMS[request.param](fn)

        def checked(*args: Any) -> Any:
            before = clone(args)
            out = inner(*args)
            assert_same(args, before)
            return out

        return checked

    return wrap
