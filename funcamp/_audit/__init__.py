"""The auditor: watch a training loop, and name its mistakes in mixed precision.

An `Observer` replaces functions of torch, and handlers (`calls/`) turn their calls into events (`events.py`). A `Loop`
is the state machine that follows the events (`loop.py`). Each mistake is a rule (`rules/`): a function of one event and
of the loop's state before it. `audit.py` puts them together. ARCHITECTURE.md says how to add a rule.
"""
