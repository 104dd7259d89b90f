"""Trained parameters -> a Hugging Face directory: weights, config, tokenizer, chat template."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dcp_jax.config import ModelConfig
from dcp_jax.tokenizer import BYTE_TOKENIZER_TOKENS
from dcp_jax.weights.hf import flatten
from dcp_jax.weights.mapping import sources
from dcp_jax.weights.safetensors_file import SINGLE_FILE
from tiny_training.config import CONFIG, EOS, TOKEN_IDS
from tiny_training.model import as_stored

CHAT_TEMPLATE = """\
{{ '<|bos|>' }}{% for message in messages %}\
{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|eos|>' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}\
{% else %}{{ message['content'] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def to_hf(params: dict, cfg: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors by their Hugging Face names: the inverse of what `weights.mapping` reads."""
    parameters = {name: np.asarray(value) for name, value in flatten(params)}
    views: dict[str, np.ndarray] = {}
    shapes = {}
    for path, source in sources(cfg, with_mtp=True).items():
        value = parameters[path].reshape(-1, *source.piece_shape)
        window = tuple(
            slice(start, start + size)
            for start, size in zip(source.start, source.piece_shape, strict=True)
        )
        for name, piece in zip(source.names, value, strict=True):
            # Two parameters may be windows of one tensor: the key and the value up-projection.
            view = views.setdefault(name, np.zeros(source.view_shape, value.dtype))
            view[window] = piece
            shapes[name] = source.tensor_shape
    return {name: view.reshape(shapes[name]) for name, view in views.items()}


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges, whose ids 0..255 are the bytes; BOS before a text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in BYTE_TOKENIZER_TOKENS:
        # <think> and the like are text that is shown: parsers look for them.
        special = token.startswith("<|")
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    bos = "<|bos|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, TOKEN_IDS[bos])]
            ),
        ]
    )
    return tokenizer


def export(
    params: dict, cfg: ModelConfig, directory: str | Path, config: dict[str, Any] = CONFIG
) -> Path:
    """Write the checkpoint; the directory is made if absent, other files in it stay.

    Args:
        params: float32 parameters.
        cfg: the model.
        directory: where to.
        config: the `config.json` that `cfg` was read from; its dtype is the weights'.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = as_stored(params, jnp.dtype(cfg.dtype))
    tensors = to_hf(stored, cfg)
    for name in tensors:
        # Rounded already (`as_stored`); in memory it is float32.
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name].astype(jnp.dtype(cfg.dtype))
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {
            **{"bos_token_id": TOKEN_IDS["<|bos|>"], "eos_token_id": EOS},
            **{"pad_token_id": TOKEN_IDS["<|pad|>"], "do_sample": False, "max_new_tokens": 256},
        },
        "tokenizer_config.json": {
            **{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768},
            **{"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"},
            **{"clean_up_tokenization_spaces": False},
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory
