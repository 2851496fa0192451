"""Well-known families that do not run. Each says what its forward pass needs and no operation computes.

A family is found by its `model_type` in config.json, or by the names of its architecture in GGUF files.
"""

from __future__ import annotations

_MODELS = {
    "multi-head latent attention (MLA)": """axk1 deepseek2 deepseek2-ocr deepseek_v2 deepseek_v3 deepseek_v32
        deepseek_v4 glm-dsa glm4_moe_lite glm_moe_dsa kimi_k2 kimi_k25 longcat_flash minicpm3 mistral4 plm sarvam_mla
        youtu""",
    "gated delta-rule layers (DeltaNet)": """kimi-linear kimi_linear olmo_hybrid qwen35 qwen35moe qwen3_5 qwen3_5_moe
        qwen3_5_text qwen3_next qwen3next""",
    "state-space layers (Mamba)": """bamba falcon-h1 falcon_h1 falcon_mamba granitehybrid granitemoehybrid jamba mamba
        mamba2 nemotron_h nemotron_h_moe plamo2 zamba zamba2""",
    "recurrent layers": "arwkv7 recurrent_gemma rwkv rwkv6 rwkv6qwen2 rwkv7 xlstm",
    "layers of short convolutions": "lfm2 lfm2_moe lfm2_vl lfm2moe",
    "linear attention": "bailing_hybrid minimax",
    "experts, and attention within chunks of a text": "llama4 llama4_text",
    "experts": """afmoe arctic bailing_moe bailingmoe bailingmoe2 dbrx deepseek dots1 ernie4_5-moe ernie4_5_moe
        exaone-moe exaone_moe glm4_moe glm4moe granitemoeshared grok grovemoe hunyuan-moe
        hunyuan_v1_moe minimax-m2 minimax_m2 olmoe phimoe qwen2_moe qwen2moe qwen3_vl_moe
        qwen3vlmoe smallthinker""",
    "embeddings of its own in each layer": "gemma3n gemma3n_text gemma4 gemma4_text",
    "attention scores capped by tanh": "gemma2",
    "layers that do not normalise their inputs, some of them without RoPE": "exaone4",
    "norms that subtract the mean": """bloom codeshell cohere cohere2 command-r falcon gpt2 gpt_bigcode gpt_neox gptj
        gptneox mpt nemotron olmo opt persimmon phi phi2 stablelm starcoder starcoder2""",
    "an MLP without a gate": "apertus arcee",
    "RoPE over the rows and columns of images": "qwen2_5_vl qwen2_vl qwen2vl qwen3vl",
    "attention to later tokens": """bert dream eurobert gemma-embedding llada llada-moe modern-bert modernbert neo-bert
        nomic-bert nomic-bert-moe nomic_bert t5 t5encoder""",
}
LACKING = {name: what for what, names in _MODELS.items() for name in names.split()}
