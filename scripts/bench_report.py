"""How long an analysis takes, compared with one forward pass of the model without weights.

    python scripts/bench_report.py
    python scripts/bench_report.py bert bloom-176b

Each model is analysed in its own process, from its config alone. The columns are the processor time
after the imports, this time divided by that of one forward pass on the meta device (the median of
seven, in the same process), and the process's peak memory. GPT-2 with 12 to 96 layers shows that
the time grows no faster than the number of layers. The last line has the time of the imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

LAYERS = (12, 24, 48, 96)
PHI_2 = {
    "num_hidden_layers": 32, "hidden_size": 2560, "intermediate_size": 10240,
    "num_attention_heads": 32,
}  # fmt: skip
STABLELM = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "qk_layernorm": True,
}  # fmt: skip
OPT_66B = {
    "num_hidden_layers": 64, "hidden_size": 9216, "num_attention_heads": 72, "ffn_dim": 36864,
    "word_embed_proj_dim": 9216,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertForMaskedLM", {}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "phi-2": ("phi", "PhiForCausalLM", PHI_2),
    "whisper": ("whisper", "WhisperForConditionalGeneration", {}),
    "stablelm": ("stablelm", "StableLmForCausalLM", STABLELM),
    "opt-66b": ("opt", "OPTForCausalLM", OPT_66B),
    "bloom-176b": (
        "bloom", "BloomForCausalLM", {"hidden_size": 14336, "n_layer": 70, "n_head": 112},
    ),
    **{f"gpt2-{n}-layers": ("gpt2", "GPT2LMHeadModel", {"n_layer": n}) for n in LAYERS},
}  # fmt: skip
ONE = """
import json, resource, statistics, sys, time, warnings
warnings.simplefilter("ignore")
begin = time.process_time()
import torch, transformers
transformers.logging.set_verbosity_error()
model_type, model_class, changes = json.loads(sys.argv[1])
config = transformers.CONFIG_MAPPING[model_type](**changes, architectures=[model_class])
cls = getattr(transformers, model_class)
theirs = time.process_time() - begin
from enjoyln_cli.analysis.analyze import analyze_config
ours = time.process_time() - begin - theirs
analyze_config(transformers.CONFIG_MAPPING["gpt2"](n_layer=1))
begin = time.process_time()
plan = analyze_config(config).plan
analysis = time.process_time() - begin
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
with torch.device("meta"):
    model = cls(config).eval()
    tokens = torch.zeros(2, 7, dtype=torch.long)
    size = getattr(config, "image_size", 0)
    inputs = {
        "vit": {"pixel_values": torch.zeros(2, 3, size, size)},
        "whisper": {"input_features": torch.zeros(2, 80, 3000), "decoder_input_ids": tokens},
    }.get(model_type, {"input_ids": tokens})
passes = []
with torch.no_grad():
    for _ in range(7):
        begin = time.process_time()
        model(**inputs)
        passes.append(time.process_time() - begin)
forward = statistics.median(passes)
print(json.dumps([len(plan.norms), len(plan.folded), analysis, forward, memory, theirs, ours]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    names = parser.parse_args().names or list(CASES)
    if unknown := set(names) - CASES.keys():
        parser.error(f"no model is called {unknown.pop()}; there is {', '.join(CASES)}")
    print(f"{'model':16} {'LNs':>5} {'folded':>7} {'seconds':>8} {'of f':>6} {'f':>7} {'GB':>5}")
    imports = []
    for name in names:
        command = [sys.executable, "-c", ONE, json.dumps(CASES[name])]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        norms, folded, seconds, forward, memory, *taken = json.loads(out.splitlines()[-1])
        imports.append(taken)
        print(
            f"{name:16} {norms:5} {folded:7} {seconds:8.2f} {seconds / forward:6.1f} "
            f"{forward:7.3f} {memory:5.1f}",
            flush=True,
        )
    theirs, ours = (sorted(column)[len(column) // 2] for column in zip(*imports, strict=True))
    print(f"imports: torch, transformers and the class {theirs:.1f} s, the analysis {ours:.1f} s")


if __name__ == "__main__":
    main()
