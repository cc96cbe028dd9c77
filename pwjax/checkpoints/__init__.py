"""Models on disk: Hugging Face checkpoints, training checkpoints, and the quantized artifact."""
