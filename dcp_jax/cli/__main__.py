"""`python -m dcp_jax.cli` is `dcp-jax`."""

from dcp_jax.cli import main

main()
