"""Programs that users have compute from our files what transformers computes."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import environment_beside, install
from live_models import CHECKPOINTS, ROOT, shaken
from safetensors.torch import load_file
from sentence_encoder import sentence_encoder
from tiny_models import BERT, GPT2, VIT, WHISPER
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from vision_language import first_row, small
from widening_cases import MARIAN

from enjoyln_cli import export, fold, load_onnx
from enjoyln_cli.onnx_export import programs
from enjoyln_cli.onnx_export.image_parts import as_read
from enjoyln_cli.onnx_export.programs import Programs, programs_of, save
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.quantisers import traced_programs
from enjoyln_cli.quantisers.schemes import SCHEMES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seeded")]

PACKAGE = "@huggingface/transformers@4.3.1"
NEW = 12
"""Tokens to generate."""
PRECISIONS = {"q8": "w8a8"}
SUFFIXES = {"fp32": "", "q8": "_quantized"}
"""What the names of files end with: the names of transformers.js for precisions."""
READERS = ("transformers<4.58", "optimum-onnx[onnxruntime]", "sentence-transformers", "fastembed")
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "bert": lambda: BertModel(BertConfig(**BERT)),
    "vit": lambda: ViTForImageClassification(ViTConfig(**VIT)),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**WHISPER)),
    "marian": lambda: MarianMTModel(MarianConfig(**MARIAN)),
}
Request = dict[str, Any]
Client = Callable[..., Any]
"""Computes a request to a directory, in a precision."""
every_precision = pytest.mark.parametrize("precision", SUFFIXES)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose JavaScript may import transformers.js."""
    place = tmp_path_factory.mktemp("transformers_js")
    install_packages = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", PACKAGE]
    subprocess.run(install_packages, cwd=place, check=True, capture_output=True)
    return place


