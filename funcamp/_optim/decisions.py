"""Branches of an optimizer's step on numbers that change in training: each side runs, and the condition selects.

A step may ask in Python whether a number or a tensor is true: `if step > warmup_steps`. No program can ask that without
reading a tensor on the host. So the step runs once for each way to answer its questions, and `torch.where` takes the
results of the way that the values go.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

#: How many runs of a step there may be. Each is computed in every step, and two questions make up to four.
LARGEST_PATH_COUNT = 16
#: Files whose lines are no class's: torch's own modes and functions, and this package.
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_OPTIMIZERS = str(Path("torch") / "optim")

_Result = TypeVar("_Result")


class Question(NamedTuple):
    """A number or a tensor that a step asked for its truth."""

    condition: Tensor
    """bool, shape ()."""
    answer: bool
    """The answer that the run got."""
    place: str
    """The file and line where the step asked."""
    spot: tuple[object, int]
    """The code and the instruction where it asked: there may be several on a line."""


class Decisions:
    """The answers that one run of a class's step gets if it asks.

    Args:
        class_name: the name of the optimizer's class, for errors.
        answers: the answers to the first questions. Later ones are answered with what they propose.
        in_use: labels of hyperparameters of which it is known that a comparison with 0 needs no question: the formula
            for other values holds for 0, too.
        zeros: labels of hyperparameters that are 0 in this run.
        asks_divisors: whether a division by a number asks if it is 0, because the class catches `ZeroDivisionError`.
        truthful: whether later questions are answered with what is true, which reads it: in a trial.
        flipped: the number of the comparison in the constructor that gets the other answer: in a trial.
    """

    def __init__(
        self,
        class_name: str,
        answers: tuple[bool, ...] = (),
        in_use: frozenset[str] = frozenset(),
        zeros: frozenset[str] = frozenset(),
        *,
        asks_divisors: bool = False,
        truthful: bool = False,
        flipped: int | None = None,
    ) -> None:
        self.class_name = class_name
        self.in_use = in_use
        self.zeros = zeros
        self.asks_divisors = asks_divisors
        self._truthful = truthful
        self.is_constructing = True
        """Whether the constructor runs, which checks the ranges of its arguments; later the step."""
        self.compared_in_constructor: list[str] = []
        """The labels of the hyperparameters that the constructor compared, in order."""
        self._flipped = flipped
        self.compared_with_zero: set[str] = set()
        """Labels of the hyperparameters that the step compared with 0."""
        self.questions: list[Question] = []
        self._answers = answers
        self._known: dict[Hashable, bool] = {}
        self._keys: dict[Hashable, int] = {}

    def key(self, expression: Hashable) -> int:
        """Return the number of an expression: equal expressions are asked once in a run."""
        return self._keys.setdefault(expression, len(self._keys))

    def new_key(self) -> int:
        """Return the number of a value that is known by nothing else."""
        return self.key(("value", len(self._keys)))

    def in_constructor(self, label: str, proposal: bool) -> bool:
        """Return the answer to a comparison in the constructor: that of the example, in all runs but a trial."""
        is_flipped = len(self.compared_in_constructor) == self._flipped
        self.compared_in_constructor.append(label)
        return proposal != is_flipped

    def ask(self, key: Hashable, condition: Callable[[], Tensor], proposal: bool) -> bool:
        """Return the answer to a question.

        Args:
            key: what is asked: the same key gets the same answer.
            condition: returns a bool tensor of shape ().
            proposal: the answer, unless this run is to take the other way.
        """
        if key in self._known:
            return self._known[key]
        number = len(self.questions)
        is_true = condition()
        if number < len(self._answers):
            answer = self._answers[number]
        else:
            # Not bool(is_true), which would be asked.
            answer = bool(is_true.numpy()) if self._truthful else proposal
        self.questions.append(Question(is_true, answer, *_place()))
        self._known[key] = answer
        return answer


class OtherAnswers(Generic[_Result]):
    """The answers of further runs: each question of a run answered otherwise, also those that only such a run asks.

    A question that only a further run asks is answered otherwise once for each place in the code. Iteration yields the
    answers of a run, of which the last one is another, and the result of the run that gave the same ones but for it.

    Args:
        questions: those of the first run.
        result: its result.
    """

    def __init__(self, questions: list[Question], result: _Result) -> None:
        self._waiting: list[tuple[tuple[bool, ...], _Result]] = []
        answers = tuple(question.answer for question in questions)
        for number, answer in enumerate(answers):
            self._waiting.append(((*answers[:number], not answer), result))
        self._known = {(question.spot, question.answer) for question in questions}

    def __iter__(self) -> Iterator[tuple[tuple[bool, ...], _Result]]:
        while self._waiting:
            yield self._waiting.pop(0)

    def note(self, answers: tuple[bool, ...], questions: list[Question], result: _Result) -> None:
        """Note the questions and the result of a further run with these answers."""
        taken = tuple(question.answer for question in questions)
        self._known |= {(question.spot, question.answer) for question in questions[: len(answers)]}
        for number, question in enumerate(questions[len(answers) :], len(answers)):
            other = question.spot, not question.answer
            if other not in self._known:
                self._known.add(other)
                self._waiting.append(((*taken[:number], not question.answer), result))


def _place() -> tuple[str, tuple[object, int]]:
    """Return the file and line of the class's code that asks, and the instruction.

    It is the innermost frame that is not torch's or funcamp's.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if _OPTIMIZERS in name or not name.startswith(_PACKAGES):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", (frame.f_code, frame.f_lasti)


