"""Choice of an implementation, and block sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocking import block_size, map_blocks
from pallas_kernels.dispatch import pick
from pallas_kernels.lse_merge import merge_partials


def xla(x):
    return "xla", x


def declines(x):
    raise NotImplementedError("odd size")


def test_none_takes_the_first_that_accepts_the_inputs():
    assert pick("op", None, {"xla": xla})(1) == ("xla", 1)
    assert pick("op", None, {"xla": xla, "mosaic_gpu": lambda x: ("gpu", x)})(1) == ("gpu", 1)
    assert pick("op", None, {"xla": xla, "triton": declines})(1) == ("xla", 1)
    with pytest.raises(NotImplementedError, match="no implementation takes these inputs.*odd size"):
        pick("op", None, {"mosaic_gpu": declines, "triton": declines})(1)


def test_named_implementation_never_falls_back():
    with pytest.raises(NotImplementedError, match="odd size"):
        pick("op", "triton", {"xla": xla, "triton": declines})(1)
    with pytest.raises(NotImplementedError, match="op: implementation='triton' does not exist"):
        pick("op", "triton", {"xla": xla})
    with pytest.raises(ValueError, match="'cuda' is not a known name"):
        pick("op", "cuda", {"xla": xla})


def test_ops_take_the_name():
    outs, lses = jnp.zeros((2, 1, 4)), jnp.zeros((2, 1))
    assert np.array_equal(merge_partials(outs, lses, implementation="xla")[0], jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match="merge_partials"):
        merge_partials(outs, lses, implementation="best")


@pytest.mark.parametrize(
    ("n", "item", "budget", "expected"),
    [
        (10, 1, 100, 10),
        (10, 10, 100, 10),
        (10, 11, 100, 5),
        (10, 1000, 100, 1),
        (7, 30, 100, 3),
        (0, 5, 9, 1),
    ],
)
def test_block_size_is_balanced(n, item, budget, expected):
    assert block_size(n, item, budget) == expected


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", [1, 3, 4, 6, 7, 9])
def test_map_blocks_covers_every_row_once(axis, block):
    x = jnp.arange(7 * 7 * 2.0).reshape(7, 7, 2)
    y = jnp.arange(49).reshape(7, 7)
    got = jax.jit(
        lambda x, y: map_blocks(
            lambda a, b: (a * 2, (a.sum(-1) + b,)), (x, y), axis=axis, block=block
        )
    )(x, y)
    assert np.array_equal(got[0], x * 2)
    assert np.array_equal(got[1][0], x.sum(-1) + y)


def test_one_block_makes_no_loop():
    lowered = jax.jit(lambda x: map_blocks(lambda a: a + 1, (x,), axis=0, block=8)).lower(
        jnp.zeros(8)
    )
    assert "while" not in lowered.as_text()
