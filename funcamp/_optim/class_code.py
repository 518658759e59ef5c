"""What only the code of an optimizer's class shows, because a tensor in place of a number gives it no sign."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping

from funcamp._optim.arguments import impure
from funcamp._optim.class_state import Changing


def _code_of(cls: type) -> Iterator[types.CodeType]:
    """Yield the code of a class's methods and of the functions that they reach by the names they use."""
    seen: dict[int, object] = {}
    waiting: list[object] = [cls]
    while waiting:
        member = waiting.pop()
        if id(member) in seen:
            continue
        seen[id(member)] = member
        if not isinstance(member, types.FunctionType):
            waiting += _parts_of(member)
            continue
        # A wrapper may be torch's, as that of torch.no_grad, around a function of the class.
        waiting += _enclosed_in(member)
        if _is_followed(member.__globals__.get("__name__")):
            for code in _with_inner(member.__code__):
                yield code
                waiting += _named_in(code, member.__globals__)


#: Packages whose code is not looked at. A class that `exec` defines may say that it is from "builtins".
_NOT_FOLLOWED = (sys.stdlib_module_names | {"torch", "numpy", "funcamp"}) - {"builtins"}


def _is_followed(module: object) -> bool:
    return str(module).partition(".")[0] not in _NOT_FOLLOWED


def _parts_of(member: object) -> Iterable[object]:
    """Return what may contain the code of an object that is not a function: its methods, elements, class, and so on."""
    if isinstance(member, type):
        bases = [base for base in member.__mro__ if _is_followed(base.__module__)]
        return [value for base in bases for value in vars(base).values()]
    if isinstance(member, (staticmethod, classmethod, types.MethodType)):
        return [member.__func__]
    if isinstance(member, property):
        return [member.fget, member.fset]
    if isinstance(member, (functools.partial, functools.partialmethod)):
        return [member.func, *member.args, *member.keywords.values()]
    if isinstance(member, functools.cached_property):
        return [member.func]
    if isinstance(member, dict):
        return list(member.values())
    if isinstance(member, (list, tuple, set, frozenset)):
        return list(member)
    # A function with `functools.cache` has the function in its __dict__.
    return [type(member), getattr(member, "__dict__", {}).get("__wrapped__")]


def _enclosed_in(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function has from the functions around it, and its defaults."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _named_in(code: types.CodeType, names: Mapping[str, object]) -> Iterator[object]:
    """Yield what a function names: globals, and attributes of modules, also of those that it imports."""
    modules: list[types.ModuleType] = []
    for instruction in dis.get_instructions(code):
        named = None
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named = names.get(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            path = str(instruction.argval)
            named = sys.modules.get(path) or sys.modules.get(f"{names.get('__package__')}.{path}")
        if isinstance(named, types.ModuleType):
            modules.append(named)
        elif named is not None:
            yield named
    seen: set[str] = set()
    while modules:
        module = modules.pop()
        if module.__name__ in seen or not _is_followed(module.__name__):
            continue
        seen.add(module.__name__)
        # `co_names` has the names of attributes too.
        for value in [vars(module)[name] for name in code.co_names if name in vars(module)]:
            if isinstance(value, types.ModuleType):
                modules.append(value)
            else:
                yield value


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
    return any(errors & _caught_in(code) for code in _code_of(cls))


#: Functions of torch that raise for some finite matrices, and those that tell of it instead.
_RAISING_FUNCTIONS = {"cholesky": "cholesky_ex", "inv": "inv_ex", "inverse": "inv_ex", "solve": "solve_ex"}
_ERRORS_OF_TORCH = frozenset({"RuntimeError", "LinAlgError", "_LinAlgError"})


def refuse_caught_errors(cls: type) -> None:
    """Refuse a class that goes on by an error: of Python's arithmetic, which a tensor's does not raise, or of torch's.

    A program takes no other way after an error.
    """
    for code in _code_of(cls):
        caught = _caught_in(code)
        names = sorted(caught & {"OverflowError", "ValueError", _WITHOUT_NAME, *_ALL_ERRORS})
        if names and "math" in code.co_names:
            raise impure(
                cls,
                f"its {code.co_name} may catch {' or '.join(names)} of math, which tensors do not raise; "
                "ask with `if` instead",
            )
        functions = sorted(_RAISING_FUNCTIONS.keys() & {*code.co_names})
        names = sorted(caught & {*_ERRORS_OF_TORCH, _WITHOUT_NAME, *_ALL_ERRORS})
        if names and functions:
            raise impure(
                cls,
                f"its {code.co_name} may catch {' or '.join(names)} of {functions[0]}, which a program cannot; "
                f"select by the info of torch.linalg.{_RAISING_FUNCTIONS[functions[0]]} with torch.where instead",
            )


def refuse_identity_of_flags(cls: type, changing: Changing) -> None:
    """Refuse a class that keeps a bool which changes, and compares something with `is True` or `is False`."""
    flags = [name for kinds in (changing.per_param, changing.shared) for name, kind in kinds.items() if kind == "bool"]
    if not flags:
        return
    for code in _code_of(cls):
        instructions = list(dis.get_instructions(code))
        for constant, comparison in itertools.pairwise(instructions):
            if comparison.opname == "IS_OP" and isinstance(constant.argval, bool):
                raise impure(
                    cls,
                    f"its {code.co_name} asks `is {constant.argval}`, and it keeps {flags[0]!r}, which changes in "
                    "training and so is a tensor, which is neither; ask with `if` instead",
                )
