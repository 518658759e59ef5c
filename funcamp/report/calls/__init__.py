"""The calls that are observed, in a file per subject: a class handles them, and emits their events."""
