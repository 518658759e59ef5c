"""Pytrees. The only user of torch.utils._pytree: torch 2.11 to 2.15 has no public pytree module."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._types import Tree

if TYPE_CHECKING:
    from torch.utils import _pytree

    TreeSpec = _pytree.TreeSpec
else:
    _pytree = _upstream.find("torch.utils._pytree")
#: Classes of immutable nodes, and functions that return a node's children first.
_immutable: dict[type, Callable[[Any], tuple[list[object], object]]] = {}
_Node = TypeVar("_Node")


def flatten(tree: Tree) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a tree from left to right, including None, and its structure."""
    return _pytree.tree_flatten(tree)


def unflatten(flat: Iterable[object], spec: TreeSpec) -> Tree:
    """Return the tree of this structure with these leaves."""
    return _pytree.tree_unflatten(flat, spec)


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves of a tree from left to right, including None."""
    return flatten(tree)[0]


def tensors_in(tree: Tree) -> list[Tensor]:
    """Return the tensors among the leaves of a pytree."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


@functools.cache
def is_named_tuple(kind: type) -> bool:
    """Return whether the items of a class's objects are their children, as those of a NamedTuple are."""
    return _pytree.is_namedtuple_class(kind)


def path_of(tree: Tree, index: int) -> str:
    """Return the path of the leaf at a position, as Python indexes it; the empty string for a bare leaf."""
    try:
        leaves_with_paths, _ = _pytree.tree_flatten_with_path(tree)
    except ValueError:  # a class was registered without names for its parts
        return f" (leaf {index})"
    path, _ = leaves_with_paths[index]
    return _pytree.keystr(path)


def names(tree: Tree) -> list[str]:
    """Return a dotted name for every leaf, as torch.nn.Module.state_dict does: layers.0.weight."""
    leaves_with_paths, _ = _pytree.tree_flatten_with_path(tree)
    return [_dotted(path) for path, _ in leaves_with_paths]


def _dotted(path: tuple[object, ...]) -> str:
    """Return a path of torch's pytree as a dotted name."""
    return ".".join([str(_name(entry)) for entry in path])


def _name(entry: object) -> object:
    """Return the name in one entry of a path: a key, an index or an attribute."""
    attribute = next(attribute for attribute in ("key", "idx", "name") if hasattr(entry, attribute))
    return getattr(entry, attribute)


