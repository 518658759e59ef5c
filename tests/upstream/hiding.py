"""Use funcamp while one private name of torch is hidden: `-m tests.upstream.hiding FOLDER`, the names in stdin.

For every name, and for none, a forked process imports funcamp anew and writes what it found to a file of its own.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.compile_fx
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree


class Hiding:
    """A module, or a part of one, without the name that is hidden."""

    def __init__(self, real: Any, path: str, hidden: str) -> None:
        self._real, self._path, self._hidden = real, path, hidden

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        if path == self._hidden:
            raise AttributeError(name)
        found = getattr(self._real, name)
        return Hiding(found, path, self._hidden) if self._hidden.startswith(f"{path}.") else found


def hide(hidden: str) -> None:
    """Hide a name from `funcamp._upstream` alone: torch itself needs it."""
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if sys._getframe(1).f_globals["__name__"] != "funcamp._upstream":
            return real(name, package)
        if name == hidden:
            raise ImportError(name)
        found = real(name, package)
        return Hiding(found, name, hidden) if hidden.startswith(f"{name}.") else found

    importlib.import_module = import_module


X = torch.linspace(-1.0, 1.0, 12).view(4, 3)
CONFIG = {"init_scale": 2.0**127, "growth_interval": 2}


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return 16 * ((x @ params["w"]).square().mean() + params["b"].sum())


def params() -> dict[str, Tensor]:
    return {"w": torch.ones(3, 2), "b": torch.zeros(2)}


def trained(
    funcamp: Any, wrap: Callable[[Any], Any], engine: str | None = None, cls: Any = torch.optim.AdamW, **options: Any
) -> Any:
    """A few steps, the first of which overflow."""
    loss = funcamp.loss(loss_fn, engine=engine)
    optimizer = funcamp.stateless(cls, lr=0.1)
    step = funcamp.make_train_step(loss, optimizer, funcamp.ScalerConfig(**CONFIG), max_norm=1.0, **options)
    state, run = step.init(params()), wrap(step)
    for _ in range(6):
        state, metrics = run(state, X)
    assert 0 < state.skipped < 6
    return state.params.tree(), metrics.scale, step.state_dict(state)


def eager(step: Any) -> Any:
    return step


def scaler(funcamp: Any) -> Any:
    """GradScaler by selection."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = funcamp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2, skip="select")
    for number in range(6):
        optimizer.zero_grad()
        made.scale(model(X).square().mean() * (float("inf") if number == 2 else 1.0)).backward()
        made.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step(optimizer)
        made.update()
    return [param.detach() for param in model.parameters()], made.get_scale(), optimizer.state_dict()["state"]


def batched(funcamp: Any) -> Any:
    """A stateless optimizer under vmap; under grad it must refuse."""
    adamw = funcamp.stateless(torch.optim.AdamW, lr=0.1)
    new, _ = torch.func.vmap(lambda w: adamw.update({"w": w}, {"w": w + 1}, adamw.init({"w": w})))(X)
    try:
        torch.func.grad(lambda w: adamw.update({"w": w}, {"w": w}, adamw.init({"w": w}))[0]["w"].sum())(X)
    except ValueError as error:
        return new, str(error)
    raise AssertionError("a differentiated update must be refused")


