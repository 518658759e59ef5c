"""Training on several processes: the flag, gradients and states over torch.distributed.

`max_over` reduces the flag over all ranks. `DataParallel` makes a training step data-parallel. `sharded_state_dict`
returns what torch.distributed.checkpoint saves.
"""

from funcamp._layers import register_passes
from funcamp.distributed.checkpoint import gather_state, load_sharded_state_dict, sharded_state_dict
from funcamp.distributed.collectives import max_over
from funcamp.distributed.data_parallel import DataParallel

register_passes("distributed.passes")

__all__ = ["DataParallel", "gather_state", "load_sharded_state_dict", "max_over", "sharded_state_dict"]
