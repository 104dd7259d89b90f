"""Every notebook runs from top to bottom at small sizes, and is kept without outputs."""

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from dcp_jax.testing.harness import tiny_config
from dcp_jax.testing.stand_in import write_stand_in

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@dataclass(frozen=True)
class Case:
    """A notebook at small sizes.

    Attributes:
        id: the notebook's name.
        parameters: what its cell tagged "parameters" becomes; TEXT_MODEL stands for a checkpoint
            that reads text: tiny-dsa where it is, else random weights of a small model.
        figures: how many it draws.
        says: what it prints.
        asserts: a last cell, which must hold for any weights.
        trained: another, which holds for tiny-dsa; run only where that model is.
    """

    id: str
    parameters: str
    figures: int = 0
    says: tuple[str, ...] = ()
    asserts: str = ""
    trained: str = ""


CASES = [
    Case(
        "01_generate",
        """
MODEL = TEXT_MODEL
TP = DCP_SIZE = 1
DTYPE = "float32"
MAX_MODEL_LEN = 256
PROMPTS = ["ab", "The pass", "Good morrow, cousin."]
NEW_TOKENS = 24
""",
        figures=3,
        says=("the same seed gives the same text: True", "cumulative log-probability -"),
        asserts="""
assert "".join(pieces) == llm.generate(PROMPTS[0], greedy, use_tqdm=False)[0].outputs[0].text
assert len(entries) == 24 and np.isfinite(bits).all()
assert logits.shape == (1, llm.config.vocab_size)
assert sum(sizes.values()) == sum(a.size for a in jax.tree.leaves(params))
""",
        trained="""
assert "50917" in answer
assert llm.generate("The number is ", greedy, use_tqdm=False)[0].outputs[0].text
""",
    ),
    Case(
        "02_decode_context_parallel",
        """
MODEL = TEXT_MODEL
W = 4
LENGTH = 512
DEPTH = 0.4
PAGE_SIZE = 16
RELEASED = ("deepseek-v3.2", "glm-5.2")
DEVICE, TP, BATCH, CONTEXT = "H200", 8, 8, 131072
""",
        figures=6,
        says=("one rank selects what 4 ranks select: True", "steps run again:"),
        asserts="""
assert sum(owned) == len(ids) and max(owned) - min(owned) <= 1
assert (totals == np.minimum(np.arange(len(ids)) + 1, k)).all()
assert error < 1e-4 and op_error < 1e-4 and np.abs(whole).max() > 1e-2
assert np.allclose(weights.sum(axis=0), 1)
assert received["latent"] > 0 and received["index_k"] > 0
assert all(capacity[name, 8] > 4 * capacity[name, 1] for name in configs)
""",
        trained="""
assert answer.startswith(document.digits)
assert max(recall.values()) > 0
""",
    ),
    Case(
        "03_prefill_thresholds",
        """
from dcp_jax.testing.harness import tiny_config

MODEL = tiny_config(index_topk=32, indexer_types=["full"] * 3)
RANDOM_WEIGHTS, LAYERS = True, 1
DTYPE, KV_CACHE_DTYPE, PAGE_SIZE = "float32", "float32", 4
TP = DCP_SIZE = 2
PREFIXES, EXTENDS, BATCHES = (0, 16, 64), (4, 16), (1,)
REPEATS, OUTPUT = 2, None
""",
        figures=3,
        says=(
            "48 records, 0 whose output does not agree",
            "6 cases: the default policy takes",
        ),
    ),
]


@pytest.fixture(scope="module")
def text_model(tiny_dsa, tmp_path_factory) -> Path:
    """tiny-dsa where it is, else random weights with the same tokenizer, quick to compile."""
    if tiny_dsa.trained:
        return tiny_dsa.path
    config = tiny_config(vocab_size=264, index_topk=32, num_hidden_layers=3)
    config |= {"mlp_layer_types": ["dense", "sparse", "dense"], "num_nextn_predict_layers": 0}
    return write_stand_in(tmp_path_factory.mktemp("text"), **config)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_every_notebook_has_a_case():
    assert [case.id for case in CASES] == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in CASES])
def test_notebook_runs(case: Case, text_model: Path, tiny_dsa):
    notebook = read(ROOT / "notebooks" / f"{case.id}.ipynb")
    (parameters,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    small = case.parameters.replace("TEXT_MODEL", repr(str(text_model)))
    assert assigned(parameters.source) <= assigned(small), "a parameter has no small value"
    parameters.source = small
    conditions = [case.asserts, case.trained if tiny_dsa.trained else ""]
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in conditions if cell]
    client = NotebookClient(notebook, timeout=240, kernel_name="python3")
    client.execute(env=kernel_environment(), cwd=str(ROOT))
    outputs = [out for c in notebook.cells if c.cell_type == "code" for out in c.outputs]
    assert not [out for out in outputs if out.output_type == "error"]
    assert len([out for out in outputs if "image/png" in out.get("data", {})]) == case.figures
    text = "".join(out.get("text", "") for out in outputs)
    for sentence in case.says:
        assert sentence in text


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
