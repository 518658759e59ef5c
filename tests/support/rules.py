"""Every update rule, by a name for the test."""

from __future__ import annotations

from funcamp._scaler.rule import Rule, Static, Torch
from funcamp.rules.apex import Apex, ApexHysteresis
from funcamp.rules.deepspeed import DeepSpeed
from funcamp.rules.fairseq import Fairseq
from funcamp.rules.flax import Flax
from funcamp.rules.jmp import Jmp
from funcamp.rules.megatron import Megatron
from funcamp.rules.paddle import Paddle, PaddleDygraph
from funcamp.rules.tensorflow import TensorFlow

RULES: dict[str, Rule] = {
    "torch": Torch(),
    "static": Static(),
    "apex": Apex(),
    "apex_hysteresis": ApexHysteresis(),
    "deepspeed": DeepSpeed(),
    "deepspeed_consecutive": DeepSpeed(consecutive=True),
    "fairseq": Fairseq(stop_scale=0.5),
    "flax": Flax(),
    "jmp": Jmp(),
    "megatron": Megatron(),
    "paddle": Paddle(),
    "paddle_dygraph": PaddleDygraph(),
    "tensorflow": TensorFlow(),
}
