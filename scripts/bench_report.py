"""How long the analysis takes, and that it grows no faster than a model's number of layers.

    python scripts/bench_report.py

GPT-2 with 12, 24, 48 and 96 layers, and OPT with the 96 layers and 12,288 features of its 175B
model, as the language models that these checkpoints are. Each is analysed in a process of its own,
from the config alone; seconds without the imports, and the process's peak memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LAYERS = (12, 24, 48, 96)
GPT2 = {"architectures": ["GPT2LMHeadModel"]}
OPT_175B = {
    "architectures": ["OPTForCausalLM"], "num_hidden_layers": 96, "hidden_size": 12288,
    "num_attention_heads": 96, "ffn_dim": 49152, "word_embed_proj_dim": 12288,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"GPT-2, {layers} layers": ("gpt2", GPT2 | {"n_layer": layers}) for layers in LAYERS},
    "OPT-175B": ("opt", OPT_175B),
}
ONE = """
import json, resource, sys, time
import transformers
from enjoyln_cli.analysis import analyze_config
model_type, changes = json.loads(sys.argv[1])
config = transformers.CONFIG_MAPPING[model_type](**changes)
analyze_config(transformers.CONFIG_MAPPING["gpt2"](n_layer=1))
begin = time.perf_counter()
plan = analyze_config(config).plan
seconds = time.perf_counter() - begin
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps([len(plan.norms), len(plan.folded), seconds, memory]))
"""


def main() -> None:
    print(f"{'model':20} {'LNs':>5} {'folded':>7} {'seconds':>8} {'per LN':>8} {'GB':>5}")
    for name, case in CASES.items():
        command = [sys.executable, "-c", ONE, json.dumps(case)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        norms, folded, seconds, memory = json.loads(out.splitlines()[-1])
        per_norm = seconds / norms
        print(f"{name:20} {norms:5} {folded:7} {seconds:8.2f} {per_norm:8.3f} {memory:5.1f}")


if __name__ == "__main__":
    main()
