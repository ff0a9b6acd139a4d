"""What ``enjoyln quantize`` makes of a model: the table of docs/quantisation.md.

    python scripts/real_models.py openai/whisper-tiny.en --audio speech --words
    python scripts/real_models.py sentence-transformers/all-MiniLM-L6-v2 --text lines.txt

There is one row for each scheme of each format that is installed: what was written, and the
original quantised in the same way, both on the half of the data that had no part in the choice.
``--out FILE`` appends all numbers to a file of JSON lines.

``--words`` counts the words that Whisper gets wrong, on all recordings, except in OpenVINO's
programs. The directory has a ``text.json`` with the spoken sentences, in the order of the names of
the recordings. ``--faster-whisper FOLDER`` transcribes them with that library, too, if it is
installed; FOLDER has the same model as it loads it. ``--seconds N`` joins recordings to longer
ones of at most N seconds, of which Whisper reads 30 at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.quantisation.load_onnx import load_onnx
from enjoyln_cli.quantisation.quantize import quantize
from enjoyln_cli.quantisers.schemes import FORMATS, ONNX, OPENVINO

MOST_TOKENS = 224
RATE = 16000
ENGLISH_ONLY = 51864
"""The vocabulary size of a Whisper without tokens for languages and tasks."""
HEADS = ("format", "scheme", "written", "cost", "of the original", "untied (calibration)", "top-1")
HEADS += ("size", "time / float32", "wrong words", "processor seconds, all recordings")
Transcribe = Callable[[Any], str]


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
    parser.add_argument("--faster-whisper", type=Path, help="a folder: its words and times as well")
    parser.add_argument("--seconds", type=float, default=0, help="join recordings to so many")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("cost: KL divergence of the logits, or relative error of the outputs\n")
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    for format_name in options.formats:
        installed = all(find_spec(package) for package in FORMATS[format_name].packages)
        for scheme in FORMATS[format_name].schemes if installed else ():
            if options.schemes and scheme not in options.schemes:
                continue
            try:
                row = measured(options, format_name, scheme)
            except EnjoyLNError as error:
                print(f"| {format_name} | {scheme} | {error} |", flush=True)
                continue
            print("| " + " | ".join(cells(row)) + " |", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def measured(options: argparse.Namespace, format_name: str, scheme: str) -> dict[str, Any]:
    """All numbers of one format and scheme."""
    images = [options.image] if options.image else []
    places = {"text": options.text, "audio": options.audio, "tokens": options.tokens}
    data = read_user_data(images=images, **places)
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        row = quantize(
            options.model,
            out,
            data,
            scheme=scheme,
            format=format_name,
            rotations=options.rotations,
            inputs=options.inputs,
            keep=options.keep,
            max_error=torch.inf,
        ).to_json()
        if options.words and format_name != OPENVINO:
            quantised = load_onnx(out, threads=1) if format_name == ONNX else whisper(out)
            row |= word_errors(
                options.model, quantised, options.audio, options.faster_whisper, options.seconds
            )
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of one row, in the order of ``HEADS``."""
    untied = {one["name"]: one["differences"] for one in row["candidates"]}.get("untied")
    cost = "error" if row["held_out"]["kl"] is None else "kl"
    top1 = row["held_out"]["top1"]
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
        _each(row.get("word_errors"), " %"),
        _each(row.get("transcription_seconds"), " s"),
    ]


def _each(numbers: Mapping[str, float] | None, unit: str) -> str:
    """``12.1 % (float32 12.5 %)``."""
    if not numbers:
        return ""
    first, *others = (f"{name} {value:.1f}{unit}" for name, value in numbers.items())
    return f"{first.removeprefix('quantised ')} ({', '.join(others)})"


def whisper(folder: str | Path) -> Any:
    """The Whisper in a directory, in float32 but for what is quantised."""
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def word_errors(
    model: str,
    quantised: Any,
    speech: Path,
    faster_whisper: Path | None = None,
    joined: float = 0,
) -> dict[str, Any]:
    """Words that Whisper gets wrong, in percent, and its processor seconds for all recordings.

    Whisper in float32 and ``quantised``, both greedy, and the model that faster-whisper loads from
    a folder, in int8. They take turns.
    """
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    processor = WhisperProcessor.from_pretrained(model)
    original, normalize = whisper(model), EnglishTextNormalizer({})
    multilingual = original.config.vocab_size != ENGLISH_ONLY
    told = {"language": "en", "task": "transcribe"} if multilingual else {}

    def generating(one: Any) -> Transcribe:
        def transcribe(sound: Any) -> str:
            features = processor(sound, sampling_rate=RATE, return_tensors="pt").input_features
            with torch.no_grad():
                tokens = one.generate(features, max_new_tokens=MOST_TOKENS, **told)
            return str(processor.tokenizer.decode(tokens[0], skip_special_tokens=True))

        return transcribe

    programs = {"quantised": generating(quantised), "float32": generating(original)}
    if faster_whisper:
        programs["faster-whisper"] = _faster_whisper(faster_whisper)
    seconds, wrong, total = dict.fromkeys(programs, 0.0), dict.fromkeys(programs, 0), 0
    for sound, text in recordings(speech, joined):
        words = normalize(text).split()
        total += len(words)
        for name, transcribe in programs.items():
            begin = time.process_time()
            said = transcribe(sound)
            seconds[name] += time.process_time() - begin
            wrong[name] += edit_distance(words, normalize(said).split())
    rates = {name: 100 * count / total for name, count in wrong.items()}
    return {"word_errors": rates, "transcription_seconds": seconds, "words": total}


def recordings(speech: Path, joined: float) -> list[tuple[Any, str]]:
    """The recordings with their texts, joined in their order to at most ``joined`` seconds."""
    from transformers.audio_utils import load_audio

    texts = json.loads((speech / "text.json").read_text())
    found: list[tuple[Any, str]] = []
    for file, text in zip(sorted(speech.glob("*.wav")), texts, strict=True):
        sound = load_audio(str(file), RATE)
        if found and len(found[-1][0]) + len(sound) <= joined * RATE:
            before, said = found.pop()
            sound, text = np.concatenate([before, sound]), f"{said} {text}"
        found.append((sound, text))
    return found


def _faster_whisper(folder: Path) -> Transcribe:
    from faster_whisper import WhisperModel

    model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)
    settings = {"beam_size": 1, "temperature": 0, "without_timestamps": True, "language": "en"}

    def transcribe(sound: Any) -> str:
        parts, _ = model.transcribe(sound, condition_on_previous_text=False, **settings)
        return " ".join(part.text for part in parts)

    return transcribe


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