@pytest.fixture(scope="module")
def transformers_js(scripts: Path) -> Client:
    """Computes a request to a directory in one precision with transformers.js, in node."""
    script = shutil.copy(ROOT / "tests" / "support" / "transformers_js.mjs", scripts)

    def compute(folder: Path, request: Request, precision: str = "fp32") -> Any:
        run = subprocess.run(
            ["node", script, folder, precision],
            input=json.dumps(request),
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    return compute


@pytest.fixture(scope="module")
def older_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with readers that need an older transformers; it has torch from here."""
    python = environment_beside(tmp_path_factory.mktemp("readers") / "env")
    install(python, *READERS)
    return python


def environ(cache: Path) -> dict[str, str]:
    """The variables of a process in another environment."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}


@pytest.fixture(scope="module")
def readers_in_python(
    older_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Computes a request with optimum, sentence-transformers or fastembed."""
    place = tmp_path_factory.mktemp("readers")
    script = ROOT / "tests" / "support" / "readers_in_python.py"
    with (
        open(place / "printed.txt", "w+") as printed,
        subprocess.Popen(
            [older_python, script],
            env=environ(place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
        ) as process,
    ):

        def compute(folder: Path, request: Request, precision: str = "fp32") -> Any:
            line = json.dumps({**request, "folder": str(folder), "suffix": SUFFIXES[precision]})
            process.stdin.write(line + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            answer = process.stdout.readline()  # type: ignore[union-attr]
            assert answer, (place / "printed.txt").read_text()
            return json.loads(answer)

        yield compute
        process.kill()


@pytest.fixture(params=["transformers_js", "readers_in_python"])
def client(request: pytest.FixtureRequest) -> Client:
    """Each program that reads a model of any kind."""
    found: Client = request.getfixturevalue(request.param)
    return found


@functools.cache
def in_float32(kind: str) -> tuple[Any, Programs]:
    """A model with random weights, and its programs."""
    torch.manual_seed(0)
    model = shaken(MODELS[kind](), 0.3)
    return model, programs_of(model, torch.float32)


def written(kind: str, folder: Path, precision: str = "fp32") -> Any:
    """A model with random weights, after its programs and configs were written to ``folder``.

    In other precisions than float32, it is the same model as our own ``load_onnx`` runs it.
    """
    model, exact = in_float32(kind)
    stored = exact
    if precision != "fp32":
        stored = traced_programs.quantised(exact, SCHEMES[PRECISIONS[precision]], {}, {})
    save(stored, folder, SUFFIXES[precision])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.eos_token_id = None
        model.generation_config.save_pretrained(folder)
    return model if precision == "fp32" else load_onnx(folder)


def require_most_probable(logits: torch.Tensor, found: torch.Tensor, precision: str) -> None:
    """Each token of ``found`` has the largest of the logits before it, or as good as the largest.

    Two versions of onnxruntime do not round activations to the same 8 bits.
    """
    chosen = logits.gather(-1, found[..., None])[..., 0]
    lost = (logits.amax(-1) - chosen) / logits.nan_to_num(neginf=0.0).std(-1)
    assert float(lost.max()) < {"fp32": 1e-3, "q8": 0.2}[precision]
    assert float((lost == 0).float().mean()) > 0.9


def tensors(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Inputs as JSON."""
    return {
        name: {
            "type": {torch.float32: "float32", torch.bool: "bool"}.get(value.dtype, "int64"),
            "data": (value.int() if value.dtype == torch.bool else value).flatten().tolist(),
            "dims": list(value.shape),
        }
        for name, value in inputs.items()
    }


def values(found: Any) -> torch.Tensor:
    return torch.tensor(found["data"]).reshape(found["dims"])


def tokens(rows: int, count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(5, 35, (rows, count))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("largest", [programs.LARGEST, 1000])
def test_an_exported_gpt2_writes_the_same_text(
    largest: int,
    transformers_js: Client,
    readers_in_python: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its norms are operators of opset 23. Large weights are a file of their own."""
    monkeypatch.setattr(programs, "LARGEST", largest)
    fold(CHECKPOINTS / "gpt2", tmp_path / "out", verify=False, options=Options(merge="bias"))
    exported = export(tmp_path / "out", tmp_path / "onnx", verify=False)
    assert len(exported.files) == (2 if largest == 1000 else 1) and exported.opset == 23
    text, options = "You may copy and", {"max_new_tokens": NEW, "do_sample": False}
    request = {"task": "text-generation", "text": text, "options": options}
    (made,) = transformers_js(tmp_path / "onnx", request)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2")
    inputs = tokenizer(text, return_tensors="pt")
    ids = model.generate(**inputs, **options)
    assert made["generated_text"] == tokenizer.decode(ids[0])
    assert len(made["generated_text"]) > len(text)
    request = {"class": "AutoModelForCausalLM", "inputs": tensors(inputs), "options": options}
    assert torch.equal(values(readers_in_python(tmp_path / "onnx", request)), ids)


@every_precision
def test_a_decoder_generates_padded_rows(precision: str, client: Client, tmp_path: Path) -> None:
    model = written("gpt2", tmp_path / "gpt2", precision)
    inputs = tokens(6, 7)
    for row in range(6):
        inputs["attention_mask"][row, :row] = 0
    options = {"max_new_tokens": NEW, "do_sample": False}
    request = {"class": "AutoModelForCausalLM", "inputs": tensors(inputs), "options": options}
    found = values(client(tmp_path / "gpt2", request, precision))
    assert found.shape == (6, 7 + NEW) and torch.equal(found[:, :7], inputs["input_ids"])
    assert len({tuple(row[7:]) for row in found.tolist()}) > 2
    mask = torch.cat([inputs["attention_mask"], torch.ones(6, NEW, dtype=torch.int64)], 1)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=found, attention_mask=mask, position_ids=counted).logits
    require_most_probable(logits[:, 6:-1], found[:, 7:], precision)


@every_precision
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_models_of_one_call(kind: str, precision: str, client: Client, tmp_path: Path) -> None:
    model = written(kind, tmp_path / kind, precision)
    if kind == "bert":
        inputs = {**tokens(3, 9), "token_type_ids": torch.zeros(3, 9, dtype=torch.int64)}
        request = {"class": "AutoModel", "output": "last_hidden_state"}
    else:
        inputs = {"pixel_values": torch.randn(3, 3, 15, 15)}
        request = {"class": "AutoModelForImageClassification", "output": "logits"}
    found = values(client(tmp_path / kind, {**request, "inputs": tensors(inputs)}, precision))
    with torch.no_grad():
        expected = model(**inputs)[request["output"]]
    error = torch.linalg.norm(found - expected) / torch.linalg.norm(expected)
    assert float(error) < {"fp32": 1e-5, "q8": 0.02}[precision]


@every_precision
@pytest.mark.parametrize("kind", ["whisper", "marian"])
def test_encoder_decoders(kind: str, precision: str, client: Client, tmp_path: Path) -> None:
    model = written(kind, tmp_path / kind, precision)
    if kind == "whisper":
        inputs = {"input_features": torch.randn(1, 8, 40)}
        given, name = {"inputs": inputs["input_features"]}, "AutoModelForSpeechSeq2Seq"
        start = [1, 3]
    else:
        given = inputs = tokens(1, 7)
        name, start = "AutoModelForSeq2SeqLM", [36]
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "decoder_input_ids": [start],
        "no_repeat_ngram_size": 1,
    }
    request = {"class": name, "inputs": tensors(given), "options": options}
    found = values(client(tmp_path / kind, request, precision))
    assert found.shape == (1, len(start) + NEW) and found[0, : len(start)].tolist() == start
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=found).logits
    for at in range(found.shape[1]):  # no token twice
        logits[:, at, found[0, : at + 1]] = -torch.inf
    logits = logits[:, len(start) - 1 : -1]
    if (end := model.config.eos_token_id) not in found:  # some clients never generate it
        logits[..., end] = -torch.inf
    require_most_probable(logits, found[:, len(start) :], precision)


def with_older_tokenizer(folder: Path) -> Path:
    """The directory, whose tokenizer has the class that older releases of transformers know."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder that was exported, with a quantised file beside; it has a dense layer."""
    place = tmp_path_factory.mktemp("encoder")
    model = with_older_tokenizer(sentence_encoder(place / "model"))
    fold(model, place / "out", verify=False)
    export(place / "out", place / "encoder-int8", verify=False)
    exact = programs_of(BertModel.from_pretrained(model).eval(), torch.float32)
    small = traced_programs.quantised(exact, SCHEMES[PRECISIONS["q8"]], {}, {})
    save(small, place / "encoder-int8", SUFFIXES["q8"])
    return place / "encoder-int8"


@pytest.mark.parametrize("reader", ["SentenceTransformer", "fastembed"])
def test_sentence_encoders(reader: str, readers_in_python: Client, encoder: Path) -> None:
    """sentence-transformers computes the dense layer as well.

    It pads the texts to one batch, whose inputs share the scales by which 8 bits round them.
    """
    original = encoder.parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "bert")
    texts = ["You may copy and distribute", "the program", "a much longer warranty"]
    bert = BertModel.from_pretrained(original).eval()
    for precision, limit in {"fp32": 1e-5, "q8": 0.1}.items():
        if precision != "fp32":
            bert = load_onnx(encoder, SUFFIXES[precision][1:])
        with torch.no_grad():
            calls = [bert(**tokenizer(text, return_tensors="pt")) for text in texts]
        wanted = torch.cat([call["last_hidden_state"].mean(1) for call in calls])
        if reader == "SentenceTransformer":
            dense = load_file(original / "2_Dense" / "model.safetensors")
            wanted = torch.tanh(wanted @ dense["linear.weight"].T + dense["linear.bias"])
        else:
            wanted = torch.nn.functional.normalize(wanted)
        request = {"class": reader, "texts": texts, "features": wanted.shape[1]}
        found = values(readers_in_python(encoder, request, precision))
        assert float(torch.linalg.norm(found - wanted) / torch.linalg.norm(wanted)) < limit


def test_the_snippets_of_the_page_run(older_python: Path, scripts: Path, encoder: Path) -> None:
    here = encoder.parent
    decoder = Path(shutil.copytree(CHECKPOINTS / "gpt2", here / "gpt2-int8"))
    exact = programs_of(AutoModelForCausalLM.from_pretrained(decoder).eval(), torch.float32)
    save(
        traced_programs.quantised(exact, SCHEMES[PRECISIONS["q8"]], {}, {}), decoder, SUFFIXES["q8"]
    )
    (with_older_tokenizer(decoder) / "model.safetensors").unlink()
    page = (ROOT / "docs" / "run_a_result.md").read_text()
    snippets = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert all(code.count("\n") <= 10 for _, code in snippets)

    def printed(kind: str, count: int, *command: str | Path) -> str:
        codes = [code for one, code in snippets if one == kind]
        assert len(codes) == count
        file = scripts / f"snippets.{kind}"
        file.write_text("\n".join(codes))
        run = [*command, file]
        done = subprocess.run(run, cwd=here, env=environ(here), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text, in_python = printed("js", 1, "node"), printed("py", 3, older_python)
    assert "def add_argument(" in text and text in in_python and "(1, 9)\n[(80,)]" in in_python


@pytest.mark.parametrize("kind", ["SmolVLM", "Qwen2-VL"])
def test_a_model_of_pictures_and_text(kind: str, transformers_js: Client, tmp_path: Path) -> None:
    """The config of Qwen2-VL is laid out as on the Hub, which transformers 5 writes differently."""
    model = small(kind)
    save(programs_of(model, torch.float32), tmp_path / kind)
    config = model.config.to_dict()
    if kind == "Qwen2-VL":
        config = {**config.pop("text_config"), **config}
    (tmp_path / kind / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(tmp_path / kind)
    inputs, options = first_row(kind), {"max_new_tokens": NEW, "do_sample": False}
    given = {n: as_read(n, v) for n, v in inputs.items() if n.startswith(("pixel", "image"))}
    given |= {name: inputs[name] for name in ("input_ids", "attention_mask")}
    request = {"class": "AutoModelForImageTextToText", "inputs": tensors(given), "options": options}
    found = values(transformers_js(tmp_path / kind, request))
    assert torch.equal(found, model.generate(**inputs, **options))
    assert len(set(found[0, -NEW:].tolist())) > 2
