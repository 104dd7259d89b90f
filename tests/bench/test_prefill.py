"""The whole bench at small sizes: every path timed, compared, counted and written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax import bench
from dcp_jax.bench.random_weights import random_cache
from dcp_jax.cache.pool import CacheSpec
from dcp_jax.cli import main
from dcp_jax.config import ModelConfig
from dcp_jax.mesh import make_mesh
from dcp_jax.policy import PrefillPath
from dcp_jax.testing.harness import tiny_config
from pallas_kernels.kv_layout import dequantize

DENSE, GATHERED, SPLIT, OWNED = PrefillPath
SMALL = {"page_size": 4, "repeats": 2, "random_weights": True, "layers": 2}


def config(**changes):
    return tiny_config(index_topk=32, **changes)


KINDS = ("full", "shared")
LONG = bench.Case(100, 16)


@pytest.fixture(scope="module")
def records():
    """Two ranks, float32: attention of a short row and of two long ones; layers and a step."""
    found = []
    for cases, parts, paths in (
        ((bench.Case(0, 16), bench.Case(100, 16, 2)), ("attention",), tuple(PrefillPath)),
        ((LONG,), ("layer", "step"), (DENSE, GATHERED, OWNED)),
    ):
        options = bench.PrefillOptions(
            model=config(), cases=cases, parts=parts, paths=paths, tp=2, dcp_size=2, **SMALL
        )
        found += bench.prefill(options)
    return found


def test_every_path_is_timed_or_says_why_not(records):
    kinds = [("attention", "full"), ("attention", "shared"), ("layer", "full")]
    kinds += [("layer", "shared"), ("step", "all")]
    assert list(dict.fromkeys((r.part, r.layer) for r in records)) == kinds
    assert len(records) == 2 * 2 * 4 + 3 * 3
    for record in records:
        dense_is_wrong = record.path is DENSE and record.case.keys > 32
        assert (record.times is None) == dense_is_wrong
        assert (record.skipped is not None) == dense_is_wrong
        if record.skipped:
            assert "116 keys are more than index_topk=32" in record.skipped
            continue
        assert 0 < record.times.fastest <= record.times.median <= record.times.slowest
        assert record.temp_bytes > 0
        assert record.chosen == (record.path is (DENSE if record.case.keys <= 32 else GATHERED))
    for case, part, layer in {(r.case, r.part, r.layer) for r in records}:
        mine = [r for r in records if (r.case, r.part, r.layer) == (case, part, layer)]
        assert min(r.ratio for r in mine if r.times) == 1
        assert sum(r.chosen for r in mine) == 1


def test_outputs_and_selected_sets_agree(records):
    compared = [r for r in records if r.agreement]
    assert all(r.agreement.agrees for r in compared)
    assert max(r.agreement.worst for r in compared) < 1e-4
    first = {r.agreement.reference for r in compared if r.case.keys > 32}
    assert first == {GATHERED}
    sampled = [r for r in compared if r.part == "attention" and r.layer == "full"]
    for record in sampled:
        rows = 0 if record.path is GATHERED and record.case.prefix == 0 else record.case.batch
        assert record.agreement.sampled == 16 * rows
        assert record.agreement.unequal_sets == 0


def test_what_is_exchanged_and_computed_is_recorded(records):
    timed = {(r.path, r.part, r.layer): r for r in records if r.case.prefix and r.times}
    owned, gathered = timed[OWNED, "attention", "full"], timed[GATHERED, "attention", "full"]
    assert (owned.shape.rows, owned.shape.tokens) == (4, 16)  # two rows in a bucket of four
    # Of each token: q of 4 heads x 40 channels, 32 pairs of 6 bytes, 4 heads x (32 + 1) merged.
    assert owned.received_bytes == {
        "q": 64 * 4 * 40 * 4,
        "candidates": 64 * 32 * 6,
        "merge": 64 * 4 * 33 * 4,
        "tp_sum": 64 * 32 * 4,
    }
    assert gathered.received_bytes.keys() == {"latent", "index_k", "tp_sum"}
    assert gathered.received_bytes["latent"] == 4 * gathered.shape.pages * 4 * (32 + 8) * 4
    shared = timed[OWNED, "attention", "shared"]
    assert shared.received_bytes.keys() == {"q", "merge", "tp_sum"}
    assert gathered.flops["indexer"] == 2 * owned.flops["indexer"] > 0
    assert shared.flops["indexer"] == 0


def test_a_layer_and_a_step_are_recorded_with_an_estimate_for_the_model(records):
    timed = {(r.path, r.part, r.layer): r for r in records if r.case == LONG and r.times}
    step, layers = timed[OWNED, "step", "all"], [timed[OWNED, "layer", k] for k in KINDS]
    assert (step.feed_forward, step.flops) == ("dense", {})
    assert [r.stands_for for r in layers] == [2, 1]
    total = sum(r.stands_for * r.times.median for r in layers)
    assert {r.ttft_estimate for r in (step, *layers)} == {total}
    assert layers[0].flops["linear"] > 6 * 16 * 32 * 32 / 2


def test_records_survive_a_file(records, tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    bench.write_records(path, records[:3])
    bench.write_records(path, records[3:])
    assert bench.read_records(path) == records
    line = json.loads(path.read_text().splitlines()[0])
    assert line["path"] == "mha_one_shot"
    assert line["setup"]["dcp_size"] == 2
    assert line["setup"]["jax"] == jax.__version__
    assert line["case"] == {"prefix": 0, "extend": 16, "batch": 1}


def test_measured_records_can_be_fitted(records):
    (found,) = bench.fit(records)
    assert found.part == "attention"
    assert len(found.outcomes) == 2
    assert found.no_claim == (LONG,)  # whose attention was not timed
    assert {case for case, _ in found.missing} == {LONG}


@pytest.mark.parametrize(
    ("dcp_size", "options"),
    [
        (1, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
        (2, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
        (3, {"index_cache": "replicated", "dcp_comm": "ag_rs", "gather_chunk_tokens": (24, 512)}),
    ],
    ids=["one-rank", "low-precision", "replicated-index"],
)
def test_other_setups_agree_too(dcp_size: int, options: dict):
    wanted = bench.PrefillOptions(
        model=config(indexer_types=["full"] * 3),
        cases=(bench.Case(61, 7),),
        parts=("attention",),
        tp=dcp_size,
        dcp_size=dcp_size,
        **SMALL,
        **options,
    )
    found = list(bench.prefill(wanted))
    timed = [r for r in found if r.times]
    assert all(r.agreement is None or r.agreement.agrees for r in timed)
    chunks = [r.gather_chunk_tokens for r in timed if r.path is GATHERED]
    assert chunks == ([] if dcp_size == 1 else list(wanted.gather_chunk_tokens))
    if dcp_size == 1:
        assert {r.path for r in timed} == {OWNED}
        assert "nothing is gathered" in " ".join(r.skipped for r in found if r.skipped)
    if dcp_size == 2:
        assert {r.setup.kv_cache_dtype for r in found} == {"fp8_e4m3"}


def test_a_path_without_room_is_skipped_before_it_runs(monkeypatch):
    """A run that fails would take the caches with it."""
    monkeypatch.setattr("dcp_jax.bench.run.free_bytes", lambda mesh: 0)
    cases, parts = (bench.Case(61, 7),), ("attention",)
    options = bench.PrefillOptions(
        model=config(), cases=cases, parts=parts, paths=(OWNED,), **SMALL
    )
    full, shared = bench.prefill(options)
    assert "GiB of temporary memory and 0.0 are free" in full.skipped
    assert "the full layer whose selection it reuses was not timed" in shared.skipped
    with pytest.raises(ValueError, match="no record of the bench part was timed"):
        bench.fit([full, shared])


def test_a_checkpoint_is_timed_with_its_own_weights(golden):
    """Its own layers, counted in the whole model."""
    options = bench.PrefillOptions(
        model=golden("p3").path,
        cases=(bench.Case(20, 8),),
        paths=(GATHERED, OWNED),
        parts=("layer",),
        dtype="float32",
        tp=2,
        dcp_size=2,
        page_size=4,
        repeats=1,
    )
    found = list(bench.prefill(options))
    assert all(r.agreement is None or r.agreement.agrees for r in found)
    cfg = ModelConfig.from_hf(golden("p3").path)
    layers = {r.layer: r for r in found}
    assert {kind: r.stands_for for kind, r in layers.items()} == {
        kind: cfg.indexer_types.count(kind) for kind in KINDS
    }
    assert {r.feed_forward for r in layers.values()} <= {"dense", "sparse"}
    assert found[0].setup.weights == "checkpoint"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_the_prefix_is_random_everywhere(kv_dtype: str):
    """Finite, of unit size, another one on each rank; a replicated index the same on both."""
    cfg = ModelConfig.from_hf(config())
    sizes = {"pages": 8, "page_size": 4, "dcp_size": 2, "kv_dtype": kv_dtype}
    spec = CacheSpec.of(cfg, index_replicated=True, **sizes)
    cache = random_cache(spec, make_mesh(2, 2), seed=3)
    latent = cache.latent
    if spec.fp8:
        latent = dequantize(latent, cache.scale, jnp.float32)
    latent = np.asarray(latent, np.float32)
    assert latent.shape == (2 * spec.layers * spec.rows, cfg.kv_lora_rank)
    assert latent.std() == pytest.approx(1, abs=0.05)
    assert len(np.unique(latent.round(4), axis=0)) == len(latent)
    shards = [np.asarray(shard.data) for shard in cache.index_k.addressable_shards]
    np.testing.assert_array_equal(*shards)


@pytest.fixture
def run(capsys):
    """Runs the command line: (exit code, stdout, stderr)."""

    def call(*args):
        try:
            main(["bench", "prefill", *map(str, args)])
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


def test_command_times_writes_and_fits(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config(indexer_types=["full"] * 3)))
    flags = ["--tp", 2, "--dcp", 2, "--block-size", 4, "--random-weights", "--layers", 2]
    flags += ["--prefix", 0, 100, "--extend", 16, "--repeats", 2, "--part", "attention"]
    output = tmp_path / "r.jsonl"
    code, out, err = run(tmp_path, *flags, "--output", output, "--fit")
    assert code == 0, err
    for text in ("attention, full layer (3 in the model)", "gathered_split_indexer", "skipped for"):
        assert text in out
    assert "default policy against the best path" in out
    assert len(bench.read_records(output)) == 2 * 4
    code, again, _ = run("--fit", output)
    assert code == 0
    assert out.endswith(again)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--config glm-5.2 --random-weights --prefix a", "--prefix a is not a number"),
        ("--config glm-5 --random-weights --extend 0", "--extend 0 is not a number"),
        ("--config glm-9 --random-weights", "'glm-9' is no directory"),
        ("--config glm-5.2", "glm-5.2 is a config without weights"),
        ("", "give one model"),
        ("here --config glm-5.2", "give one model"),
        ("--config glm-5.2 --fit none.jsonl", "--fit with files times nothing"),
        ("--fit none.jsonl", "none.jsonl cannot be read"),
        ("--config glm-5.2 --random-weights --output no/such/f", "there is no directory no/such"),
        (
            "--config glm-5.2 --random-weights --layers 2 --prefix 2000000",
            "prefix 2000000 + extend 512 is beyond the model's max_position_embeddings=1048576",
        ),
        (
            "--config glm-5.2 --random-weights --layers 2 --prefix 1000000 --batch 512",
            "512 rows of 1000000 + 2048 tokens need about",
        ),
        (
            "--config glm-5.2 --random-weights --layers 2 --prefix 1000000 --batch 4096",
            "4096 rows of 1000000 + 2048 tokens are 8208777216 cache rows a device, more than",
        ),
    ],
)
def test_refusals_are_one_sentence(run, flags: str, text: str):
    code, out, err = run(*flags.split())
    assert (code, out) == (2, "")
    assert text in err
    assert len(err.strip().splitlines()) == 1
