"""Plans of three kinds of models, as their analysis would make them, and their configs."""

from __future__ import annotations

from typing import Any

from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.plan import MeanSubtraction, Plan, Verdict

AFFINE = "its input holds the output of a LayerNorm with weight and bias, whose mean is not zero"


def gpt2_config(layers: int, width: int = 48, tied: bool = True) -> dict[str, Any]:
    return {
        "n_embd": width,
        "n_head": 4,
        "n_layer": layers,
        "n_positions": 32,
        "tie_word_embeddings": tied,
    }


def gpt2_plan(layers: int = 3, width: int = 48, tied: bool = True, stored: str = "") -> Plan:
    """A pre-LN plan; with ``tied``, an operation centres the embedding's output.

    ``stored="base"``: the tensors are stored without the prefix ``transformer.``.
    """

    def writer(name: str, *shape: int) -> CentredWeight:
        tensor = name.removeprefix("transformer.") if stored == "base" else name
        dim = len(shape) - 1
        return CentredWeight(name, Axis(dim, 0, 1, width, 1), shape, tensor)

    writers = [writer("transformer.wpe.weight", 32, width)]
    if not tied:
        writers.append(writer("transformer.wte.weight", 99, width))
    ops = ("transformer.wte",) if tied else ()
    status = "with_subtraction" if tied else "in_weights"
    norms: list[Verdict] = []
    for i in range(layers):
        h = f"transformer.h.{i}"
        norms.append(Verdict(f"{h}.ln_1", status, ops, tuple(w.parameter for w in writers)))
        writers.append(writer(f"{h}.attn.c_proj.weight", width, width))
        writers.append(writer(f"{h}.attn.c_proj.bias", width))
        norms.append(Verdict(f"{h}.ln_2", status, ops, tuple(w.parameter for w in writers)))
        writers.append(writer(f"{h}.mlp.c_proj.weight", 4 * width, width))
        writers.append(writer(f"{h}.mlp.c_proj.bias", width))
    norms.append(Verdict("transformer.ln_f", status, ops, tuple(w.parameter for w in writers)))
    centring = MeanSubtraction(
        "transformer.wte", "output", Axis(-1, 0, 1, width, 1), "the head reads it"
    )
    return Plan(
        "gpt2",
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
        tuple(norms),
        tuple(writers),
        (centring,) if tied else (),
        ("inputs_embeds",),
        ("cross_attn_head_mask",),
    )


def bert_plan(layers: int = 3) -> Plan:
    """A post-LN plan: each kept norm names the norm before it, often one layer below."""
    norms = [
        Verdict("embeddings.LayerNorm", "in_weights", (), ("embeddings.word_embeddings.weight",))
    ]
    before = "embeddings.LayerNorm"
    for i in range(layers):
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            norm = f"encoder.layer.{i}.{name}"
            norms.append(Verdict(norm, "stays_layernorm", reason=AFFINE, culprit=before))
            before = norm
    writer = CentredWeight(
        "embeddings.word_embeddings.weight",
        Axis(1, 0, 1, 32, 1),
        (99, 32),
        "bert.embeddings.word_embeddings.weight",
    )
    return Plan("bert", "BertModel", ("BertModel",), tuple(norms), (writer,), ())


def heads_plan(layers: int = 2, heads: int = 4, head_dim: int = 8, groups: int = 2) -> Plan:
    """Query and key norms over each head: split and fused projections, grouped keys."""
    norms: list[Verdict] = []
    writers: list[CentredWeight] = []
    width = heads * head_dim
    for i in range(layers):
        q, k = f"model.layers.{i}.q_proj.weight", f"model.layers.{i}.k_proj.weight"
        fused = f"model.layers.{i}.cross.qkv.weight"
        writers += [
            CentredWeight(q, Axis(0, 0, heads, head_dim, 1), (width, width)),
            CentredWeight(k, Axis(0, 0, groups, head_dim, 1), (groups * head_dim, width)),
            CentredWeight(fused, Axis(0, width, heads, head_dim, 1), (3 * width, width)),
        ]
        norms += [
            Verdict(f"model.layers.{i}.q_norm", "in_weights", (), (q,)),
            Verdict(f"model.layers.{i}.k_norm", "in_weights", (), (k, fused)),
        ]
    return Plan("phi", "PhiForCausalLM", ("PhiForCausalLM",), tuple(norms), tuple(writers), ())


def heads_config(heads: int = 4, head_dim: int = 8, groups: int = 2) -> dict[str, Any]:
    return {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": heads * head_dim,
    }
