"""Timing of the prefill paths on this machine, and the thresholds that follow from it.

    from dcp_jax import bench

    options = bench.PrefillOptions(model="glm-5.2", layers=2, random_weights=True)
    records = list(bench.prefill(options))
    for fitted in bench.fit(records):
        print(fitted.flags)

Names are imported on first use: reading and fitting records needs no jax.
"""

from dcp_jax.lazy import lazy_names

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
__getattr__, __dir__ = lazy_names(globals(), _HOME)
