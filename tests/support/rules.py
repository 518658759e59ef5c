"""Every update rule, by a name for the test."""

from __future__ import annotations

from funcamp._scaler.rule import Dynamic, Rule, Static
from funcamp.rules.apex import Apex, ApexHysteresis
from funcamp.rules.deepspeed import DeepSpeed, DeepSpeedFP16, DeepSpeedOld
from funcamp.rules.fairseq import Fairseq
from funcamp.rules.flax import Flax
from funcamp.rules.fsdp import FsdpCpu
from funcamp.rules.jmp import Jmp
from funcamp.rules.keras import Keras
from funcamp.rules.megatron import Megatron
from funcamp.rules.paddle import Paddle, PaddleDygraph
from funcamp.rules.tensorflow import TensorFlow
from funcamp.rules.warm_start import WarmStart

RULES: dict[str, Rule] = {
    "dynamic": Dynamic(),
    "static": Static(),
    "warm_start": WarmStart(),
    "apex": Apex(),
    "apex_hysteresis": ApexHysteresis(),
    "deepspeed": DeepSpeed(),
    "deepspeed_consecutive": DeepSpeed(consecutive=True),
    "deepspeed_old": DeepSpeedOld(),
    "deepspeed_old_consecutive": DeepSpeedOld(consecutive=True),
    "deepspeed_fp16": DeepSpeedFP16(),
    "fairseq": Fairseq(stop_scale=0.5),
    "flax": Flax(),
    "fsdp_cpu": FsdpCpu(),
    "jmp": Jmp(),
    "keras": Keras(),
    "megatron": Megatron(),
    "paddle": Paddle(),
    "paddle_dygraph": PaddleDygraph(),
    "tensorflow": TensorFlow(),
}
