"""Layers of the model: parameter containers (Flax nnx) with a pure forward on local shapes."""
