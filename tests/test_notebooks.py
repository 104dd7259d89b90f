"""Every notebook runs from top to bottom at small sizes, and is kept without outputs."""

import ast
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What the cell tagged "parameters" becomes, by the notebook's name.
SMALL = {
    "03_prefill_thresholds": """
from dcp_jax.testing.harness import tiny_config

MODEL = tiny_config(index_topk=32, indexer_types=["full"] * 3)
RANDOM_WEIGHTS, LAYERS = True, 1
DTYPE, KV_CACHE_DTYPE, PAGE_SIZE = "float32", "float32", 4
TP = DCP_SIZE = 2
PREFIXES, EXTENDS, BATCHES = (0, 16, 64), (4, 16), (1,)
REPEATS, OUTPUT = 2, None
""",
    "04_serving": """
MODEL = "tests/golden/p3_glm_indexshare"
TP, DCP_SIZE = 2, 2
DTYPE, PAGE_SIZE = "float32", 4
CHUNK, RUNNING = 32, 4
LENGTHS = (60, 5, 40, 9)
NEW_TOKENS = 8
ARRIVAL_STEPS = 2
""",
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path):
    notebook = read(path)
    (parameters,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    small = SMALL[path.stem]
    assert assigned(parameters.source) <= assigned(small), "a parameter has no small value"
    parameters.source = small
    client = NotebookClient(notebook, timeout=240, kernel_name="python3")
    client.execute(env=kernel_environment(), cwd=str(ROOT))
    outputs = [out for c in notebook.cells if c.cell_type == "code" for out in c.outputs]
    assert not [out for out in outputs if out.output_type == "error"]
    figures = [out for out in outputs if "image/png" in out.get("data", {})]
    text = "".join(out.get("text", "") for out in outputs)
    if path.stem == "03_prefill_thresholds":
        assert len(figures) == 3
        assert "48 records, 0 whose output does not agree" in text
        assert "6 cases: the default policy takes" in text
    if path.stem == "04_serving":
        assert len(figures) == 2
        assert "96 of 114 prompt tokens were cached, and every text is the same" in text
        assert "wait" in text


def assigned(source: str) -> set[str]:
    """Names that a cell's statements give values to."""
    return {
        node.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def kernel_environment() -> dict[str, str]:
    """This checkout, on CPU devices, with the compiled programs of the other tests."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
