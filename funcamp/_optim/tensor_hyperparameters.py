"""What a class does with its hyperparameters if they are tensors: whether it reads them, and compares them with 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from funcamp._optim.arguments import first_line, is_own_refusal
from funcamp._optim.class_step import ClassStep
from funcamp._optim.containers import leaves_of
from funcamp._optim.decisions import Decisions
from funcamp._optim.hyperparameters import Hyper, is_dynamic, map_items
from funcamp._optim.instance_state import container_of, kind_of, same
from funcamp._optim.number import Number
from funcamp._optim.run import constructed_state
from funcamp._optim.trial import are_equal, inputs_on, precise_inputs, two_steps


def refuse_choices_of_constructor(step: ClassStep) -> None:
    """Refuse a tensor or a schedule that the constructor uses otherwise than to put it into the parameter group.

    It may choose by the value, or keep a number made of it. What value a loop would give it is not known, except for a
    scheduler of torch.
    """
    if step.are_starts_known:
        return
    decisions = step.decisions()
    leaves = _constructed_leaves(step, decisions)
    for name, leaf in leaves.items():
        if isinstance(leaf, Number) and (container_of(name) not in step.dynamic or not leaf.is_hyperparameter):
            raise TypeError(
                f"stateless: {', '.join(step.dynamic)} must be a number, because the constructor of "
                f"{step.cls.__name__} keeps a number made of it as {name}, which a schedule of torch leaves as it is; "
                "got a tensor or a schedule"
            )
    again = _constructed_leaves(step, step.decisions())
    comparable = [name for name in leaves.keys() & again.keys() if _is_as_before(leaves[name], again[name])]
    for number, label in enumerate(decisions.compared_in_constructor):
        try:
            others = _constructed_leaves(step, step.decisions(flipped_comparison=number))
        except Exception:
            continue  # it allows no such value
        if not all(name in others and _is_as_before(leaves[name], others[name]) for name in comparable):
            raise TypeError(
                f"stateless: {container_of(label)} must be a number, because the constructor of {step.cls.__name__} "
                "chooses by its value; got a tensor or a schedule: make another optimizer for another value"
            )


def _constructed_leaves(step: ClassStep, decisions: Decisions) -> dict[str, object]:
    """Return what all parameters share in a new instance."""
    state = constructed_state(step.cls, step.arguments, step.examples("meta"), inputs_on("meta").params, decisions)
    return leaves_of(state.shared)


def _is_as_before(leaf: object, other: object) -> bool:
    """Return whether a leaf is the same in two instances; numbers and tensors are compared by their text."""
    return repr(leaf) == repr(other) if kind_of(leaf) and kind_of(other) else same(leaf, other)


def refuse_reads_of(step: ClassStep, name: str) -> None:
    """Refuse one hyperparameter by name if steps fail when it is a tensor and do not fail when it is a number."""

    def error_with(values: Mapping[str, object]) -> Exception | None:
        # Forms are of hyperparameters that are all tensors, or none.
        trial = replace(step, dynamic=tuple(values), _forms={})
        try:
            two_steps(trial, inputs_on("meta"), values=values)
        except Exception as error:
            return error
        return None

    error = error_with({name: step.arguments[name]})
    if error is None or error_with({}) is not None:
        return
    if is_own_refusal(error):
        raise error
    raise TypeError(
        f"stateless: {name} must be a number, because {step.cls.__name__} uses its value in Python "
        f"({type(error).__name__}: {first_line(error)}); got a tensor or a schedule: make another optimizer "
        "for another value"
    ) from error


def multiplied(step: ClassStep, name: str, factor: float) -> object:
    """Return the example of a hyperparameter times a factor; of a tuple only the items that are dynamic."""

    def multiply(_: str, item: object, number: float) -> float:
        return number * factor if is_dynamic(item) else number

    return map_items(multiply, name, step.hyperparameters[name], step.arguments[name])


def without_needless_questions(step: ClassStep) -> ClassStep:
    """Return the class with the hyperparameters whose comparison with 0 needs no question (`Decisions`).

    For such a hyperparameter a step with the tensor 0 in the formula for other values equals a step in which the
    comparison with 0 is true.
    """
    inputs = precise_inputs(step)
    hyper = step.examples("cpu")
    decisions = step.decisions()
    step.run(inputs.params, inputs.grads, None, hyper, decisions)
    treated_as_nonzero: set[str] = set()
    for label in sorted(decisions.compared_with_zero):
        values = _with_zero(step, label)
        step_of_others = replace(step, treated_as_nonzero=frozenset([label]))
        try:
            with_zero = two_steps(step, inputs, values, frozenset([label]))
            is_same = are_equal(two_steps(step_of_others, inputs, values), with_zero)
        except TypeError:  # with 0 the class keeps other entries
            continue
        if is_same:
            treated_as_nonzero.add(label)
    return replace(step, treated_as_nonzero=frozenset(treated_as_nonzero))


def _with_zero(step: ClassStep, zero_label: str) -> Hyper:
    """Return the examples of the dynamic hyperparameters, with 0 for the one with this label."""

    def value_of(label: str, number: float) -> float:
        return 0.0 if label == zero_label else number

    return {name: map_items(value_of, name, step.arguments[name]) for name in step.dynamic}
