"""Checkpoints with quantised weights: what is not read is refused by name, before a weight is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from symbiosis.cli.model_fit import room_for
from symbiosis.errors import ConfigError
from symbiosis.executor.model.checkpoint import DEMO_MODEL
from symbiosis.executor.model.load import load_model
from symbiosis.executor.options import Options
from symbiosis.executor.preflight import check

UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        "quantised by torchao .Int4WeightOnlyConfig.",
    ),
    "unknown": ({"quant_method": "mallory"}, "quantised by mallory.*serve the checkpoint that it was made of"),
    "nameless": ({"bits": 4}, "quantised by an unknown method"),
}


def quantised(tmp_path: Path, told: dict[str, Any], key: str = "quantization_config") -> Path:
    """Return a copy of the demo model whose configuration says that its weights are quantised."""
    folder = tmp_path / "quantised"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: told}))
    return folder


@pytest.mark.parametrize("name", UNREAD)
def test_a_format_that_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    told, message = UNREAD[name]
    folder = quantised(tmp_path, told)
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ConfigError, match=message):
        check(Options(model=str(folder)))
    with pytest.raises(ConfigError, match=message):
        load_model(str(folder))
    assert room_for(str(folder)).state == "FAIL"


def test_a_part_of_a_model_may_be_quantised(tmp_path: Path) -> None:
    folder = quantised(tmp_path, {"quantization_config": {"quant_method": "mallory"}}, key="text_config")
    with pytest.raises(ConfigError, match="quantised by mallory"):
        check(Options(model=str(folder)))


def test_a_model_that_is_quantised_here_is_refused_by_name() -> None:
    import symbiosis

    model: Any = load_model("demo")
    model.is_quantized, model.config.quantization_config = True, {"quant_method": "mallory"}
    with pytest.raises(ConfigError, match="LlamaForCausalLM.*quantised by mallory"):
        symbiosis.Executor(model)
