"""Write checkpoints that survive a kill at any moment, and read them without running their code."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import pickle
import re
import secrets
import shutil
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree

#: The longest file name on Linux, macOS and Windows, in bytes.
_NAME_BYTES = 255
_TENSORS = (Tensor, torch.nn.Parameter)
#: What torch.load(weights_only=True) accepts in any process, tested type by type on torch 2.11 and 2.13.
_PLAIN = (*_TENSORS, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def save(saved: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint atomically.

    At every moment path is the complete old file or the complete new one. The file is written into a folder beside
    path, synced to disk and renamed. A killed save leaves that folder, `<name>.<8 hex digits>.part` (a long name is
    shortened); the next successful save to path removes it. A symbolic link is followed. Syncs: reads every tensor.

    Args:
        saved: the result of `state_dict`, or tensors, numbers and strings in dicts, lists and tuples.
        path: the file. If it ends in `.safetensors` the format is safetensors, for a flat dict of dense tensors,
            without sharing; otherwise torch.save's zip, which torch.load also reads.

    Raises:
        TypeError: path is not a path; saved is not a dict, or contains what the format cannot store or `load` would not
            read.
        ValueError: path is not a file: a folder, a device, a link to itself; saved contains itself, or a tensor without
            values (on the meta device), or is nested deeper than Python's recursion limit.
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
    target = os.path.realpath(name)  # renaming onto a link would replace the link
    if not os.path.basename(name) or (os.path.exists(target) and not os.path.isfile(target)):
        raise ValueError(f"save: path must name a file; got {name!r}, which is a folder or a device")
    if os.path.islink(target):
        raise ValueError(f"save: path must name a file; got {name!r}, which is a link that leads to itself")
    if not isinstance(saved, dict):
        raise TypeError(f"save: saved must be a dict, as state_dict gives it; got a {type(saved).__name__}")
    package = _safetensors("save", target)
    if package:
        saved = _packed(saved)
    else:
        try:
            _check_plain("saved", saved)
        except RecursionError as error:
            raise ValueError("save: saved must be nested less deeply than Python's recursion limit") from error
    with _folder_beside(target) as folder:
        part = os.path.join(folder, os.path.basename(target))
        if package:
            _write_safetensors(package, saved, part)
        else:
            _write_zip(saved, part)
            _check_readable(part)
        if os.path.exists(target):
            os.chmod(part, stat.S_IMODE(os.stat(target).st_mode))
        _sync(part, os.O_RDWR)
        os.replace(part, target)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder; the file is complete anyway
            _sync(os.path.dirname(target), os.O_RDONLY)
    _remove_stale(target)


def load(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint written by `save` or torch.save, without running code from it.

    A truncated file raises. A flipped bit in a tensor's data is not detected, because torch and safetensors have no
    checksum for it. The tensors do not depend on the file afterwards. Syncs: reads every tensor.

    Args:
        path: the file; its extension decides the format, as in `save`.
        map_location: the device to put the tensors on. `load_state_dict` moves them itself, so leave them on the CPU.

    Returns:
        The saved dict; from safetensors in the file's order.

    Raises:
        TypeError: path is not a path, or map_location not a device.
        ValueError: the file is truncated, damaged, of another format, or contains an object that only code could
            create; path is a folder, a pipe or a device; the machine does not have the device.
        ImportError: path ends in `.safetensors` and the package is missing.
        FileNotFoundError: there is no file.

    Example:
        >>> load("missing.pt")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: 'missing.pt'
    """
    name = _checked_path("load", path)
    if not isinstance(map_location, (str, torch.device)):
        raise TypeError(f"load: map_location must be a device; got {map_location!r}")
    try:
        device = torch.empty(0, device=map_location).device  # a missing device is not the file's fault
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"load: map_location must be a device of this machine; got {map_location!r}") from error
    package = _safetensors("load", os.path.realpath(name))
    rule = f"load: path must name a complete checkpoint; got {name!r}, which"
    if os.path.exists(name) and not os.path.isfile(name):  # opening a pipe would block until there is a writer
        raise ValueError(f"{rule} is a folder or a device")
    with open(name, "rb") as file:
        if package is None and not zipfile.is_zipfile(file):
            size = os.fstat(file.fileno()).st_size
            raise ValueError(f"{rule} is cut short, or no zip file as torch.save makes ({size} bytes)")
        file.seek(0)
        try:
            if package:
                # copy=True, because these tensors are the mapped file and a later write to it would change them.
                return {key: value.to(device, copy=True) for key, value in package.torch.load_file(name).items()}
            saved = torch.load(file, map_location=device, weights_only=True, mmap=False)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # torch raises any type of error for a damaged file
            raise ValueError(f"{rule} {_reason(error)}") from error
    if not isinstance(saved, dict):
        raise ValueError(f"{rule} holds a {type(saved).__name__} instead of a dict")
    return saved


def _checked_path(call: str, path: object) -> str:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{call}: path must be a str or an os.PathLike; got {_tree.brief(path)}")
    return str(os.fspath(path))


