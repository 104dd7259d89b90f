"""How a checkpoint's `quantization_config` says that weights are stored: plain Python, no jax.

| quant_method | stored as | beside it |
|---|---|---|
| fp8, weight_block_size [128, 128] | `X.weight` e4m3 | `X.weight_scale_inv`, one per 128 x 128 |
| quark, fp4 in groups of 32 | `X.weight` uint8, e2m1 pairs | `X.weight_scale` e8m0, one per 32 |

A weight is its value *times* the scale in both, whatever the name says. `scale_fmt: ue8m0` means
that scales are powers of two; they are stored in float32 all the same. Which modules are left alone
stands in `modules_to_not_convert` (`exclude` for quark).
"""

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["e4m3", "mxfp4"]


@dataclass(frozen=True)
class Blocks:
    """How a parameter lies in memory: bytes, and a scale for every block of values.

    Attributes:
        kind: "e4m3", one value a byte and float32 scales, or "mxfp4", two values of the last axis a
            byte and e8m0 scales as bytes.
        sizes: for each axis, how many values share a scale.
    """

    kind: Kind
    sizes: tuple[int, ...]

    @property
    def values_per_byte(self) -> int:
        """Values of one byte."""
        return 2 if self.kind == "mxfp4" else 1

    @property
    def scale_dtype(self) -> Literal["uint8", "float32"]:
        """Of the scales."""
        return "uint8" if self.kind == "mxfp4" else "float32"

    def byte_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the bytes of a parameter of this shape."""
        return (*shape[:-1], shape[-1] // self.values_per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of its scales."""
        return tuple(-(-n // size) for n, size in zip(shape, self.sizes, strict=True))


@dataclass(frozen=True)
class BlockFormat:
    """How a checkpoint stores a matrix in blocks.

    Attributes:
        kind: "e4m3" or "mxfp4".
        block: rows and columns of a stored matrix that share a scale.
        scale_name: what a scale's name has instead of `.weight`.
    """

    kind: Kind
    block: tuple[int, int]
    scale_name: str

    @property
    def values_per_byte(self) -> int:
        """Values of one byte."""
        return Blocks(self.kind, self.block).values_per_byte

    def scale_of(self, tensor: str) -> str:
        """Name of the scales of a tensor."""
        return tensor.removesuffix(".weight") + self.scale_name


E4M3 = BlockFormat("e4m3", (128, 128), ".weight_scale_inv")
MXFP4 = BlockFormat("mxfp4", (1, 32), ".weight_scale")

# What `--quantization fp8` makes of a checkpoint that is not quantised.
FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def block_format(quantization: Mapping[str, Any] | None) -> BlockFormat | None:
    """The format that a checked `quantization_config` names; None without one."""
    if quantization is None:
        return None
    return E4M3 if quantization.get("quant_method") == "fp8" else MXFP4


def activation_scales(quantization: Mapping[str, Any]) -> Literal["float32", "ue8m0"]:
    """What the scales of dynamically quantised activations are, as the release has them."""
    return "ue8m0" if quantization.get("scale_fmt") == "ue8m0" else "float32"


def kept_modules(quantization: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a tensor's module, or one around it, is listed as not quantised: a predicate.

    An entry is dotted parts of a name, matched whole and anywhere ("self_attn", "layers.3.mlp"), a
    pattern with `*`, or `re:` and a regular expression.
    """
    entries = _kept_entries(quantization)
    if not entries:
        return lambda tensor: False
    patterns = [re.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    patterns += [
        re.compile(fnmatch.translate(entry))
        for entry in entries
        if "*" in entry and not entry.startswith("re:")
    ]
    plain = {entry for entry in entries if "*" not in entry and not entry.startswith("re:")}

    def is_kept(tensor: str) -> bool:
        module = tensor.removesuffix(".weight")
        parts = module.split(".")
        spans = itertools.combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[a:b]) in plain for a, b in spans) or any(
            pattern.match(module) for pattern in patterns
        )

    return is_kept


def _kept_entries(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    key = "exclude" if quantization.get("quant_method") == "quark" else "modules_to_not_convert"
    entries = quantization.get(key) or ()
    return (entries,) if isinstance(entries, str) else tuple(entries)


def problems(quantization: Mapping[str, Any]) -> Iterator[str]:
    """Why a `quantization_config` cannot be used, one clause each."""
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if "nvfp4" in str(quantization).lower():
        yield (
            "the quantization is NVFP4, whose e2m1 values have e4m3 scales per 16 and another per "
            "tensor, which is not implemented: use the FP8 or bfloat16 release"
        )
    elif method == "quark":
        yield from _quark_problems(quantization)
    elif method != "fp8" or block not in ([128, 128], (128, 128)):
        yield (
            f"quantization with quant_method={method!r} and weight_block_size={block!r} is not "
            "implemented: convert the checkpoint to bfloat16, or to 'fp8' in blocks of [128, 128]"
        )
    elif quantization.get("activation_scheme", "dynamic") != "dynamic":
        yield (
            f"activation_scheme={quantization['activation_scheme']!r} needs scales of activations "
            "that are stored with the weights, which is not implemented: use a release whose "
            "activation_scheme is 'dynamic'"
        )
    if not all(isinstance(entry, str) for entry in _kept_entries(quantization)):
        yield "the list of modules that are not quantised has entries that are no names"


def _quark_problems(quantization: Mapping[str, Any]) -> Iterator[str]:
    weight = (quantization.get("global_quant_config") or {}).get("weight")
    weight = weight if isinstance(weight, Mapping) else {}
    dtype, group = weight.get("dtype"), weight.get("group_size")
    if dtype != "fp4" or group != 32 or weight.get("scale_format", "e8m0") != "e8m0":
        yield (
            f"quantization with quant_method='quark' and weights of dtype={dtype!r} in groups of "
            f"{group!r} is not implemented: of Quark's formats only MXFP4 is, 'fp4' in groups of "
            "32 with e8m0 scales"
        )
    if quantization.get("layer_quant_config"):
        yield (
            "layer_quant_config gives some layers another format, which is not implemented: use a "
            "checkpoint with one format"
        )
