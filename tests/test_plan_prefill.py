"""Which prefill steps the plan takes into account: against every step that a policy can choose."""

import itertools
import random
from dataclasses import replace

import pytest

from dcp_jax.config import ModelConfig
from dcp_jax.configs import named_config
from dcp_jax.plan import Deployment, Layout, check
from dcp_jax.plan.prefill import group_of, largest_prefills
from dcp_jax.policy import Parallelism, PrefillBatch, PrefillPath, PrefillPolicy, choose_path

MHA, GATHERED, SPLIT, OWNED = (
    PrefillPath.MHA_ONE_SHOT,
    PrefillPath.GATHERED,
    PrefillPath.GATHERED_SPLIT_INDEXER,
    PrefillPath.OWNED,
)


def every_step(policy, group, longest, chunk) -> dict[PrefillPath, int]:
    """Path -> most new tokens, by trying all prefixes and extends."""
    found: dict[PrefillPath, int] = {}
    for new in range(1, min(chunk, longest) + 1):
        for prefix in range(longest - new + 1):
            found[choose_path(policy, PrefillBatch((prefix,), (new,)), group)] = new
    return found


def random_limits(seed: int):
    rng = random.Random(seed)
    policy = PrefillPolicy(
        dense_attn_kv_len_threshold=rng.choice([0, 1, 5, 12, 50]),
        allow_dense_beyond_topk=rng.random() < 0.3,
        split_indexer_min_kv=rng.choice([0, 1, 4, 9, 20, 100]),
        owned_prefill_ratio=rng.choice([0, 0.1, 0.3, 1.0, 3.0, float("inf")]),
    )
    group = Parallelism(rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 8]), rng.choice([1, 4, 12]))
    return policy, group, rng.randint(1, 40), rng.randint(1, 45)


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_of_each_path_the_largest_step(seed):
    for policy, group, longest, chunk in map(random_limits, range(seed, seed + 40)):
        found = largest_prefills(policy, group, longest, chunk)
        most = {path: batch.extend_tokens for path, batch in found.items()}
        assert most == every_step(policy, group, longest, chunk), (policy, group, longest, chunk)
        assert all(batch.kv_len <= longest for batch in found.values())


@pytest.mark.parametrize(
    ("path", "longest", "keys"),
    [(OWNED, 100, 100), (SPLIT, 5, 5), (MHA, 8, 8), (MHA, 100, 8)],  # longer prompts are refused
)
def test_a_forced_path_is_the_only_one(path, longest, keys):
    policy = PrefillPolicy(force=path)
    (step,) = largest_prefills(policy, Parallelism(2, 8, 8), longest, 7).items()
    assert (step[0], step[1].kv_len, step[1].extend_tokens) == (path, keys, min(7, keys))


def deployment(**changes) -> Deployment:
    layout = Layout(tp=8, dcp_size=8, weights="fp8", kv_dtype="fp8_e4m3")
    cfg = ModelConfig.from_hf(named_config("glm-5.2"))
    return Deployment(cfg, layout, max_total_tokens=262144, **changes)


@pytest.mark.parametrize(
    ("longest", "changes", "paths"),
    [
        (2048, {}, {MHA}),
        (8192, {}, {MHA, GATHERED, OWNED}),
        (200_000, {}, set(PrefillPath)),
        (200_000, {"chunked_prefill_size": 64}, set(PrefillPath)),
        (200_000, {"prefill": PrefillPolicy(owned_prefill_ratio=1e6)}, {MHA, GATHERED, SPLIT}),
        (200_000, {"prefill": PrefillPolicy(owned_prefill_ratio=0)}, {MHA, OWNED}),
        (200_000, {"prefill": PrefillPolicy(force="gathered")}, {GATHERED}),
    ],
)
def test_paths_that_limits_allow(longest, changes, paths):
    wanted = deployment(max_model_len=longest, **changes)
    steps = wanted.steps(longest)
    assert {shape.path for name, shape in steps.items() if name != "decode"} == paths
    assert set(check(wanted).peaks) == set(steps)


def test_without_dcp_nothing_is_gathered():
    one = deployment()
    one = replace(one, layout=replace(one.layout, dcp_size=1))
    assert set(one.steps(200_000)) == {"decode", "prefill, mha_one_shot", "prefill, owned"}
    with pytest.raises(ValueError, match=r"prefill.force='gathered': with dcp_size=1.*--dcp-size"):
        check(replace(one, prefill=PrefillPolicy(force=GATHERED)))


def test_gathered_memory_is_bounded_by_the_chunk():
    """Whatever the prefix; what grows with it is exchanged, not held."""
    peaks = {}
    for longest, chunk in itertools.product((65536, 200_000), (8192, 32768)):
        wanted = deployment(max_model_len=longest, prefill=PrefillPolicy(gather_chunk_tokens=chunk))
        found = check(wanted)
        peaks[longest, chunk] = [found.peaks[f"prefill, {p.value}"] for p in (GATHERED, SPLIT)]
    assert peaks[65536, 8192] == peaks[200_000, 8192]
    assert peaks[65536, 32768] == peaks[200_000, 32768]


def test_group_has_padded_heads():
    cfg = ModelConfig.from_hf(named_config("glm-5.2"))
    assert group_of(cfg, Layout(tp=8, dcp_size=4)) == Parallelism(4, 32, 2048)
    assert group_of(cfg, Layout(tp=6, dcp_size=3)).gathered_heads == 33
