"""How many optimizers of public packages does `funcamp.stateless` take, and does each follow itself?

    python benchmarks/optimizers.py [--sizes "timm Lion;optimi AdamW"] [--packages timm] [--backend inductor]

Every class of torch.optim.Optimizer that a package exports, and the forms of _own_optimizers.py. Each takes 20 steps
in its own loop, on three matrices, a vector, a convolution's weight and a scalar, with random gradients of a seed;
three of the steps are skipped, the first among them. Beside it `funcamp.make_train_step` takes the same steps, eager
and by `jit`: the loss is linear in the parameters with the batch as gradients, which are infinite in the three steps.
Parameters are compared after every step. A difference is over the tensor's largest element; "of the way" is over the
tensor's largest change in the run. A class that refuses a shape is tried without it. No step of a class that draws
random numbers is skipped: a skipped step draws here and not in torch's loop. "foreach=False": this is the comparison
with the loop that has this argument, which funcamp gives too; the loop with the class's default rounds otherwise.

With --backend inductor `jit` compiles, in seconds to a minute a class, so a dozen classes of different kinds are the
default; in the last column with `exact=True`, which rounds inside to bfloat16 where the class does.

    pip install pytorch_optimizer timm torchvision torch-optimi schedulefree prodigyopt lion-pytorch adabelief-pytorch
    pip install torch-optimizer
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import io
import math
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _public import without_operators
from _timing import Report, Row, about, arguments, chosen, named, table
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

import funcamp

STEPS = 20
SKIPPED = (0, 7, 12)
"""The first too: a state must not begin with a step that was not taken."""
SECONDS = 60
"""For one run of one class."""
NEAR = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""Of a tensor's largest element, as the largest difference between two orders of the same arithmetic. In bfloat16 that
is a rounding: torch's kernels round the last elements of a tensor otherwise, and flat storage has others last."""
NEAR_OF_THE_WAY = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the largest change of any tensor: what a step of this size would hide is no agreement."""
LEAST_WAY = 1e-3
"""Of its largest element a tensor must move in a run, one at least, or nothing was compared."""
SHAPES = {"wide": (8, 12), "like": (8, 12), "tall": (12, 8), "bias": (12,), "filter": (6, 4, 3, 3), "factor": ()}
"""Without the last ones for a class that refuses them. Two are alike, for a class that stacks such."""
FEWEST = 2
RATES = (None, 1e-3, 1e-2, 1e-1, 1e-4)
"""Learning rates to try, the class's own first, until parameters move and stay finite."""

COMPILED = (
    *("optimi AdamW", "timm Lion", "timm Lamb", "prodigyopt Prodigy"),
    *(f"pytorch_optimizer {name}" for name in ("Muon", "NorMuon", "AdEMAMix", "RAdam", "AdaFactor", "StableAdamW")),
    *("pytorch_optimizer ScheduleFreeAdamW", "schedulefree AdamWScheduleFree"),
    *("own CountsInGroup", "own KahanAdamW", "own MuonAdamW"),
)
"""What is compiled if nothing else is asked for."""

Params = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer's class and how it is made."""

    package: str
    cls: type[torch.optim.Optimizer]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    groups: dict[str, dict[str, Any]] | None = None
    """The options of the param groups for "matrix" and "vector", for a class that asks for them."""
    dtype: torch.dtype = torch.float32
    note: str = ""
    """What distinguishes it from another case of its class."""

    @property
    def name(self) -> str:
        """How a row calls it."""
        return f"{self.package} {self.cls.__name__}" + (f", {self.note}" if self.note else "")


PACKAGES = {
    "pytorch_optimizer": ("pytorch_optimizer",),
    "timm": ("timm.optim",),
    "optimi": ("optimi",),
    "schedulefree": ("schedulefree",),
    "prodigyopt": ("prodigyopt",),
    "lion_pytorch": ("lion_pytorch", "lion_pytorch.foreach", "lion_pytorch.cautious_lion"),
    "adabelief_pytorch": ("adabelief_pytorch",),
    "torch_optimizer": ("torch_optimizer",),
    "dion": ("dion",),
    "own": ("_own_optimizers",),
}
"""The modules of each package that export optimizers."""
DISTRIBUTIONS = {"optimi": "torch-optimi"}
"""The names under which they are installed, where they differ."""


