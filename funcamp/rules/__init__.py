"""The update rules of other libraries, one file each: its rule, its presets and its source.

`Rule` is the base of every rule, also of your own, and `Outcome` what it returns. `funcamp.presets` has the presets of
all files.

Each rule is bit for bit its library's if the library's scale is a float32. DeepSpeed, apex.amp and fairseq store a
Python float; here every result is rounded to float32. If the factors are powers of two, that changes nothing until the
scale leaves float32's range. tests/rules/peer_rules.py has every rule in plain Python, with its source.
"""

from funcamp._scaler.rule import Outcome, Rule

__all__ = ["Outcome", "Rule"]
