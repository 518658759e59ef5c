"""Branches of an optimizer's step on values that change in training: each side runs, and the condition selects.

Three words of this room:

- A *question* is a test by Python of a number or a tensor whose value changes in training: `if step > warmup_steps`. A
  program cannot answer it without reading a tensor on the host.
- An *answer* is what Python gets in one run of the step: True or False. A run without given answers gets the *proposed*
  ones: a number proposes what is true of its example, a tensor proposes True.
- A *path* is the way through the step that a sequence of answers takes.

So the step runs once along every path, and `torch.where` selects the results of the path that the values take
(`along_paths`). `Decisions` is one run's side of this: it answers, and records the questions. A trial that needs the
other side of every branch, but not all combinations of them, uses `OtherAnswers`.
"""

from __future__ import annotations

import contextlib
import dis
import math
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

#: The largest number of runs of a step. Each is computed in every step, and two questions make up to four.
LARGEST_PATH_COUNT = 16
#: Folders whose code is no optimizer's: torch's modes and functions, and this package. torch.optim is in the first.
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_OPTIMIZERS = str(Path("torch") / "optim")

#: The answers to the first questions of a run, in order.
Answers: TypeAlias = tuple[bool, ...]
#: An instruction of Python: its code and its offset there. One line may have several that ask.
Instruction: TypeAlias = tuple[object, int]
_Result = TypeVar("_Result")


class Question(NamedTuple):
    """A number or a tensor whose truth a step asked for."""

    condition: Tensor
    """bool, shape ()."""
    answer: bool
    """The answer that the run got."""
    location: str
    """The file and line that asked."""
    instruction: Instruction
    """The instruction that asked."""


