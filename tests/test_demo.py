"""The demonstration of retrieval: it runs, and says honestly whether the numbers were found."""

import pytest
from rich.console import Console

from dcp_jax import demo
from dcp_jax.bench.passkey import Outcome
from dcp_jax.testing.harness import tiny_config
from dcp_jax.testing.stand_in import write_stand_in


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = tiny_config(vocab_size=264, index_topk=32, num_hidden_layers=1)
    config |= {"indexer_types": ["full"], "mlp_layer_types": ["dense"]}
    return write_stand_in(tmp_path_factory.mktemp("small"), **config, num_nextn_predict_layers=0)


@pytest.mark.slow
@pytest.mark.parametrize("found", [False, True])
def test_demo(small, found, monkeypatch):
    """Random weights find nothing; a run whose keys are all found says so."""
    console = Console(record=True, width=200)
    if found:
        monkeypatch.setattr(Outcome, "hit", property(lambda outcome: True))
    assert demo.run(small, 2, console, tokens=384) is found
    printed = console.export_text()
    for text in ("3 texts of 384 tokens over 2 ranks", "rank 1", "What is the pass key?"):
        assert text in printed
    assert ("NOT found" in printed) is not found
    assert demo.OPENING in printed
