"""`python -m dcp_jax` is `dcp-jax`."""

from dcp_jax.cli import main

main()
