"""What to do where torch says no: its own text, told from a part of it, and a way out."""

from __future__ import annotations

_WAYS_OUT = {
    "support saved tensor hooks": "torch.func does not take torch.utils.checkpoint or other saved-tensor hooks; pass "
    "engine='autograd'",
    "must override the setup_context": "torch.func does not take an autograd.Function whose forward takes ctx "
    "(a full backward hook is one); decorate it with funcamp.custom_function, or pass engine='autograd'",
    "call Tensor.requires_grad_() (or perhaps": "engine='autograd' does not nest in torch.func's transforms, vmap and "
    "grad; pass engine='func'",
    "trampoline_autograd_apply": "an autograd.Function goes into the program whole, so that its backward is not lost; "
    "give it tensors, numbers and strings as arguments, and let it read no other tensor; or pass engine='autograd'",
    "element 0 of tensors does not require grad": "the state's tensors do not require gradients; differentiate with "
    "scaled_grad_and_value, torch.func.grad, or torch.autograd.grad with respect to `w.detach().requires_grad_()`",
    "appears to not have been used in the graph": "under torch.func the loss has tensors of its own, of which "
    "torch.autograd.grad finds no way to those around it; take torch.func.grad there, or pass engine='autograd'",
    "incompatible with .grad()": "torch.autograd.grad does not take torch.utils.checkpoint with use_reentrant=True; "
    "pass use_reentrant=False",
}


def advise(call: str, error: Exception) -> None:
    """Raise RuntimeError with a way out, where one is known."""
    text = str(error)
    for part, way_out in _WAYS_OUT.items():
        if part in text:
            raise RuntimeError(f"{call}: {way_out}") from error
