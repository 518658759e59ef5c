"""How fast is an update of a reinforcement learning agent, beside eager torch, torch.compile and JAX?

PPO (a minibatch), DQN, TD3 and SAC (an update of everything, targets too), on minibatches that are there. In float32
without a scale, and in bfloat16 with one: torch's GradScaler, funcamp's scaler, jmp's rule in JAX. A call of a variant
is a sweep over 32 minibatches, an update each; "32 in a call" gives all of them to one call, `unroll=32` or
`jax.lax.scan`; "from Python" leaves out the pass that puts that loop into C++. Variants run interleaved. Reported are
microseconds of an update, median and quartiles over the rounds; the ratios within each round to eager torch, and to JAX
with as many updates in a call, in the same precision; the largest difference of a parameter from eager torch's after
the first sweep, in the same precision; and the first sweep, with its compilation. The first variant that compiles also
starts Inductor, and a later one finds kernels of the earlier ones: for first calls that compare, give --variants one
name.

    python benchmarks/rl.py [--device cuda] [--threads 2] [--rounds 9] [--sizes "DQN;..."]
        [--variants "funcamp.jit float32;..."] [--tricks] [--out DIR]

--tricks measures what each pass of `jit` brings instead: eager torch, `jit`, and `jit` without one of them, in float32.

JAX has failed rows where it is absent.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from _rl_learners import SIZES, UPDATES, Size, minibatches, stacked
from _rl_updates import Learner, funcamp_learner, torch_learner
from _timing import Report, Row, Variant, about, arguments, check_on_cpu, chosen, measured, named, table, torch_variant
from torch import Tensor
from torch.utils import _pytree


class Way(NamedTuple):
    """A way to write an update."""

    library: str
    low: bool
    """Whether products are in bfloat16, with a scale."""
    at_once: bool = False
    """Whether one call gets all minibatches of a sweep."""
    without: str = ""
    """The pass that is left out; "" for none."""

    @property
    def from_python(self) -> bool:
        """Whether the loop over the minibatches is left in Python."""
        return self.without == "steps_in_cpp"

    @property
    def name(self) -> str:
        """As in the table."""
        precision = "bfloat16" if self.low else "float32"
        loop = f", {UPDATES} in a call" * self.at_once + " from Python" * self.from_python
        return f"{self.library} {precision}{loop}" + (
            f", without {self.without}" if self.without and not self.from_python else ""
        )


EAGER = "torch eager"
COMPILED = "torch.compile"
JITTED = "funcamp.jit"
JAX = "JAX"
ONE_BY_ONE = [
    *(Way(library, low=False) for library in (EAGER, COMPILED, JITTED, JAX)),
    *(Way(library, low=True) for library in (EAGER, JITTED, JAX)),
]
AT_ONCE = [Way(library, low, at_once=True) for low in (False, True) for library in (JITTED, JAX)]
FROM_PYTHON = [Way(JITTED, low, at_once=True, without="steps_in_cpp") for low in (False, True)]
WAYS = {way.name: way for way in ONE_BY_ONE + AT_ONCE + FROM_PYTHON}
#: The passes of a program on a CPU for its time, each left out by itself.
TRICKS = [
    *(Way(EAGER, low=False), Way(JITTED, low=False)),
    *(Way(JITTED, low=False, without=name) for name in ("products", "tanh", "small_buffers", "part_inputs")),
]
WAYS_OF_TRICKS = {way.name: way for way in TRICKS}


class Sweep:
    """An update with every minibatch; keeps the parameters after the first sweep."""

    def __init__(self, way: Way, learner: Learner, batches: list[Any]) -> None:
        self.way = way
        self.learner = learner
        self.batches = batches
        self.first: dict[str, Tensor] = {}

    def __call__(self) -> None:
        for batch in self.batches:
            self.learner.update(batch)
        self.first = self.first or self.learner.values()

    def difference(self, other: Sweep) -> float:
        """The largest of a parameter after the first sweep."""
        return max((value.cpu() - self.first[name].cpu()).abs().max().item() for name, value in other.first.items())


def on_device(batches: list[Any], device: str) -> list[Any]:
    """Minibatches, moved."""
    return [_pytree.tree_map(lambda leaf: leaf.to(device), batch) for batch in batches]


def make(way: Way, size: Size, device: str) -> Variant:
    """A sweep, and what waits for its end. JAX chooses its device itself."""
    batches = minibatches(size)
    if way.at_once:
        batches = [stacked(batches)]
    if way.library == JAX:
        import _jax_rl

        learner, wait = _jax_rl.learner(size, low=way.low, at_once=way.at_once)
        return Variant(Sweep(way, learner, [_jax_rl.arrays(batch) for batch in batches]), wait)
    with torch.device(device):
        if way.library == JITTED:
            left_out = [way.without] if way.without else []
            learner = funcamp_learner(size, low=way.low, at_once=way.at_once, without=left_out)
        else:
            learner = torch_learner(size, low=way.low, compiled=way.library == COMPILED)
    return torch_variant(Sweep(way, learner, on_device(batches, device)), device)


@functools.cache
def first_sweep(size: Size, device: str, *, low: bool) -> Sweep:
    """That of torch's loop, which the others should agree with."""
    sweep = make(Way(EAGER, low), size, device).call
    assert isinstance(sweep, Sweep)
    sweep()
    return sweep


