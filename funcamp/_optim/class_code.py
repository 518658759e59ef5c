"""What only the code of an optimizer's class shows, because a tensor in place of a number gives it no sign."""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator

from funcamp._optim.arguments import impure, is_torchs
from funcamp._optim.class_state import Changing


def _code_of_methods(cls: type) -> Iterator[types.CodeType]:
    """Yield the code of a class's methods."""
    for base in cls.__mro__:
        yield from _code_in(vars(base).values())


def _code_around(cls: type) -> Iterator[types.CodeType]:
    """Yield the code of a class's methods and, for one that is not torch's, of the functions of its module."""
    yield from _code_of_methods(cls)
    module = sys.modules.get(cls.__module__)
    if module is not None and not is_torchs(cls):
        yield from _code_in(vars(module).values())


def _code_in(members: Iterable[object]) -> Iterator[types.CodeType]:
    """Yield the code of functions and properties among some objects."""
    for member in members:
        for function in (member, getattr(member, "__func__", None), getattr(member, "fget", None)):
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if isinstance(code, types.CodeType):
                yield from _with_inner(code)


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and that of the functions which it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


#: Names of exceptions that stand for all that Python's arithmetic raises; `contextlib.suppress` may be given any.
_ALL_ERRORS = frozenset({"Exception", "BaseException", "suppress"})
#: What stands for an `except:` without a name.
_WITHOUT_NAME = "every error"


def _caught_in(code: types.CodeType) -> set[str]:
    """Return the names of the errors that a function catches."""
    caught = {"suppress"} & {*code.co_names}
    instructions = list(dis.get_instructions(code))
    handlers = {instruction.argval for instruction in instructions if instruction.opname == "SETUP_FINALLY"}  # in 3.10
    for index, instruction in enumerate(instructions):
        begins_handler = instruction.offset in handlers or (index and instructions[index - 1].opname == "PUSH_EXC_INFO")
        if begins_handler and instruction.opname == "POP_TOP":
            caught.add(_WITHOUT_NAME)
        if instruction.opname in _CATCHES:
            # The names, or a tuple of them, are loaded before.
            names = itertools.takewhile(lambda before: before.opname in _LOADS, reversed(instructions[:index]))
            caught |= {str(name.argval) for name in names}
    return caught


#: The instructions that compare an error with the class of one, in 3.11 and in 3.10.
_CATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")
#: Those that load this class.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "BUILD_TUPLE")


def catches_zero_divisions(cls: type) -> bool:
    """Return whether a class may catch a division by 0."""
    errors = {"ZeroDivisionError", "ArithmeticError", _WITHOUT_NAME, *_ALL_ERRORS}
    return any(errors & _caught_in(code) for code in _code_around(cls))


#: Functions of torch that raise for some finite matrices, and those that tell of it instead.
_RAISING_FUNCTIONS = {"cholesky": "cholesky_ex", "inv": "inv_ex", "inverse": "inv_ex", "solve": "solve_ex"}
_ERRORS_OF_TORCH = frozenset({"RuntimeError", "LinAlgError", "_LinAlgError"})


def refuse_caught_errors(cls: type) -> None:
    """Refuse a class that goes on by an error: of Python's arithmetic, which a tensor's does not raise, or of torch's.

    A program takes no other way after an error.
    """
    for code in _code_of_methods(cls):
        caught = _caught_in(code)
        names = sorted(caught & {"OverflowError", "ValueError", _WITHOUT_NAME, *_ALL_ERRORS})
        if names and "math" in code.co_names:
            raise impure(
                cls,
                f"its method {code.co_name} may catch {' or '.join(names)} of math, which tensors do not raise; "
                "ask with `if` instead",
            )
        functions = sorted(_RAISING_FUNCTIONS.keys() & {*code.co_names})
        names = sorted(caught & {*_ERRORS_OF_TORCH, _WITHOUT_NAME, *_ALL_ERRORS})
        if names and functions:
            raise impure(
                cls,
                f"its method {code.co_name} may catch {' or '.join(names)} of {functions[0]}, which a program cannot; "
                f"select by the info of torch.linalg.{_RAISING_FUNCTIONS[functions[0]]} with torch.where instead",
            )


def refuse_identity_of_flags(cls: type, changing: Changing) -> None:
    """Refuse a class that keeps a bool which changes, and compares something with `is True` or `is False`."""
    flags = [name for kinds in (changing.per_param, changing.shared) for name, kind in kinds.items() if kind == "bool"]
    if not flags:
        return
    for code in _code_around(cls):
        instructions = list(dis.get_instructions(code))
        for constant, comparison in itertools.pairwise(instructions):
            if comparison.opname == "IS_OP" and isinstance(constant.argval, bool):
                raise impure(
                    cls,
                    f"its {code.co_name} asks `is {constant.argval}`, and it keeps {flags[0]!r}, which changes in "
                    "training and so is a tensor, which is neither; ask with `if` instead",
                )