def _is_raised_by_class(error: BaseException) -> bool:
    """Return whether a class fails on a path in its own loop, too, so that the path is not taken.

    Its code raises the error by `raise` or `assert`, divides by 0, finds no such key, or uses what is None.
    """
    if isinstance(error, ZeroDivisionError):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    if not (_OPTIMIZERS in code.co_filename or not code.co_filename.startswith(_PACKAGES)):
        return False
    uses_none = isinstance(error, AttributeError) and error.obj is None
    raises = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return raises or uses_none or isinstance(error, LookupError)


class TooManyPathsError(TypeError):
    """A step asks so much that it would run more than `LARGEST_PATH_COUNT` times.

    Args:
        told: the decisions of the runs so far.
    """

    def __init__(self, told: list[Decisions]) -> None:
        places = dict.fromkeys(question.place for decisions in told for question in decisions.questions)
        super().__init__(
            f"stateless: {told[0].class_name} cannot be made pure: its step branches on numbers that change in "
            f"training in more than {LARGEST_PATH_COUNT} ways ({', '.join(places)}); compute with min, max or "
            "torch.where instead, or use the optimizer in an ordinary loop with funcamp.GradScaler"
        )


def along_paths(
    run: Callable[[Decisions], _Result],
    select: Callable[[Tensor, _Result, _Result], _Result],
    decisions: Callable[[tuple[bool, ...]], Decisions],
) -> _Result:
    """Run a step along every path through its questions, and select.

    Args:
        run: one run.
        select: from a condition, the result if it is true, and the other one.
        decisions: makes those of a run from the answers to its first questions.

    Raises:
        TooManyPathsError: there are more than `LARGEST_PATH_COUNT` paths.
    """
    all_told: list[Decisions] = []

    def result_from(answers: tuple[bool, ...]) -> _Result:
        """Return what a step gives that begins with these answers."""
        if len(all_told) == LARGEST_PATH_COUNT:
            raise TooManyPathsError(all_told)
        told = decisions(answers)
        all_told.append(told)
        result = run(told)
        taken = tuple(question.answer for question in told.questions)
        # From the last question back: where its answer is another one, the other way's result.
        for number in range(len(taken) - 1, len(answers) - 1, -1):
            try:
                other = result_from((*taken[:number], not taken[number]))
            except Exception as error:
                if not _is_raised_by_class(error):
                    raise
                continue  # the class says that this does not happen
            condition = told.questions[number].condition
            result = select(condition, result, other) if taken[number] else select(condition, other, result)
        return result

    return result_from(())


def every_path(
    run: Callable[[Decisions], _Result], decisions: Callable[[tuple[bool, ...]], Decisions]
) -> dict[tuple[bool, ...], _Result]:
    """Return the result of every path by its answers, without a selection.

    Args:
        run: one run.
        decisions: makes those of a run from the answers to its first questions.

    Raises:
        TooManyPathsError: there are more than `LARGEST_PATH_COUNT` paths.
    """
    results: dict[tuple[bool, ...], _Result] = {}
    all_told: list[Decisions] = []
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        if len(results) + len(waiting) > LARGEST_PATH_COUNT:
            raise TooManyPathsError(all_told)
        answers = waiting.pop()
        told = decisions(answers)
        all_told.append(told)
        try:
            result = run(told)
        except Exception as error:
            if not answers or not _is_raised_by_class(error):
                raise
            continue
        taken = tuple(question.answer for question in told.questions)
        results[taken] = result
        waiting += [(*taken[:number], not taken[number]) for number in range(len(answers), len(taken))]
    return results
