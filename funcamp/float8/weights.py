"""The weights of a step in float8: of full parameters, or of a rank's slices by an all-gather of a byte per number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from funcamp._scaler.precision import reciprocal
from funcamp._storage.inputs import Inputs
from funcamp._storage.params import Params
from funcamp._trace.tracing import running
from funcamp._tree import settled
from funcamp.distributed.collectives import Ranks, largest
from funcamp.distributed.shards import pieces_of
from funcamp.float8.config import FORWARD, Float8Config
from funcamp.float8.product import Operands, Scales, make_operands, operands_of_values
from funcamp.float8.quantized import amax_of, current_scale, quantize


def weights_in_float8(
    params: Params, inputs: Inputs, values: Sequence[Tensor], config: Float8Config, delayed: Scales | None
) -> list[Operands]:
    """Return the operands of all weights that multiply in float8.

    A trace with sharded parameters gathers float8 values, and drops the gathers of full parameters that nothing else
    reads. An eager step cannot know what is read, and takes the full parameters.

    params: the parameters as they are stored.
    inputs: of the loss.
    values: theirs.
    delayed: of all layers, shape (layers, 3).
    """
    input_numbers = inputs.float8_inputs()
    slots = [inputs.distinct[number].slot for number in input_numbers]
    if delayed is None:
        weight_scales: list[Scales | None] = [None] * len(slots)
    else:
        weight_scales = [delayed.at(layer, 1) for layer in range(len(slots))]
    gathered: dict[int, Operands] = {}
    if isinstance(params.ranks, Ranks) and running() is not None and not config.by_row:
        scales_by_slot = dict(zip(slots, weight_scales))
        gathered = _gather_operands(params, params.ranks, inputs.float8_groups(), config, scales_by_slot)
    all_operands = []
    for slot, number, scales in zip(slots, input_numbers, weight_scales):
        if slot in gathered:
            all_operands.append(gathered[slot])
        else:
            all_operands.append(make_operands(values[number].detach(), config, scales))
    return all_operands


def _gather_operands(
    params: Params, ranks: Ranks, groups: list[int], config: Float8Config, delayed: dict[int, Scales | None]
) -> dict[int, Operands]:
    """Return the operands of the weights in these groups of flat storage, by their slots.

    All tensors of the groups must be in `delayed`, by their slots.
    """
    slots_of_group: dict[int, list[int]] = {}
    padding_of_group: dict[int, Tensor] = {}
    pieces: dict[int, Tensor] = {}  # this rank's piece of each weight, by its slot
    for group in groups:
        *pieces_of_weights, padding = pieces_of(params, group)
        slots_of_group[group] = _slots_in(params, group)
        padding_of_group[group] = padding
        pieces.update(zip(slots_of_group[group], pieces_of_weights))
    if not pieces:
        return {}
    weight_slots = list(pieces)
    amaxes = _largest_over_ranks(list(pieces.values()), ranks)
    scales = _scales_by_slot(weight_slots, amaxes, config, delayed)

    groups_to_send: list[Tensor] = []
    for group in groups:
        quantized_pieces = [quantize(pieces[slot], scale=scales[slot].scale).values for slot in slots_of_group[group]]
        quantized_pieces.append(padding_of_group[group].to(FORWARD))
        # As bytes, because not every backend sends float8.
        groups_to_send.append(torch.cat([piece.view(torch.uint8) for piece in quantized_pieces]))
    gathered_groups: list[Tensor | None] = [None] * len(params.groups)
    for group, gathered_bytes in zip(groups, ranks.gather(groups_to_send)):
        length = sum(params.layout.padded_sizes[group])
        gathered_groups[group] = gathered_bytes.view(FORWARD)[:length]

    weights = params.layout.views(tuple(gathered_groups), weight_slots)
    operands_by_slot = {}
    for slot, amax in zip(weight_slots, amaxes):
        weight = weights[slot]
        assert weight is not None
        is_delayed = delayed[slot] is not None
        operands_by_slot[slot] = operands_of_values(weight, scales[slot].inverse, amax if is_delayed else None)
    return operands_by_slot


def _slots_in(params: Params, group: int) -> list[int]:
    """Return the numbers of the slots of a layout that are in a group."""
    return [number for number, slot in enumerate(params.layout.slots) if slot.group == group]


def _largest_over_ranks(pieces: list[Tensor], ranks: Ranks) -> Tensor:
    """Return the largest magnitudes of tensors of which each rank has pieces, which may be empty."""
    amaxes = [amax_of(piece) if piece.numel() else piece.new_zeros(()) for piece in pieces]
    return largest(torch.stack(amaxes), ranks)


def _scales_by_slot(
    slots: list[int], amaxes: Tensor, config: Float8Config, delayed: dict[int, Scales | None]
) -> dict[int, Scales]:
    """Return the delayed scales of weights, or the current ones from their amaxes, all computed at once."""
    scales_by_slot: dict[int, Scales] = {}
    for slot in slots:
        scales = delayed[slot]
        if scales is not None:
            scales_by_slot[slot] = scales
    if scales_by_slot:
        return scales_by_slot
    current = settled(current_scale(amaxes, FORWARD, config.power_of_two))
    current_scales = Scales(current, settled(reciprocal(current)))
    return {slot: current_scales.at(index) for index, slot in enumerate(slots)}
