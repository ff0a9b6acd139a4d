"""``EnjoyLNCallback`` in the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import GPT2, live
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from enjoyln_cli import from_pretrained, verify
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.train import EnjoyLNCallback
from enjoyln_cli.train.trained_fold import plan_in_training

CONFIG = transformers.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
STEPS = 6


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_in_training(live("GPT2LMHeadModel", CONFIG))


class Record(TrainerCallback):
    """The losses that the Trainer logs, and which norms its evaluations run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rms: list[bool] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.losses += [value for key, value in logs.items() if key in ("loss", "eval_loss")]

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norms = [module for module in kwargs["model"].modules() if isinstance(module, Folded)]
        self.rms.append(bool(norms) and not any(norm.shifted for norm in norms))


def dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 37, (9,), generator=generator) for _ in range(2 * STEPS)]
    return [{"input_ids": row, "labels": row} for row in rows]


def exact_loss(output: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """In the dtype of the model; its own loss is rounded to float32."""
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(
    out: Path,
    model: Any,
    *callbacks: TrainerCallback,
    resume: Path | None = None,
    loss: Any = exact_loss,
    **more: Any,
) -> tuple[Record, Trainer]:
    record = Record()
    args: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(out), **{**args, **more}),
        train_dataset=dataset(),  # type: ignore[arg-type]
        eval_dataset=dataset()[:4],  # type: ignore[arg-type]
        compute_loss_func=loss,
        callbacks=[record, *callbacks],
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return record, trainer


def largest(a: Record, b: Record) -> float:
    pairs = zip(a.losses, b.losses, strict=True)
    return max(abs(one - other) / other for one, other in pairs)


@pytest.mark.slow
def test_a_trainer_learns_the_same_and_saves_folded_checkpoints(tmp_path: Path, plan: Plan) -> None:
    plain, _ = trained(tmp_path / "plain", live("GPT2LMHeadModel", CONFIG))
    kept, trainer = trained(
        tmp_path / "kept", live("GPT2LMHeadModel", CONFIG), EnjoyLNCallback(plan=plan)
    )
    assert largest(kept, plain) < 1e-11
    assert kept.rms == [True] * 3 and plain.rms == [False] * 3
    assert plain.losses[-1] < 0.9 * plain.losses[2]  # of two evaluations

    saved = tmp_path / "kept" / "checkpoint-4"
    assert verify(saved, samples=4).passed
    model = from_pretrained(saved)
    assert read_marker(model.config.to_dict()).trained

    trainer.save_model(str(tmp_path / "last"))  # after the last step, without an event
    assert (tmp_path / "last" / "enjoyln_recipe.yaml").is_file()
    assert (tmp_path / "last" / "enjoyln_plan.json").is_file()
    from_pretrained(tmp_path / "last")

    resumed, _ = trained(
        tmp_path / "resumed",
        live("GPT2LMHeadModel", CONFIG, seed=1),
        EnjoyLNCallback(plan=plan),
        resume=saved,
    )
    assert resumed.losses == kept.losses[-len(resumed.losses) :] and len(resumed.losses) == 3


@pytest.mark.slow
def test_a_folded_model_is_trained_and_resumed(tmp_path: Path, outs: dict[str, Path]) -> None:
    def folded() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(outs["opt"])

    more: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "loss": None}
    whole, _ = trained(tmp_path / "whole", folded(), EnjoyLNCallback(), **more)
    saved = tmp_path / "whole" / "checkpoint-2"
    resumed, _ = trained(tmp_path / "rest", folded(), EnjoyLNCallback(), resume=saved, **more)
    assert len(resumed.losses) == 3 and resumed.losses == whole.losses[-3:]
    assert resumed.rms == [True]


@pytest.mark.slow
def test_mixed_precision_accumulation_and_checkpointing(tmp_path: Path, plan: Plan) -> None:
    """The masters are float32; an error of bfloat16 is allowed where the mean is taken off it."""
    more = {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    more |= {"max_steps": 3, "loss": None}
    plain, _ = trained(tmp_path / "plain", live("GPT2LMHeadModel", CONFIG).float(), **more)
    callback = EnjoyLNCallback(plan=plan)
    model = live("GPT2LMHeadModel", CONFIG).float()
    kept, trainer = trained(tmp_path / "kept", model, callback, **more)
    assert kept.rms == [True] * 2
    assert largest(kept, plain) < 2 * torch.finfo(torch.bfloat16).eps
    assert trainer.model.dtype == torch.float32
    trainer.save_model(str(tmp_path / "last"))
    assert verify(tmp_path / "last", samples=4).passed


@pytest.mark.slow
def test_adapters_in_a_trainer(tmp_path: Path, plan: Plan) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int = 0) -> Any:
        base = live("GPT2LMHeadModel", CONFIG)
        torch.manual_seed(seed)
        layers = ["c_attn", "c_proj"]
        lora = peft.LoraConfig(target_modules=layers, fan_in_fan_out=True, init_lora_weights=False)
        return peft.get_peft_model(base, lora).double()

    kept, _ = trained(tmp_path / "kept", adapted(), EnjoyLNCallback(plan=plan))
    assert kept.rms == [True] * 3
    saved = tmp_path / "kept" / "checkpoint-4"
    callback = EnjoyLNCallback(plan=plan)
    resumed, _ = trained(tmp_path / "resumed", adapted(seed=5), callback, resume=saved)
    assert resumed.losses == kept.losses[-len(resumed.losses) :]


@pytest.mark.slow
def test_a_callback_that_is_added_later_and_one_that_stays_unused(
    tmp_path: Path, plan: Plan
) -> None:
    model = live("GPT2LMHeadModel", CONFIG)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    trainer = Trainer(model, args, train_dataset=dataset())  # type: ignore[arg-type]
    trainer.add_callback(EnjoyLNCallback(plan=plan))
    assert not any(isinstance(module, Folded) for module in model.modules())
    trainer.train()
    with torch.no_grad():
        model.eval()(input_ids=dataset()[0]["input_ids"][None])
    assert not any(m.shifted for m in model.modules() if isinstance(m, Folded))
