"""Advice for torch's errors: a fix for each text that is known."""

from __future__ import annotations

import traceback

from torch import nn

_TWO_DTYPES = (
    "{layer} met an input and parameters of two dtypes, as torch says: {text}; cast the one to the other: the batch to "
    "the parameters' dtype, batch.float() for float32 (numpy's arrays are float64), and x.float() in the forward pass "
    "for a layer that autocast does not cast (autocast(enabled=False), nn.Bilinear)"
)
#: https://github.com/pytorch/pytorch/issues/184890
_NORM_UNDER_VMAP = (
    "under vmap torch cannot differentiate LayerNorm and BatchNorm for an input and weights of two dtypes, {text}: "
    "give the layer x.float() in the forward pass, or take GroupNorm or RMSNorm, or no policy"
)
#: Fixes by a part of torch's text. `{text}` is that text, `{layer}` the layer that raised.
_FIXES = {
    **dict.fromkeys(
        (
            "have the same dtype",
            "have same dtype",
            "expected scalar type Float but found",
            "expected scalar type Double but found",
            "and bias type (",
            "and weight type (",
        ),
        _TWO_DTYPES,
    ),
    "support saved tensor hooks": "torch.func does not take torch.utils.checkpoint or other saved-tensor hooks; pass "
    "engine='autograd'",
    "must override the setup_context": "torch.func does not take an autograd.Function whose forward takes ctx "
    "(a full backward hook is one); override its setup_context, or pass engine='autograd'",
    "call Tensor.requires_grad_() (or perhaps": "engine='autograd' does not nest in torch.func's transforms, vmap and "
    "grad; pass engine='func'",
    "trampoline_autograd_apply": "an autograd.Function is one call in the program, so that its backward is not lost; "
    "give it tensors, numbers and strings as arguments, and let it read no other tensor; or pass engine='autograd'",
    "element 0 of tensors does not require grad": "the state's tensors do not require gradients; differentiate with "
    "scaled_grad_and_value, torch.func.grad, or torch.autograd.grad with respect to `w.detach().requires_grad_()`",
    "One of the differentiated Tensors does not require grad": "the loss must not freeze a parameter that it is given, "
    "requires_grad_(False): freeze it before the loss is made, or take p.detach() in the loss",
    "appears to not have been used in the graph": "torch.autograd.grad in the loss gets tensors that the loss does not "
    "use, such as a module's parameters; give it those of the loss's argument",
    "backward() called inside a functorch transform": "the loss must not call backward(), because the step "
    "differentiates it: return it, and take torch.func.grad for a gradient inside it",
    "backward through the graph a second time": "the step differentiates the loss: return it without calling "
    "backward; for a gradient inside the loss take torch.autograd.grad with create_graph=True",
    "_c10d_functional_": "a collective failed; another rank has ended, or has stopped for longer than the timeout of "
    "init_process_group",
    "incompatible with .grad()": "torch.autograd.grad does not take torch.utils.checkpoint with use_reentrant=True; "
    "pass use_reentrant=False",
}
#: Those that hold if torch.func differentiates the loss.
_FIXES_FOR_FUNC = {
    **_FIXES,
    "appears to not have been used in the graph": "under torch.func the loss has separate tensors, of which "
    "torch.autograd.grad finds no way to those around it; take torch.func.grad there, or pass engine='autograd'",
    "expected scalar type BFloat16 but found Float": _NORM_UNDER_VMAP,
    "expected scalar type Half but found Float": _NORM_UNDER_VMAP,
    "call Tensor.requires_grad_() (or perhaps": "under torch.func a loss must not call requires_grad_(), as for "
    "derivatives with respect to the input; take torch.func.grad in the loss, or pass engine='autograd' and give no "
    "argument that requires a gradient",
}


def advise(call: str, error: Exception, *, uses_func: bool = False) -> None:
    """Raise RuntimeError with the fix for an error of torch, if one is known.

    Args:
        call: the function that was called.
        error: torch's error.
        uses_func: whether torch.func differentiates the loss.
    """
    text = str(error)
    if error.__cause__ is not None and str(error.__cause__) in text:  # already advice that quotes torch
        return
    if isinstance(error, ZeroDivisionError):
        if _module_that_raised(error).startswith(("torch._decomp", "torch._refs", "torch._prims")):
            raise RuntimeError(
                f"{call}: the batch must not be empty: torch divides by its number of elements, 0, where it traces a "
                "mean; leave a batch of 0 rows out, or, on several ranks, which all take the step, pad it with rows "
                "that do not count"
            ) from error
        return
    fixes = _FIXES_FOR_FUNC if uses_func else _FIXES
    for known_text, fix in fixes.items():
        if known_text in text:
            raise RuntimeError(f"{call}: {fix.format(layer=_layer_that_raised(error), text=text)}") from error


def _module_that_raised(error: Exception) -> str:
    """Return the name of the Python module whose code raised."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def _layer_that_raised(error: Exception) -> str:
    """Return the torch module that raised, by its name inside the outermost module that was called."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    called = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "_call_impl"]
    if called and isinstance(called[0], nn.Module):
        for name, module in called[0].named_modules():
            if module is called[-1] and name:
                return f"layer {name!r}"
    return "a layer"