def adapted(
    cls: type[torch.optim.Optimizer], make: Callable[[Any, dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
) -> type[torch.optim.Optimizer]:
    """A class whose constructor begins with parameters, of one that wants something else.

    make: from the parameters and the arguments to the constructor's arguments.
    """

    def init(self: Any, params: Any, **arguments: Any) -> None:
        positional, named = make(params, arguments)
        cls.__init__(self, *positional, **named)

    found = list(inspect.signature(cls.__init__).parameters.values())
    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    options = [parameter for parameter in found[1:] if parameter.kind is parameter.VAR_KEYWORD]
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in found[1:]
        if parameter.name not in ("params", "optimizer", "model") and parameter.kind is not parameter.VAR_KEYWORD
    ]
    init.__signature__ = inspect.Signature([found[0], first, *others, *options])  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__, "adapts": cls})


def of_sgd(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A wrapper of an optimizer's instance, around SGD with momentum."""
    return adapted(
        cls, lambda params, options: ((torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),), options)
    )


class Holder(torch.nn.Module):
    """A model that is nothing but parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__()
        for index, param in enumerate(params):
            self._parameters[f"p{index}"] = param  # not wrapped: a step reads the gradient of this object


def of_model(cls: type[torch.optim.Optimizer], params_too: bool = False) -> type[torch.optim.Optimizer]:
    """A class whose constructor begins with a model, and may go on with parameters."""

    def make(params: Any, options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        params = list(params)
        return ((Holder(params), params) if params_too else (Holder(params),)), options

    return adapted(cls, make)


def of_group(cls: type[torch.optim.Optimizer], *names: str) -> type[torch.optim.Optimizer]:
    """A class that wants param groups with options; these are arguments here, and groups stay as they are."""

    def make(params: Any, options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        params = list(params)
        if params and isinstance(params[0], dict):
            return (params,), options
        group = {"params": params} | {name: options.pop(name) for name in names if name in options}
        return ([group],), options

    made = adapted(cls, make)
    signature = inspect.signature(made.__init__)
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    *others, last = signature.parameters.values()
    is_options = last.kind is last.VAR_KEYWORD
    ordered = [*others, *extra, last] if is_options else [*others, last, *extra]
    made.__init__.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
    return made


USES_MUON = ("Muon", "AdaGO", "AdaMuon", "DistributedMuon", "MuonClip", "NorMuon")
"""Classes of pytorch_optimizer whose param groups say whether they use it."""
PROJECTS = ("GaLore", "Fira", "APOLLO")
"""Classes of pytorch_optimizer that project the gradients of groups with a rank."""
PROJECTION = {"rank": 4, "update_proj_gap": 5, "scale": 1.0, "projection_type": "std"}
SGD_INSIDE = {"base_optimizer": torch.optim.SGD, "lr": 0.05}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "pytorch_optimizer BSAM": {"num_data": 1000},
    "pytorch_optimizer SAM": SGD_INSIDE,
    "pytorch_optimizer WSAM": SGD_INSIDE,
    "pytorch_optimizer LookSAM": {**SGD_INSIDE, "k": 4},
    "pytorch_optimizer FriendlySAM": SGD_INSIDE,
    "pytorch_optimizer LoRARite": {"lora_r_dim": 0},
    "pytorch_optimizer SaRA": {"threshold": 0.5, "lr": 1e-3},
    "pytorch_optimizer TRAC": {"s_prev": 1e-2},
    "pytorch_optimizer DAdaptAdaGrad": {"d0": 1e-2},
    "pytorch_optimizer DAdaptAdan": {"d0": 1e-3},
    "pytorch_optimizer DAdaptLion": {"d0": 1e-3},
    "pytorch_optimizer DAdaptSGD": {"d0": 1e-2},
    "pytorch_optimizer PID": {"momentum": 0.9, "derivative": 0.1, "integral": 0.5},
    "pytorch_optimizer SGDW": {"momentum": 0.9, "lr": 1e-2},
    # In 17 steps a class that does something at some steps only does it, and does not do it.
    "pytorch_optimizer Ranger21": {"num_iterations": 18, "num_warm_up_iterations": 4, "num_warm_down_iterations": 5},
    "pytorch_optimizer AdaGC": {"warmup_steps": 6},
    "pytorch_optimizer AdaShift": {"keep_num": 5},
    "pytorch_optimizer Alice": {"update_interval": 5, "rank": 4, "leading_basis": 2},
    "pytorch_optimizer ApolloDQN": {"warmup_steps": 6},
    "pytorch_optimizer Conda": {"update_proj_gap": 5},
    "pytorch_optimizer DASH": {"precondition_frequency": 5, "start_preconditioning_step": 3},
    "pytorch_optimizer DualAdam": {"switch_rate": 0.1},
    "pytorch_optimizer GrokFastAdamW": {"grokfast_after_step": 6, "lr": 1e-3},
    "pytorch_optimizer SOAP": {"precondition_frequency": 5},
    "pytorch_optimizer SPAM": {"update_proj_gap": 7, "warmup_epoch": 3, "grad_accu_steps": 2, "threshold": 4},
    "pytorch_optimizer SPlus": {"inverse_steps": 5, "lr": 1e-2},
    "pytorch_optimizer SRMM": {"memory_length": 5},
    "pytorch_optimizer ScalableShampoo": {
        "start_preconditioning_step": 6,
        "preconditioning_compute_steps": 4,
        "statistics_compute_steps": 2,
    },
    "pytorch_optimizer Shampoo": {"preconditioning_compute_steps": 3},
    "pytorch_optimizer StableSPAM": {"update_proj_gap": 7, "t_max": 10},
    "pytorch_optimizer ScheduleFreeSGD": {"warmup_steps": 5},
    "pytorch_optimizer ScheduleFreeAdamW": {"warmup_steps": 5},
    "pytorch_optimizer ScheduleFreeRAdam": {"lr": 1e-2},
    "schedulefree AdamWScheduleFree": {"warmup_steps": 5},
    "schedulefree AdamWScheduleFreeClosure": {"warmup_steps": 5},
    "schedulefree AdamWScheduleFreeReference": {"warmup_steps": 5},
    "schedulefree AdamWScheduleFreePaper": {"warmup_steps": 5},
    "schedulefree SGDScheduleFree": {"warmup_steps": 5},
    "schedulefree SGDScheduleFreeClosure": {"warmup_steps": 5},
    "schedulefree SGDScheduleFreeReference": {"warmup_steps": 5},
    "schedulefree RAdamScheduleFree": {"lr": 1e-2},
    "schedulefree RAdamScheduleFreeClosure": {"lr": 1e-2},
    "optimi SGD": {"lr": 1e-2, "momentum": 0.9},
    "optimi Adam": {"lr": 1e-3},
    "optimi AdamW": {"lr": 1e-3},
    "optimi Adan": {"lr": 1e-3},
    "optimi Lion": {"lr": 1e-3},
    "optimi RAdam": {"lr": 1e-3},
    "optimi Ranger": {"lr": 1e-3},
    "optimi StableAdamW": {"lr": 1e-3, "triton": False},  # Triton is its default, without a GPU too
    "timm Lars": {"lr": 1e-1, "momentum": 0.9},
    "timm SGDP": {"lr": 1e-2, "momentum": 0.9},
    "timm SGDW": {"lr": 1e-2, "momentum": 0.9},
    "timm Muon": {"lr": 1e-2},
}
"""What a class needs, or with which it does more than with its defaults."""
ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "pytorch_optimizer Lookahead": of_sgd,
    "pytorch_optimizer TRAC": of_sgd,
    "pytorch_optimizer OrthoGrad": of_sgd,
    "pytorch_optimizer Magma": of_sgd,
    "pytorch_optimizer PCGrad": of_sgd,
    "pytorch_optimizer SafeFP16Optimizer": of_sgd,
    "pytorch_optimizer ScheduleFreeWrapper": of_sgd,
    "timm Lookahead": of_sgd,
    "torch_optimizer Lookahead": of_sgd,
    "pytorch_optimizer LOMO": of_model,
    "pytorch_optimizer AdaLOMO": of_model,
    "pytorch_optimizer AdamMini": of_model,
    "pytorch_optimizer WSAM": functools.partial(of_model, params_too=True),
    **{f"pytorch_optimizer {name}": lambda cls: of_group(cls, "use_muon") for name in USES_MUON},
    **{f"pytorch_optimizer {name}": lambda cls: of_group(cls, *PROJECTION) for name in PROJECTS},
}
"""How a class is made whose constructor does not begin with parameters."""
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    **{
        f"pytorch_optimizer {name}": {"matrix": {"use_muon": True}, "vector": {"use_muon": False}} for name in USES_MUON
    },
    **{f"pytorch_optimizer {name}": {"matrix": PROJECTION, "vector": {}} for name in PROJECTS},
    "own MuonAdamW": {"matrix": {"kind": "muon"}, "vector": {"kind": "adamw"}},
    "own CompiledMuonAdamW": {"matrix": {"kind": "muon"}, "vector": {"kind": "adamw"}},
}
"""The options of param groups that a class asks for."""
OF_PROCESSES = ("pytorch_optimizer DeMo", "pytorch_optimizer DistributedMuon")
"""Classes that talk to the other processes: here there are none."""
NARROW = ("optimi Adam", "optimi AdamW", "optimi Lion", "optimi SGD", "optimi StableAdamW", "own KahanAdamW")
"""Classes that keep what rounding to bfloat16 loses: tried with such parameters too."""


def cases(packages: list[str]) -> Iterator[Case]:
    """Yield every class that the packages export."""
    for package in packages:
        for module_name in PACKAGES[package]:
            with without_operators():  # torchvision's, which timm imports
                try:
                    module = importlib.import_module(module_name)
                except ModuleNotFoundError as error:
                    print(f"{package}: {error}")
                    continue
            note = module_name.partition(".")[2] if package == "lion_pytorch" else ""
            for name, cls in list(vars(module).items()):
                is_optimizer = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
                if not is_optimizer or cls.__module__.startswith("torch.") or name.startswith("_"):
                    continue
                key = f"{package} {cls.__name__}"
                found = Case(package, ADAPTERS.get(key, lambda cls: cls)(cls), ARGUMENTS.get(key, {}), GROUPS.get(key))
                yield dataclasses.replace(found, note=note)
                if key in NARROW:
                    yield dataclasses.replace(found, dtype=torch.bfloat16, note="bfloat16")


def numbers(
    names: tuple[str, ...], dtype: torch.dtype, skipped: tuple[int, ...] = SKIPPED
) -> tuple[Params, list[Params]]:
    """Parameters before the first step, and the gradients of all steps, infinite in those to be skipped."""
    generator = torch.Generator().manual_seed(0)

    def drawn(scale: float) -> Params:
        return {name: (scale * torch.randn(SHAPES[name], generator=generator)).to(dtype) for name in names}

    params = {name: value + 0.5 for name, value in drawn(0.5).items()}
    steady = drawn(0.05)  # so that averages of gradients are not small beside the gradients
    grads = []
    for step in range(STEPS):
        noise = drawn(0.1)
        grads.append({name: steady[name] + noise[name] for name in names})
        if step in skipped:
            grads[-1] = {name: torch.full_like(value, math.inf) for name, value in grads[-1].items()}
    return params, grads


def linear(params: Params, grads: Params) -> Tensor:
    """A loss with these gradients."""
    return torch.stack([(params[name].float() * grads[name].float()).sum() for name in grads]).sum()


def label(_: str, param: Tensor) -> str:
    """The param group of a parameter, for a class that has two kinds."""
    return "matrix" if param.dim() == 2 else "vector"


class Run(NamedTuple):
    """What a class did in a run."""

    trail: list[Params]
    """The parameters after every step."""
    entries: int
    """Names of its state."""
    draws: bool
    """Whether it drew random numbers."""
    by_closure: bool
    """Whether its step was given a closure."""


def own_loop(case: Case, names: tuple[str, ...], options: dict[str, Any], skipped: tuple[int, ...] = SKIPPED) -> Run:
    """The class's own loop: a step that is skipped is not taken."""
    first, grads = numbers(names, case.dtype, skipped)
    params = {name: value.clone().requires_grad_() for name, value in first.items()}
    optimizer: Any = case.cls(_given(case, params), **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    trail = []
    by_closure = "closure" in _required_arguments(case.cls)
    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    for index, batch in enumerate(grads):
        if index not in skipped:
            closure = functools.partial(_loss_with_gradients, params, batch)
            closure()
            try:
                optimizer.step(closure) if by_closure else optimizer.step()
            except Exception as error:
                if by_closure or "closure" not in f"{type(error).__name__} {error}".lower():
                    raise
                by_closure = True
                optimizer.step(closure)
        trail.append({name: value.detach().clone() for name, value in params.items()})
    entry_names = {str(entry) for state in optimizer.state.values() if isinstance(state, dict) for entry in state}
    return Run(trail, len(entry_names), not torch.equal(drawn, torch.get_rng_state()), by_closure)


def _given(case: Case, params: Params) -> list[Any]:
    """What the class's constructor gets: parameters, or param groups."""
    if case.groups is None:
        return list(params.values())
    groups = {name: {"params": [], **options} for name, options in case.groups.items()}
    for name, value in params.items():
        groups[label(name, value)]["params"].append(value)
    return [group for group in groups.values() if group["params"]]


@torch.enable_grad()
def _loss_with_gradients(params: Params, batch: Params) -> Tensor:
    """Fill the parameters' gradients; the closure of a step."""
    for param in params.values():
        param.grad = None
    loss = linear(params, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _required_arguments(cls: type[torch.optim.Optimizer]) -> list[str]:
    """The arguments that a class's step cannot do without."""
    found = list(inspect.signature(cls.step).parameters.values())[1:]
    return [item.name for item in found if item.default is item.empty and item.kind is item.POSITIONAL_OR_KEYWORD]


def pure(case: Case, options: dict[str, Any]) -> Any:
    """The class as funcamp has it; one for each param group that it asks for."""
    if case.groups is None:
        return funcamp.stateless(case.cls, **options)
    optimizers = {name: funcamp.stateless(case.cls, **options, **group) for name, group in case.groups.items()}
    return funcamp.by_group(optimizers, group=label)


def by_funcamp(
    case: Case, names: tuple[str, ...], options: dict[str, Any], skipped: tuple[int, ...], wrap: Callable[[Any], Any]
) -> Run:
    """The same steps of funcamp."""
    params, grads = numbers(names, case.dtype, skipped)
    step = funcamp.make_train_step(linear, pure(case, options), funcamp.presets.disabled())
    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    state = step.init(params)
    run = wrap(step)
    trail = []
    for index, batch in enumerate(grads):
        state, metrics = run(state, batch)
        if bool(metrics.found_inf) != (index in skipped):
            raise RuntimeError(f"step {index}: other skips")
        trail.append({name: value.detach().clone() for name, value in state.params.tree().items()})
    states = state.opt_state.values() if isinstance(state.opt_state, dict) else [state.opt_state]
    entry_names = {name for found in states for name in found.state}
    return Run(trail, len(entry_names), not torch.equal(drawn, torch.get_rng_state()), by_closure=False)


def distances(found: list[Params], wanted: list[Params], first: Params) -> tuple[bool, float, float]:
    """How two runs compare.

    Returns whether they are equal to the bit, the largest difference over the tensor's largest element, and over the
    largest change of the tensor in the run (at least a hundredth of the largest change of any).
    """
    changes = {name: (wanted[-1][name].double() - first[name].double()).abs().max().item() for name in first}
    least = max(changes.values()) / 100
    equal = True
    of_size = of_way = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            equal = equal and torch.equal(ours[name], value)
            apart = (ours[name].double() - value.double()).abs().max().item()
            apart = apart if math.isfinite(apart) else math.inf
            of_size = max(of_size, apart / value.double().abs().max().item())
            of_way = max(of_way, apart / max(changes[name], least))
    return equal, of_size, of_way


def outcome(found: list[Params], wanted: dict[str, list[Params]], first: Params) -> str:
    """How a run compares with those of the class, the class's default first, by how its argument foreach was chosen.

    The nearest decides: funcamp gives foreach=False, and a class may round otherwise with lists of tensors.
    """
    texts = {}
    for name, trail in wanted.items():
        equal, of_size, of_way = distances(found, trail, first)
        dtype = next(iter(first.values())).dtype
        numbers_text = f"{of_size:.0e}, {of_way:.0e} of the way"
        if equal:
            text = "equal to the bit"
        elif of_size <= NEAR[dtype] and of_way <= NEAR_OF_THE_WAY[dtype]:
            text = f"near: {numbers_text}"
        else:
            text = f"wrong: {numbers_text}"
        texts[name] = text
    best = min(texts, key=lambda name: GRADES.index(grade(texts[name])))
    default = next(iter(texts))
    return texts[best] if best == default else f"{texts[best]}; {best}, to the default {texts[default]}"


class TooLongError(Exception):
    """A run that took too many seconds."""


@contextlib.contextmanager
def time_limit(limit: int) -> Iterator[None]:
    """Context manager: raise TooLongError after so many seconds."""

    def stop(*_: object) -> None:
        raise TooLongError(f"more than {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reason(error: BaseException) -> str:
    """An error in a line, without the paths of this machine."""
    lines = str(error).strip().splitlines() or [""]
    text = re.sub(r"^stateless: \w+ cannot be made pure: |; (begin it as|use it in|keep it in) .*", "", lines[0])
    return " ".join(f"{type(error).__name__}: {text}".replace("|", "/").split())[:300]


class Oracle(NamedTuple):
    """A class's own loop, with what it took to run it."""

    names: tuple[str, ...]
    options: dict[str, Any]
    skipped: tuple[int, ...]
    runs: dict[str, Run]
    """By how foreach is chosen, the class's default first."""


def oracle(case: Case) -> Oracle:
    """Find shapes and a learning rate with which the class's own loop moves its parameters and stays finite.

    Raises:
        RuntimeError: there are none; with the first failure.
    """
    failure = ""
    accepted = inspect.signature(case.cls.__init__).parameters
    has_rate = "lr" in accepted or "base_optimizer" in case.arguments
    for count in range(len(SHAPES), FEWEST - 1, -1):
        names = tuple(SHAPES)[:count]
        for rate in RATES if has_rate else RATES[:1]:
            options = dict(case.arguments) if rate is None else {**case.arguments, "lr": rate}
            try:
                run = own_loop(case, names, options)
                skipped = () if run.draws else SKIPPED
                run = own_loop(case, names, options, skipped)
            except TooLongError:
                raise
            except Exception as error:
                failure = failure or reason(error)
                break  # another rate would not help
            problem = _problem(run.trail, numbers(names, case.dtype)[0])
            if not problem:
                runs = {"default": run}
                if "foreach" in accepted:
                    runs["foreach=False"] = own_loop(case, names, {**options, "foreach": False}, skipped)
                return Oracle(names, options, skipped, runs)
            failure = failure or problem
    raise RuntimeError(failure)


def _problem(trail: list[Params], first: Params) -> str:
    """Why a run shows nothing; empty if it does."""
    if not all(value.isfinite().all() for params in trail for value in params.values()):
        return "its own loop is not finite"
    for name, value in first.items():
        if (trail[-1][name] - value).abs().max() > LEAST_WAY * value.abs().max():
            return ""
    return "its own loop moves no parameter"


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Context manager: a process group of this process."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def measure(case: Case, backend: str) -> Row:
    """The row of a class, with a process group if it asks for one."""
    with one_process() if case.name in OF_PROCESSES else contextlib.nullcontext():
        return _measure(case, backend)


def _measure(case: Case, backend: str) -> Row:
    """The row of a class."""
    warnings.simplefilter("ignore")
    row: Row = {"size": case.package, "variant": case.name.removeprefix(f"{case.package} ")}
    start = time.perf_counter()
    try:
        with time_limit(SECONDS), contextlib.redirect_stdout(io.StringIO()):
            found = oracle(case)
        row["own loop"] = _notes(case, found)
    except Exception as error:
        found = Oracle(tuple(SHAPES)[:FEWEST], case.arguments, SKIPPED, {})
        row["own loop"] = f"none: {reason(error).removeprefix('RuntimeError: ')}"
    first, _ = numbers(found.names, case.dtype)
    wanted = {name: run.trail for name, run in found.runs.items()}
    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda step: step,
        "jit": functools.partial(funcamp.jit, backend=backend),
    }
    if backend == "inductor":
        ways["exact"] = functools.partial(funcamp.jit, backend=backend, exact=True)
    for way, wrap in ways.items():
        try:
            with time_limit(SECONDS), contextlib.redirect_stdout(io.StringIO()):
                run = by_funcamp(case, found.names, found.options, found.skipped, wrap)
        except Exception as error:
            row[way] = f"refused: {reason(error)}"
            continue
        row["entries"] = run.entries
        row[way] = outcome(run.trail, wanted, first) if wanted else "taken, compared with nothing"
    if row["jit"] == row["eager"] and grade(row["eager"]) == "refused":
        row["jit"] = "refused: the same"
    torch._dynamo.reset()
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _notes(case: Case, found: Oracle) -> str:
    """What is remarkable about a class's own loop."""
    run = next(iter(found.runs.values()))
    notes = [", ".join(found.names)] if len(found.names) < len(SHAPES) else []
    notes += [f"{name}={value}" for name, value in found.options.items() if case.arguments.get(name) != value]
    notes += ["given a closure"] if run.by_closure else []
    notes += ["draws, so nothing is skipped"] if run.draws else []
    return "; ".join(notes)


def grade(text: str) -> str:
    """An outcome in a word of GRADES."""
    return text.split(":")[0].split(";")[0]


GRADES = ("equal to the bit", "near", "wrong", "refused", "taken, compared with nothing")


def summary(rows: list[Row]) -> list[str]:
    """Tables of all rows: how many of each package come to what, and why the others are refused."""
    lines = []
    heads = [f"within {NEAR[torch.float32]:.0e}" if name == "near" else name for name in GRADES]
    for way in ("eager", "jit", "exact"):
        if not any(way in row for row in rows):
            continue
        counts = {package: Counter(grade(row[way]) for row in rows if row["size"] == package) for package in PACKAGES}
        counts = {package: found for package, found in counts.items() if found} | {
            "all": Counter(grade(row[way]) for row in rows)
        }
        cells = [[package, found.total(), *(found[name] for name in GRADES)] for package, found in counts.items()]
        lines += [f"## {way}", "", *table(["package", "classes", *heads], cells), ""]
    whys = Counter(re.sub(r"'\w+'|got .*", "...", row["eager"]) for row in rows if grade(row["eager"]) == "refused")
    lines += ["## Why the eager step is refused", ""]
    return [*lines, *table(["classes", "reason"], [[count, why[9:]] for why, count in whys.most_common()])]


def main() -> None:
    """Run all, and write what is known after each."""
    parser = arguments(__doc__)
    parser.add_argument("--packages", help="names, separated by semicolons")
    parser.add_argument("--backend", default="eager", help="of jit; inductor compiles")
    args = parser.parse_args()
    packages = named(parser, "--packages", args.packages, PACKAGES)
    known = {case.name: case for case in cases(packages)}
    is_compiled = args.backend == "inductor"
    if is_compiled and args.sizes is None:
        args.sizes = ";".join(COMPILED)
    names = chosen(parser, args, known)
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    facts = about("cpu", steps=f"{STEPS}, of which {len(SKIPPED)} are skipped", **versions)
    columns = {
        "package": "size",
        "class": "variant",
        "eager": "eager",
        f"jit(backend={args.backend!r})": "jit",
        **({"jit(exact=True)": "exact"} if is_compiled else {}),
        "state entries": "entries",
        "its own loop": "own loop",
        "seconds": "seconds",
    }
    file = "optimizers-inductor-cpu" if is_compiled else "optimizers-cpu"
    report = Report(args.out, file, "Optimizers of public packages", facts, columns, summary)
    for case in names.values():
        report.add([measure(case, args.backend)])
    print(*report.summary(), sep="\n")


if __name__ == "__main__":
    main()
