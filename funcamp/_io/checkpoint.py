"""Checkpoint files: torch.save to a temporary name and a rename; torch.load without running code from the file."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import cast

import torch

from funcamp import _tree
from funcamp._types import StateDict


def save(saved: StateDict, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint: torch.save to a temporary file in the same folder, then a rename.

    At every moment path is the complete old file or the complete new one. An error removes the temporary file; a
    killed process leaves it: delete `<name>.<8 hex digits>.part`. Syncs: reads every tensor.

    Args:
        saved: the result of `state_dict`, or tensors, numbers and strings in dicts, lists and tuples, which `load`
            reads back.
        path: the file, in a folder that exists.

    Raises:
        TypeError: saved is not a dict, or contains an object that `load` refuses; path is not a path.
        ValueError: path ends in `.safetensors`.
        Exception: what torch.save or the system raises; path is then as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"w": torch.ones(2), "epoch": 3}, f"{folder}/checkpoint.pt")
        ...     load(f"{folder}/checkpoint.pt")
        {'w': tensor([1., 1.]), 'epoch': 3}
    """
    name = name_of_file("save", path)
    if not isinstance(saved, dict):
        raise TypeError(f"save: saved must be a dict, as state_dict gives it; got {_tree.brief(saved)}")
    # The name is random, because several ranks or threads may save to the same path at the same time.
    temporary = f"{name}.{secrets.token_hex(4)}.part"
    try:
        with open(temporary, "xb") as file:
            torch.save(saved, file)
            # Without fsync, a power failure after the rename could leave an empty file under the final name.
            file.flush()
            os.fsync(file.fileno())
        _check_that_it_loads(temporary)
        os.replace(temporary, name)
    except BaseException:  # KeyboardInterrupt too
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def _check_that_it_loads(name: str) -> None:
    """Raise TypeError if `load` would refuse a file for a class in it; reads no tensor."""
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(name)
    if refused:
        raise TypeError(
            "save: saved must hold tensors, numbers and strings in dicts, lists and tuples, which load reads back; got "
            f"{_tree.listed(sorted(refused))}: convert it first, as by float(x), str(path), dict(x), vars(x), "
            "torch.from_numpy(x), or to_state_dict(x, config) for a scaler's state"
        )


def load(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> StateDict:
    """Read a checkpoint of `save` or torch.save by torch.load(weights_only=True), which runs no code.

    Syncs: reads every tensor.

    Args:
        path: the file.
        map_location: the device to put the tensors on. `load_state_dict` moves them itself, so leave them on the CPU.

    Returns:
        What was saved.

    Raises:
        TypeError: path is not a path.
        ValueError: path ends in `.safetensors`.
        FileNotFoundError: there is no file.
        Exception: what torch.load raises for a file that is damaged, of another format, or contains an object that only
            code could create.

    Example:
        >>> load("/home/me/missing.pt")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: '/home/me/missing.pt'
    """
    return cast(StateDict, torch.load(name_of_file("load", path), map_location=map_location, weights_only=True))


def name_of_file(call: str, path: str | os.PathLike[str]) -> str:
    """Return the path as a str; raise for what is no path and for the format of another package."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{call}: path must be a str or an os.PathLike; got {_tree.brief(path)}")
    name = os.fspath(path)
    if name.endswith(".safetensors"):
        raise ValueError(
            f"{call}: path must be a file of torch.save's format; got {name!r}: use the package safetensors, "
            "save_file(step.state_dict(state), path) and step.load_state_dict(load_file(path), like=state)"
        )
    return name
