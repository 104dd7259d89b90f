"""`dcp-jax selfcheck`: it passes here, and notices each of eight faults; `dcp-jax env`."""

import json
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcp_jax import environment
from dcp_jax.cli import main
from dcp_jax.dcp import collectives, layout
from dcp_jax.engine.runner import Runner
from dcp_jax.selfcheck import Area, Outcome, distance, exit_code, measure, run, unequal
from dcp_jax.selfcheck.layout import format_checks, layout_checks
from dcp_jax.selfcheck.mesh import available, exchange_checks, model_checks
from dcp_jax.selfcheck.ops import attention_checks, merge_checks, topk_checks
from pallas_kernels import kv_layout, lse_merge, sparse_mla, topk

pytestmark = pytest.mark.slow


def lse_of_base_2(patch: pytest.MonkeyPatch):
    def merge(outs, lses):
        weights = jnp.exp2(lses - jnp.max(lses, axis=0))
        weights = weights / weights.sum(axis=0)
        return jnp.sum(outs * weights[..., None], axis=0), jax.nn.logsumexp(lses, axis=0)

    patch.setattr(lse_merge, "_merge_partials_xla", merge)


def owner_off_by_one(patch: pytest.MonkeyPatch):
    real = layout.owner
    patch.setattr(layout, "owner", lambda slot, W: (real(slot, W) + 1) % W)


def dropped_candidate(patch: pytest.MonkeyPatch):
    real = collectives.unpack_candidates

    def unpack(buffer, *, wide):
        keys, index = real(buffer, wide=wide)
        return topk.Candidates(keys.at[-1, ..., 0].set(0), index)

    patch.setattr(collectives, "unpack_candidates", unpack)


def ties_to_the_last(patch: pytest.MonkeyPatch):
    real = topk._local_topk_xla

    def backwards(scores, lengths, k):
        n = scores.shape[-1]
        visible = jnp.arange(n) < lengths[..., None]
        reversed_scores = jnp.where(visible, scores, -jnp.inf)[..., ::-1]
        found = real(reversed_scores, jnp.full_like(lengths, n), k)
        exists = jnp.arange(k) < jnp.minimum(lengths, k)[..., None]
        return topk.Candidates(
            jnp.where(exists, found.keys, 0), jnp.where(exists, n - 1 - found.index, 0)
        )

    patch.setattr(topk, "_local_topk_xla", backwards)


def empty_shard_with_lse_0(patch: pytest.MonkeyPatch):
    real = sparse_mla._sparse_mla_xla

    def attend(*args, **kwargs):
        out, lse = real(*args, **kwargs)
        return out, jnp.where(lse == -jnp.inf, 0.0, lse)

    patch.setattr(sparse_mla, "_sparse_mla_xla", attend)


def scale_lost(patch: pytest.MonkeyPatch):
    def dequantize(values, scale, dtype):
        return kv_layout.e4m3_from_bytes(values).astype(dtype)

    patch.setattr(sparse_mla, "dequantize", dequantize)


def one_key_more(patch: pytest.MonkeyPatch):
    real = topk._cutoff
    patch.setattr(topk, "_cutoff", lambda keys, position, k: real(keys, position, k + 1))


def stale_page_table(patch: pytest.MonkeyPatch):
    real, tables = Runner._pad, {}

    def pad(self, *args):
        batch = real(self, *args)
        key = id(self), batch.tokens.shape, batch.page_table.shape
        return batch._replace(page_table=tables.setdefault(key, batch.page_table))

    patch.setattr(Runner, "_pad", pad)


@dataclass(frozen=True)
class Fault:
    """A fault and the area that must notice it; `check` is in the name of a check that fails."""

    inject: Callable[[pytest.MonkeyPatch], None]
    area: Area
    check: str


FAULTS = [
    Fault(lse_of_base_2, merge_checks, "known values"),
    Fault(owner_off_by_one, layout_checks, "rows of a batch, W=2"),
    Fault(dropped_candidate, exchange_checks, "candidates, W=2"),
    Fault(ties_to_the_last, topk_checks, "local_topk ties"),
    Fault(empty_shard_with_lse_0, attention_checks, "shards of W=8"),
    Fault(scale_lost, attention_checks, "e4m3 pool"),
    Fault(one_key_more, topk_checks, "merge_candidates W=4"),
    Fault(stale_page_table, partial(model_checks, sizes=(1,)), "W=1, chunks"),
]


