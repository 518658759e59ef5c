"""A class of another package, which is tried once: eight steps as a function against those of its own loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from funcamp._optim.foreign.instance import changed_names, cloned, instance, refusal, shared_in, step_of
from funcamp._optim.foreign.number import RefusedError
from funcamp._optim.foreign.own_step import ChangesError, OwnStep, TooManyWaysError, example_hyper
from funcamp._optim.modes import generators_put_back
from funcamp._optim.optimizer import OptState
from funcamp._trace.as_compiled import as_eager

_STEPS = 8
#: The most names of shared numbers that only some path changes.
_MOST_NAMES = 16
_SHAPES = ((2, 3), (2,), (48, 32), (2, 3), (32, 48), (2, 2, 2, 1))
#: The parameters of a trial; fewer kinds for a class that refuses some.
_TRIALS = ((*_SHAPES, ()), _SHAPES, ((2, 3), (3, 2), (2, 3)))


class OtherNumbersError(RefusedError):
    """A step as a function computes other numbers than the class's own."""


class ForeignOptimizer(OwnStep):
    """A class of another package as two pure functions; made by `stateless`."""

    def _prepare(self) -> None:
        super()._prepare()
        with as_eager(), generators_put_back(), torch.compiler.set_stance("force_eager"):
            self._try()

    def _try(self) -> None:
        """Find how the class steps, or raise with the reason why it cannot be used."""
        first_failure: Exception | None = None
        for shapes in _TRIALS:
            for dtype in (torch.float64, torch.float32):
                params = [_numbers_like(shape, dtype, offset) for offset, shape in enumerate(shapes)]
                try:
                    self._shared_names = self._changing(params)
                    self._find_first_step(params)
                except RefusedError:
                    raise
                except Exception as failure:  # of the class's own code, which may refuse a shape or a dtype
                    first_failure = first_failure or failure
                else:
                    return
        name = type(first_failure).__name__
        raise refusal(self._cls, f"its step fails ({name}: {first_failure})") from first_failure

    def _find_first_step(self, params: list[Tensor]) -> None:
        """Find whether the first step goes on from the recorded state, or is a formula of its own."""
        try:
            self._compare_with_names(params)
        except OtherNumbersError:
            self._first_differs = True
            self._compare_with_names(params)

    def _compare_with_names(self, params: list[Tensor]) -> None:
        for _ in range(_MOST_NAMES):
            self._forms.clear()
            try:
                return self._compare(params)
            except ChangesError as error:  # on another path than the loop takes
                self._shared_names |= {error.name}
            except TooManyWaysError:
                if self._is_separate:
                    raise
                self._is_separate = True
        raise refusal(self._cls, f"its step changes {', '.join(sorted(self._shared_names))}")

    def _changing(self, params: list[Tensor]) -> frozenset[str]:
        """Return the names of what three steps of the class's own loop change for all parameters."""
        optimizer, leaves = self._loop(params)
        changing: set[str] = set()
        for number in range(3):
            before = cloned(shared_in(optimizer))
            _step(optimizer, leaves, self._grads(params, number))
            changing |= changed_names(before, shared_in(optimizer))
        return frozenset(changing)

    def _loop(self, params: list[Tensor]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        torch.manual_seed(0)
        leaves = [nn.Parameter(param.clone()) for param in params]
        return instance(self._cls, leaves, self._arguments), leaves  # type: ignore[arg-type]

    def _compare(self, params: list[Tensor]) -> None:
        """Raise if some steps are other ones than the class's own loop takes."""
        optimizer, leaves = self._loop(params)
        torch.manual_seed(0)
        hyper = example_hyper(self)
        states, shared = self._first(params, hyper)
        current = params
        for number in range(_STEPS):
            grads = self._grads(params, number)
            generator_before = torch.get_rng_state()
            _step(optimizer, leaves, grads)
            generator_after = torch.get_rng_state()
            torch.set_rng_state(generator_before)
            stepped = self._stepped(current, grads, states, OptState(torch.tensor(number), {}, shared), hyper)
            current, states, shared = stepped
            if number and not torch.equal(torch.get_rng_state(), generator_after):
                raise refusal(self._cls, "its step draws other random numbers as a function than in its loop")
            for found, wanted, start in zip(current, leaves, params):
                self._check_near(number, found, wanted.detach(), start)

    def _check_near(self, number: int, found: Tensor, wanted: Tensor, start: Tensor) -> None:
        """Raise OtherNumbersError if parameters are not near, over their size or over the way that they went."""
        apart = _largest(found - wanted)
        is_double = found.dtype == torch.float64 and not torch.equal(wanted, wanted.float().double())
        of_way, of_size = (1e-5, 1e-15) if is_double else (1e-3, 5e-7)
        if not (apart < of_way * _largest(wanted - start) or apart < of_size * _largest(wanted)):
            raise OtherNumbersError(
                f"stateless: {self._cls.__name__} cannot be made pure: its step number {number} as a function comes to "
                "other numbers than in its own loop: it keeps something elsewhere, what it computes for one parameter "
                "depends on another one, or it uses a number of its constructor that is a tensor or a schedule here"
            )

    def _grads(self, params: list[Tensor], number: int) -> list[Tensor]:
        """Return gradients of several sizes.

        If parameters step one by one, one gradient is large beside the others, to find that they do not depend on it.
        """
        factor = (1.0, 0.3, 30.0, 1.0, 1e-3)[number % 5]
        grads = []
        for index, param in enumerate(params):
            grads.append(_numbers_like(tuple(param.shape), param.dtype, 10 * number + index + 3) * factor)
        if self._is_separate and number == 5:
            grads[0] = grads[0] * 1e6
        return grads


def _step(optimizer: torch.optim.Optimizer, leaves: list[nn.Parameter], grads: list[Tensor]) -> None:
    """Take a step of the class's own loop."""
    for leaf, grad in zip(leaves, grads):
        leaf.grad = grad.clone()
    with torch.no_grad():
        step_of(optimizer)()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _numbers_like(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    position = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + (0.7 * offset + 0.1)
    return (position * (2.3 + 0.17 * position)).sin().reshape(shape).to(dtype)
