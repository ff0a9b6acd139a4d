"""Which configurations are refused before anything is computed, and which load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, dynamic_module_utils

from enjoyln_cli import analyze
from enjoyln_cli.checkpoint.config import load_config, raw_config, require_unfolded
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import AlreadyFolded, BadCheckpoint, EnjoyLNError, UnsupportedModel


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    return folder


def refused(folder: Path, words: str, kind: type[EnjoyLNError] = UnsupportedModel) -> None:
    with pytest.raises(kind, match=words) as caught:
        load_config(open_source(str(folder)))
    assert "\n" not in str(caught.value)


def test_a_known_config_loads(tmp_path: Path) -> None:
    stored = {"model_type": "gpt2", "n_layer": 3, "layer_norm_epsilon": 1e-3, "own": [1]}
    source = open_source(str(write(tmp_path, stored)))
    assert raw_config(source) == stored
    config = load_config(source)
    assert (config.model_type, config.num_hidden_layers, config.own) == ("gpt2", 3, [1])
    assert config.layer_norm_epsilon == 1e-3


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"model_type": "gpt2"', b"\xff\xfe", b"[" * 100_000, b"{'a': 1}"]
)
def test_a_config_that_is_no_json(tmp_path: Path, text: bytes) -> None:
    refused(write(tmp_path, text), "config.json is not valid JSON", BadCheckpoint)


@pytest.mark.parametrize(("content", "kind"), [([], "list"), ("gpt2", "str"), (None, "NoneType")])
def test_a_config_that_is_no_object(tmp_path: Path, content: Any, kind: str) -> None:
    refused(write(tmp_path, content), f"holds a JSON {kind}, not an object", BadCheckpoint)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (None, "has no config.json; pass the directory that save_pretrained wrote"),
        ("adapter_config.json", "holds a PEFT adapter .*; merge it into its base model first"),
        ("model_index.json", "holds a diffusers pipeline"),
        ("0_Transformer/config.json", "there is one in its folder 0_Transformer"),
    ],
)
def test_no_config(tmp_path: Path, file: str | None, words: str) -> None:
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    refused(tmp_path, words)


@pytest.mark.parametrize("found", [{}, {"model_type": ""}, {"model_type": 7}])
def test_no_model_type(tmp_path: Path, found: Any) -> None:
    refused(write(tmp_path, found), "names no model_type; add it")


def test_an_unknown_model_type_gets_a_suggestion(tmp_path: Path) -> None:
    refused(write(tmp_path, {"model_type": "gtp2"}), "no model type 'gtp2'; did you mean .*gpt2")
    refused(write(tmp_path, {"model_type": "qqqqqq"}), "no model type 'qqqqqq'; if it is new")


def test_values_that_transformers_rejects(tmp_path: Path) -> None:
    refused(
        write(tmp_path, {"model_type": "gpt2", "n_layer": "many"}),
        "transformers rejects the config.json of .*n_layer",
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantised \(gptq\), .*; convert the original checkpoint, then quantise the result",
        ),
        (
            {"quantization_config": {"load_in_8bit": True}, "enjoyln": {}},
            r"quantised \(so its config says\).*; use the converted checkpoint that it was",
        ),
        ({"compression_config": {"quant_method": "sparse"}}, r"quantised \(sparse\)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"quantised \(awq\)"),
    ],
)
def test_quantised_models_are_refused_with_what_to_use(
    tmp_path: Path, config: Any, words: str
) -> None:
    refused(write(tmp_path, {"model_type": "gpt2", **config}), words)


def test_a_config_that_mentions_no_quantisation_is_not_refused(tmp_path: Path) -> None:
    stored = {"model_type": "gpt2", "quantization_config": None, "task_specific_params": {"a": 1}}
    assert load_config(open_source(str(write(tmp_path, stored)))).model_type == "gpt2"


CODE = """
from pathlib import Path
from transformers import PretrainedConfig

Path(r"{mark}").touch()


class OwnConfig(PretrainedConfig):
    model_type = "entirely-own"
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies custom code into a folder of the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.usefixtures("modules")
def test_code_runs_only_when_allowed(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    stored = {"model_type": "entirely-own", "auto_map": {"AutoConfig": "configuration.OwnConfig"}}
    folder = write(tmp_path / "model", stored)
    (folder / "configuration.py").write_text(CODE.format(mark=mark))
    refused(folder, r"custom code \(configuration.OwnConfig\).*--trust-remote-code")
    assert not mark.exists()
    config = load_config(open_source(str(folder)), trust_remote_code=True)
    assert type(config).__name__ == "OwnConfig"
    assert mark.exists()


@pytest.mark.usefixtures("modules")
def test_code_that_fails_is_an_error_of_one_line(tmp_path: Path) -> None:
    stored = {"model_type": "own", "auto_map": {"AutoConfig": "configuration.OwnConfig"}}
    source = open_source(str(write(tmp_path / "broken", stored)))
    with pytest.raises(UnsupportedModel, match="transformers rejects the config.json"):
        load_config(source, trust_remote_code=True)


def test_known_types_with_code_of_their_own_need_permission_too(tmp_path: Path) -> None:
    stored = {"model_type": "gpt2", "auto_map": {"AutoModel": "modeling.Own"}}
    refused(write(tmp_path, stored), r"custom code \(modeling.Own\)")


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("configuration_files", ["config.4.0.0.json"]),
        ("attribute_map", {"auto_map": "zzz"}),
    ],
)
def test_code_does_not_come_in_by_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    """Not by a key that redirects transformers to another file, or that renames a key."""
    mark = tmp_path / "ran"
    code = {"AutoModel": "modeling.Own", "AutoModelForCausalLM": "modeling.Own"}
    folder = write(tmp_path / "model", {"model_type": "gpt2", key: value, "zzz": code})
    hidden = {"model_type": "gpt2", "auto_map": code}
    (folder / "config.4.0.0.json").write_text(json.dumps(hidden))
    (folder / "modeling.py").write_text(CODE.format(mark=mark))
    with pytest.raises(BadCheckpoint, match=f"has {key}, .* remove it"):
        load_config(open_source(str(folder)))
    monkeypatch.setattr("enjoyln_cli.checkpoint.config._REDIRECTING_KEYS", set())
    with pytest.raises(UnsupportedModel, match=r"custom code \(modeling.Own\)"):
        load_config(open_source(str(folder)))
    assert not mark.exists()


def test_code_of_a_config_in_memory_needs_permission_too() -> None:
    config = GPT2Config(auto_map={"AutoModel": "modeling.Own"})
    with pytest.raises(UnsupportedModel, match=r"this GPT2Config comes with custom code"):
        analyze(config)


def test_a_folded_model_is_refused(tmp_path: Path) -> None:
    plain = {"model_type": "gpt2"}
    folded = {**plain, "enjoyln": {"version": 1, "source": "gpt2"}}
    require_unfolded(plain)
    require_unfolded(load_config(open_source(str(write(tmp_path, plain)))))
    with pytest.raises(AlreadyFolded, match=r"fold its source \(gpt2\) instead"):
        require_unfolded(folded)
    with pytest.raises(AlreadyFolded, match=r"fold its source \(gpt2\) instead"):
        require_unfolded(load_config(open_source(str(write(tmp_path, folded)))))
    with pytest.raises(AlreadyFolded, match="unknown"):
        require_unfolded({"enjoyln": None})
