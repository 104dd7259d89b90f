"""Timing of the prefill paths on this machine, and the thresholds that follow from it.

    from dcp_jax import bench

    options = bench.PrefillOptions(model="glm-5.2", layers=2, random_weights=True)
    records = list(bench.prefill(options))
    for fitted in bench.fit(records):
        print(fitted.flags)

Names are imported on first use: reading and fitting records needs no jax.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Case": "dcp_jax.bench.cases",
    "Fit": "dcp_jax.bench.thresholds",
    "PrefillOptions": "dcp_jax.bench.options",
    "Record": "dcp_jax.bench.records",
    "fit": "dcp_jax.bench.thresholds",
    "fit_notes": "dcp_jax.bench.tables",
    "fit_tables": "dcp_jax.bench.tables",
    "grid": "dcp_jax.bench.cases",
    "prefill": "dcp_jax.bench.run",
    "read_records": "dcp_jax.bench.records",
    "result_tables": "dcp_jax.bench.tables",
    "write_records": "dcp_jax.bench.records",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
