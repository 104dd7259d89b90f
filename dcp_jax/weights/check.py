"""Whether a checkpoint is one of a model, from its headers: everything wrong in one message."""

from collections.abc import Mapping

from dcp_jax.config import ModelConfig
from dcp_jax.quantization import BlockFormat, Blocks, block_format
from dcp_jax.weights.blocks import FORMATS, SCALE_DTYPES
from dcp_jax.weights.mapping import Source, is_ignorable
from dcp_jax.weights.safetensors_file import Checkpoint

READABLE_DTYPES = ("F32", "BF16", "F16")
_NAMES_SHOWN = 20


def check_checkpoint(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    table: Mapping[str, Source],
    blocks: Mapping[str, Blocks],
    *,
    with_mtp: bool,
    convert: bool = False,
) -> None:
    """Refuse a checkpoint whose tensors are not those that the parameters come from.

    Args:
        checkpoint: headers of the files.
        cfg: the model.
        table: path -> source of every parameter.
        blocks: parameters that are held in blocks.
        with_mtp: the MTP layer's are among them.
        convert: float tensors may become blocks.

    Raises:
        ValueError: all tensors missing, unexpected, misshapen, unreadable, or quantised otherwise
            than the config says.
    """
    fused = [table[path].names[0] for path in blocks if not table[path].quantized]
    if fused:
        raise ValueError(
            listing(
                f"{checkpoint.directory} has its experts fused, and only one expert a tensor can be"
                " held in blocks; save it with Hugging Face's save_pretrained, or load it without"
                " quantization",
                fused,
            )
        )
    wanted = block_format(cfg.quantization)
    needed: dict[str, tuple[int, ...]] = {}
    scales: dict[str, tuple[tuple[int, ...], BlockFormat]] = {}
    unreadable, undeclared, unquantized = [], [], []
    for path, source in table.items():
        for name in source.names:
            needed[name] = source.tensor_shape
            if name not in checkpoint:
                continue
            dtype = checkpoint[name].dtype
            stored = FORMATS.get(dtype)
            if dtype in READABLE_DTYPES:
                if path in blocks and not convert:
                    unquantized.append(name)
            elif stored is None or len(source.tensor_shape) != 2 or (wanted and stored != wanted):
                unreadable.append(f"{name} is {dtype}")
            elif wanted is None:
                undeclared.append(f"{name} is {dtype}")
            else:
                layout = Blocks(stored.kind, stored.block)
                needed[name] = layout.byte_shape(source.tensor_shape)
                scales[stored.scale_of(name)] = layout.scale_shape(source.tensor_shape), stored
    needed |= {name: shape for name, (shape, _) in scales.items()}
    unreadable += [
        f"{name} is {checkpoint[name].dtype}"
        for name, (_, stored) in scales.items()
        if name in checkpoint and checkpoint[name].dtype not in SCALE_DTYPES[stored.kind]
    ]
    misshapen = [
        f"{name} is {list(checkpoint[name].shape)}, not {list(shape)}"
        for name, shape in needed.items()
        if name in checkpoint and checkpoint[name].shape != shape
    ]
    undeclared_scales = {
        stored.scale_of(name)
        for name in needed
        if name in checkpoint and (stored := FORMATS.get(checkpoint[name].dtype))
    }
    unexpected = [
        name
        for name in checkpoint
        if name not in needed
        and name not in undeclared_scales
        and not is_ignorable(name, cfg, with_mtp=with_mtp, names=checkpoint)
    ]
    found = (
        ("tensors are missing", [name for name in needed if name not in checkpoint]),
        ("tensors are unexpected", unexpected),
        ("tensors have another shape than the config says", misshapen),
        (
            f"tensors have a dtype that is none of {', '.join(READABLE_DTYPES)}"
            + (f", nor {wanted.kind} in blocks" if wanted else ""),
            unreadable,
        ),
        (
            "tensors are quantised, but config.json has no quantization_config: fetch the config "
            "that belongs to them",
            undeclared,
        ),
        (
            "tensors are not quantised, but the quantization_config says that all are which it "
            "does not list: add them to modules_to_not_convert (exclude)",
            unquantized,
        ),
    )
    problems = [listing(f"{len(names)} {what}", names) for what, names in found if names]
    if problems:
        raise ValueError(
            f"{checkpoint.directory} is not a checkpoint of this {cfg.model_type} config"
            f" ({cfg.num_hidden_layers} layers{', with MTP' if with_mtp else ''}):\n  "
            + "\n  ".join(problems)
        )


def listing(what: str, names: list[str]) -> str:
    """`what: a, b, c`, with at most `_NAMES_SHOWN` of the names."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}"
