"""What tests and notebooks need to make inputs: random checkpoints."""
