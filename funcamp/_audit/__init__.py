"""The auditor: watch a training loop, and name its mistakes in mixed precision.

An `Observer` turns calls into events (`events.py`). A `Loop` is the state machine that follows them (`loop.py`). Each
mistake is a rule (`rules/`): a function of one event and of the loop before it. `audit.py` puts them together.
"""
