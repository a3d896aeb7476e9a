"""IA3 whose feedforward modules, or targets, are patterns: PEFT wants a subset only where both are lists."""

from pathlib import Path

import peft
import pytest

from tests.adapters import Configure, off, run, saved, sequence_of
from tests.inproc.test_serving_adapters import AS_ALONE, Serving, llama, logits, of, prompt

LISTED = ["k_proj", "down_proj"]
PATTERN = r".*(k|down)_proj"
SAVED = {"modules_to_save": ["lm_head"]}  # which has PEFT compute it
KINDS: dict[str, Configure] = {
    "pattern of feedforward modules": of(
        peft.IA3Config, target_modules=LISTED, feedforward_modules=r".*down_proj", **SAVED
    ),
    "one layer": of(peft.IA3Config, target_modules=LISTED, feedforward_modules=r".*1\.mlp\.down_proj", **SAVED),
    "pattern of targets": of(peft.IA3Config, target_modules=PATTERN, feedforward_modules=["down_proj"], **SAVED),
    "wider pattern": of(peft.IA3Config, target_modules=PATTERN, feedforward_modules=r".*(up|down)_proj", **SAVED),
    "end of a name": of(peft.IA3Config, target_modules=PATTERN, feedforward_modules=["n_proj"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_it_is_served_as_peft_computes_it(name: str, tmp_path: Path) -> None:
    serving = Serving(llama())
    folder, alone = saved(serving.base, KINDS[name](), tmp_path)
    adapter = serving.library.add("a", folder)
    assert serving.residency.fetch(adapter)
    tokens = prompt(1)
    found = run(serving.served, [(sequence_of(tokens, adapter), len(tokens))])[0]
    assert off(found, logits(alone, tokens)[-1]) < AS_ALONE
