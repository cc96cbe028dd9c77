"""Calibration: a model and text in, quantized blocks and damage tables out. Knows no model of its own."""
