"""Small models of Hugging Face transformers, and where each is cut."""

from __future__ import annotations

from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "max_position_embeddings": 64}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
T5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0, "pad_token_id": 0}

# A model with each kind of layer; of T5, whose stages are in two stacks, the cuts.
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "llama-tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8)),
    # Grouped matrix products know no float64.
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **GROUPED, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**COMMON, **QUIET)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}
CUTS = {("t5", 2): ["decoder"], ("t5", 4): ["encoder.block.1", "decoder", "decoder.block.1"]}


def make(name: str) -> Any:
    """A model of this name in float64, the same at every call."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    model.train()
    return model


def batch(rows: int) -> dict[str, torch.Tensor]:
    """What the models take: words, of which the first are padding in some rows, and what they should have been."""
    words = torch.randint(3, 64, (rows, 7))
    mask = torch.ones_like(words)
    mask[::2, :2] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": torch.randint(3, 64, (rows, 7))}
