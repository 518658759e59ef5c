"""The rules, by subject. Each is one small function."""

from funcamp._audit.rules import gradients, resuming, scalers, steps, values, windows
from funcamp._audit.rules.rule import RULES, Rule

__all__ = ["RULES", "Rule", "gradients", "resuming", "scalers", "steps", "values", "windows"]
