"""Models whose MLPs can subtract a mean."""

from __future__ import annotations

from tiny_models import BERT, TOKENS

from enjoyln_cli.plan.fold_options import Options

WIDEN = Options(widen_mlp=True)


BART = {
    **TOKENS,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "d_model": 21,
    "encoder_ffn_dim": 33,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 31,
    "decoder_start_token_id": 2,
}


FAMILY = [
    ("bert", BERT, "BertModel", 1, 3),
    ("deberta", BERT, "DebertaModel", 1, 3),
    ("bart", BART, "BartModel", 2, 6),
    ("albert", {**BERT, "embedding_size": 9}, "AlbertModel", 1, 2),
]
MARIAN = {
    **BART, "pad_token_id": 36, "eos_token_id": 0, "forced_eos_token_id": None,
    "decoder_start_token_id": 36,
}  # fmt: skip
