"""The weights of a step in float8: of full parameters, or of a rank's slices by an all-gather of a byte per number."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._scaler.precision import reciprocal
from funcamp._storage.compute_copies import Copies, float8_groups, float8_inputs, float8_leaves, for_loss
from funcamp._trace.tracing import running
from funcamp._tree import settled
from funcamp._types import Tree
from funcamp.distributed.collectives import all_gather_each, largest
from funcamp.distributed.shards import Shards, pieces_of
from funcamp.float8.config import FORWARD, Float8Config
from funcamp.float8.product import Operands, Scales, of_values, operands
from funcamp.float8.quantized import amax_of, current_scale, quantize


def weights_in_float8(
    params: Tree, copies: Copies, stored: Tree, config: Float8Config, delayed: Scales | None
) -> list[Operands]:
    """Return the operands of all weights that multiply in float8.

    A trace with sharded parameters gathers float8 values, and drops the gathers of full parameters that nothing else
    reads. An eager step cannot know what is read, and takes the full parameters.

    params: the full parameters.
    copies: their compute copies.
    stored: the parameters as they are stored.
    delayed: of all layers, shape (layers, 3).
    """
    plan = copies.plan
    leaves, (inputs, _) = float8_leaves(plan), for_loss(params, copies)
    given = [None if delayed is None else delayed.at(number, 1) for number in range(len(leaves))]
    gathered: dict[int, Operands] = {}
    if isinstance(stored, Shards) and running() is not None and not config.by_row:
        gathered = _gathered(stored, float8_groups(plan, stored.layout), config, dict(zip(leaves, given)))
    return [
        gathered.get(leaf) or operands(inputs[place].detach(), config, scales)
        for leaf, place, scales in zip(leaves, float8_inputs(plan), given)
    ]


def _gathered(
    shards: Shards, chosen: list[int], config: Float8Config, delayed: dict[int, Scales | None]
) -> dict[int, Operands]:
    """Return the operands of the weights in these groups of flat storage, by the number of the weight.

    All tensors of the groups must be in `delayed`, by their numbers.
    """
    layout = shards.layout
    held = {group: [number for number, slot in enumerate(layout.slots) if slot.group == group] for group in chosen}
    parts = {group: pieces_of(shards, group) for group in chosen}
    local = {number: part for group in chosen for number, part in zip(held[group], parts[group])}
    if not local:
        return {}
    amaxes = torch.stack([amax_of(part) if part.numel() else part.new_zeros(()) for part in local.values()])
    amaxes = largest(amaxes, shards.ranks)
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
    groups: list[Tensor | None] = [None] * len(shards.groups)
    for group, whole in zip(chosen, all_gather_each(sent, shards.ranks)):
        groups[group] = whole.view(FORWARD)[: sum(layout.pieces[group])]
    values = layout.views(tuple(groups), local)
    made = {}
    for number, amax in zip(local, amaxes):
        value = values[number]
        assert value is not None
        made[number] = of_values(value, scales[number].inverse, None if delayed[number] is None else amax)
    return made
