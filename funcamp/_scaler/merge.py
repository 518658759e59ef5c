"""One flag of several states that share a scale."""

from __future__ import annotations

from funcamp._scaler.state import ScalerState, check_state, replace


def merge(*states: ScalerState) -> ScalerState:
    """Combine the flags of states that share a scale: optimizers that skip independently, one update.

    found_inf = 1 if any state's found_inf != 0, else 0. The other fields come from the first state. The caller must
    guarantee that all states have the same scale; checking would synchronize. If their scales differ (a scaler per
    loss), use the result only for `skip_step`. Pure; safe under torch.compile and vmap; no sync.

    Args:
        *states: one state or more, all unscaled and checked from the same one.

    Returns:
        The state for `update`.

    Raises:
        TypeError: no state is given, or one is not a scaler state, or they have different types.

    Example:
        >>> state = init()
        >>> _, generator = unscale_and_check(state, torch.tensor(float("inf")))
        >>> _, critic = unscale_and_check(state, torch.tensor(1.0))
        >>> merge(generator, critic).found_inf
        tensor(1.)

    References:
        `GradScaler.update` sums the flags of its optimizers, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    if not states:
        raise TypeError("merge: states must be one scaler state or more; got none")
    first = check_state("merge", states[0])
    is_found = first.found_inf != 0
    for other in states[1:]:
        if type(other) is not type(first):
            raise TypeError(f"merge: states must be of one type; got {type(first).__name__} and {other!r}")
        is_found_in_other = check_state("merge", other).found_inf != 0
        is_found = is_found | is_found_in_other.to(is_found.device)
    return replace(first, found_inf=is_found.float())
