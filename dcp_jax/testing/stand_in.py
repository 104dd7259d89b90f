"""A stand-in for the model in the box: its config and its tokenizer, with random weights.

Everything but the answers works as with the trained model: sizes, caches, text, chat, exchanges.
"""

import json
from pathlib import Path
from typing import Any

from dcp_jax.testing.checkpoints import write_random_checkpoint
from dcp_jax.tokenizer import BYTE_TOKENIZER_CLASS, BYTE_TOKENIZER_TOKENS

_BYTES = 256
_BOS, _EOS = (_BYTES + BYTE_TOKENIZER_TOKENS.index(name) for name in ("<|bos|>", "<|eos|>"))

TINY_DSA: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": _BYTES + len(BYTE_TOKENIZER_TOKENS),
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 256,
    "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
    "indexer_rope_interleave": True,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 33792,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "num_nextn_predict_layers": 1,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
}

_TEMPLATE = """\
{{ '<|bos|>' }}{% for message in messages %}\
{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|eos|>' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] }}\
{% else %}{{ message['content'] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def write_stand_in(directory: str | Path, seed: int = 0, **changes: Any) -> Path:
    """Writes the checkpoint; the same seed gives the same bytes.

    Args:
        directory: made if absent.
        seed: of the weights.
        **changes: other fields of the config (fewer layers, say).

    Returns:
        The directory.
    """
    directory = write_random_checkpoint(directory, TINY_DSA | changes, seed, dtype="bfloat16")
    tokenizer = {
        "tokenizer_class": BYTE_TOKENIZER_CLASS,
        "special_tokens": list(BYTE_TOKENIZER_TOKENS),
        "bos_token": "<|bos|>",
        "add_bos_token": True,
    }
    generation = {"bos_token_id": _BOS, "eos_token_id": _EOS, "do_sample": False}
    for name, content in (
        ("tokenizer_config.json", tokenizer),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return directory