def ties(funcamp: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    step = funcamp.make_train_step(
        funcamp.module_loss(model, lambda out, _: out.sum()), funcamp.stateless(torch.optim.SGD, lr=0.1)
    )
    return sorted(step.init().params.tree())


def consumed(funcamp: Any) -> Any:
    model = nn.Linear(3, 2)
    step = funcamp.make_train_step(
        funcamp.module_loss(model, lambda out, _: out.sum()), funcamp.stateless(torch.optim.SGD), policy="bfloat16"
    )
    state = step.init(consume=True)
    nn.init.ones_(model.weight)
    return step.compute_params(state)["weight"]


def ranks(funcamp: Any) -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    parallel = funcamp.distributed.DataParallel(shard=True)
    step = funcamp.make_train_step(loss_fn, funcamp.stateless(torch.optim.SGD, lr=0.1), parallel=parallel)
    state, _ = step(step.init(params()), X)
    saved = funcamp.distributed.sharded_state_dict(state)
    return sorted(saved), funcamp.distributed.gather_state(state).params.tree()


def compiled(funcamp: Any) -> Any:
    return trained(funcamp, lambda step: torch.compile(step, fullgraph=True, backend="eager"), cls=torch.optim.SGD)


def tracked(funcamp: Any) -> Any:
    """A step of Inductor's, its samples counted."""
    loss = funcamp.numerics.track_scales(funcamp.module_loss(nn.Linear(3, 2), lambda out, _: out.square().mean()))
    step = funcamp.make_train_step(loss, funcamp.stateless(torch.optim.SGD, lr=0.1))
    state = step.init({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    _, metrics = funcamp.jit(step)(state, (X, None))
    return {name: record.forward.count for name, record in metrics.records.items()}


def captured(_: Any) -> Any:
    """What a captured step asks for besides."""
    return [importlib.import_module("funcamp._jit.cuda_graph").own_workspaces() is not None]


def product(funcamp: Any) -> Any:
    return funcamp.float8.scaled_mm(torch.ones(16, 16), torch.ones(16, 16))


PARTS: dict[str, Callable[[Any], Any]] = {
    "step": lambda funcamp: trained(funcamp, eager),
    "select": scaler,
    "batched": batched,
    "ties": ties,
    "consumed": consumed,
    "ranks": ranks,
    "product": product,
}
_TRACED = ("torch._C._are", "torch._C._functorch", "torch._dynamo", "torch.utils")
#: What takes seconds, and the names that it may need: no other is in a file whose code it runs.
COMPILED: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "jit": (
        lambda funcamp: trained(funcamp, lambda step: funcamp.jit(step, backend="eager")),
        (*_TRACED, "torch._subclasses", "torch.fx", "torch.ops"),
    ),
    "compiled": (compiled, _TRACED),
    "tracked": (tracked, ("torch._inductor",)),
    "captured": (captured, ("torch._inductor.cudagraph",)),
}


def digest(tree: Any) -> str:
    """Every bit of a result."""
    leaves = _pytree.tree_leaves(tree)
    texts = [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def look(hidden: str) -> dict[str, Any]:
    """Import funcamp, run every part, ask the doctor."""
    hide(hidden)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        funcamp = importlib.import_module("funcamp")
        importlib.import_module("funcamp.distributed")
        importlib.import_module("funcamp.numerics")
        importlib.import_module("funcamp._jit.jit_step")  # else the first jitted step imports it
        chosen = {name: part for name, (part, needs) in COMPILED.items() if not hidden or hidden.startswith(needs)}
        for name, part in {**PARTS, **chosen}.items():
            try:
                found[name] = digest(part(funcamp))
            except RuntimeError as error:
                found[name] = f"RuntimeError: {error}"
        found["doctor"] = importlib.import_module("funcamp._upstream").lost()
    found["warnings"] = [str(one.message) for one in told if str(one.message).startswith("funcamp: torch")]
    return found


def warm_up() -> None:
    """Compile something, so that each process does not do again what torch does at the first time.

    Nothing is differentiated: torch built for CUDA starts autograd's threads then, and refuses it after a fork.
    """
    with torch._inductor.config.patch(compile_threads=1):  # threads would not outlive the fork
        torch.compile(lambda w: w - (X @ w).square().mean(), fullgraph=True)(torch.ones(3, 2))
    torch._dynamo.reset()


def main(folder: Path, names: list[str]) -> None:
    """One process a name, each with a file of its own."""
    warm_up()
    gc.collect()
    gc.freeze()  # memory that no collection touches is not copied
    for name in names:
        child = os.fork()
        if not child:
            code = 1
            # After a fork the first call replaces torch's thread pool; autograd's threads would do so all at once.
            torch.set_num_threads(1)
            try:
                (folder / f"{name}.json").write_text(json.dumps(look(name)))
                code = 0
            except BaseException:
                sys.stderr.write(f"{name}: {traceback.format_exc()}")
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
