"""torch's own database of optimizers: each class with each of its inputs follows the class, over steps and a skip.

Element by element it is bit for bit. ROUNDED are the exceptions: ASGD's and Adafactor's numbers are tensors, with which
a tensor is multiplied and added in two roundings where torch's CPU takes one; with a tensor's learning rate torch does
arithmetic in float32. A refusal is in REFUSED with its reason; one that disappears fails the test.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import skip_step, stateless
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.optimizer_database import optimizer_database
from tests.support.oracle import state_of

DATABASE = optimizer_database()
#: Classes that are no function of dense gradients.
NEVER = {
    "LBFGS": "its step needs closure",
    "SparseAdam": "does not support dense gradients",
}
#: Arguments that `stateless` refuses, as it runs the step its own way.
REFUSED = {
    "foreach": "must be False or None",
    "fused": "must be False or None",
    "differentiable": "must be False or None",
}
#: Classes whose parameters cannot be complex, with torch's reason.
NO_COMPLEX = {"Adafactor": "does not support complex", "Muon": "does not support complex"}
#: On one processor an input of ASGD and one of NAdam were not equal to the bit; why was not found.
ROUNDED = {"ASGD": 5e-8, "Adafactor": 1e-8, "NAdam": 2e-7}
#: A complex parameter is stepped as real numbers; torch adds some of its terms as complex ones.
ROUNDED_COMPLEX = 2e-7
STEPS = 5


def inputs() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return every input for a CPU, and every flag that the class has."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for info in DATABASE:
        all_kwargs = [dict(database_input.kwargs) for database_input in info.optim_inputs_func(device="cpu")]
        all_kwargs += [{flag: True} for flag in info.supported_impls]
        if info.has_capturable_arg:
            all_kwargs.append({"capturable": True})
        for number, kwargs in enumerate(all_kwargs):
            text = ",".join(f"{name}={float(v) if isinstance(v, Tensor) else v}" for name, v in kwargs.items())
            found[f"{info.optim_cls.__name__}-{number}-{text}"] = (info.optim_cls, kwargs)
    return found


INPUTS = inputs()


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=["real", "complex"])
@pytest.mark.parametrize("name", INPUTS)
def test_every_input_of_torchs_database_follows_the_class(name: str, dtype: torch.dtype) -> None:
    cls, kwargs = INPUTS[name]
    reason = NEVER.get(cls.__name__) or next((REFUSED[flag] for flag in REFUSED if kwargs.get(flag)), None)
    if reason is not None:
        with pytest.raises((TypeError, ValueError), match=f"(?s)stateless: .*{re.escape(reason)}"):
            stateless(cls, **kwargs)
        return
    optimizer = stateless(cls, **kwargs)
    params = [torch.randn(4, 3, dtype=dtype), torch.randn(2, 5, dtype=dtype)]
    if dtype.is_complex and cls.__name__ in NO_COMPLEX:
        with pytest.raises(TypeError, match=NO_COMPLEX[cls.__name__]):
            optimizer.init(params)
        return
    assert_follows_class(cls, kwargs, optimizer, params)


def assert_follows_class(cls: Any, kwargs: dict[str, Any], optimizer: Any, params: list[Tensor]) -> None:
    leaves = [param.clone().requires_grad_() for param in params]
    # On a CPU torch accepts capturable=True only when it compiles; the state is on the device either way.
    eager = cls(leaves, **{key: value for key, value in kwargs.items() if key != "capturable"})
    has_tensor = any(isinstance(value, Tensor) for value in kwargs.values())
    is_complex = params[0].is_complex()
    tolerance = max(ROUNDED.get(cls.__name__, 0.0), 5e-7 if has_tensor else 0.0, ROUNDED_COMPLEX if is_complex else 0.0)
    opt_state = optimizer.init(params)
    for step in range(STEPS):
        grads = [torch.randn_like(param) for param in params]
        new = optimizer.update(params, grads, opt_state)
        found_inf = float(step == 2)
        params, opt_state = clone(skip_step(state_of(8.0, found_inf=found_inf), new=new, old=(params, opt_state)))
        if not found_inf:
            for leaf, grad in zip(leaves, grads):
                leaf.grad = grad.clone()
            eager.step()
        expected = [real(leaf.detach()) for leaf in leaves]
        if tolerance:
            assert_close([real(param) for param in params], expected, tolerance)
        else:
            assert_same([real(param) for param in params], expected)
    assert opt_state.applied == STEPS - 1


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def test_the_database_has_every_class_of_torch_optim() -> None:
    classes = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    optimizers = {cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer}
    assert {info.optim_cls for info in DATABASE} == optimizers