class Decisions:
    """The answers that one run of a class's step gets, and the questions that it asks.

    Args:
        class_name: the name of the optimizer's class, for errors.
        answers: the answers to the first questions. Later questions get the proposed answer.
        treated_as_nonzero: labels of hyperparameters whose comparison with 0 is no question, because the formula for
            other values holds for 0 too.
        treated_as_zero: labels of hyperparameters that are 0 in this run.
        asks_divisors: whether a division by a number asks if it is 0, because the class catches `ZeroDivisionError`.
        flipped_instruction: an instruction whose questions get the other answer than the proposed one.
        truthful: whether later questions get the true answer instead, which reads the tensor: in a trial.
        flipped_comparison: the number of the comparison in the constructor that gets the other answer: in a trial.
        unknown_example: the float of a number whose value is not known. No step may use it: a trial gives several.
        hides_known_examples: whether the step, not the constructor, gets it for hyperparameters too.
    """

    def __init__(
        self,
        class_name: str,
        answers: Answers = (),
        treated_as_nonzero: frozenset[str] = frozenset(),
        treated_as_zero: frozenset[str] = frozenset(),
        *,
        asks_divisors: bool = False,
        flipped_instruction: Instruction | None = None,
        truthful: bool = False,
        flipped_comparison: int | None = None,
        unknown_example: float = math.nan,
        hides_known_examples: bool = False,
    ) -> None:
        self.class_name = class_name
        self.treated_as_nonzero = treated_as_nonzero
        self.treated_as_zero = treated_as_zero
        self.asks_divisors = asks_divisors
        self.unknown_example = unknown_example
        self._hides_known_examples = hides_known_examples
        self._flipped_instruction = flipped_instruction
        self._truthful = truthful
        self._flipped_comparison = flipped_comparison
        self._given_count = len(answers)
        self._tried_answers: set[Answers] = set()
        self._begin(answers)

    def _begin(self, answers: Answers) -> None:
        """Begin the run, or begin it again with other answers."""
        self._first_answers = answers
        self.is_constructing = True
        """Whether the constructor runs, which checks the ranges of its arguments; later the step."""
        self.compared_in_constructor: list[str] = []
        """The labels of the hyperparameters that the constructor compared, in order."""
        self.compared_with_zero: set[str] = set()
        """Labels of the hyperparameters that the step compared with 0."""
        self.questions: list[Question] = []
        self.thresholds: set[int] = set()
        """The whole numbers with which the step compares numbers."""
        self._refusal: TypeError | None = None
        self._answer_of_key: dict[Hashable, bool] = {}
        self._key_of_expression: dict[Hashable, int] = {}

    def along_a_path_that_ends(self, run: Callable[[], _Result]) -> _Result:
        """Return the result of a run; of one with other answers if the class raises an error for the proposed ones.

        An optimizer may raise for a gradient that is NaN: `if grad.isnan().any(): raise`. The values never take that
        side, so the last question whose answer was proposed gets the other one.

        Raises:
            Exception: the run raises for every answer, or for answers that were given or are true.
        """
        while True:
            try:
                return run()
            except Exception as error:
                answers = self._untried_answers()
                if self._truthful or answers is None or not _is_raised_by_class(error):
                    raise
            self._begin(answers)

    def _untried_answers(self) -> Answers | None:
        """Return the answers of a run that was not tried, as many as possible like those of this one; None if none."""
        path = tuple([question.answer for question in self.questions])
        self._tried_answers.update(path[: number + 1] for number in range(len(path)))
        for number in range(len(path) - 1, self._given_count - 1, -1):
            answers = (*path[:number], not path[number])
            if answers not in self._tried_answers:
                return answers
        return None

    def key(self, expression: Hashable) -> int:
        """Return the number that stands for an expression: the same for equal ones, so that each is asked once."""
        return self._key_of_expression.setdefault(expression, len(self._key_of_expression))

    def new_key(self) -> int:
        """Return the number of a value that equals no earlier expression."""
        return self.key(("value", len(self._key_of_expression)))

    @property
    def hides_examples(self) -> bool:
        """Whether the float of a number is `unknown_example` though an example is known."""
        return self._hides_known_examples and not self.is_constructing

    def refuse(self, text: str) -> NoReturn:
        """Raise TypeError; `raising_refusals` raises it again, because the class may catch it."""
        error = TypeError(f"stateless: {text}")
        self._refusal = self._refusal or error
        raise error

    def refuse_class(self, reason: str) -> NoReturn:
        """Raise TypeError, because the class cannot be made pure."""
        self.refuse(f"{self.class_name} cannot be made pure: {reason}")

    @contextlib.contextmanager
    def raising_refusals(self) -> Iterator[None]:
        """Context manager around the code of a class: raise what was refused in it, even if the class has caught it."""
        try:
            yield
        finally:
            if self._refusal is not None:
                raise self._refusal

    def answer_in_constructor(self, label: str, proposal: bool) -> bool:
        """Return the answer to a comparison of a hyperparameter in the constructor.

        It is what is true of the example, because a constructor that checks a range must pass. A trial flips one answer
        to find a constructor that chooses by it.
        """
        is_flipped = len(self.compared_in_constructor) == self._flipped_comparison
        self.compared_in_constructor.append(label)
        return proposal != is_flipped

    def ask(self, key: Hashable, condition: Callable[[], Tensor], proposal: bool) -> bool:
        """Return the answer to a question, and record the question.

        Args:
            key: what is asked: the same key gets the same answer.
            condition: returns a bool tensor of shape ().
            proposal: the answer, unless this run is to take the other side.
        """
        if key in self._answer_of_key:
            return self._answer_of_key[key]
        number = len(self.questions)
        is_true = condition()
        location, instruction = _asking_code()
        if number < len(self._first_answers):
            answer = self._first_answers[number]
        elif self._truthful:
            answer = bool(is_true.numpy())  # not bool(is_true), which would be a question
        else:
            answer = proposal != (instruction == self._flipped_instruction)
        self.questions.append(Question(is_true, answer, location, instruction))
        self._answer_of_key[key] = answer
        return answer


