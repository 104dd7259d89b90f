"""Which prefill path a batch takes: pure numbers."""

import pytest

from dcp_jax.policy import PrefillPath, PrefillPolicy, choose_path

GATHERED, OWNED = PrefillPath.GATHERED, PrefillPath.OWNED

# prefix tokens, new tokens, gathered heads -> path, at the default ratio of 3
CASES = [
    (0, 1, 8, GATHERED),
    (0, 8192, 64, GATHERED),
    (23, 1, 8, GATHERED),
    (24, 1, 8, OWNED),
    (25, 1, 8, OWNED),
    (100_000, 512, 64, OWNED),
    (98_303, 512, 64, GATHERED),
    (98_304, 512, 64, OWNED),
]


@pytest.mark.parametrize(("prefix", "extend", "heads", "path"), CASES)
def test_default_thresholds(prefix, extend, heads, path):
    chosen = choose_path(
        PrefillPolicy(), prefix_tokens=prefix, extend_tokens=extend, gathered_heads=heads
    )
    assert chosen is path


@pytest.mark.parametrize("path", PrefillPath)
def test_a_forced_path_wins(path):
    policy = PrefillPolicy(force=path)
    assert choose_path(policy, prefix_tokens=0, extend_tokens=9, gathered_heads=1) is path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("owned_prefill_ratio", -0.1),
        ("owned_prefill_ratio", float("nan")),
        ("gather_chunk_tokens", 0),
        ("force", "owned"),
    ],
)
def test_refused_values_name_the_field(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        PrefillPolicy(**{field: value})
