"""The README and the plots beside the checkpoint, from the log and the evaluation alone."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LENGTHS = ("<=1024", "<=2048", "<=4096", "<=8192", "<=16384", "<=32768")


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a training log; of one written twice (after a stop) the later counts."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return list({(line["stage"], line["step"]): line for line in lines}.values())


def report(
    directory: str | Path,
    log: list[dict[str, Any]],
    evaluation: dict[str, Any],
    *,
    device: str,
    sources: dict[str, int],
    licences: dict[str, str],
    seconds: float,
    parameters: int,
) -> Path:
    """Write `README.md`, `training.png`, `accuracy.png` and `recall.png`.

    Args:
        directory: of the checkpoint.
        log: lines of `log.jsonl`.
        evaluation: what `evaluate` returned.
        device: what it was trained on, in words.
        sources: bytes of each text.
        licences: of each text.
        seconds: of training.
        parameters: how many numbers.
    """
    directory = Path(directory)
    _plot(directory, log)
    tokens = log[-1]["tokens"]
    text = f"""\
# tiny-dsa

A GLM-5-architecture model (`glm_moe_dsa`: latent attention with the sparse-attention indexer,
IndexShare, mixture of experts, one MTP layer) of {parameters / 1e6:.2f} M parameters. It reads and
writes bytes, and finds a pass key in up to 32k tokens. It knows nothing else: it is there to test
and to show long-context inference.

Trained by `checkpoints/train_tiny_dsa.py` (`make train-tiny`) on {device}:
{tokens / 1e6:.0f} M tokens in {seconds / 60:.1f} minutes, compiling included.

## What it does

{_table(evaluation)}

Teacher-forced greedy answers (all digits and the full stop), filler from held-out text, fresh
digits, other numbers strewn into two prompts of three; selection as deployed (top 256), bfloat16,
unless the row says otherwise. "random" attends to 256 random keys: the task needs the indexer.

{_layers(evaluation)}

Held-out text: {evaluation.get("bits_per_byte", "not measured")} bits per byte.
{_mtp(evaluation)}
{_left_out(evaluation)}
A prompt in the form that it knows:

    ... text The pass key of erin is 60214. text ...
    What is the pass key of erin? The pass key of erin is

## Training

| stage | steps | tokens a sequence | bits per byte | answers right | ms a step |
|---|---|---|---|---|---|
{_stages(log)}

![loss](training.png)
![accuracy by length](accuracy.png)
![recall of the indexer](recall.png)

## Text

| source | MB | licence |
|---|---|---|
"""
    rows = (f"| {name} | {size / 1e6:.2f} | {licences[name]} |" for name, size in sources.items())
    text += "\n".join(rows) + "\n\nThe repository holds the weights only, not the text.\n"
    path = directory / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _table(evaluation: dict[str, Any]) -> str:
    """Rows: kind of prompt; columns: lengths."""
    cells = evaluation["cells"]
    lengths = sorted({cell["length"] for cell in cells})
    rows: dict[str, dict[int, str]] = {}
    for cell in cells:
        keys = "1 key" if cell["needles"] == 1 else f"{cell['needles']} named keys"
        depth = "any depth" if cell["depth"] is None else f"depth {cell['depth']}"
        name = f"{keys}, {depth}" + ("" if cell["mode"] == "sparse" else f", {cell['mode']}")
        rows.setdefault(name, {})[cell["length"]] = f"{cell['hits']}/{cell['trials']}"
    head = ["| |" + "|".join(f" {length:,} " for length in lengths) + "|"]
    head.append("|---" * (len(lengths) + 1) + "|")
    body = (
        f"| {name} |" + "|".join(f" {by.get(length, '')} " for length in lengths) + "|"
        for name, by in rows.items()
    )
    return "\n".join([*head, *body])


def _layers(evaluation: dict[str, Any]) -> str:
    """By layer: attention mass on the needle's byte, and how often it is in the selection."""
    mass = _weighted(evaluation["cells"], "mass")
    recall = _weighted(evaluation["cells"], "recall")
    lines = ["| layer | dense attention on the key's byte | byte in the top 256 |", "|---|---|---|"]
    for layer in sorted(mass, key=int):
        found = f"{recall[layer]:.4f}" if layer in recall else "shares the selection before it"
        lines.append(f"| {layer} | {mass[layer]:.3f} | {found} |")
    return "\n".join(lines) + "\n\n(the last layer is the MTP layer)"


