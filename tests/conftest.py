"""Fixtures of the whole suite, and the devices it runs on: 8 CPU devices unless told otherwise."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
CASES = (
    "p1_dsv32_basic",
    "p2_dsv32_yarn_groups_pad",
    "p3_glm_indexshare",
    "p4_glm_mtp_bf16",
)

# Before any test module can start the backend. JAX_PLATFORMS=cuda runs the suite on GPUs instead.
if not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Compiling is most of the suite's time: a second run takes the programs of the first.
jax.config.update("jax_compilation_cache_dir", str(TESTS.parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

# An example that compiles is slow the first time it runs: no deadline per example.
settings.register_profile("dcp_jax", deadline=None)
settings.load_profile("dcp_jax")


@dataclass(frozen=True)
class Golden:
    """A checkpoint directory and what the reference implementation computed from it."""

    path: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Gives a golden case by its name, or by the part before the first `_`; read once."""
    read: dict[str, Golden] = {}

    def case(name: str) -> Golden:
        (full,) = (c for c in CASES if name in (c, c.split("_")[0]))
        if full not in read:
            path = TESTS / "golden" / full
            with np.load(path / "golden.npz") as arrays:
                read[full] = Golden(
                    path,
                    json.loads((path / "config.json").read_text()),
                    json.loads((path / "meta.json").read_text()),
                    dict(arrays),
                )
        return read[full]

    return case


@dataclass(frozen=True)
class TinyDsa:
    """The model in the box, or random weights of its sizes in its place.

    Attributes:
        path: checkpoint directory.
        trained: tests hold a model to its answers, which random weights do not know, only if so.
    """

    path: Path
    trained: bool


@pytest.fixture(scope="session")
def tiny_dsa(tmp_path_factory) -> TinyDsa:
    """`checkpoints/tiny-dsa` once it exists; until then a stand-in, whose answers mean nothing."""
    trained = TESTS.parent / "checkpoints" / "tiny-dsa"
    if (trained / "config.json").is_file():
        return TinyDsa(trained, trained=True)
    from dcp_jax.testing.stand_in import write_stand_in

    return TinyDsa(write_stand_in(tmp_path_factory.mktemp("tiny-dsa")), trained=False)


@pytest.fixture(scope="session")
def golden_quant() -> dict[str, np.ndarray]:
    """Bytes of the cache and weight formats: see tests/golden/README.md."""
    with np.load(TESTS / "golden" / "q1_quant.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """For tests that count or time compilations: nothing is read from an earlier run."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)