def _safetensors(call: str, name: str) -> Any:
    """Return the safetensors package if the file name needs it."""
    if not name.endswith(".safetensors"):
        return None
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{call}: {name!r} needs the package safetensors: pip install safetensors") from error
    return safetensors


def _check_plain(where: str, value: object, around: tuple[object, ...] = ()) -> None:
    """Reject what load could not read, at a time when the run still has its state."""
    if any(value is container for container in around):
        raise ValueError(f"save: saved must not hold itself; got {where}, which does")
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():  # type: ignore[attr-defined]
            _check_plain(f"a key of {where}", key, (*around, value))
            _check_plain(f"{where}[{key!r}]", item, (*around, value))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):  # type: ignore[arg-type]
            _check_plain(f"{where}[{index}]", item, (*around, value))
    elif isinstance(value, Tensor) and value.is_meta:
        raise ValueError(f"save: {where} must have values; got {_tree.describe(value)}")
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"save: {where} must be a tensor, a number, a string, or a dict, list or tuple of them; "
            f"got a {type(value).__module__}.{type(value).__qualname__}"
        )


def _packed(saved: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors as safetensors needs them: dense, contiguous, each with its own storage."""
    packed: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in saved.items():
        if type(name) is not str or name == "__metadata__":
            raise TypeError(
                f"save: saved must have strings as keys, and no '__metadata__', in safetensors; got {name!r}"
            )
        if type(value) not in _TENSORS or value.layout != torch.strided:
            got = _tree.describe(value) + (f", {value.layout}" if isinstance(value, Tensor) else "")
            raise TypeError(f"save: saved[{name!r}] must be a dense tensor in safetensors; got {got}")
        if value.is_meta:
            raise ValueError(f"save: saved[{name!r}] must have values; got {_tree.describe(value)}")
        # safetensors writes raw memory, so a lazy conjugate or negative would lose its sign.
        value = value.detach().resolve_conj().resolve_neg().contiguous()
        storage = value.untyped_storage().data_ptr()
        packed[name] = value.clone() if storage in seen else value
        seen.add(storage)
    return packed


def _write_safetensors(package: Any, saved: dict[str, Tensor], part: str) -> None:
    with open(part, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        package.torch.save_file(saved, part)
    except KeyError as error:
        name = next(name for name, value in saved.items() if value.dtype == error.args[0])
        raise TypeError(f"save: saved[{name!r}] must have a dtype of safetensors; got {error.args[0]}") from error
    except package.SafetensorError as error:
        raise OSError(f"save: the checkpoint could not be written: {error}") from error
    os.chmod(part, mode)  # safetensors replaces the file by one that other users may not read


def _write_zip(saved: dict[str, Any], part: str) -> None:
    with open(part, "wb") as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:
            # On a full disk torch raises a RuntimeError about the file position.
            if isinstance(error.__context__, OSError):
                raise OSError(error.__context__.errno, f"save: {error.__context__.strerror}", part) from error
            raise


def _check_readable(part: str) -> None:
    """Reject what shows only after writing: attributes of a tensor, numbers unknown to the reader."""
    try:
        torch.load(part, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        raise TypeError(
            f"save: saved must hold what load can read back; the file {_reason(error)} (attributes of a tensor count)"
        ) from error


@contextlib.contextmanager
def _folder_beside(target: str) -> Iterator[str]:
    """Create a folder for the new file, lock it while in use and remove it afterwards."""
    while True:
        folder = f"{_stem(target)}.{secrets.token_hex(4)}.part"
        os.mkdir(folder)
        with _locked(folder, wait=True):
            if not os.path.exists(folder):  # another save removed it as stale before it was locked
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return


def _stem(target: str) -> str:
    """Return the prefix of the folders beside a file: its name, shortened if they would be too long."""
    name = os.fsencode(os.path.basename(target))
    if len(name) + len(".00000000.part") <= _NAME_BYTES:
        return target
    mark = hashlib.sha256(name).hexdigest()[:16]
    return os.path.join(os.path.dirname(target), f"{os.fsdecode(name[:200]).encode(errors='ignore').decode()}.{mark}")


def _remove_stale(target: str) -> None:
    """Remove the folders of killed saves of this file: those whose lock is free."""
    stem = _stem(target)
    for folder in glob.glob(f"{glob.escape(stem)}.*.part"):
        if re.fullmatch(r"\.[0-9a-f]{8}\.part", folder[len(stem) :]):
            with _locked(folder, wait=False) as free:
                if free:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str, *, wait: bool) -> Iterator[bool]:
    """Yield whether the lock was acquired; never without locks. The system frees it when its process dies."""
    with contextlib.ExitStack() as stack:
        got = False
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # POSIX only

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            got = True
        yield got


def _sync(name: str, flags: int) -> None:
    descriptor = os.open(name, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """Return why the file was rejected, without torch's advice to load it anyway."""
    text = str(error).strip()
    if isinstance(error, pickle.UnpicklingError):
        made = re.search(r"GLOBAL (\S+)", text)
        return f"holds a {made[1]}, which only code could make" if made else "is damaged"
    return f"cannot be read: {type(error).__name__}: {text.splitlines()[0][:160] if text else ''}"
