"""Plans and a verification to show."""

from __future__ import annotations

from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.plan import MeanSubtraction, Plan, Verdict
from enjoyln_cli.verification.verify import Verification

REASON = "the output of a LayerNorm with weights is not zero-mean"


PLAN = Plan(
    model_type="made-up",
    model_class="MadeUpModel",
    classes=("MadeUpModel", "MadeUpForCausalLM"),
    norms=(
        Verdict("h.0.ln", "in_weights"),
        Verdict("h.1.ln", "with_subtraction", subtractions=("wte",)),
        Verdict(
            "h.2.ln", "stays_layernorm", reason=REASON, culprit="embed.ln", path=("h.2", "embed.ln")
        ),
        Verdict(
            "h.3.ln", "stays_layernorm", reason=REASON, culprit="embed.ln", path=("h.3", "embed.ln")
        ),
        Verdict("head.ln", "stays_layernorm", reason="gelu | tanh", culprit="head.act"),
    ),
    centred_weights=(
        CentredWeight("h.0.proj.weight", Axis(1, 0, 1, 6, 1), (6, 6)),
        CentredWeight("h.0.proj.weight", Axis(1, 0, 1, 6, 1), (6, 6), "copy.weight"),
        CentredWeight("h.0.proj.bias", Axis(0, 0, 1, 6, 1), (6,)),
    ),
    subtractions=(
        MeanSubtraction("wte", "output", Axis(-1, 0, 1, 6, 1), "it is tied to the head"),
    ),
    unproven=("inputs_embeds",),
    other_norms=(("SomeRMSNorm", 2),),
)


ONLY_RMS = Plan("llama", "LlamaModel", ("LlamaModel",), (), (), (), other_norms=(("RMS", 33),))


CHECKED = Verification(
    passed=True,
    failures=(),
    identity_error=1.234e-16,
    storage_error=2.5e-8,
    runtime_error=3.1e-7,
    original_error=3.0e-7,
    stock_error=3.2e-7,
    ratio=1.0333,
    chance=1.152,
    stock_ratio=1.0667,
    stock_chance=1.16,
    max_ratio=1.25,
    kl=4e-13,
    top1_agreement=1.0,
    norm_input_mean={"h.0.ln": 2e-8, "h.1.ln": 1e-8},
    writer_drift={"h.0.proj.weight": 5e-9},
    perplexity={"original": 12.5, "folded": 12.5001, "tokens": 512.0},
    model_class="MadeUpModel",
    source="somewhere",
    compute_dtype="float32",
    rows=4,
    seed=0,
)
