"""torch's version, its defects that funcamp works around, and the private names that funcamp uses.

`tests/upstream/test_upstream.py` shows that each defect is present in the versions named here and absent in the others.
If a test fails, the range is wrong. If the oldest supported version no longer has a defect, remove the workaround.

A later torch may lack a private name. `find` then warns once and returns a replacement, or an object that raises when
it is used: `import funcamp` never fails, and no result is wrong. tests/upstream/test_private_names.py hides each name.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

#: Major and minor: (2, 13) for 2.13.0, 2.13.0+cpu and 2.13.0a0+git1234. As strings, "2.9" > "2.13".
VERSION: tuple[int, int] = (0, 0)
if _numbers := re.match(r"(\d+)\.(\d+)", str(torch.__version__)):
    VERSION = (int(_numbers[1]), int(_numbers[2]))


# Defects that some supported versions have: True if the installed torch is one of them. The comment names the file with
# the workaround, below funcamp, and torch's issue if there is one. A defect that all of them have needs no name here.

#: Dynamo does not trace `requires_grad_` of a tensor that it created: `_autograd/differentiate.py`.
NO_LEAVES = VERSION < (2, 12)
#: Inductor loses the order of a write after a read when it fuses loops of different ranges:
#: `_upstream/bugs.py`, `_cpu/convolutions.py`.
#: https://github.com/pytorch/pytorch/issues/177631
LOST_ORDER = VERSION < (2, 12)
#: It loses there that memory was written in place since, such as dropout's mask on a CPU:
#: `_upstream/bugs.py`. Fixed in 2.14 or 2.15.
#: https://github.com/pytorch/pytorch/issues/185509
LOST_WRITES = VERSION < (2, 15)
#: Inductor reads a rounded value back unrounded, even with emulate_precision_casts: `_upstream/bugs.py`.
#: https://github.com/pytorch/pytorch/issues/185337
UNROUNDED = VERSION < (2, 13)
#: C++ that Inductor generates ignores errors of `index_put` and `scatter_reduce`: `_upstream/bugs.py`.
#: https://github.com/pytorch/pytorch/pull/190909
LOST_ERRORS = VERSION < (2, 14)
#: C++ that Inductor generates takes a list of one tensor for the tensor, and the process dies: `_upstream/bugs.py`.
LIST_OF_ONE = VERSION < (2, 14)
#: Inductor's patterns match operations with keyword arguments that they do not name, and lose those:
#: `_upstream/bugs.py`. https://github.com/pytorch/pytorch/issues/167313
LOST_KEYWORDS = VERSION < (2, 15)
#: Inductor makes zeros of a product with the integer 0, also of infinite and NaN factors: `_upstream/bugs.py`.
LOST_NAN = VERSION < (2, 14)
#: vmap has no rule for `view(dtype)`: `numerics/counting.py`.
NO_RULE_FOR_BITS = VERSION < (2, 13)
#: Inductor reads other rows of some tensors whose shape follows from values, and so gets no such programs:
#: `_jit/compile.py`. Torch 2.11 reads the right ones in the test, and has not been tried further.
WRONG_ROWS = VERSION < (2, 15)
#: With a CUDA build and no GPU, the first thread that enters a FakeTensorMode must not end: `_trace/trace.py`.
ENDED_THREAD = VERSION < (2, 12)
#: A compiled softshrink of NaN is 0: `_jit/passes/whole_operations.py`.
NAN_SHRUNK = VERSION < (2, 14)
#: A compiled multi-label margin loss counts the classes after the first -1:
#: `_jit/passes/whole_operations.py`.
#: https://github.com/pytorch/pytorch/issues/141017
PADDED_TARGETS = VERSION < (2, 14)
#: Generated code reads zeros that have no memory, such as derivatives of constants:
#: `_jit/passes/zero_tensors.py`.
#: https://github.com/pytorch/pytorch/issues/177261
ZERO_TENSORS = VERSION < (2, 14)
#: A CPU has no float8 products with a scale per row: `float8/product.py`.
NO_ROWS_ON_CPU = VERSION < (2, 13)

#: Every private name of torch that `find` looks up, and what does not work without it.
PRIVATE = {
    "torch._C._are_functorch_transforms_active": "losses inside torch.func transforms do not work",
    "torch._C._cuda_endAllocateToPool": "after a capture that failed no other step can be captured in this process",
    "torch._C._cuda_releasePool": "the memory of a capture that failed is not given back",
    "torch._C._current_graph_task_id": "jit refuses torch.utils.checkpoint around dropout",
    "torch._C.DispatchKey": "jit computes nn.Bilinear and affine_grid under autocast in float32",
    "torch._C._dispatch_keyset_full_after": "jit computes nn.Bilinear and affine_grid under autocast in float32",
    "torch._C._dynamo.guards.TensorGuards": "a call of a jitted step takes some microseconds more",
    "torch._C._functorch.get_unwrapped": "stateless does not work under torch.func transforms",
    "torch._C._functorch.is_functorch_wrapped_tensor": "ties of parameters are looked up more slowly",
    "torch._C._functorch.is_gradtrackingtensor": "stateless does not work under torch.func transforms",
    "torch._C._swap_tensor_impl": "init(consume=True) does not work",
    "torch._amp_foreach_non_finite_check_and_unscale_": "GradScaler does not work",
    "torch._amp_update_scale_": "GradScaler.update takes several kernels",
    "torch._decomp.get_decompositions": "jit does not take trilinear interpolation if the environment has CI=true",
    "torch._disable_dynamo": "import funcamp takes longer",
    "torch._foreach_copy_": "captured steps, and GradScaler with 16-bit gradients, do not work",
    "torch._foreach_mul_": "GradScaler does not work",
    "torch._foreach_norm": "GradScaler does not work on a GPU",
    "torch._inductor.codecache.CppPythonBindingsCodeCache": "a first call takes longer",
    "torch._inductor.codecache.CppWrapperCodeCache": "a first call takes longer",
    "torch._inductor.codecache.PyCodeCache": "a compiled step cannot be saved",
    "torch._inductor.cpu_vec_isa.pick_vec_isa": "a first call takes longer",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "jit does not work with the inductor backend",
    "torch._inductor.decomposition.select_decomp_table": "jit does not work with the inductor backend",
    "torch._inductor.inductor_prims.force_stride_order": "gradients of depthwise convolutions take longer on a CPU",
    # Before the next two, which cannot be imported first: torch._inductor has a circle of imports.
    "torch._inductor.lowering.register_lowering": "products take longer on a CPU",
    "torch._inductor.codegen.cpp_template.CppTemplate": "products take longer on a CPU",
    "torch._inductor.codegen.cpp_gemm_template.gen_2d_view_of_epilogue_buf": "products take longer on a CPU",
    "torch._inductor.utils.parallel_num_threads": "products take longer on a CPU",
    "torch._inductor.virtualized.V": "products take longer on a CPU",
    "torch._inductor.ir": "products take longer on a CPU",
    "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.generate_end": "small steps on a CPU take longer",
    "torch._inductor.cudagraph_trees.clear_cublas_manager": "captured steps may share memory that cuBLAS works in",
    "torch._inductor.pattern_matcher.stable_topological_sort": "tracked samples are counted one by one",
    "torch._prims_common.suggest_memory_format": "batch norms of channels-last images take longer under jit on a CPU",
    "torch._scaled_mm": "float8 products work with emulate=True only",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "jit names no line where a step reads a value",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "jit names no line where a shape follows from values",
    "torch._subclasses.fake_tensor.FakeTensor": "jit does not work",
    "torch._subclasses.fake_tensor.FakeTensorMode": "jit and optimizers of other packages do not work",
    "torch.fx._lazy_graph_module._LazyGraphModule": "a first call takes longer",
    "torch.fx._lazy_graph_module._use_lazy_graph_module": "a first call takes longer",
    "torch.distributed.distributed_c10d._resolve_process_group": "distributed does not work",
    "torch.nn.utils.stateless._reparametrize_module": "module_loss does not work",
    "torch.nn.modules.transformer._detect_is_causal_mask": "jit takes masks of nn.Transformer if is_causal is given",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "jit computes float16 convolutions in float32 on every CPU",
    "torch.optim.optimizer._global_optimizer_post_hooks": "GradScaler.step reads found_inf on the host",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "GradScaler.step reads found_inf on the host",
    "torch.utils._python_dispatch.TorchDispatchMode": "jit does not work",
    "torch.utils._python_dispatch._disable_current_modes": (
        "stateless is not made under FakeTensorMode or torch.compile"
    ),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "jit does not work",
    "torch.utils._pytree": "funcamp does not work",
}


class MissingNameError(RuntimeError):
    """Says what does not work because torch lacks a private name."""


class Missing:
    """Replaces a private name that torch no longer has; any use of it raises `MissingNameError`.

    Deriving a class from it does not: modules do that when they are imported.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, *_: object, **__: object) -> NoReturn:
        """Raise the error."""
        raise MissingNameError(message(self.path))

    __call__ = fail

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # so that Python finds no special methods
            raise AttributeError(name)
        self.fail()

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (_MissingBase,)


