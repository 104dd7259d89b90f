"""The host side of serving: sequences, the loop over steps, and the runner that jits the model."""