def _asking_code() -> tuple[str, Instruction]:
    """Return the file and line of the class's code that asks, and the instruction.

    It is that of the innermost frame outside of torch and funcamp.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_code_of_class(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", (frame.f_code, frame.f_lasti)


def _is_code_of_class(file_name: str) -> bool:
    """Return whether a file is that of an optimizer: of torch.optim, or no part of torch and funcamp."""
    return _OPTIMIZERS in file_name or not file_name.startswith(_PACKAGES)


def _is_raised_by_class(error: BaseException) -> bool:
    """Return whether the class's own code fails on a path: its loop would fail too, so the values never take the path.

    Such code raises the error by `raise` or `assert`, divides by 0, finds no such key, or uses what is None.
    """
    if isinstance(error, ZeroDivisionError):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    if not _is_code_of_class(code.co_filename):
        return False
    uses_none = isinstance(error, AttributeError) and error.obj is None
    raises = dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    return raises or uses_none or isinstance(error, LookupError)


class TooManyPathsError(TypeError):
    """A step asks so much that it would run more than `LARGEST_PATH_COUNT` times.

    Args:
        runs: the decisions of the runs so far.
    """

    def __init__(self, runs: list[Decisions]) -> None:
        locations = dict.fromkeys(question.location for decisions in runs for question in decisions.questions)
        super().__init__(
            f"stateless: {runs[0].class_name} cannot be made pure: its step branches on numbers that change in "
            f"training in more than {LARGEST_PATH_COUNT} ways ({', '.join(locations)}); compute with min, max or "
            "torch.where instead, or use the optimizer in an ordinary loop with funcamp.GradScaler"
        )


def along_paths(
    run: Callable[[Decisions], _Result],
    select: Callable[[Tensor, _Result, _Result], _Result],
    decisions_for: Callable[[Answers], Decisions],
) -> _Result:
    """Run a step along every path, and select the result of the path that the values take.

    Args:
        run: one run of the step.
        select: returns the second argument if the condition is true, else the third.
        decisions_for: returns the decisions of a run whose first answers are given.

    Raises:
        TooManyPathsError: there are more than `LARGEST_PATH_COUNT` paths.
    """
    runs: list[Decisions] = []

    def result_after(answers: Answers) -> _Result:
        """Return the selected result of all paths that begin with these answers."""
        if len(runs) == LARGEST_PATH_COUNT:
            raise TooManyPathsError(runs)
        decisions = decisions_for(answers)
        runs.append(decisions)
        result = run(decisions)
        path = tuple([question.answer for question in decisions.questions])
        # From the last question back: `result` is then that of all paths that share the answer to this question.
        for number in range(len(path) - 1, len(answers) - 1, -1):
            condition, answer = decisions.questions[number].condition, path[number]
            try:
                other_result = result_after((*path[:number], not answer))
            except Exception as error:
                if not _is_raised_by_class(error):
                    raise
                continue  # the values never take that side
            if answer:
                result = select(condition, result, other_result)
            else:
                result = select(condition, other_result, result)
        return result

    return result_after(())


def results_of_paths(
    run: Callable[[Decisions], _Result], decisions_for: Callable[[Answers], Decisions]
) -> list[_Result]:
    """Return the result of every path, without a selection. Arguments and errors as in `along_paths`."""
    results: list[_Result] = []

    def run_and_keep(decisions: Decisions) -> _Result:
        results.append(run(decisions))
        return results[-1]

    along_paths(run_and_keep, lambda _, result, __: result, decisions_for)
    return results


class OtherAnswers(Generic[_Result]):
    """The first answers of further runs that together take the other side of every branch.

    Each question of the first run gets the other answer in one run. A question that only a further run asks gets it
    once for each instruction. So the number of runs grows with the branches in the code, not with their combinations as
    in `along_paths`, and a trial may follow more questions.

    Iteration yields the answers of a run, the last of which is the other one, and the result of the run that gave the
    same answers up to it. `note` must be called with each further run that succeeds.

    Args:
        questions: those of the first run.
        result: its result.
    """

    def __init__(self, questions: list[Question], result: _Result) -> None:
        self._next_runs: list[tuple[Answers, _Result]] = []
        path = tuple([question.answer for question in questions])
        for number, answer in enumerate(path):
            self._next_runs.append(((*path[:number], not answer), result))
        self._taken_sides = {(question.instruction, question.answer) for question in questions}

    def __iter__(self) -> Iterator[tuple[Answers, _Result]]:
        while self._next_runs:
            yield self._next_runs.pop(0)

    def note(self, answers: Answers, questions: list[Question], result: _Result) -> None:
        """Note the questions and the result of a further run with these first answers."""
        path = tuple([question.answer for question in questions])
        self._taken_sides |= {(question.instruction, question.answer) for question in questions[: len(answers)]}
        for number, question in enumerate(questions[len(answers) :], len(answers)):
            other_side = question.instruction, not question.answer
            if other_side not in self._taken_sides:
                self._taken_sides.add(other_side)
                self._next_runs.append(((*path[:number], not question.answer), result))
