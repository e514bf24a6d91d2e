"""A config.json becomes the model that transformers would build from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exatwin.scenarios.architectures import MODEL_TYPES, READERS
from exatwin.scenarios.huggingface import model_fields
from exatwin.scenarios.model import Model, load_model
from exatwin.scenarios.scenario import load_scenario
from exatwin.topology.errors import InputError
from exatwin.topology.files import build


def config(architecture: str, hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, **more) -> dict:
    """A file of one that names its keys as Llama does."""
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    } | more


QWEN_57B = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128, "decoder_sparse_step": 1}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V2_LITE = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
V3 = {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 8, "bias": False, "alibi": False}

# The keys of the published files that shape the model, and the parameters that the Hub counts in the checkpoint.
PUBLISHED = {
    "llama-3.2-1b": (
        config("LlamaForCausalLM", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "llama-3.1-405b": (config("LlamaForCausalLM", 16384, 126, 128, 8, 53248, 128256), 405_853_388_800),
    "mistral-7b": (config("MistralForCausalLM", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096), 7_241_732_096),
    "mixtral-8x7b": (
        config("MixtralForCausalLM", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "qwen2-0.5b": (config("Qwen2ForCausalLM", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True), 494_032_768),
    "qwen1.5-moe-a2.7b": (
        config("Qwen2MoeForCausalLM", 2048, 24, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4,
               moe_intermediate_size=1408, shared_expert_intermediate_size=5632, mlp_only_layers=[]),
        14_315_784_192,
    ),
    "qwen3-8b": (config("Qwen3ForCausalLM", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "qwen3-30b-a3b": (
        config("Qwen3MoeForCausalLM", 2048, 48, 32, 4, 6144, 151936, moe_intermediate_size=768, **QWEN3_MOE),
        30_532_122_624,
    ),
    "deepseek-moe-16b": (
        config("DeepseekForCausalLM", 2048, 28, 16, 16, 10944, 102400, first_k_dense_replace=1, **V2_LITE),
        16_375_728_128,
    ),
    "deepseek-v2-lite": (
        config("DeepseekV2ForCausalLM", 2048, 27, 16, 16, 10944, 102400, first_k_dense_replace=1, q_lora_rank=None,
               **V2_LITE, **LATENT),
        15_706_484_224,
    ),
    "deepseek-v3": (
        config("DeepseekV3ForCausalLM", 7168, 61, 128, 128, 18432, 129280, first_k_dense_replace=3, moe_layer_freq=1,
               q_lora_rank=1536, num_nextn_predict_layers=1, **V3, **LATENT),
        671_026_419_200 - 58 * 256,  # without the biases of the routers, which no gradient moves
    ),
    "gemma-2b": (config("GemmaForCausalLM", 2048, 18, 8, 1, 16384, 256000, head_dim=256), 2_506_172_416),
    "gemma-2-9b": (config("Gemma2ForCausalLM", 3584, 42, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984),
    "gemma-3-1b": (config("Gemma3ForCausalLM", 1152, 26, 4, 1, 6912, 262144, head_dim=256), 999_885_952),
    "gpt-oss-20b": (
        config("GptOssForCausalLM", 2880, 24, 64, 8, 2880, 201088, head_dim=64, attention_bias=True,
               num_local_experts=32, num_experts_per_tok=4),
        20_914_757_184 - 24 * 64,  # without the attention sinks
    ),
    "phi-2": (config("PhiForCausalLM", 2560, 32, 32, 32, 10240, 51200), 2_779_683_840),
    "phi-3-mini": (config("Phi3ForCausalLM", 3072, 32, 32, 32, 8192, 32064), 3_821_079_552),
    "command-r": (config("CohereForCausalLM", 8192, 40, 64, 64, 22528, 256000), 34_980_831_232),
    "smollm3-3b": (
        config("SmolLM3ForCausalLM", 2048, 36, 16, 4, 11008, 128256, tie_word_embeddings=True), 3_075_098_624,
    ),
    "starcoder2-7b": (config("Starcoder2ForCausalLM", 4608, 32, 36, 4, 18432, 49152), 7_173_923_840),
    "gpt-neox-20b": (config("GPTNeoXForCausalLM", 6144, 44, 64, 64, 24576, 50432), 20_554_567_680),
    "pythia-6.9b": (config("GPTNeoXForCausalLM", 4096, 32, 32, 32, 16384, 50432), 6_857_302_016),
    "gpt2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "gpt2-xl": (
        {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_ctx": 1024, "vocab_size": 50257},
        1_557_611_200,
    ),
    "starcoder": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
         "n_positions": 8192, "vocab_size": 49152, "multi_query": True},
        15_517_456_384,
    ),
    "bloom": (
        {"model_type": "bloom", "n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880},
        176_247_271_424,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
         "multi_query": True, "parallel_attn": True, "vocab_size": 65024},
        6_921_720_704,
    ),
    "falcon-40b": (
        {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
         "vocab_size": 65024} | NEW_FALCON,
        41_303_293_952,
    ),
    "opt-125m": (
        {"model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "ffn_dim": 3072,
         "max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 768},
        125_239_296,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432, "no_bias": True,
         "max_seq_len": 2048, "attn_config": {"alibi": True, "attn_type": "multihead_attention"}},
        6_649_286_656,
    ),
}  # fmt: skip


def read(document: dict) -> Model:
    return Model.model_validate(model_fields(document, "some/model/config.json"))


@pytest.mark.parametrize(("document", "parameters"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_file_has_the_parameters_of_its_checkpoint(document: dict, parameters: int):
    assert read(document).parameters().total == parameters


@pytest.mark.parametrize(
    "name", ["llama-3.1-405b", "mixtral-8x7b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"]
)
def test_a_bundled_model_is_the_one_that_its_file_says(name: str):
    own = {"name", "source", "note", "vocab_multiple"}
    assert read(PUBLISHED[name][0]).model_dump(exclude=own) == load_model(name).model_dump(exclude=own)


def test_a_file_reads_wherever_a_model_is_named(tmp_path):
    path = tmp_path / "llama" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(PUBLISHED["llama-3.2-1b"][0] | {"torch_dtype": "bfloat16", "rope_theta": 500000.0}))
    assert load_model(str(path)).name == "llama"
    scenario = load_scenario("h100-llama-3-8b", [f"model={path}", "layout={tp: 1, pp: 1}"])
    assert (scenario.model.hidden, scenario.model.layers) == (2048, 16)
    shallow = load_scenario("h100-llama-3-8b", [f"model={path}", "model.layers=4", "layout={tp: 1, pp: 1}"])
    assert shallow.model.layers == 4


def test_the_name_within_the_file_goes_before_that_of_its_folder():
    assert read(PUBLISHED["gpt2"][0] | {"_name_or_path": "openai/gpt2"}).name == "openai/gpt2"
    assert read(PUBLISHED["gpt2"][0]).name == "model"


def test_windows_that_are_not_simulated_are_noted():
    assert "4096" in (read(PUBLISHED["mistral-7b"][0]).note or "")
    unused = PUBLISHED["qwen2-0.5b"][0] | {"sliding_window": 32768, "use_sliding_window": False}
    assert read(unused).note is None


def test_every_model_type_has_a_reader():
    assert set(MODEL_TYPES.values()) <= set(READERS)


LLAMA = PUBLISHED["llama-3.1-405b"][0]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not read"),
        ({"architectures": ["LlamaForCausalML"]}, "did you mean LlamaForCausalLM?"),
        ({"model_type": "t5"}, "layers, hidden, heads, kv_heads, ffn, vocab"),
        ({key: LLAMA[key] for key in LLAMA if key != "vocab_size"}, "vocab_size: is needed by LlamaForCausalLM"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size: should be a whole number, but it is '4096'"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings: should be true or false, but it is '1'"),
        (LLAMA | {"attention_bias": True}, "attention_bias: is true while mlp_bias is not"),
        (PUBLISHED["phi-2"][0] | {"qk_layernorm": True}, "True of PhiForCausalLM is not read; there is false"),
        (PUBLISHED["opt-125m"][0] | {"word_embed_proj_dim": 512}, "512 of OPTForCausalLM is not read; there is 768"),
        (PUBLISHED["mpt-7b"][0] | {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln: True of MptForCausalLM"),
        (PUBLISHED["qwen1.5-moe-a2.7b"][0] | {"mlp_only_layers": [3]}, "mlp_only_layers: is read for the first layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_has_one_message(document: dict, said: str):
    with pytest.raises(InputError) as error:
        model_fields(document, "config.json")
    assert len(error.value.problems) == 1
    assert said in str(error.value)


def test_all_that_is_missing_is_said_at_once():
    with pytest.raises(InputError) as error:
        model_fields({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}, "config.json")
    missing = {problem.field for problem in error.value.problems}
    assert missing == {"num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**9), st.floats(), st.text(max_size=5), st.lists(st.integers(0, 3)),
    st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip
EXTRA = ["architectures", "model_type", "_name_or_path", "sliding_window", "mlp_only_layers", "attn_config", "head_dim"]


def test_layers_without_experts_are_a_list():
    document = PUBLISHED["qwen1.5-moe-a2.7b"][0]
    assert read(document | {"mlp_only_layers": [0, 1]}).dense_layers == 2
    with pytest.raises(InputError, match="mlp_only_layers"):
        read(document | {"mlp_only_layers": 2})


@given(data=st.data(), name=st.sampled_from(sorted(PUBLISHED)), value=JUNK)
def test_whatever_a_key_holds_is_a_model_or_one_clear_error(data, name, value):
    document = PUBLISHED[name][0]
    key = data.draw(st.sampled_from([*document, *EXTRA]))
    try:
        build(Model, model_fields(document | {key: value}, "config.json"), "config.json")
    except InputError as error:
        assert str(error)
