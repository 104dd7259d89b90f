"""Sizes that shard over the tensor-parallel group, zero-padded to what N ranks can share.

Padding changes nothing: a padded head meets a zero output projection, a padded intermediate channel
is silu(0) * 0, and a padded token's logit is -inf. Experts are never padded: routing is over the
real ones, and each is split over all ranks.
"""

from dataclasses import dataclass

from dcp_jax.config import ModelConfig
from dcp_jax.dcp.layout import padded


@dataclass(frozen=True)
class Sizes:
    """Global sizes in memory.

    Attributes:
        vocab: rows of embedding and output head.
        heads: attention heads.
        intermediate: of the dense layers.
        moe_intermediate: of one routed expert.
        shared_intermediate: of the shared experts together.
    """

    vocab: int
    heads: int
    intermediate: int
    moe_intermediate: int
    shared_intermediate: int

    @classmethod
    def real(cls, cfg: ModelConfig) -> "Sizes":
        """The checkpoint's own sizes."""
        return cls(
            cfg.vocab_size,
            cfg.num_attention_heads,
            cfg.intermediate_size,
            cfg.moe_intermediate_size,
            cfg.n_shared_experts * cfg.moe_intermediate_size,
        )

    @classmethod
    def padded(cls, cfg: ModelConfig, tp: int) -> "Sizes":
        """Sizes that `tp` ranks can share evenly."""
        real = cls.real(cfg)
        # A rank's part of a block-quantised weight is a whole number of 128-wide blocks.
        width = tp * 128 if cfg.quantization else tp
        return cls(
            padded(real.vocab, tp),
            padded(real.heads, tp),
            padded(real.intermediate, width),
            padded(real.moe_intermediate, width),
            padded(real.shared_intermediate, width),
        )


def padding(cfg: ModelConfig, tp: int) -> dict[str, tuple[int, int]]:
    """What is padded for `tp` ranks: name -> (real size, size in memory)."""
    real, held = Sizes.real(cfg), Sizes.padded(cfg, tp)
    both = {name: (getattr(real, name), getattr(held, name)) for name in vars(real)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}
