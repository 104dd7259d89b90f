"""The model in the box: its `config.json`, and the ids of its tokens.

GLM-5's architecture with every code path present: a dense and five sparse layers, IndexShare, one
MTP layer, an index row of one 128-wide block, a latent of one 128-wide tile.

IndexShare: layers 3 and 5 use the selections of 2 and 4. Looking up a key takes two layers in a row
(one marks each token with what came before it, the next finds the mark), and which layers do it is
the training's choice; layers 0, 1, 2 and 4 have an indexer of their own, so that the second of the
two can be a full layer wherever the pair forms, and the last word is a full layer's as well.
"""

from typing import Any

from dcp_jax.config import ModelConfig
from dcp_jax.tokenizer import BYTE_TOKENIZER_TOKENS

BYTES = 256
TOKEN_IDS = {name: BYTES + number for number, name in enumerate(BYTE_TOKENIZER_TOKENS)}
PAD, BOS, EOS = TOKEN_IDS["<|pad|>"], TOKEN_IDS["<|bos|>"], TOKEN_IDS["<|eos|>"]
USER, ASSISTANT = TOKEN_IDS["<|user|>"], TOKEN_IDS["<|assistant|>"]
THINK, END_THINK = TOKEN_IDS["<think>"], TOKEN_IDS["</think>"]

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": BYTES + len(BYTE_TOKENIZER_TOKENS),
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 256,
    "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
    "indexer_rope_interleave": True,
    "index_share_for_mtp_iteration": False,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 33792,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def model_config(**changes: Any) -> ModelConfig:
    """The checked configuration, with other sizes for tests."""
    return ModelConfig.from_hf({**CONFIG, **changes})
