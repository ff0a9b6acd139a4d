"""What ``enjoyln quantize`` makes of a model: the table of docs/quantisation.md.

    python scripts/real_models.py openai/whisper-tiny.en --audio speech --words
    python scripts/real_models.py sentence-transformers/all-MiniLM-L6-v2 --text lines.txt

There is one row for each scheme of each format that is installed: what was written, and the
original quantised in the same way, both on the half of the data that had no part in the choice.
``--out FILE`` appends all numbers to a file of JSON lines.

``--words`` counts the words that Whisper gets wrong, on all recordings: the directory then has a
``text.json`` with the spoken sentences, in the order of the names of the recordings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import GenerationMixin, WhisperForConditionalGeneration, WhisperProcessor

from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.quantisation.measure import Compute
from enjoyln_cli.quantisation.quantize import load_result, quantize
from enjoyln_cli.quantisers.schemes import FORMATS

MOST_TOKENS = 64
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
ENGLISH_ONLY = 51864
"""The vocabulary size of a Whisper without tokens for languages and tasks."""
HEADS = ("format", "scheme", "written", "cost", "of the original", "untied (first half)", "top-1")
HEADS += ("size", "time / float32", "wrong words (float32)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one model and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    for kind in ("text", "tokens", "image", "audio"):
        parser.add_argument(f"--{kind}", type=Path)
    parser.add_argument("--schemes", nargs="*", help="default: all")
    parser.add_argument("--formats", nargs="*", default=["onnx", "openvino"])
    parser.add_argument("--rotations", type=int, default=3)
    parser.add_argument("--inputs", type=int, default=8, help="in each half of the data")
    parser.add_argument("--keep", nargs="*", default=(), help="layers to leave more precise")
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("cost: KL divergence of the logits, or relative error of the outputs\n")
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    for form in options.formats:
        installed = all(find_spec(package) for package in FORMATS[form].packages)
        for scheme in FORMATS[form].schemes if installed else ():
            if options.schemes and scheme not in options.schemes:
                continue
            try:
                row = measured(options, form, scheme)
            except EnjoyLNError as error:
                print(f"| {form} | {scheme} | {error} |", flush=True)
                continue
            print("| " + " | ".join(cells(row)) + " |", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def measured(options: argparse.Namespace, form: str, scheme: str) -> dict[str, Any]:
    """All numbers of one format and scheme."""
    images = [options.image] if options.image else []
    data = read_user_data(options.text, images, audio=options.audio, tokens=options.tokens)
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        row = quantize(
            options.model,
            out,
            data,
            scheme=scheme,
            form=form,
            seeds=range(options.rotations),
            inputs=options.inputs,
            keep=options.keep,
            max_error=torch.inf,
        ).to_json()
        if options.words:
            compute = load_result(out, form, WhisperForConditionalGeneration)
            row |= word_errors(options.model, compute, options.audio)
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of one row, in the order of ``HEADS``."""
    untied = {form["name"]: form["differences"] for form in row["candidates"]}.get("untied")
    cost = "error" if row["held_out"]["kl"] is None else "kl"
    top1, words = row["held_out"]["top1"], row.get("word_errors")
    return [
        row["format"],
        row["scheme"],
        row["chosen"],
        f"{row['held_out'][cost]:.3g}",
        f"{row['plain'][cost]:.3g}",
        f"{untied[cost]:.3g}" if untied else "",
        "" if top1 is None else f"{top1:.3f}",
        f"{row['size'] / 1e6:.1f} of {row['float_size'] / 1e6:.1f} MB",
        f"{row['speed']['milliseconds'] / row['float_speed']['milliseconds']:.2f}"
        if row["speed"]
        else "",
        "" if words is None else f"{words:.1f} % ({row['float_word_errors']:.1f} %)",
    ]


def word_errors(model: str, compute: Compute, speech: Path) -> dict[str, float]:
    """Word error rates, in percent, of Whisper in float32 and of ``compute``; both are greedy.

    ``compute`` has no cache, so the float model proposes how a sentence goes on. One call of
    ``compute`` reads the whole proposal, and replaces the first token that it would not have said.
    """
    from transformers.audio_utils import load_audio
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    processor = WhisperProcessor.from_pretrained(model)
    original = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    settings, normalize = original.generation_config, EnglishTextNormalizer({})
    never = {name: getattr(settings, name) for name in ("suppress_tokens", "begin_suppress_tokens")}
    names = PROMPT[::3] if original.config.vocab_size == ENGLISH_ONLY else PROMPT
    prompt = torch.tensor([processor.tokenizer.convert_tokens_to_ids(list(names))])
    begin, end = prompt.shape[1], settings.eos_token_id
    total = wrong = float_wrong = 0
    texts = json.loads((speech / "text.json").read_text())
    for file, text in zip(sorted(speech.glob("*.wav")), texts, strict=True):
        sound = load_audio(str(file), 16000)
        features = processor(sound, sampling_rate=16000, return_tensors="pt").input_features

        def proposal(ids: torch.Tensor, features: torch.Tensor = features) -> torch.Tensor:
            call = {"decoder_input_ids": ids, "max_new_tokens": MOST_TOKENS, **never}
            with torch.no_grad():
                return GenerationMixin.generate(
                    original, features, do_sample=False, num_beams=1, **call
                )

        first = ids = proposal(prompt)
        agreed = begin
        while agreed < MOST_TOKENS and ids[0, agreed - 1] != end:
            call = {"input_features": features, "decoder_input_ids": ids}
            logits = compute(call)["logits"][0]
            logits[:, never["suppress_tokens"]] = -torch.inf
            logits[begin - 1, never["begin_suppress_tokens"]] = -torch.inf
            said = logits.argmax(-1)
            while agreed < ids.shape[1] and ids[0, agreed] == said[agreed - 1]:
                agreed += 1
            if ids[0, agreed - 1] != end:
                ids = torch.cat([ids[:, :agreed], said[agreed - 1 : agreed][None]], 1)
                agreed += 1
                ids = ids if ids[0, -1] == end else proposal(ids)
        words = normalize(text).split()
        heard = [
            normalize(processor.tokenizer.decode(tokens[0], skip_special_tokens=True)).split()
            for tokens in (ids, first)
        ]
        total += len(words)
        wrong += edit_distance(words, heard[0])
        float_wrong += edit_distance(words, heard[1])
    rates = {"word_errors": 100 * wrong / total, "float_word_errors": 100 * float_wrong / total}
    return rates | {"words": total}


def edit_distance(first: list[str], second: list[str]) -> int:
    """The least number of words to insert, remove or replace."""
    row = list(range(len(second) + 1))
    for at, word in enumerate(first, 1):
        before, row[0] = row[0], at
        for column, other in enumerate(second, 1):
            cheapest = min(row[column] + 1, row[column - 1] + 1, before + (word != other))
            before, row[column] = row[column], cheapest
    return row[-1]


if __name__ == "__main__":
    main()
