"""Optimizers of other packages, by one generic way: the class's own step, run on tensors. Start at `optimizer.py`.

optimizer.py      `ForeignOptimizer`: a step as a function, which runs along every path and selects
own_loop.py       the class's own loop, with which eight steps are compared
instance.py       the instance of a run: what it keeps, filled and read
calls.py          torch's calls in a run
number.py         a number that changes
"""
