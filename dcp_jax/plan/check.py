"""`check`: what a deployment holds, needs and exchanges; or why it cannot work, and what can."""

from dataclasses import dataclass

from dcp_jax.layers.sizes import Sizes
from dcp_jax.plan.exchange import StepShape, exchange_bytes
from dcp_jax.plan.limits import Deployment, fixes, problems, request_tokens
from dcp_jax.plan.memory import CacheBytes, Pool, sizes, weight_bytes
from dcp_jax.plan.workspace import Workspace, workspace


@dataclass(frozen=True)
class Check:
    """What a deployment that can run looks like; bytes are those of one rank.

    Attributes:
        deployment: what was checked.
        owner_rule: where a position lies.
        pool: the caches.
        max_model_len: tokens of a request.
        prefix_granularity: prefixes are shared in multiples of this many tokens.
        padding: size -> (real, in memory).
        cache_bytes: per token and layer, over all layers, and per token of the pool and rank.
        weights: by group.
        decode_workspace: of the largest decode step.
        steps: the largest of each kind: decode, and prefill by each path that can occur.
        peaks: of them.
        exchanged: kind of step -> bytes received by kind of exchange.
    """

    deployment: Deployment
    owner_rule: str
    pool: Pool
    max_model_len: int
    prefix_granularity: int
    padding: dict[str, tuple[int, int]]
    cache_bytes: CacheBytes
    weights: dict[str, int]
    decode_workspace: Workspace
    steps: dict[str, StepShape]
    peaks: dict[str, int]
    exchanged: dict[str, dict[str, int]]


def check(wanted: Deployment) -> Check:
    """The plan of a deployment.

    Raises:
        ValueError: it cannot work; every reason, and the nearest settings that do.
    """
    found = [text for _, text in problems(wanted)]
    if found:
        settings = fixes(wanted)
        advice = f" What does: {'; or '.join(settings)}." if settings else ""
        raise ValueError(f"{'; '.join(found)}.{advice}")
    cfg, layout = wanted.cfg, wanted.layout
    pool, context, real = wanted.pool, request_tokens(wanted), Sizes.real(cfg)
    held = sizes(cfg, layout)
    shapes = wanted.steps(context)
    spaces = {name: workspace(cfg, layout, shape) for name, shape in shapes.items()}
    return Check(
        deployment=wanted,
        owner_rule=f"position p lies on rank p % {layout.dcp_size}, "
        f"in its local row p // {layout.dcp_size}",
        pool=pool,
        max_model_len=context,
        prefix_granularity=layout.page_tokens,
        padding={
            name: (getattr(real, name), getattr(held, name))
            for name in vars(real)
            if getattr(real, name) != getattr(held, name)
        },
        cache_bytes=CacheBytes.of(cfg, layout),
        weights=weight_bytes(cfg, layout),
        decode_workspace=spaces["decode"],
        steps=shapes,
        peaks={name: space.peak for name, space in spaces.items()},
        exchanged={name: exchange_bytes(cfg, layout, shape) for name, shape in shapes.items()},
    )
