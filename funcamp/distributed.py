"""One model on several processes: verdicts, gradients and states over torch.distributed, inside the step.

`max_over` makes the flag one of all ranks, `DataParallel` a training step of all; `sharded_state_dict` is what
torch.distributed.checkpoint saves of it.
"""

from funcamp._distributed.collectives import max_over
from funcamp._step.data_parallel import DataParallel
from funcamp._step.state import gather_state, load_sharded_state_dict, sharded_state_dict

__all__ = ["DataParallel", "gather_state", "load_sharded_state_dict", "max_over", "sharded_state_dict"]
