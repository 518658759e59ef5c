"""Optimizers of other packages, by one generic way: the class's own step, run on tensors. Start at `optimizer.py`.

optimizer.py      `ForeignOptimizer`: the one trial
own_step.py       a step as a function: runs along every path, selected
instance.py       the instance of a run: what it keeps, filled and read
calls.py          torch's calls in a run
number.py         a number that changes
caught_errors.py  what only the source says
"""