@pytest.fixture(scope="module")
def whole() -> list[dict]:
    """The outcomes of the command on these devices, and its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        with pytest.raises(SystemExit) as stop:
            main(["selfcheck", "--json"])
    return [json.loads(line) for line in printed] + [{"code": stop.value.code}]


def test_passes_here(whole):
    """Nothing fails; what is skipped are implementations that no op has yet, hence exit code 3."""
    *outcomes, code = whole
    assert [o for o in outcomes if o["status"] == "FAILED"] == []
    skipped = [o for o in outcomes if o["status"] == "SKIPPED"]
    sizes, missing = available()
    if jax.default_backend() == "cpu":
        assert (sizes, missing) == ([1, 2, 4, 8], {})
        elsewhere = ("mosaic_gpu", "triton", "cudnn")
        assert all(any(name in o["check"] for name in elsewhere) for o in skipped)
        assert all(o["reason"] for o in skipped)
    assert code == {"code": 3 if skipped else 0}
    areas = ("layout", "formats", "merge", "index", "topk", "attention", "exchange", "model")
    assert tuple(dict.fromkeys(o["area"] for o in outcomes)) == areas
    checked = {o["check"] for o in outcomes if o["status"] == "ok"}
    for size in sizes:
        assert any(o.startswith(f"W={size}, chunks") for o in checked)
    for op in ("merge_partials", "index_scores", "index_topk", "local_topk", "merge_candidates"):
        assert any(o.startswith(op) for o in checked)


@pytest.mark.parametrize("fault", [pytest.param(f, id=f.inject.__name__) for f in FAULTS])
def test_notices(fault: Fault, monkeypatch):
    fault.inject(monkeypatch)
    outcomes = list(run([fault.area]))
    failed = [o for o in outcomes if o.status == "FAILED"]
    assert any(fault.check in o.check and o.error is not None for o in failed), failed
    assert exit_code(outcomes) == 1


def test_healthy_areas_pass_again():
    """No fault outlives its test: what failed above is right without it."""
    outcomes = list(run([layout_checks, merge_checks, format_checks]))
    assert exit_code(outcomes) in (0, 3)


def test_outcomes():
    ok = measure("area", "check", 1.0, lambda: 0.5)
    bad = measure("area", "check", 1.0, lambda: float("nan"))

    def broken():
        raise RuntimeError("boom")

    def declines():
        raise NotImplementedError("not for these inputs")

    crashed, skipped = (measure("area", "check", 1.0, f) for f in (broken, declines))
    assert [o.status for o in (ok, bad, crashed, skipped)] == ["ok", "FAILED", "FAILED", "SKIPPED"]
    assert crashed.reason == "RuntimeError: boom"
    assert skipped.reason == "not for these inputs"
    assert exit_code([ok]) == 0
    assert exit_code([ok, skipped]) == 3
    assert exit_code([ok, skipped, bad]) == 1
    assert replace(ok, error=1.5).status == "FAILED"

    def area():
        yield ok
        raise RuntimeError("boom")

    assert [o.status for o in run([area, lambda: [ok]])] == ["ok", "FAILED", "ok"]


def test_measures():
    one, nan = np.array([1.0, np.inf]), np.array([np.nan, np.inf])
    assert distance(one, one) == 0
    assert distance(nan, nan) == 0
    assert distance(nan, one) == distance(one, nan) == np.inf
    assert distance(-one, one) == np.inf
    assert distance((one, np.array([0.5])), (one, np.array([0.25]))) == 0.25
    assert distance(np.array([202.0]), np.array([200.0])) == 0.01
    assert distance(one, one[:1]) == unequal(one, one[:1]) == np.inf
    assert unequal((one, nan), (one, one)) == 1


def test_too_few_devices_are_said(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(platform="gpu")])
    outcomes = list(exchange_checks())
    assert [(o.check, o.status) for o in outcomes] == [(f"W={n}", "SKIPPED") for n in (2, 4, 8)]
    assert outcomes[-1].reason == "needs 8 devices and 1 are visible"


def test_table(monkeypatch, capsys):
    for area in ("ops.merge", "ops.index", "ops.topk", "ops.attention", "layout.format"):
        monkeypatch.setattr(f"dcp_jax.selfcheck.{area}_checks", list)
    skipped = [Outcome("exchange", "W=8 [x]", 0.0, reason="too few", skipped=True)]
    failed = [Outcome("model", "W=8", 1e-3, error=0.5)]
    monkeypatch.setattr("dcp_jax.selfcheck.mesh.exchange_checks", lambda: skipped)
    monkeypatch.setattr("dcp_jax.selfcheck.mesh.model_checks", lambda model, dtype: failed)
    with pytest.raises(SystemExit) as stop:
        main(["selfcheck"])
    out = capsys.readouterr().out
    assert stop.value.code == 1
    for text in ("SKIPPED: exchange: W=8 [x]: too few", "FAILED", "10 ok, 1 SKIPPED, 1 FAILED"):
        assert text in out


def test_a_model_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["selfcheck", "nowhere"])
    assert stop.value.code == 2
    assert "nowhere holds no config.json" in capsys.readouterr().err


def test_env(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS_TEST", "yes")
    monkeypatch.setenv("SECRET_TOKEN", "no")
    main(["env", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"] == jax.__version__
    assert len(found["devices"]) == len(jax.devices())
    assert found["devices"][0]["kind"] == jax.devices()[0].device_kind
    assert found["variables"]["XLA_FLAGS_TEST"] == "yes"
    assert "SECRET_TOKEN" not in found["variables"]
    assert found["links"]
    main(["env"])
    out = capsys.readouterr().out
    assert f"jax: {jax.__version__}" in out
    assert "XLA_FLAGS_TEST: yes" in out


def test_links(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert environment.links("gpu").startswith("not known")
    monkeypatch.setattr(environment.shutil, "which", lambda name: name)
    monkeypatch.setattr(environment, "LINKS", {"gpu": (("echo", "NV18"),)})
    assert environment.links("gpu") == "NV18"
    monkeypatch.setattr(environment, "LINKS", {"gpu": (("false",),)})
    assert environment.links("gpu").startswith("not known: false")
