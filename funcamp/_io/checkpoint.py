"""Checkpoint files: torch.save or safetensors, written atomically, and read without running code from them."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import secrets
import stat
import zipfile
from types import ModuleType

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._types import StateDict


def save(saved: StateDict, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically: torch.save to a temporary file in the same folder, then a rename.

    At every moment path is the complete old file or the complete new one. An error removes the temporary file; a
    killed process leaves it: delete `<name>.<8 hex digits>.part`, and `.tmp<6 letters>` of safetensors. A symbolic link
    is followed. Syncs: reads every tensor.

    Args:
        saved: the result of `state_dict`, or tensors, numbers and strings in dicts, lists and tuples.
        path: the file, in a folder that exists. If it ends in `.safetensors` the format is safetensors, for a flat dict
            of dense tensors, without sharing; otherwise torch.save's, which torch.load reads.

    Raises:
        TypeError: path is not a path; saved is not a dict, or contains what the format cannot store or `load` would not
            read.
        ValueError: path is a folder or a device.
        ImportError: path ends in `.safetensors` and the package is missing.
        OSError: the file cannot be written; path is then as it was.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"w": torch.ones(2), "epoch": 3}, f"{folder}/checkpoint.pt")
        ...     load(f"{folder}/checkpoint.pt")
        {'w': tensor([1., 1.]), 'epoch': 3}
    """
    name = _checked_path("save", path)
    if not isinstance(saved, dict):
        raise TypeError(f"save: saved must be a dict, as state_dict gives it; got a {type(saved).__name__}")
    # A rename onto a symbolic link would replace the link, not the file that it names.
    target = os.path.realpath(name)
    is_no_file = os.path.exists(target) and not os.path.isfile(target)
    if is_no_file or not os.path.basename(name):
        raise ValueError(f"save: path must name a file; got {name!r}, which is a folder or a device")
    if not os.path.isdir(os.path.dirname(target)):
        message = "save: the folder of path must exist: create it with os.makedirs"
        raise FileNotFoundError(errno.ENOENT, message, os.path.dirname(target))
    safetensors = _safetensors("save", target)

    # The name is random, because several ranks or threads may save to the same path at the same time.
    temporary = f"{target}.{secrets.token_hex(4)}.part"
    with open(temporary, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        if safetensors:
            _write_safetensors(safetensors, saved, temporary)
        else:
            _write_torch(saved, temporary)
        _check_readable(safetensors, temporary)
        # Without fsync, a power failure after the rename could leave an empty file under the final name.
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        if os.path.exists(target):
            mode = os.stat(target).st_mode
        # safetensors makes files that only their owner can read.
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:  # KeyboardInterrupt too
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def load(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> StateDict:
    """Read a checkpoint written by `save` or torch.save, without running code from it.

    It is torch.load(weights_only=True), or safetensors. A truncated file raises. A flipped bit in a tensor's data is
    not detected, because torch and safetensors have no checksum for it. The tensors do not depend on the file
    afterwards. Syncs: reads every tensor.

    Args:
        path: the file; its extension decides the format, as in `save`.
        map_location: the device to put the tensors on. `load_state_dict` moves them itself, so leave them on the CPU.

    Returns:
        The saved dict; from safetensors in the file's order.

    Raises:
        TypeError: path is not a path, or map_location not a device.
        ValueError: the file is truncated, damaged, of another format, or contains an object that only code could
            create; path is a folder or a device; the machine does not have the device of map_location.
        ImportError: path ends in `.safetensors` and the package is missing.
        FileNotFoundError: there is no file.

    Example:
        >>> load("/home/me/missing.pt")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] load: path must name an existing file: '/home/me/missing.pt'
    """
    name = _checked_path("load", path)
    device = _checked_device(map_location)
    safetensors = _safetensors("load", os.path.realpath(name))
    if not os.path.exists(name):
        # The complete path, because a wrong working folder is the usual cause.
        raise FileNotFoundError(errno.ENOENT, "load: path must name an existing file", os.path.abspath(name))
    rule = f"load: path must name a complete checkpoint; got {name!r}, which"
    if not os.path.isfile(name):
        raise ValueError(f"{rule} is a folder or a device (torch.distributed.checkpoint.load reads folders)")
    with open(name, "rb") as file:
        if safetensors is None and not zipfile.is_zipfile(file):
            size = os.path.getsize(name)
            raise ValueError(f"{rule} is cut short, or no zip file as torch.save makes ({size} bytes)")
        file.seek(0)
        try:
            if safetensors:
                mapped = safetensors.torch.load_file(name)
                # copy=True, because these tensors are the mapped file: a later write to it would change them.
                return {key: tensor.to(device, copy=True) for key, tensor in mapped.items()}
            saved = torch.load(file, map_location=device, weights_only=True, mmap=False)
        except (OSError, MemoryError, torch.OutOfMemoryError, Warning):  # a warning, if a filter makes it an error
            raise
        except Exception as error:  # torch raises any type of error for a damaged file
            raise ValueError(f"{rule} {_reason(error)}") from error
    if not isinstance(saved, dict):
        raise ValueError(f"{rule} holds a {type(saved).__name__} instead of a dict")
    return saved


def _checked_path(call: str, path: object) -> str:
    """Return the path as a str; raise TypeError for bytes and for anything that is not a path."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{call}: path must be a str or an os.PathLike; got {_tree.brief(path)}")
    return str(os.fspath(path))


def _checked_device(map_location: object) -> torch.device:
    """Return the device; without this check, torch.load would blame the file for a device that is missing."""
    if not isinstance(map_location, (str, torch.device)):
        raise TypeError(f"load: map_location must be a device; got {map_location!r}")
    try:
        return torch.empty(0, device=map_location).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"load: map_location must be a device of this machine; got {map_location!r}") from error


def _safetensors(call: str, name: str) -> ModuleType | None:
    """Return the safetensors package if the file name needs it, else None."""
    if not name.endswith(".safetensors"):
        return None
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{call}: {name!r} needs the package safetensors: pip install safetensors") from error
    return safetensors


def _write_torch(saved: StateDict, name: str) -> None:
    """Write by torch.save; raise TypeError for what pickle cannot write, and OSError for a full disk."""
    with open(name, "wb") as file:
        try:
            torch.save(saved, file)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:  # what pickle raises
            raise _unreadable(f"pickle: {error}") from error
        except RuntimeError as error:
            # On a full disk torch raises a RuntimeError about the file position.
            if isinstance(error.__context__, OSError):
                raise OSError(error.__context__.errno, f"save: {error.__context__.strerror}", name) from error
            raise


def _write_safetensors(package: ModuleType, saved: StateDict, name: str) -> None:
    """Write a flat dict of dense tensors; raise TypeError for anything else."""
    tensors: dict[str, Tensor] = {}
    addresses: set[int] = set()
    """The memory of the tensors so far."""
    for key, value in saved.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not is_dense or not isinstance(key, str):
            raise TypeError(
                "save: saved must be a flat dict of dense tensors by name in safetensors; "
                f"got {_tree.brief(value)} for {key!r}: save to a name that ends in .pt"
            )
        # safetensors writes raw memory, so a lazy conjugate or negative would lose its sign.
        tensor = value.detach().resolve_conj().resolve_neg().contiguous()
        # It refuses tensors that share memory.
        address = tensor.untyped_storage().data_ptr()
        tensors[key] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    try:
        package.torch.save_file(tensors, name)
    except package.SafetensorError as error:
        raise OSError(f"save: the checkpoint could not be written: {error}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise TypeError(f"save: saved must hold what safetensors can store; it raises {text}") from error


def _check_readable(safetensors: ModuleType | None, name: str) -> None:
    """Refuse what `load` would refuse, while the run still has its state.

    Reads the structure, and of the data at most the indices of sparse tensors, because the file is mapped.
    """
    try:
        if safetensors:
            safetensors.safe_open(name, framework="pt")
        else:
            # Not onto "meta": torch 2.15 checks the indices of sparse tensors, which it cannot read there.
            torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    except Warning:  # torch 2.15 warns that it checks sparse tensors; a filter may make that an error
        raise
    except Exception as error:
        raise _unreadable(f"the file {_reason(error)}") from error


def _unreadable(reason: str) -> TypeError:
    return TypeError(
        "save: saved must hold what load can read back, tensors, numbers and strings in dicts, lists and tuples; "
        f"{reason}: save an object's state_dict(), or its numbers"
    )


def _reason(error: Exception) -> str:
    """Return why the file was refused, without torch's advice to load it anyway."""
    text = str(error).strip()
    if isinstance(error, pickle.UnpicklingError):
        class_name = re.search(r"GLOBAL (\S+)", text)
        return f"holds a {class_name[1]}, which only code could make" if class_name else "is damaged"
    first_line = text.splitlines()[0] if text else ""
    return f"cannot be read: {type(error).__name__}: {first_line[:160]}"
