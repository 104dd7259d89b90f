"""Checkpoints in and out: Hugging Face safetensors directories and Orbax directories."""
