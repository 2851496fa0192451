"""Well-known families that are not supported, each with what it needs, such as a layer that no operation computes.

A family is found by its `model_type` in config.json, or by the names of its architecture in GGUF files.
"""

from __future__ import annotations

_MODELS = {
    "multi-head latent attention (MLA)": """axk1 axk2 deepseek2 deepseek2-ocr deepseek_v2 deepseek_v3 deepseek_v32
        deepseek_v4 dots3_note dots3_note_text glm-dsa glm4_moe_lite glm_moe_dsa hy_v4 kimi_k2 kimi_k25 longcat_flash
        minicpm3 mistral4 plm sarvam_mla youtu""",
    "gated delta-rule layers (DeltaNet)": """kimi-linear kimi_linear lara_mini olmo_hybrid qwen35 qwen35moe qwen3_5
        qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen3next qwen4_exp qwen4_exp_text""",
    "state-space layers (Mamba)": """bamba falcon-h1 falcon_h1 falcon_mamba granitehybrid jamba mamba mamba2 nemotron_h
        nemotron_h_moe plamo2 zamba zamba2""",
    "recurrent layers": "arwkv7 recurrent_gemma rwkv rwkv6 rwkv6qwen2 rwkv7 xlstm",
    "layers of short convolutions": """inkling2_loop_text inkling2_text inkling_text lfm2 lfm2_moe lfm2_vl lfm2moe lfm3
        zaya""",
    "linear attention": "bailing_hybrid minimax",
    "experts, and attention within chunks of a text": "llama4 llama4_text",
    "no new operation, only a description of their files as in families/experts.py": """aria_text bailing_moe bailingmoe
        deepseek exaone-moe exaone_moe granitemoeshared hunyuan-moe hunyuan_v1_moe hy_v3 minimax-m2 minimax_m2
        sarvam_moe solar_open""",
    "experts in groups, of which a router first chooses some": "bailingmoe2",
    "a gate of attention's output": "afmoe laguna",
    "experts of another kind": """arctic dbrx flex_olmo flint grok grovemoe jetmoe kolibri1 mellum mimo_v2_flash
        minimax_m3_vl_text phimoe smallthinker""",
    "embeddings of its own in each layer": """gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text gemma4_unified
        gemma4_unified_assistant gemma4_unified_text""",
    "logits capped by tanh, beside an MLP without a gate and norms without scales": "nanochat",
    "norms that subtract the mean": """biogpt bloom codegen codeshell cohere cohere2 cohere2_moe cohere_compass_text
        command-r cpmant ctrl falcon fuyu gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj gptneox jais2
        mpt nemotron olmo openai-gpt opt persimmon phi phi2 stablelm starcoder starcoder2 xglm""",
    "an MLP without a gate": "apertus apertus1p5_text arcee",
    "norms inside attention and the MLP": "bitnet",
    "sinks or norms beside Granite's multipliers": "granite_swa granitemoe_swa hyperclovax",
    "attention of a kind of its own": "blt diffllama doge dory hrm_text reformer",
    "RoPE over the rows and columns of images": "phi4_multimodal qwen2_5_omni qwen3_omni_moe",
    "attention to an image or to sound": """emu3 git got_ocr2 mllama moshi moss_transcribe_diarize musicgen
        musicgen_melody trocr whisper""",
    "attention to later tokens or to another text": """bart bert bert-generation big_bird bigbird_pegasus blenderbot
        blenderbot-small camembert data2vec-text dream electra ernie eurobert gemma-embedding llada llada-moe marian
        mbart megatron-bert modern-bert modernbert modernbert-decoder mvp neo-bert nomic-bert nomic-bert-moe nomic_bert
        pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer t5 t5encoder xlm xlm-roberta
        xlm-roberta-xl xlnet xmod""",
}
LACKING = {name: what for what, names in _MODELS.items() for name in names.split()}
