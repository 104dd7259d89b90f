"""What tests, notebooks and measurements need to make inputs: random checkpoints and a harness."""

from dcp_jax.testing.released import write_checkpoint

__all__ = ["write_checkpoint"]
