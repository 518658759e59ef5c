"""What one step computes: scale, differentiate, check, clip, step, skip and update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from funcamp import _tree
from funcamp._optim.chain import Chain
from funcamp._optim.part import Update
from funcamp._scaler.skip_step import old_where
from funcamp._scaler.update import cannot_fall, cannot_grow, decided, moved
from funcamp._step.accumulate import accumulate, micro_batches, shares_of
from funcamp._step.check import flag_and_norm, squares_and_finite, unscaled_gradients
from funcamp._step.differentiate import differentiator
from funcamp._step.state import Metrics, TrainState
from funcamp._storage.params import Params, clone, expand
from funcamp._types import Tree

if TYPE_CHECKING:
    from funcamp._step.step import TrainStep


def take_step(step: TrainStep, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
    """Return the state after a step and its metrics, as `TrainStep.__call__` does; read it from top to bottom.

    Args:
        step: the step.
        state: a state with its parameters as this step stores them.
        batch: one batch, as the user passed it.
    """
    loss_fn = step.loss_fn
    options = step._options
    parallel = options.parallel
    device = state.scaler.scale.device
    batch = _tree.plain(batch)
    _refuse_average(step, state)

    # What the loss gets: full parameters, in float32. Autocast casts them at their use.
    params_of_loss = step._params_of_loss("step", state.params)
    tape = loss_fn.tape(device)

    # The scaled gradients, the loss, its buffers and the records of the tape.
    pieces = [batch] if options.accumulate == 1 else micro_batches(batch, options.accumulate)
    shares = shares_of(options.weight, pieces, parallel.size, parallel.sum_of_weights, device)
    differentiate_loss = differentiator(step, state, params_of_loss, tape, shares)
    if options.accumulate == 1:
        result = differentiate_loss(state.buffers, batch, None)
    else:
        gradients_like = state.params.outline()
        result = accumulate(differentiate_loss, gradients_like, state.buffers, tape, pieces, shares)

    # The sum over ranks; the flag and the norm by one reading of the gradients. An overflow of one rank reaches the
    # others in the sum of the gradients; with slices in `joined`; with a user's own reduction in `flag_and_norm`.
    # Nothing looks at the loss: an infinite loss whose gradients are finite is applied.
    result = parallel.summed(result, shares.own, state.buffers)
    squares, finite = squares_and_finite(state.scaler, result.gradients)
    squares, finite = parallel.joined(squares, finite)
    if shares.is_empty is not None:
        finite = finite | shares.is_empty  # 0 / 0 in the loss of a batch that does not count
    scaler, norm = flag_and_norm(state.scaler, squares, finite, parallel.reduce)

    # Clipping, the optimizer and the average.
    gradients = unscaled_gradients(state.scaler, result.gradients)
    changed, opt_state = step._transforms.transform(Update(state.params, gradients, norm), state.opt_state)

    # The only skip: for a gradient that is not finite, and for a window without weight.
    skips = scaler.found_inf != 0
    if shares.is_empty is not None:
        skips = skips | shares.is_empty
    buffers_if_skipped = result.buffers if loss_fn.keep_buffers else state.buffers
    params, opt_state, buffers = old_where(
        "step",
        skips,
        new=(changed.params, opt_state, result.buffers),
        old=(state.params, state.opt_state, buffers_if_skipped),
    )
    if loss_fn.keep_buffers:
        # `old_where` has returned these as they are, being old and new at once; one may be a tensor of the batch.
        buffers = clone(buffers)

    # Counts, which move also when the step is skipped; and the scale, which moves by the gradients' flag.
    is_skipped = skips.long()
    calls = state.step + 1
    skipped = state.skipped + is_skipped
    decision = decided(scaler, step.config)
    next_scaler = moved(scaler, *decision)
    if shares.is_empty is not None:  # neither a good step nor an overflow
        next_scaler = old_where("step", shares.is_empty, next_scaler, state.scaler)
    after = TrainState(
        step=calls,
        skipped=skipped,
        consecutive_skips=(state.consecutive_skips + 1) * is_skipped,
        params=params,
        opt_state=opt_state,
        scaler=next_scaler,
        buffers=buffers,
    )
    # Copies of what is in a state: the next step may be donated the state, and would overwrite these.
    metrics = Metrics(
        loss=result.loss,
        grad_norm=norm.float(),
        scale=state.scaler.scale.clone(),
        lr=step._transforms.learning_rate(state.opt_state),
        found_inf=scaler.found_inf,
        exhausted=cannot_fall(scaler, *decision).float(),
        saturated=cannot_grow(scaler, *decision).float(),
        applied=calls - skipped,
        skipped=skipped.clone(),
        consecutive_skips=after.consecutive_skips.clone(),
        observed=_observed(step, gradients),
        records=loss_fn.collected(result.records),
        aux=result.aux,
    )
    return after, metrics


def _refuse_average(step: TrainStep, state: TrainState) -> None:
    """Raise ValueError if the state has an average and the step has none. Of the reverse the chain reports."""
    if isinstance(state.ema, Params) and step._options.ema_decay is None and not isinstance(step.optimizer, Chain):
        raise ValueError(
            "step: state must have no average without ema_decay; got one: drop it with "
            "state._replace(opt_state=state.opt_state[0])"
        )


def _observed(step: TrainStep, gradients: Params) -> dict[str, Tree]:
    """Return the results of the observe functions on the unscaled gradients, in the parameters' own tree."""
    if not step._options.observe:
        return {}
    tree = expand(gradients)
    results = {name: function(tree) for name, function in step._options.observe.items()}
    for index, leaf in enumerate(_tree.leaves(results)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"step: observe{_tree.path_of(results, index)} must return tensors; got {_tree.describe(leaf)}"
            )
    copies: dict[str, Tree] = clone(results)
    return copies
