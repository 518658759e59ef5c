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
from funcamp.float8.product import Operands, Scales, of_values, operands
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
    numbers = inputs.float8_inputs()
    slots = [inputs.distinct[number].slot for number in numbers]
    scales_of_weights = [None if delayed is None else delayed.at(row, 1) for row in range(len(numbers))]
    gathered: dict[int, Operands] = {}
    if isinstance(params.ranks, Ranks) and running() is not None and not config.by_row:
        by_slot = dict(zip(slots, scales_of_weights))
        gathered = _gathered(params, params.ranks, inputs.float8_groups(), config, by_slot)
    return [
        gathered.get(slot) or operands(values[number].detach(), config, scales)
        for slot, number, scales in zip(slots, numbers, scales_of_weights)
    ]


def _gathered(
    params: Params, ranks: Ranks, chosen: list[int], config: Float8Config, delayed: dict[int, Scales | None]
) -> dict[int, Operands]:
    """Return the operands of the weights in these groups of flat storage, by the number of the weight.

    All tensors of the groups must be in `delayed`, by their numbers.
    """
    layout = params.layout
    held = {group: [number for number, slot in enumerate(layout.slots) if slot.group == group] for group in chosen}
    parts = {group: pieces_of(params, group) for group in chosen}
    local = {number: part for group in chosen for number, part in zip(held[group], parts[group])}
    if not local:
        return {}
    amaxes = torch.stack([amax_of(part) if part.numel() else part.new_zeros(()) for part in local.values()])
    amaxes = largest(amaxes, ranks)
    scales = {number: scale for number in local if (scale := delayed[number]) is not None}
    if not scales:
        current = settled(current_scale(amaxes, FORWARD, config.power_of_two))
        both = Scales(current, settled(reciprocal(current)))
        scales = {number: both.at(place) for place, number in enumerate(local)}
    sent = []
    for group in chosen:
        *mine, padding = parts[group]
        pieces = [quantize(part, scale=scales[number].scale).values for number, part in zip(held[group], mine)]
        sent.append(torch.cat([piece.view(torch.uint8) for piece in [*pieces, padding.to(FORWARD)]]))
    groups: list[Tensor | None] = [None] * len(params.groups)
    for group, whole in zip(chosen, ranks.gather(sent)):
        groups[group] = whole.view(FORWARD)[: sum(layout.padded_sizes[group])]
    values = layout.views(tuple(groups), local)
    made = {}
    for number, amax in zip(local, amaxes):
        value = values[number]
        assert value is not None
        made[number] = of_values(value, scales[number].inverse, None if delayed[number] is None else amax)
    return made
