"""The same prompts at other dcp sizes, paths, index caches and cache dtypes: are the answers equal?

The reference is W = 1 in float32. A variant in float32 must answer every prompt with the same
tokens; one with e4m3 caches or bf16 activations in `SAME_IN_LOW_PRECISION` of the trials. Every
difference is listed with what made it possible: how close the K-th index score was to the next one,
and how close the logits were, both in the reference.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from dcp_jax.bench.passkey import Outcome, Prompt, longest
from dcp_jax.policy import Parallelism, PrefillPath, PrefillPolicy, ineligible
from dcp_jax.testing.margins import MarginMeter

DCP_SIZES = (2, 4, 8)
SAME_IN_LOW_PRECISION = 0.995


@dataclass(frozen=True)
class Variant:
    """Options of one run; `path` None is the policy's choice."""

    dcp_size: int
    path: PrefillPath | None = None
    index_cache: str = "sharded"
    kv_cache_dtype: str = "float32"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """For tables and bars."""
        path = self.path.value if self.path else "policy's path"
        return f"W={self.dcp_size} {path}, index {self.index_cache}, {self.precision}"

    @property
    def precision(self) -> str:
        """Of activations and caches."""
        same = self.kv_cache_dtype == self.dtype
        return self.dtype if same else f"{self.dtype} with {self.kv_cache_dtype} caches"

    @property
    def exact(self) -> bool:
        """Whether every answer must be the reference's."""
        return self.dtype == self.kv_cache_dtype == "float32"

    @property
    def policy(self) -> PrefillPolicy:
        """What makes a prefill take `path`."""
        return PrefillPolicy(force=self.path)

    def takes(self, tokens: int, index_topk: int) -> bool:
        """Whether a prompt of so many tokens may take the path."""
        group = Parallelism(self.dcp_size, gathered_heads=1, index_topk=index_topk)
        return self.path is None or ineligible(self.path, self.policy, tokens, group) is None


REFERENCE = Variant(1)


def variants_of(
    dcp_sizes: Sequence[int] = DCP_SIZES,
    *,
    paths: Sequence[PrefillPath | None] = (None, *PrefillPath),
    index_caches: Sequence[str] = ("sharded", "replicated"),
    precisions: Sequence[tuple[str, str]] = (("float32", "float32"), ("float32", "fp8_e4m3")),
) -> list[Variant]:
    """Every combination; with one rank there is one index cache and nothing to gather.

    Args:
        dcp_sizes: W.
        paths: of the prefill.
        index_caches: sharded, replicated.
        precisions: (dtype, kv_cache_dtype).
    """
    return [
        variant
        for w, path, index_cache, (dtype, kv) in product(
            dict.fromkeys(dcp_sizes), paths, index_caches, precisions
        )
        if (variant := Variant(w, path, index_cache, kv, dtype)) != REFERENCE
        and (w > 1 or (index_cache == "sharded" and not (path and path.gathers)))
    ]


@dataclass(frozen=True)
class Difference:
    """A prompt that a variant answered otherwise.

    Attributes:
        variant: which.
        length: tokens of the prompt.
        depth: of the key.
        keys: how many.
        number: of the trial in its cell.
        expected: the digits.
        reference: the answer of W = 1 in float32.
        answer: the variant's.
        token: the first token of the answer that differs.
        logit_gap: largest less second largest logit there.
        topk_margin: per full layer, K-th less next index score of the token before it.
        topk_scale: standard deviation of those scores.
    """

    variant: str
    length: int
    depth: float
    keys: int
    number: int
    expected: str
    reference: str
    answer: str
    token: int
    logit_gap: float
    topk_margin: dict[int, float]
    topk_scale: dict[int, float]