def register(
    cls: type[_Node],
    flatten_node: Callable[[_Node], tuple[list[object], object]],
    unflatten_node: Callable[[Any, Any], _Node],
    attribute: str,
) -> None:
    """Register a class of immutable objects as a pytree node.

    `attribute`: the path to one of its children, without the index.
    """

    def with_keys(node: _Node) -> tuple[list[Any], Any]:
        children, context = flatten_node(node)
        named_children = [(_pytree.GetAttrKey(f"{attribute}[{index}]"), child) for index, child in enumerate(children)]
        return named_children, context

    _immutable[cls] = flatten_node
    if not _upstream.usable(_pytree):  # an error of every later call, not of the import
        return
    _pytree.register_pytree_node(
        cls,
        flatten_node,
        unflatten_node,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


def map_nodes(cls: type, fn: Callable[..., object], *trees: Tree) -> Tree:
    """Replace every node of a class in the first tree by fn of it and of the others' parts there.

    Every other leaf is that of the second tree, or of the first if there is no second.
    """

    def replaced(node: object, *parts: object) -> object:
        # The parts may be subtrees in place of a node or leaf of the first tree.
        if isinstance(node, cls):
            return fn(node, *parts)
        return parts[0] if parts else node

    return _pytree.tree_map(replaced, *trees, is_leaf=lambda node: isinstance(node, cls))


def contents(tree: Tree) -> list[tuple[Any, list[Any] | None, tuple[object, ...]]] | None:
    """Return every dict and list of a tree of tensors with its keys and items; None if another node may be mutable."""
    containers: list[tuple[object, list[object] | None, tuple[object, ...]]] = []
    unvisited = [tree]
    while unvisited:
        node = unvisited.pop()
        if type(node) in _immutable:
            unvisited += _immutable[type(node)](node)[0]
        elif isinstance(node, dict):
            containers.append((node, list(node), tuple(node.values())))
            unvisited += node.values()
        elif isinstance(node, list):
            containers.append((node, None, tuple(node)))
            unvisited += node
        elif isinstance(node, tuple):
            unvisited += node
        elif node is not None and not isinstance(node, Tensor):
            return None
    return containers


def describe(leaf: object) -> str:
    """Return a leaf for an error message: dtype, shape, device and layout of a tensor, else value and type."""
    if isinstance(leaf, Tensor):
        layout = "" if leaf.layout == torch.strided else f" in layout {leaf.layout}"
        return f"a {leaf.dtype} tensor of shape {tuple(leaf.shape)} on {leaf.device}{layout}"
    if torch.compiler.is_compiling():  # Dynamo may represent the value by a symbol, which has no string
        return brief_kind(leaf)
    if leaf is None:
        return "None"
    if hasattr(type(leaf), "__array_interface__"):  # the values of an array say nothing
        return brief_kind(leaf)
    if isinstance(leaf, Mapping):
        return brief(leaf)
    text = repr(leaf)
    return f"{text} of type {type(leaf).__name__}" if _is_short(text) else brief_kind(leaf)


def brief(value: object) -> str:
    """Return any value for an error message, with the kinds of its tensors instead of their numbers."""
    if isinstance(value, Tensor) or torch.compiler.is_dynamo_compiling():
        return describe(value)
    kind = brief_kind(value)
    if hasattr(type(value), "_fields"):  # a NamedTuple, such as a state
        return kind
    if isinstance(value, Mapping) and value:
        return f"{kind} with {listed([repr(key) for key in value])}"
    if isinstance(value, (tuple, list, set)) and value:
        items = [describe(item) if isinstance(item, Tensor) else brief_kind(item) for item in value]
        return f"{kind} of {listed(items)}"
    text = repr(value)
    return text if _is_short(text) else kind


def brief_kind(value: object) -> str:
    """Return the class of a value for an error message: a Linear, an Adam."""
    name = type(value).__name__
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    return f"{article} {name}"


#: The longest text of a value in an error message, and the most items of a container.
_MOST_CHARACTERS = 100
_MOST_ITEMS = 5


def _is_short(text: str) -> bool:
    return len(text) <= _MOST_CHARACTERS and "\n" not in text


def listed(texts: list[str]) -> str:
    """Join texts by commas: the first few, and the number of all if there are more."""
    shown = texts[:_MOST_ITEMS]
    if len(texts) > _MOST_ITEMS:
        shown.append(f"... ({len(texts)})")
    return ", ".join(shown)


def plain(tree: Tree) -> Tree:
    """Convert mappings that are no pytree nodes into dicts (Hugging Face tokenizers return `UserDict`)."""
    flat, spec = flatten(tree)
    if not any(isinstance(leaf, Mapping) for leaf in flat):
        return tree
    return unflatten([plain(dict(leaf)) if isinstance(leaf, Mapping) else leaf for leaf in flat], spec)


def tensors(call: str, name: str, tree: Tree) -> tuple[list[Tensor | None], TreeSpec]:
    """Flatten a tree whose leaves must be tensors or None.

    Raises:
        TypeError: a leaf is something else; names the call, the argument, the leaf's path and the value.
    """
    flat, spec = flatten(tree)
    for index, leaf in enumerate(flat):
        if leaf is not None and not isinstance(leaf, Tensor):
            where = f"{call}: {name}{path_of(tree, index)}"
            raise TypeError(f"{where} must be a tensor or None; got {describe(leaf)}")
    return flat, spec


def parameters(call: str, name: str, tree: Tree, *, sparse: bool = False) -> tuple[list[Tensor | None], TreeSpec]:
    """Flatten a tree of strided floating-point or complex tensors; with `sparse` they may be sparse COO.

    Raises:
        TypeError: a leaf is not a tensor, is an integer or boolean tensor, or has another layout.
    """
    flat, spec = tensors(call, name, tree)
    layouts = (torch.strided, torch.sparse_coo) if sparse else (torch.strided,)
    for index, leaf in enumerate(flat):
        if leaf is None:
            continue
        has_gradients = leaf.is_floating_point() or leaf.is_complex()
        if not has_gradients or leaf.layout not in layouts:
            raise TypeError(
                f"{call}: {name}{path_of(tree, index)} must be a strided {'or sparse COO ' * sparse}floating-point or "
                f"complex tensor; got {describe(leaf)}"
            )
    return flat, spec


def gradients(call: str, name: str, tree: Tree, device: torch.device) -> tuple[list[Tensor | None], TreeSpec]:
    """Flatten a tree of strided or sparse floating-point or complex tensors on one type of device.

    Raises:
        TypeError: a leaf is not a tensor, is an integer or boolean tensor, or is neither strided nor sparse COO.
        ValueError: a leaf is on another type of device than the scaler state.
    """
    flat, spec = parameters(call, name, tree, sparse=True)
    for index, leaf in enumerate(flat):
        if leaf is not None:
            check_device(call, name, tree, index, leaf, device)
    return flat, spec


def check_device(call: str, name: str, tree: Tree, index: int, leaf: Tensor, device: torch.device) -> None:
    """Raise ValueError if a leaf is on another type of device than the scaler state.

    Moving the flag or the scale between devices would synchronize.
    """
    if leaf.device.type != device.type:
        raise ValueError(
            f"{call}: {name}{path_of(tree, index)} must be on the scaler state's type of device, {device.type} "
            f"(make the state with init(device=...)); got {describe(leaf)}"
        )


def same_structure(call: str, names: tuple[str, str], trees: tuple[Tree, Tree]) -> None:
    """Raise ValueError if two trees differ in structure; name the first path that differs."""
    first, second = trees
    first_leaves, first_spec = flatten(first)
    second_leaves, second_spec = flatten(second)
    if first_spec == second_spec:
        return
    for index in range(max(len(first_leaves), len(second_leaves))):
        first_path = path_of(first, index) if index < len(first_leaves) else None
        second_path = path_of(second, index) if index < len(second_leaves) else None
        if first_path != second_path:
            raise ValueError(
                f"{call}: {names[0]} and {names[1]} must have one tree structure, dict keys in one order; "
                f"they part at leaf {index}: {_where(names[0], first_path)} against {_where(names[1], second_path)}"
            )
    # The paths are equal and the kinds of nodes are not, such as a tuple and a list.
    raise ValueError(
        f"{call}: {names[0]} and {names[1]} must have one tree structure; got {first_spec} against {second_spec}"
    )


def _where(name: str, path: str | None) -> str:
    """Return a leaf of an argument for an error message; a path of None stands for a leaf that is not there."""
    return f"no leaf here in {name}" if path is None else f"{name}{path}"


def builder(tree: Tree) -> Callable[[Iterator[Tensor]], Tree]:
    """Return a function that builds a tree like this one from tensors, which it takes from an iterator.

    It is several times as fast as `unflatten`.

    Args:
        tree: a tree with the class `Tensor` in the place of each tensor.
    """
    kind: Any = type(tree)
    if tree is Tensor:
        return next
    if not tree and kind in (dict, tuple, list):
        return lambda _: kind()
    if kind is dict:
        names = list(tree)
        builders = [builder(value) for value in tree.values()]
        return lambda tensors: {name: build(tensors) for name, build in zip(names, builders)}
    if kind is tuple or kind is list or is_named_tuple(kind):
        make = getattr(kind, "_make", kind)
        builders = [builder(item) for item in tree]
        return lambda tensors: make([build(tensors) for build in builders])
    return _builder_by_spec(tree)


def _builder_by_spec(tree: Tree) -> Callable[[Iterator[Tensor]], Tree]:
    """Return the `builder` of a node of any class, or of a leaf that is no tensor."""
    parts, spec = flatten(tree)
    is_leaf = len(parts) == 1 and parts[0] is tree
    if is_leaf:  # the same in every tree
        return lambda _: tree
    builders = [builder(part) for part in parts]
    return lambda tensors: unflatten([build(tensors) for build in builders], spec)


def map_leaves(fn: Callable[[Tensor], Tensor], flat: list[Tensor | None], spec: TreeSpec) -> Tree:
    """Apply a function to the leaves and rebuild the tree; None passes through."""
    return unflatten([None if leaf is None else fn(leaf) for leaf in flat], spec)


def stacked(trees: list[Tree]) -> Tree:
    """Stack the tensors of trees of one structure; other leaves are the first tree's."""

    def stack(*column: Any) -> object:
        return torch.stack(column) if isinstance(column[0], Tensor) else column[0]

    return _pytree.tree_map(stack, *trees)


def unstacked(tree: Tree, count: int) -> list[Tree]:
    """Invert `stacked` for a number of trees: take the tensors apart along their first dimension."""
    return [_pytree.tree_map_only(Tensor, operator.itemgetter(index), tree) for index in range(count)]
