"""Branches of a step on values: every path runs, and the values select one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from funcamp._optim.decisions import (
    LARGEST_PATH_COUNT,
    Answers,
    Decisions,
    OtherAnswers,
    TooManyPathsError,
    along_paths,
    results_of_paths,
)


def decisions_for(answers: Answers) -> Decisions:
    return Decisions("Stepper", answers)


def select(condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
    return torch.where(condition, if_true, if_false)


def ask(decisions: Decisions, name: str, value: bool = True) -> bool:
    return decisions.ask(name, lambda: torch.tensor(value), True)


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product([False, True], repeat=2)))
def test_the_result_is_that_of_the_path_that_the_values_take(outer: bool, inner: bool) -> None:
    def run(decisions: Decisions) -> Tensor:
        if ask(decisions, "outer", outer):
            return torch.tensor(1 if ask(decisions, "inner", inner) else 2)
        return torch.tensor(3)

    expected = (1 if inner else 2) if outer else 3
    assert along_paths(run, select, decisions_for) == expected


def test_the_results_of_all_paths_are_in_the_order_of_their_runs() -> None:
    runs: list[str] = []

    def run(decisions: Decisions) -> str:
        runs.append("".join("ab"[ask(decisions, name)] for name in "xyz"))
        return runs[-1]

    assert results_of_paths(run, decisions_for) == runs
    assert runs[0] == "bbb"
    assert sorted(runs) == ["".join(path) for path in itertools.product("ab", repeat=3)]


def test_a_question_that_is_asked_again_gets_the_same_answer() -> None:
    def run(decisions: Decisions) -> Tensor:
        assert ask(decisions, "same") is ask(decisions, "same")
        return torch.tensor(len(decisions.questions))

    assert [int(result) for result in results_of_paths(run, decisions_for)] == [1, 1]


def test_a_path_on_which_the_class_raises_is_not_selected() -> None:
    def run(decisions: Decisions) -> Tensor:
        if not ask(decisions, "is positive", False):
            raise ValueError("must be positive")
        return torch.tensor(1)

    assert along_paths(run, select, decisions_for) == 1


def test_an_error_of_the_first_run_is_raised() -> None:
    def run(decisions: Decisions) -> Tensor:
        assert not ask(decisions, "fails")
        return torch.tensor(1)

    with pytest.raises(AssertionError):
        along_paths(run, select, decisions_for)


def test_more_paths_than_the_largest_count_are_refused_with_the_lines_that_ask() -> None:
    runs: list[Decisions] = []

    def run(decisions: Decisions) -> Tensor:
        runs.append(decisions)
        return torch.tensor(sum(ask(decisions, name) for name in "abcde"))

    with pytest.raises(TooManyPathsError, match=r"Stepper cannot be made pure.* 16 ways \(test_decisions.py:\d+\)"):
        along_paths(run, select, decisions_for)
    assert len(runs) == LARGEST_PATH_COUNT


def test_other_answers_take_the_other_side_of_each_branch() -> None:
    def condition() -> Tensor:
        return torch.tensor(True)

    def run(decisions: Decisions) -> list[bool]:
        a = decisions.ask("a", condition, True)
        b = decisions.ask("b", condition, True)
        return [a, b] if a else [a, b, decisions.ask("only without a", condition, True)]

    first = decisions_for(())
    others = OtherAnswers(first.questions, run(first))
    results = []
    for answers, _ in others:
        decisions = decisions_for(answers)
        results.append(run(decisions))
        others.note(answers, decisions.questions, results[-1])
    assert results == [[False, True, True], [True, False], [False, False, True], [False, True, False]]
