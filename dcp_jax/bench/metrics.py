"""From the times of a run's tokens to the numbers that are compared; keys are vLLM's.

TTFT: from submission to the first token. TPOT: time per token after the first, of one request. ITL:
gaps between arrivals; tokens of one launch arrive together. Plain Python: no jax.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 99)


@dataclass
class Timing:
    """One request.

    Attributes:
        submitted: seconds on any clock.
        arrivals: time of each generated token.
        prompt_tokens: length of the prompt.
        cached_tokens: of them, those that were in the prefix cache.
        failed: it ended by an error.
    """

    submitted: float
    prompt_tokens: int
    arrivals: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    failed: bool = False

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.submitted

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)


def summary(
    timings: list[Timing],
    *,
    duration: float,
    devices: int,
    peak_running: int,
    peak_kv_use: float,
) -> dict[str, Any]:
    """Result of a run as a flat dict.

    Args:
        timings: every request.
        duration: seconds from the first submission to the last token.
        devices: that the engine ran on.
        peak_running: most requests running at once.
        peak_kv_use: largest share of the pool's pages in use.
    """
    done = [t for t in timings if t.arrivals and not t.failed]
    prompt = sum(t.prompt_tokens for t in done)
    output = sum(len(t.arrivals) for t in done)
    longer = [t for t in done if len(t.arrivals) > 1]
    times = {
        "ttft": [t.ttft for t in done],
        "tpot": [t.tpot for t in longer],
        "itl": [gap for t in longer for gap in np.diff(t.arrivals)],
        "e2el": [t.arrivals[-1] - t.submitted for t in done],
    }
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "output_throughput_per_device": output / duration / devices,
        "max_concurrent_requests": peak_running,
        "peak_kv_cache_usage": peak_kv_use,
        "cached_input_tokens": sum(t.cached_tokens for t in done),
    }
    for name, values in times.items():
        result |= _statistics(name, np.asarray(values) * 1e3)
    tpot = result["median_tpot_ms"]
    # Tokens per second that one user sees.
    result["interactivity"] = 1000 / tpot if tpot else 0.0
    return result


def _statistics(name: str, milliseconds: np.ndarray) -> dict[str, float]:
    if not milliseconds.size:
        milliseconds = np.zeros(1)
    found = {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
    }
    for percent in _PERCENTILES:
        found[f"p{percent}_{name}_ms"] = float(np.percentile(milliseconds, percent))
    return found