class _MissingBase:
    """Replaces a missing base class."""


def message(path: str) -> str:
    """Return the text of the warning, the error and `doctor` for a missing private name."""
    return (
        f"funcamp: torch {torch.__version__} has no {path}, so {PRIVATE[path]}; "
        "install a torch that funcamp is tested with, 2.11 to 2.15"
    )


#: What `find` has returned, by path, so that it warns once; `Missing` also if it returned a replacement.
_looked_up: dict[str, Any] = {}


def find(path: str, instead: Any = None) -> Any:
    """Return the object of a private name; if it is missing, warn once and return `instead` or `Missing`."""
    if path not in _looked_up:
        _looked_up[path] = look_up(path)
        if isinstance(_looked_up[path], Missing):
            warnings.warn(message(path), stacklevel=3)
    torch_object = _looked_up[path]
    if isinstance(torch_object, Missing) and instead is not None:
        return instead
    return torch_object


def usable(*objects: object) -> bool:
    """Return whether torch has everything that `find` returned here."""
    return not any(isinstance(torch_object, Missing) for torch_object in objects)


def check(torch_object: object) -> None:
    """Raise RuntimeError if torch lacks what `find` returned here."""
    if isinstance(torch_object, Missing):
        torch_object.fail()


def look_up(path: str) -> Any:
    """Return the object of a name, or a `Missing`."""
    names = path.split(".")
    # Import the longest start that is a module; the other names are attributes.
    for module_length in range(len(names), 0, -1):
        try:
            torch_object: Any = importlib.import_module(".".join(names[:module_length]))
        except ImportError:
            continue
        for name in names[module_length:]:
            torch_object = getattr(torch_object, name, None)
        return Missing(path) if torch_object is None else torch_object
    return Missing(path)