def measure(name: str, size: Size, ways: list[Way], rounds: int, device: str) -> Iterator[Row]:
    """One row a way."""
    ways = [way for way in ways if size.learner == "PPO" or not way.at_once]
    makers = {way.name: functools.partial(make, way, size, device) for way in ways}
    bases = {
        "over_eager": {way.name: Way(EAGER, way.low).name for way in ways},
        "over_jax": {way.name: way._replace(library=JAX, without="").name for way in ways},
    }

    def inspect(variant: Variant) -> Row:
        sweep: Any = variant.call
        return {"difference": f"{sweep.difference(first_sweep(size, device, low=sweep.way.low)):.1e}"}

    for row in measured(name, makers, size.sweeps, rounds, device, inspect, bases, together=True):
        if "median_ms" in row:
            row["median_us"] = round(row["median_ms"] / UPDATES * 1e3, 1)
            row["quartiles_us"] = [round(value / UPDATES * 1e3, 1) for value in row["quartiles_ms"]]
        yield row


def by_learner(rows: list[Row]) -> list[str]:
    """A table with a row for each learner: microseconds of every variant, and the ratios of funcamp's to JAX."""
    measured_rows = {(row["size"], row["variant"]): row for row in rows}
    learners = dict.fromkeys(row["size"] for row in rows)
    variants = dict.fromkeys(row["variant"] for row in rows)
    # The heading of a column, and the variant and the number in it.
    columns = {f"{variant} µs": (variant, "median_us") for variant in variants}
    ours = [name for name in variants if name in WAYS and WAYS[name].library == JITTED]
    columns |= {f"{name} over JAX": (name, "over_jax") for name in ours}
    lines = []
    for learner in learners:
        cells = [measured_rows.get((learner, variant), {}).get(key, "") for variant, key in columns.values()]
        lines.append([learner, *cells])
    return table(["learner", *columns], lines)


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, help="of torch and of JAX; by default each chooses")
    parser.add_argument("--variants", help="names of variants, separated by semicolons")
    parser.add_argument("--tricks", action="store_true", help="leave out each pass of jit instead")
    args = parser.parse_args()
    if args.tricks:
        check_on_cpu(parser, args)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads must be 1 or more; got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ["NPROC"] = str(args.threads)  # what JAX's CPU client asks for its number of threads
    cold = tempfile.TemporaryDirectory()  # so that the first sweep shows the whole compilation
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold.name
    sizes = chosen(parser, args, SIZES)
    known = WAYS_OF_TRICKS if args.tricks else WAYS
    names = named(parser, "--variants", args.variants, known)
    columns = {
        "learner": "size",
        "variant": "variant",
        "median µs": "median_us",
        "quartiles µs": "quartiles_us",
        "over eager": "over_eager",
        "over JAX": "over_jax",
        "difference from eager": "difference",
        "first sweep s": "first_call_s",
    }
    jax = importlib.util.find_spec("jax") and importlib.metadata.version("jax")
    facts = about(args.device, jax=jax or "not installed", rounds=args.rounds)
    kind = "rl-tricks" if args.tricks else "rl-one-thread" if args.threads == 1 else "rl"
    title = "An update of a reinforcement learning agent"
    report = Report(args.out, f"{kind}-{args.device}", title, facts, columns, by_learner)
    for name, size in sizes.items():
        report.add(measure(name, size, [known[way] for way in names], args.rounds, args.device))
    print(*report.summary(), sep="\n")


if __name__ == "__main__":
    main()
