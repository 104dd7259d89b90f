"""Who may import whom: the layers of the design, read from the source; a light `import dcp_jax`."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "dcp_jax")

# From the bottom: a module imports only from its own layer and those before it. The longest
# matching prefix decides. Modules that none names (config, cache, weights, ...) have no place in
# the order; what they import counts as imported by whoever imports them.
LAYERS: list[tuple[str, ...]] = [
    ("pallas_kernels",),
    ("dcp_jax.dcp",),
    ("dcp_jax.layers",),
    ("dcp_jax.model", "dcp_jax.mtp"),
    ("dcp_jax.engine.runner", "dcp_jax.engine.sampler", "dcp_jax.engine.buckets"),
    ("dcp_jax.engine",),
    ("dcp_jax.llm", "dcp_jax.async_llm", "dcp_jax.server"),
    ("dcp_jax.bench",),
    ("dcp_jax.cli",),
]

# These are plain Python: no jax, so that they are tested in milliseconds and run before a backend.
PLAIN = (
    "dcp_jax/__init__.py",
    "dcp_jax/config.py",
    "dcp_jax/hf_config.py",
    "dcp_jax/dcp/__init__.py",
    "dcp_jax/dcp/layout.py",
    "dcp_jax/policy.py",
    "dcp_jax/plan/__init__.py",
    "dcp_jax/plan/check.py",
    "dcp_jax/plan/devices.py",
    "dcp_jax/plan/exchange.py",
    "dcp_jax/plan/limits.py",
    "dcp_jax/plan/memory.py",
    "dcp_jax/plan/step.py",
    "dcp_jax/plan/tables.py",
    "dcp_jax/plan/workspace.py",
    "dcp_jax/bench/__init__.py",
    "dcp_jax/bench/cases.py",
    "dcp_jax/bench/cost.py",
    "dcp_jax/bench/records.py",
    "dcp_jax/bench/search.py",
    "dcp_jax/bench/tables.py",
    "dcp_jax/bench/thresholds.py",
    "dcp_jax/bench/metrics.py",
    "dcp_jax/bench/scheduling.py",
    "dcp_jax/bench/workloads.py",
    "dcp_jax/cache/__init__.py",
    "dcp_jax/cache/allocator.py",
    "dcp_jax/cache/pages.py",
    "dcp_jax/cache/radix.py",
    "dcp_jax/engine/__init__.py",
    "dcp_jax/engine/buckets.py",
    "dcp_jax/engine/errors.py",
    "dcp_jax/engine/ladder.py",
    "dcp_jax/engine/outputs.py",
    "dcp_jax/engine/request.py",
    "dcp_jax/engine/sampling_params.py",
    "dcp_jax/engine/scheduler.py",
    "dcp_jax/engine/scheduler_options.py",
    "dcp_jax/engine/step_plan.py",
    "dcp_jax/engine/stop.py",
    "dcp_jax/engine/text.py",
    "dcp_jax/chat/__init__.py",
    "dcp_jax/chat/deepseek.py",
    "dcp_jax/chat/glm.py",
    "dcp_jax/chat/messages.py",
    "dcp_jax/chat/parsers.py",
    "dcp_jax/chat/template.py",
    "dcp_jax/generation_config.py",
    "dcp_jax/json_files.py",
    "dcp_jax/prompts.py",
    "dcp_jax/refusals.py",
    "dcp_jax/refusals_table.py",
    "dcp_jax/tokenizer.py",
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(p): p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function, by its full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            # `from a import b`: b may be a module or a name in a
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in SOURCES else node.module for name in whole}
    return found


def layer_of(module: str) -> int | None:
    """The layer of the longest prefix that names the module; None for one that has no layer."""
    best = max(
        (
            (len(prefix), i)
            for i, layer in enumerate(LAYERS)
            for prefix in layer
            if module == prefix or module.startswith(prefix + ".")
        ),
        default=None,
    )
    return best and best[1]


def reach(start: str, through: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """(importer, imported) from a module on, followed into modules of ours that pass `through`."""
    todo, seen = [start], {start}
    while todo:
        module = todo.pop()
        for imported in imports(SOURCES[module]):
            yield module, imported
            if imported in SOURCES and imported not in seen and through(imported):
                seen.add(imported)
                todo.append(imported)


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if layer_of(m) is not None))
def test_imports_point_downwards(module: str):
    mine = layer_of(module)
    assert mine is not None
    for importer, imported in reach(module, through=lambda m: layer_of(m) is None):
        other = layer_of(imported)
        by = "" if importer == module else f" (by {importer})"
        assert other is None or other <= mine, f"{module} imports {imported}{by}, which is above it"


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if m.startswith("pallas_kernels")))
def test_kernels_know_nothing_of_the_model(module: str):
    for imported in imports(SOURCES[module]):
        assert imported.split(".")[0] not in ("dcp_jax", "flax"), f"{module} imports {imported}"


@pytest.mark.parametrize("name", [name for name in PLAIN if (ROOT / name).exists()])
def test_plain_files_import_no_jax(name: str):
    """Nor do the modules of ours that they import."""
    for importer, imported in reach(module_of(ROOT / name), through=lambda m: True):
        top = imported.split(".")[0]
        assert top not in ("jax", "jaxlib", "flax"), f"{name}: {importer} imports {imported}"


def test_import_starts_nothing():
    """`import dcp_jax` imports no jax: devices and memory can still be set afterwards."""
    code = "import sys, dcp_jax; dcp_jax.ModelConfig; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_public_names_exist():
    import dcp_jax

    assert set(dcp_jax.__all__) <= set(dir(dcp_jax))
    for name in dcp_jax.__all__:
        assert getattr(dcp_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dcp_jax.nothing  # noqa: B018
