"""What does a call of a `funcamp.jit` step cost the host, beyond its program?

The CUDA graph is replaced by one that does nothing, so that what is left is the wrapper: telling the batch signature
and the state, copying the batch in, cloning the metrics out. States of 10 and of 1,000 leaves with a batch of two
tensors, and a state of 20 leaves with batches of seven, in several structures; four numbers as metrics. On a CPU the
copies run at once; on a GPU they are launches. Beside it: a plain loop over the same static tensors, as one writes a
capture by hand, which checks nothing.

For training steps of models, on a CPU, the compiled program is replaced by one that does nothing: what is left is also
a look at all values of the model's Python. The same after an evaluation, a copy of the state and a saved dict.

    python benchmarks/overhead.py [--device cuda] [--rounds 9] [--sizes "10 leaves;MLP, 4 blocks"] [--out DIR]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from _models import Size, build, cross_entropy
from _timing import Report, Variant, about, arguments, chosen, measured, torch_variant
from torch import Tensor
from torch.utils._pytree import tree_leaves

import funcamp
from funcamp._jit import cuda_graph, executable

CALLS = 2000
STATES = {"10 leaves": 10, "20 leaves": 20, "1,000 leaves": 1000}
MODELS = {
    "MLP, 4 blocks": Size("mlp", 4, 64, 32),
    "GPT, 4 blocks": Size("gpt", 4, 64, 2, 64),
    "GPT, 12 blocks": Size("gpt", 12, 64, 2, 64),
}
SIZES: dict[str, int | Size] = {**STATES, **MODELS}
Maker = Callable[[], Variant]


class Rollout(NamedTuple):
    """A batch of a reinforcement learning agent."""

    observations: Tensor
    actions: Tensor
    chances: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    mask: Tensor


def batches(leaves: int, device: str) -> dict[str, Any]:
    """The batches to time with a state of so many leaves, by the name of the variant."""
    if leaves != 20:
        return {"funcamp.jit": tensors(2, device)}
    seven = tensors(7, device)
    named = Rollout(*seven)
    return {
        "funcamp.jit, a tuple": seven,
        "funcamp.jit, a dict": named._asdict(),
        "funcamp.jit, a NamedTuple": named,
        "funcamp.jit, a tuple with a dict": (*seven[:2], dict(zip("abcde", seven[2:]))),
        "funcamp.jit, a dict with a NamedTuple": {"batch": named, "others": []},
    }


def tensors(count: int, device: str) -> tuple[Tensor, ...]:
    """So many tensors of 8 numbers."""
    return tuple(torch.ones(8, device=device) for _ in range(count))


class NoGraph:
    """In place of CUDA graphs: warm-up and capture run, a replay does nothing."""

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Not needed."""

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """The results of one run, and a replay that leaves them as they are."""
        return lambda: None, run()


def step(state: dict[str, Tensor], batch: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Counts in every leaf."""
    total = torch.stack([leaf.sum() for leaf in tree_leaves(batch)]).sum()
    return {name: leaf + 1 for name, leaf in state.items()}, {name: total * index for index, name in enumerate("abcd")}


def captured(leaves: int, batch: Any, device: str) -> Variant:
    """A call of a captured step."""
    with mock.patch.object(cuda_graph, "graphs_for", return_value=NoGraph()):
        run = funcamp.jit(step, backend="aot_eager")
        held = [run({f"leaf{index}": torch.zeros(4, device=device) for index in range(leaves)}, batch)[0]]

    def call() -> None:
        held[0], _ = run(held[0], batch)

    return torch_variant(call, device)


def by_hand(count: int, device: str) -> Variant:
    """What every loop around a captured graph does: copy the batch in, replay, clone what is read later."""
    static, batch = tensors(count, device), tensors(count, device)
    metrics = torch.zeros(4, device=device)

    def call() -> Any:
        for target, value in zip(static, batch):
            target.copy_(value, non_blocking=True)
        return metrics.clone().unbind()

    return torch_variant(call, device)


def training_step(size: Size, *, is_used: bool) -> Variant:
    """A call of a training step whose program does nothing.

    Args:
        size: of the model.
        is_used: whether the model was evaluated, the state copied and its dict taken before.
    """
    model, x, y = build(size, "cpu")
    step = funcamp.make_train_step(
        funcamp.module_loss(model, cross_entropy), funcamp.stateless(torch.optim.AdamW, lr=1e-4), policy="bfloat16"
    )
    with mock.patch.object(executable, "_compiled", functools.partial(first_results, executable._compiled)):
        run = funcamp.jit(step, backend="eager")
        held = [run(step.init(), (x, y))[0]]
    if is_used:
        with step.evaluating(held[0]) as trained:
            trained(x)
        funcamp.clone(held[0])
        step.state_dict(held[0])

    def call() -> None:
        held[0], _ = run(held[0], (x, y))

    return torch_variant(call, "cpu")


def first_results(compile_step: Callable[..., Any], *args: Any, **options: Any) -> Callable[[list[Tensor]], Any]:
    """A program that computes once, and returns the same results at every call."""
    run = compile_step(*args, **options)
    results: list[Tensor] = []

    def return_results(values: list[Tensor]) -> list[Tensor]:
        if not results:
            results.extend(run(values))
        return [*results]

    return return_results


def variants(state: int | Size, device: str) -> dict[str, Maker]:
    """What is timed for a number of leaves, or a model."""
    if isinstance(state, Size):
        return {
            "funcamp.jit": functools.partial(training_step, state, is_used=False),
            "funcamp.jit, after an evaluation, a copy and a saved dict": functools.partial(
                training_step, state, is_used=True
            ),
        }
    cases = batches(state, device)
    makers: dict[str, Maker] = {
        "by hand": functools.partial(by_hand, len(tree_leaves(next(iter(cases.values())))), device)
    }
    return makers | {case: functools.partial(captured, state, batch, device) for case, batch in cases.items()}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    columns = {"state": "size", "call": "variant", "median µs": "median_us", "quartiles µs": "quartiles_us"}
    facts = about(args.device, rounds=args.rounds)
    title = "Host time of a call beyond its program"
    report = Report(args.out, f"overhead-{args.device}", title, facts, columns)
    states = {name: state for name, state in SIZES.items() if args.device == "cpu" or name in STATES}
    for name, state in chosen(parser, args, states).items():
        for row in measured(name, variants(state, args.device), CALLS, args.rounds, args.device):
            if "median_ms" in row:
                row["median_us"] = round(row["median_ms"] * 1e3, 1)
                row["quartiles_us"] = [round(value * 1e3, 1) for value in row["quartiles_ms"]]
            report.add([row])


if __name__ == "__main__":
    main()