def lost() -> list[str]:
    """Return a message per name that this torch lacks; imports the parts of torch that the names are in."""
    return [message(path) for path in PRIVATE if isinstance(look_up(path), Missing)]


# Private functions that several rooms call, and what takes their place in a torch that lacks them


def _has_no_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is a wrapper of torch.func, as far as this can be said without torch's own function."""
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return True
    return False


#: Whether a transform of torch.func surrounds this call. False is safe, because torch.func then raises itself.
transforms_active: Callable[[], bool] = find("torch._C._are_functorch_transforms_active", lambda: False)
is_wrapped: Callable[[Tensor], bool] = find("torch._C._functorch.is_functorch_wrapped_tensor", _has_no_storage)
is_differentiated: Callable[[Tensor], bool] = find("torch._C._functorch.is_gradtrackingtensor")
unwrapped: Callable[[Tensor], Tensor] = find("torch._C._functorch.get_unwrapped")
_copy_together: Callable[..., None] = find("torch._foreach_copy_")
multiply_each: Callable[..., None] = find("torch._foreach_mul_")
norm_of_each: Callable[..., list[Tensor]] = find("torch._foreach_norm")
unscale_each: Callable[..., None] = find("torch._amp_foreach_non_finite_check_and_unscale_")
#: torch's kernel for the scale's rule; False if torch has none.
update_scale = find("torch._amp_update_scale_", False)
#: On a GPU torch copies no tensors of these together (2.11 to 2.15).
_COPIED_APART = {torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu}


def copy_each(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors into others, together if torch can."""
    if _COPIED_APART.isdisjoint([target.dtype for target in targets]):
        _copy_together(targets, sources, non_blocking=non_blocking)
        return
    for target, source in zip(targets, sources):
        target.copy_(source, non_blocking=non_blocking)
