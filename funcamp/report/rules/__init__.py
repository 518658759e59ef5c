"""The rules, one small function each, in a file per subject. Their order here is that of the documentation's table."""

from funcamp.report.rules import gradients, resuming, scalers, steps, values, windows
from funcamp.report.rules.rule import RULES, Found, Rule

__all__ = ["RULES", "Found", "Rule", "gradients", "resuming", "scalers", "steps", "values", "windows"]
