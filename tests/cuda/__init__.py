"""Tests that need a GPU: torch, pytest and numpy are enough to run them."""
