"""Random checkpoints and runners, shared by the whole session: compiled steps are what costs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_jax.engine.runner import Runner
from dcp_jax.testing.checkpoints import write_random_checkpoint
from dcp_jax.testing.harness import open_runner, tiny_config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a random checkpoint of `tiny_config(**changes)`, each once."""
    written: dict[str, Path] = {}

    def write(**changes: Any) -> Path:
        config = tiny_config(**changes)
        key = json.dumps(config, sort_keys=True)
        if key not in written:
            written[key] = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), config)
        return written[key]

    return write


@pytest.fixture(scope="module")
def runners() -> Callable[..., Runner]:
    """`open_runner`, each distinct call once; what runs on a runner may stand in its pool."""
    opened: dict[tuple, Runner] = {}

    def get(directory: Path, **options: Any) -> Runner:
        key = (directory, *sorted(options.items()))
        if key not in opened:
            opened[key] = open_runner(directory, **options)
        return opened[key]

    return get
