"""Decode context parallelism: ownership of tokens, the per-forward step, the collectives."""
