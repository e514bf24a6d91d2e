"""What each architecture of `transformers` builds from the keys of its ``config.json``.

A reader gives the fields of a model; keys that do not shape it are left alone.

Source: GitHub huggingface/transformers, ``models/*/configuration_*.py`` and ``modeling_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from .config_json import Config, Fields


def _llama(config: Config, tied: bool = False) -> Fields:
    """RMS norms, rotary positions, a gated MLP; also Mistral and Phi-3."""
    return _rotary(config, tied) | {"bias": _bias(config)}


def _bias(config: Config) -> bool:
    """Biases on all linear layers or on none."""
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    if attention and not mlp:
        config.refuse(
            "attention_bias", "is true while mlp_bias is not, which is not read; there is true or false for both"
        )
    return attention and mlp


def _rotary(config: Config, tied: bool = False) -> Fields:
    """What models with rotary positions name alike."""
    return {
        "layers": config.number("num_hidden_layers"),
        "hidden": config.number("hidden_size"),
        "heads": config.number("num_attention_heads"),
        "kv_heads": config.maybe("num_key_value_heads"),
        "head_dim": config.maybe("head_dim"),
        "ffn": config.number("intermediate_size"),
        "vocab": config.number("vocab_size"),
        "gated": True,
        "tied": config.flag("tie_word_embeddings", tied),
        "positions": "rotary",
        "norm": "rms",
        "bias": False,
    }


def _mixtral(config: Config) -> Fields:
    return _rotary(config) | {
        "experts": config.number("num_local_experts"),
        "top_k": config.number("num_experts_per_tok"),
        "expert_ffn": config.number("intermediate_size"),
    }


def _qwen2(config: Config) -> Fields:
    return _rotary(config) | {"qkv_bias": True}


def _qwen2_moe(config: Config) -> Fields:
    shared = config.number("shared_expert_intermediate_size")
    more = {"qkv_bias": config.flag("qkv_bias", True), "shared_experts": 1, "shared_ffn": shared, "shared_gate": True}
    return _llama(config) | _qwen_experts(config) | more


def _qwen3(config: Config) -> Fields:
    # Qwen3Config: head_dim is 128 where it is left out
    return _llama(config) | {"qk_norm": True, "head_dim": config.number("head_dim", default=128)}


def _qwen3_moe(config: Config) -> Fields:
    return _llama(config) | _qwen_experts(config) | {"qk_norm": True}


def _qwen_experts(config: Config) -> Fields:
    dense = config.document.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        dense = []
        config.refuse("mlp_only_layers", "is read for the first layers alone, such as [0, 1]")
    return {
        "experts": config.number("num_experts"),
        "top_k": config.number("num_experts_per_tok"),
        "expert_ffn": config.number("moe_intermediate_size"),
        "moe_every": config.number("decoder_sparse_step", default=1),
        "dense_layers": len(dense),
    }


def _deepseek(config: Config) -> Fields:
    """The first MoE of DeepSeek: plain attention, shared and routed experts."""
    config.only("moe_layer_freq", 1)
    return _llama(config) | {
        "experts": config.number("n_routed_experts"),
        "top_k": config.number("num_experts_per_tok"),
        "expert_ffn": config.number("moe_intermediate_size"),
        "shared_experts": config.number("n_shared_experts", default=0),
        "dense_layers": config.number("first_k_dense_replace", default=0),
    }


def _deepseek_latent(config: Config) -> Fields:
    """Its second and third, with latent attention.

    The layers for further tokens are not read: transformers builds none of them.
    """
    rope, plain = config.number("qk_rope_head_dim") or 0, config.number("qk_nope_head_dim") or 0
    return _deepseek(config) | {
        "kv_heads": None,  # one a head; the key says so too
        "head_dim": rope + plain,
        "kv_rank": config.number("kv_lora_rank"),
        "q_rank": config.maybe("q_lora_rank"),
        "rope_dim": rope,
        "v_head_dim": config.number("v_head_dim"),
    }


def _gemma(config: Config) -> Fields:
    config.number("head_dim")
    return _llama(config, tied=True)


def _gemma2(config: Config) -> Fields:
    return _gemma(config) | {"layer_norms": 4}


def _gemma3(config: Config) -> Fields:
    return _gemma2(config) | {"qk_norm": True}


def _gpt_oss(config: Config) -> Fields:
    """Biases everywhere; its attention sinks, one number a head, are left out."""
    return _mixtral(config) | {"bias": config.flag("attention_bias", True)}


def _nemotron(config: Config) -> Fields:
    return _llama(config) | {"gated": False, "norm": "layer"}


def _starcoder2(config: Config) -> Fields:
    return _rotary(config, tied=True) | {"gated": False, "norm": "layer", "bias": config.flag("use_bias", True)}


def _phi(config: Config) -> Fields:
    config.only("qk_layernorm", False)
    alone = {"gated": False, "norm": "layer", "bias": True, "parallel_blocks": True, "layer_norms": 1}
    return _rotary(config) | alone | {"head_bias": True}


def _cohere(config: Config) -> Fields:
    config.only("use_qk_norm", False)
    alone = {"norm": "layer", "norm_bias": False, "parallel_blocks": True, "layer_norms": 1}
    return _llama(config, tied=True) | alone


def _gpt2(config: Config) -> Fields:
    return {
        "layers": config.number("n_layer", "num_hidden_layers"),
        "hidden": config.number("n_embd", "hidden_size"),
        "heads": config.number("n_head", "num_attention_heads"),
        "ffn": config.maybe("n_inner"),
        "vocab": config.number("vocab_size"),
        "max_positions": config.number("n_positions", "n_ctx"),
        "tied": config.flag("tie_word_embeddings", True),
    }


def _gpt_bigcode(config: Config) -> Fields:
    return _gpt2(config) | {"kv_heads": 1 if config.flag("multi_query", True) else None}


def _gpt_neox(config: Config) -> Fields:
    config.only("attention_bias", True)
    return _rotary(config) | {
        "gated": False,
        "norm": "layer",
        "bias": True,
        "parallel_blocks": config.flag("use_parallel_residual", True),
    }


def _bloom(config: Config) -> Fields:
    return {
        "layers": config.number("n_layer", "num_hidden_layers"),
        "hidden": config.number("hidden_size", "n_embed"),
        "heads": config.number("n_head", "num_attention_heads"),
        "vocab": config.number("vocab_size"),
        "positions": "alibi",
        "embedding_norm": True,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _falcon(config: Config) -> Fields:
    """One norm a layer where the blocks are parallel, but for the new decoder's two (Falcon-40B and 180B)."""
    new, parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    heads = config.number("num_attention_heads", "n_head") or 1
    one = 1 if config.flag("multi_query", True) else heads
    norms = config.number("num_ln_in_parallel_attn", default=2) if new else 1 if parallel else 2
    return {
        "layers": config.number("num_hidden_layers", "n_layer"),
        "hidden": config.number("hidden_size", "n_embed"),
        "heads": heads,
        "kv_heads": config.number("num_kv_heads", "n_head_kv", default=heads) if new else one,
        "ffn": config.maybe("ffn_hidden_size"),
        "vocab": config.number("vocab_size"),
        "positions": "alibi" if config.flag("alibi", False) else "rotary",
        "bias": config.flag("bias", False),
        "parallel_blocks": new or parallel,
        "layer_norms": norms,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _opt(config: Config) -> Fields:
    config.only("do_layer_norm_before", True)
    config.only("layer_norm_elementwise_affine", True)
    hidden = config.number("hidden_size")
    config.only("word_embed_proj_dim", hidden)
    return {
        "layers": config.number("num_hidden_layers"),
        "hidden": hidden,
        "heads": config.number("num_attention_heads"),
        "ffn": config.number("ffn_dim"),
        "vocab": config.number("vocab_size"),
        "max_positions": (config.number("max_position_embeddings") or 0)
        + 2,  # two rows stand before the first position
        "bias": config.flag("enable_bias", True),
        "tied": config.flag("tie_word_embeddings", True),
    }


def _mpt(config: Config) -> Fields:
    attention = config.inner("attn_config")
    attention.only("qk_ln", False)
    heads, hidden = config.number("n_heads") or 1, config.number("d_model") or 1
    kinds = {"multihead_attention": heads, "multiquery_attention": 1, "grouped_query_attention": None}
    kind = attention.document.get("attn_type", "multihead_attention")
    attention.only("attn_type", *kinds)
    rms, biased = "rms" in str(config.document.get("norm_type", "")), not config.flag("no_bias", True)
    alibi, rope = attention.flag("alibi", False), attention.flag("rope", False)
    return {
        "layers": config.number("n_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attention.number("kv_n_heads", default=kinds.get(str(kind)) or heads),
        "ffn": hidden * (config.number("expansion_ratio", default=4) or 1),
        "vocab": config.number("vocab_size"),
        "positions": "alibi" if alibi else "rotary" if rope else "learned",
        "max_positions": None if alibi or rope else config.number("max_seq_len"),
        "norm": "rms" if rms else "layer",
        "norm_bias": biased,
        "bias": biased,
        "tied": config.flag("tie_word_embeddings", True),
    }


READERS: dict[str, Callable[[Config], Fields]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekForCausalLM": _deepseek,
    "DeepseekV2ForCausalLM": _deepseek_latent,
    "DeepseekV3ForCausalLM": _deepseek_latent,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "NemotronForCausalLM": _nemotron,
    "Phi3ForCausalLM": _llama,
    "PhiForCausalLM": _phi,
    "CohereForCausalLM": _cohere,
    "SmolLM3ForCausalLM": _llama,
    "Starcoder2ForCausalLM": _starcoder2,
    "GPT2LMHeadModel": _gpt2,
    "GPTBigCodeForCausalLM": _gpt_bigcode,
    "GPTNeoXForCausalLM": _gpt_neox,
    "BloomForCausalLM": _bloom,
    "FalconForCausalLM": _falcon,
    "RWForCausalLM": _falcon,
    "OPTForCausalLM": _opt,
    "MptForCausalLM": _mpt,
    "MPTForCausalLM": _mpt,
}

MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phi": "PhiForCausalLM",
    "cohere": "CohereForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "RefinedWeb": "FalconForCausalLM",
    "RefinedWebModel": "FalconForCausalLM",
    "opt": "OPTForCausalLM",
    "mpt": "MptForCausalLM",
}