@dataclass(frozen=True)
class Agreement:
    """A variant beside the reference.

    Attributes:
        variant: which.
        trials: prompts that its path may take.
        same: of them, those with the reference's tokens.
        hits: of them, those with the right digits.
        differences: the others.
    """

    variant: Variant
    trials: int
    same: int
    hits: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether enough answers are the reference's."""
        least = 1.0 if self.variant.exact else SAME_IN_LOW_PRECISION
        return self.same >= least * self.trials

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "variant": self.variant.name,
            "holds": self.holds,
            "differences": [asdict(difference) for difference in self.differences],
        }


Answer = Callable[[Variant, Sequence[Prompt]], Sequence[Outcome]]


def compare(
    directory: Path,
    index_topk: int,
    reference: Sequence[Outcome],
    variants: Sequence[Variant],
    answer: Answer,
) -> Iterator[Agreement]:
    """Run every variant, and look into its differences.

    Args:
        directory: the checkpoint.
        index_topk: of the model.
        reference: outcomes of `REFERENCE` for all prompts.
        variants: what to run; those whose path takes none of the prompts are left out.
        answer: runs prompts at a variant.
    """
    meter: MarginMeter | None = None
    for variant in variants:
        taken = [o for o in reference if variant.takes(len(o.prompt.token_ids), index_topk)]
        if not taken:
            continue
        outcomes = answer(variant, [outcome.prompt for outcome in taken])
        differences = []
        for wanted, got in zip(taken, outcomes, strict=True):
            if got.token_ids == wanted.token_ids:
                continue
            if meter is None:
                tokens = longest([outcome.prompt for outcome in reference])
                meter = MarginMeter(directory, tokens=tokens)
            differences.append(_difference(meter, variant, wanted, got))
        yield Agreement(
            variant,
            trials=len(taken),
            same=len(taken) - len(differences),
            hits=sum(outcome.hit for outcome in outcomes),
            differences=tuple(differences),
        )


def _difference(meter: MarginMeter, variant: Variant, wanted: Outcome, got: Outcome) -> Difference:
    same = 0  # an answer may be the beginning of the other
    for a, b in zip(wanted.token_ids, got.token_ids, strict=False):
        if a != b:
            break
        same += 1
    near = meter.measure([*wanted.prompt.token_ids, *wanted.token_ids[:same]])
    trial = wanted.prompt.trial
    return Difference(
        variant=variant.name,
        length=trial.length,
        depth=trial.depth,
        keys=trial.keys,
        number=trial.number,
        expected=wanted.prompt.document.digits,
        reference=wanted.text,
        answer=got.text,
        token=same,
        logit_gap=near.logit_gap,
        topk_margin=near.topk_margin,
        topk_scale=near.topk_scale,
    )


def agreement_table(agreements: Sequence[Agreement]) -> Table:
    """A row per variant."""
    table = Table(title="answers beside those of W=1 in float32")
    for name in ("W", "prefill path", "index", "precision"):
        table.add_column(name)
    for name in ("same", "passkeys"):
        table.add_column(name, justify="right")
    table.add_column("holds")
    for one in agreements:
        v = one.variant
        table.add_row(
            str(v.dcp_size),
            v.path.value if v.path else "policy's",
            v.index_cache,
            v.precision,
            f"{one.same}/{one.trials}",
            f"{one.hits}/{one.trials}",
            "[green]yes[/]" if one.holds else "[bold red]NO[/]",
        )
    return table


def difference_table(differences: Sequence[Difference]) -> Table:
    """A row per difference; the margin is the layers' smallest, in deviations of the scores."""
    table = Table(title="differences (margins and gaps of the reference)")
    for name in ("variant", "length", "depth", "keys", "reference", "answer"):
        table.add_column(name)
    for name in ("token", "K-th margin / sigma", "logit gap"):
        table.add_column(name, justify="right")
    for d in differences:
        margin = min(m / (d.topk_scale[layer] or 1.0) for layer, m in d.topk_margin.items())
        table.add_row(
            d.variant,
            f"{d.length:,}",
            f"{d.depth:g}",
            str(d.keys),
            ascii(d.reference),
            ascii(d.answer),
            str(d.token),
            f"{margin:.2g}",
            f"{d.logit_gap:.2g}",
        )
    return table
