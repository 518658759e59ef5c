"""Optimizers as pure functions: torch.optim's and others' (`stateless`), schedules, and chains of parts.

    stateless.py        the function `stateless`
    optimizer.py        an optimizer: trees in, trees out, and its state
    torch_optim/        torch.optim's classes by update rules, which are written out: a file for each family
    arithmetic.py       arithmetic with a float, or a tensor in its place
    foreign/            any other class: its own step, run on tensors
    arguments.py        which arguments are refused, and what a class's constructor gets
    hyperparameters.py  numbers, tensors and schedules
    modes.py            independence of the caller's modes

A chain is `chain.py`, with a file for each kind of part: `part.py` has the protocol; then `clip.py`, `average.py`,
`every.py`. `by_group.py` has one optimizer for each label. `schedule.py` runs a scheduler of torch, whose values become
a `table.py`.
"""
