"""One of several processes that train together: ``training_member.py OUT PLAN``.

``PLAN`` is the pickled plan of the model.

Prints the losses of each way to train as JSON, without and with centred weights.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from tiny_models import PHI, live
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import language_loss

from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.train import EnjoyLNCallback, keep_centred

STEPS = 3
WRITER = "model.layers.0.mlp.fc2.weight"


def ids_of(rank: int) -> torch.Tensor:
    return torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(rank))


def train(way: str, plan: Plan | None, accelerator: Accelerator) -> dict[str, Any]:
    """Losses in training and evaluation; with a ``plan``, weights are kept centred."""
    model = live("PhiForCausalLM", transformers.PhiConfig(**PHI))
    if plan is not None:
        keep_centred(model, plan=plan)
    whole = model
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if way == "ddp":
        model, optimizer = accelerator.prepare(model, optimizer)
    ids, losses = ids_of(accelerator.process_index), []
    for _ in range(STEPS):
        model.train()
        loss = language_loss(model, ids)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses += [float(loss), float(language_loss(model, ids))]
    norms = [norm for norm in whole.modules() if isinstance(norm, Folded)]
    rms = bool(norms) and not any(norm.shifted for norm in norms)
    state = model.train().state_dict()
    weight = next(value for name, value in state.items() if name.endswith(WRITER))
    weight = weight.full_tensor() if way == "fsdp" else weight
    return {
        "losses": losses,
        "rms": rms,
        "mean": float(weight.detach().mean(0).abs().max()),
        "sum": float(weight.detach().abs().sum()),
    }


def train_with_trainer(out: Path, plan: Plan) -> None:
    rows = [{"input_ids": row, "labels": row} for n in range(4) for row in ids_of(n)]
    args = transformers.TrainingArguments(
        output_dir=str(out),
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = live("PhiForCausalLM", transformers.PhiConfig(**PHI)).float()
    callback = EnjoyLNCallback(plan=plan)
    trainer = transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback])  # type: ignore
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()


def main(out: Path, plan: Plan) -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for way in ("ddp", "fsdp"):
        found[way] = [train(way, some, accelerator) for some in (None, plan)]
    train_with_trainer(out, plan)
    print("result:", json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), pickle.loads(Path(sys.argv[2]).read_bytes()))
