"""Small parameters as few arrays, and back."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dcp_jax.layers.stacked import stack, unstack
from dcp_jax.mesh import make_mesh


def test_unstacked_parameters_are_the_same_in_value_and_place():
    mesh, rng = make_mesh(tp=4, dcp_size=2), np.random.default_rng(0)

    def array(shape, dtype, *axes):
        value = jnp.asarray(rng.normal(size=shape), dtype)
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    params = {
        "norm": array((8,), jnp.float32),
        "layers": {
            str(i): {
                "attn": {"norm": array((8,), jnp.float32), "bias": array((8,), jnp.bfloat16)},
                "router": array((8,), jnp.float32, ("model", "dcp")),
                "weight": array((64, 64), jnp.float32, None, ("model", "dcp")),
            }
            for i in range(3)
        },
        "head": array((16,), jnp.float32),
    }
    stacked = stack(params, small=64)
    assert len(stacked.small) == 3  # norms, biases, routers
    assert sorted(map(len, stacked.rows)) == [3, 3, 4]
    assert len(stacked.large) == 3 + 1  # weights, and the head that nothing is like
    whole = jax.jit(unstack)(stacked)
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    for got, want in zip(jax.tree.leaves(whole), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
    assert unstack(params) is params