def _weighted(cells: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Means over the cells as deployed, by trials."""
    deployed = [cell for cell in cells if cell["mode"] == "sparse"]
    layers = {str(layer) for cell in deployed for layer in cell[name]}
    total = max(sum(cell["trials"] for cell in deployed), 1)
    of = lambda cell, layer: {str(k): v for k, v in cell[name].items()}[layer]  # noqa: E731
    return {k: sum(of(c, k) * c["trials"] for c in deployed) / total for k in layers}


def _mtp(evaluation: dict[str, Any]) -> str:
    if "mtp" not in evaluation:
        return "MTP acceptance was not measured.\n"
    return (
        "MTP layer, 3 drafts, on its own greedy text (teacher-forced): "
        f"{evaluation['mtp']['tokens_per_step']} tokens a step.\n"
    )


def _left_out(evaluation: dict[str, Any]) -> str:
    left = evaluation["left_out"]
    return f"\nNot measured, for want of time: {', '.join(left)}.\n" if left else ""


def _stages(log: list[dict[str, Any]]) -> str:
    rows = []
    for stage in dict.fromkeys(line["stage"] for line in log):
        lines = [line for line in log if line["stage"] == stage]
        last = lines[-5:]
        hits = [h for line in last for h in _pairs(line, LENGTHS)]
        right = sum(h[0] * h[1] for h in hits) / max(sum(h[1] for h in hits), 1)
        bits = [line["bits_per_byte"] for line in last if line["bits_per_byte"] is not None]
        times = sorted(line["step_seconds"] for line in lines)
        rows.append(
            f"| {stage} | {lines[-1]['step']} | {lines[-1].get('length', '')} "
            f"| {sum(bits) / max(len(bits), 1):.3f} | {right:.3f} "
            f"| {1e3 * times[len(times) // 2]:.0f} |"
        )
    return "\n".join(rows)


def _pairs(line: dict[str, Any], names: Iterable[str]) -> list[list[float]]:
    return [line["accuracy"][name] for name in names if name in line["accuracy"]]


def _plot(directory: Path, log: list[dict[str, Any]]) -> None:
    import matplotlib  # an optional dependency, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    tokens = [line["tokens"] / 1e6 for line in log]
    changes = [tokens[i] for i in range(1, len(log)) if log[i]["stage"] != log[i - 1]["stage"]]

    def figure(name: str, label: str, curves: dict[str, list[float | None]]) -> None:
        plot, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
        for curve, values in curves.items():
            points = [(t, v) for t, v in zip(tokens, values, strict=True) if v is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=curve, linewidth=1)
        for change in changes:
            axes.axvline(change, color="0.8", linewidth=0.8, zorder=0)
        axes.set(xlabel="million tokens (a grey line: the next stage)", ylabel=label)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        plot.savefig(directory / name, dpi=110)
        pyplot.close(plot)

    def column(name: str) -> list[float | None]:
        return [line.get(name) for line in log]

    figure(
        "training.png",
        "bits per byte; nats",
        {"text (bits per byte)": column("bits_per_byte"), "answers (nats)": column("answer")},
    )
    by_length = {
        length: [line["accuracy"].get(length, [None])[0] for line in log] for length in LENGTHS
    }
    figure("accuracy.png", "answers right", by_length)
    names = sorted({name for line in log for name in line if name.startswith("recall/")})
    figure("recall.png", "key's byte in the top 256", {name: column(name) for name in names})
