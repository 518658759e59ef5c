"""The paths of the modules that a run calls, which name its operations."""

from __future__ import annotations

from torch import nn


class ModulePaths:
    """A path for every module of a run.

    The first root's modules have their plain paths. A run can call several roots, for example a model and its
    criterion; the paths of the others begin with their class, `<MSELoss>`.

    Args:
        root: the first root; None for the first module that is called.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.root = root
        self._paths: dict[nn.Module, str] = {} if root is None else _paths_below(root)

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module; a module of no known root becomes the next root."""
        plain_module: nn.Module = getattr(module, "_orig_mod", module)  # without the wrapper of torch.compile
        if plain_module not in self._paths:
            self._add_root(plain_module)
        return self._paths[plain_module]

    def _add_root(self, root: nn.Module) -> None:
        prefix = ""
        if self.root is None:
            self.root = root
        else:
            prefix = self._unused_prefix(type(root).__name__)
        for module, path in _paths_below(root).items():
            path_with_prefix = ".".join(filter(None, (prefix, path)))
            self._paths.setdefault(module, path_with_prefix)  # a module of two roots keeps its first path

    def _unused_prefix(self, class_name: str) -> str:
        used_paths = set(self._paths.values())
        prefix = f"<{class_name}>"
        number = 1
        while prefix in used_paths:
            number += 1
            prefix = f"<{class_name} {number}>"
        return prefix


def _paths_below(root: nn.Module) -> dict[nn.Module, str]:
    """Return the paths of a module and its submodules, without the `_orig_mod` of compiled ones."""
    return {module: _without_wrappers(path) for path, module in root.named_modules()}


def _without_wrappers(path: str) -> str:
    # The dot in front lets a path that begins with _orig_mod match too.
    return f".{path}".replace("._orig_mod", "").lstrip(".")
