"""Prompts for the tiny model: of several lengths, one with an end of line."""

PROMPTS = ["The quick brown", "def f(x):", "12 + 30", "lazy dog. The quick brown fox jumps over", "na", "x + 1\n"]
