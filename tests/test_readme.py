"""The README's serving loop, executed as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def snippet(heading: str) -> str:
    """The first Python block below a heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found.group(1)


@pytest.mark.slow
def test_the_serving_loop(monkeypatch, capsys):
    """Twenty lines: three requests, each printed once when it has ended."""
    code = snippet("A serving loop of your own")
    assert len(code.splitlines()) <= 20
    monkeypatch.chdir(ROOT)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(request.finished for request in names["texts"])
    assert all(0 < len(tokens) <= 8 for tokens in names["texts"].values())
    assert not names["llm"].engine.executor.programs.compiling
