"""A report on the numerics of a model: one step recorded operation by operation."""
