"""What an adapter's configuration may not do to the server that reads it: patterns that take for ever, sizes that nobody means."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from peft import HRAConfig, LoraConfig, get_peft_model

import symbiosis
from symbiosis.errors import AdapterError
from symbiosis.serving.lora import peft_layers
from symbiosis.serving.lora.config_patterns import without_patterns
from symbiosis.serving.lora.registry import AdapterRegistry
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.model_runner import ModelRunner
from tests.conftest import tiny_llama


@pytest.fixture(scope="module")
def served() -> ModelRunner:
    return make_ready(tiny_llama(), 1 << 22)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "a"
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(folder)
    return folder


def test_a_pattern_that_people_write_is_taken(served: ModelRunner, good: Path, tmp_path: Path) -> None:
    library = AdapterRegistry(served)
    assert library.add("good", changed(good, tmp_path, {"target_modules": r".*\.(q|v)_proj"})).rank == 4


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": r".*\.q_proj"},
        {"exclude_modules": ["v_proj"]},
        {"exclude_modules": r".*\.1\..*"},
        {"layers_to_transform": [0]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
    ],
)
def test_weights_that_peft_would_leave_out_are_not_served(
    served: ModelRunner, good: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(AdapterError, match="does not choose"):
        AdapterRegistry(served).add("more", changed(good, tmp_path, change))


@pytest.mark.parametrize(
    "change", [{"target_modules": "all-linear"}, {"layers_to_transform": [0, 1]}, {"exclude_modules": ["k_proj"]}]
)
def test_what_the_configuration_chooses_is(
    served: ModelRunner, good: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    assert AdapterRegistry(served).add("all", changed(good, tmp_path, change)).rank == 4


def changed(good: Path, tmp_path: Path, change: dict[str, Any]) -> Path:
    folder = Path(shutil.copytree(good, tmp_path / "changed"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return folder


NEVER_ENDS = r"\w+"
for _ in range(30):
    NEVER_ENDS = f"(?:{NEVER_ENDS})+"
LOHA = {"peft_type": "LOHA", "r": 4, "alpha": 4}


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"^model\.layers\.[01]\.self_attn\.q_proj": 4}},
        {"rank_pattern": {rf"^model\.layers\.{i}\.[a-z_]+\.{j}_proj": 4 for i in range(40) for j in "qkvo"}},
        {"megatron_core": "os", "megatron_config": {"a": 1}, "auto_mapping": {"parent_library": "a/b"}},
    ],
)
def test_what_people_write_into_configurations_is_taken(
    served: ModelRunner, good: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    assert AdapterRegistry(served).add("good", changed(good, tmp_path, change)).rank == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target_modules": "(([a-z0-9_.])+)+!"}, "takes too long"),
        # what matches each name at once, and not the larger expressions that PEFT makes of it
        ({"layers_to_transform": [0], "layers_pattern": [f"(?=self_attn){NEVER_ENDS}(?:\\..*)?"]}, "only names"),
        ({"layers_to_transform": [0], "layers_pattern": f"(?=self_attn){NEVER_ENDS}(?:\\..*)?"}, "only names"),
        ({"layers_to_transform": [0], "layers_pattern": [["]" + NEVER_ENDS]]}, "only names"),
        ({"modules_to_save": [f"{NEVER_ENDS}!"]}, "only names"),
        ({"modules_to_save": {f"{NEVER_ENDS}!": 1}}, "only names"),
        ({"modules_to_save": f"{NEVER_ENDS}!"}, "only names"),
        ({**LOHA, "rank_pattern": {f"(?=q_proj){NEVER_ENDS}!": 4}}, "takes too long"),
        ({"peft_type": "FOURIERFT", "n_frequency_pattern": {f"(?=q_proj){NEVER_ENDS}!": 4}}, "takes too long"),
        ({"peft_type": "C3A", "block_size_pattern": {f"{NEVER_ENDS}!": 4}}, "takes too long"),
        ({"peft_type": "NEW", "some_pattern": [f"{NEVER_ENDS}!"]}, "is not a table"),
        ({"target_modules": ".*nowhere"}, "matches no layer"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "needs a list"),
        ({"rank_pattern": {"(m|m)*(o|o)*((d|.)+)+!": 4}}, "takes too long"),
        ({"target_modules": "(("}, "is not a regular expression"),
        ({"rank_pattern": [1]}, "is not a table"),
        ({"peft_type": "LOHA", "r": 20_000}, "rank is 20000"),
        ({"peft_type": "VBLORA", "num_vectors": 1000, "vector_length": 1000}, "larger than its file"),
        ({"modules_to_save": ["zzz"], "r": 20_000}, "rank is 20000"),
        ({**LOHA, "rank_pattern": {"q_proj": 20_000}}, "rank is 20000"),
        ({"modules_to_save": ["zzz"], "rank_pattern": {"q_proj": 20_000}}, "rank is 20000"),
        ({"peft_type": "OFT", "r": 0, "num_cayley_neumann_terms": 2000}, "num_cayley_neumann_terms is 2000"),
        ({"peft_type": "PEANUT", "depth": 10_000}, "depth is 10000"),
        ({"lora_alpha": float("inf")}, "lora_alpha.* is inf"),
        ({"lora_alpha": 1e38}, "lora_alpha.* is 1e"),
        ({"layers_to_transform": "x"}, "PEFT does not take"),
    ],
)
def test_a_configuration_that_would_take_the_server_is_refused(
    served: ModelRunner, good: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    folder = changed(good, tmp_path, change)
    with pytest.raises(AdapterError, match=told):
        AdapterRegistry(served).add("bad", folder)


def test_an_adapter_whose_layers_take_long_is_refused(
    served: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps would hold up everybody else. (HRA's own first weights come in equal pairs, of which Gram and Schmidt make 0 / 0.)"""
    slow = HRAConfig(
        r=32, apply_GS=True, init_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    get_peft_model(tiny_llama(), slow).save_pretrained(tmp_path / "slow")
    assert AdapterRegistry(served).add("slow", tmp_path / "slow").layers
    monkeypatch.setattr(peft_layers, "LONGEST_S", 1e-4)
    with pytest.raises(AdapterError, match="take too long"):
        AdapterRegistry(served).add("slow", tmp_path / "slow")


def test_who_asks_for_what_is_loaded_does_not_wait_for_what_is_read(
    served: ModelRunner, good: Path, tmp_path: Path
) -> None:
    changed(good, tmp_path, {"target_modules": "(([a-z0-9_.])+)+!"}).rename(tmp_path / "slow")
    shutil.copytree(good, tmp_path / "mine")
    library = AdapterRegistry(served, tmp_path)
    library.get("mine")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(library.get, "slow")
        while "slow" not in library._turns._locks:
            assert not slow.done()
        assert library.get("mine").name == "mine" and library.names() == ["mine", "slow"] and len(library.loaded()) == 1
        assert "slow" in library._turns._locks
        with pytest.raises(AdapterError, match="takes too long"):
            slow.result()


def test_a_table_has_no_names_but_those_of_modules() -> None:
    """PEFT compares each of them with every layer, and has none left to compare with."""
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    table = {"q_proj": 4, "layers.1.self_attn.q_proj": 8, "_proj": 9, "model.layers.0": 2} | {
        f"x{n}": 1 for n in range(60_000)
    }
    got = without_patterns({"peft_type": "LOHA", "rank_pattern": table, "alpha_pattern": {}}, names)
    assert list(got["rank_pattern"]) == ["q_proj", "layers.1.self_attn.q_proj"] and got["alpha_pattern"] == {}


def test_a_kind_that_peft_does_not_know_is_refused_by_name(served: ModelRunner, good: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"NEWEST cannot be served: PEFT \d.* has no such kind.*upgrade peft"):
        AdapterRegistry(served).add("new", changed(good, tmp_path, {"peft_type": "NEWEST"}))


@pytest.mark.parametrize("kind", ["CARTRIDGE", "CPT"])
def test_what_acts_elsewhere_is_refused_before_anything_is_made_of_it(
    served: ModelRunner, good: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_layers, "_inject", lambda *_: pytest.fail("it was made"))
    change = {"peft_type": kind, "num_virtual_tokens": 1_000_000}
    with pytest.raises(AdapterError, match="cannot be served"):
        AdapterRegistry(served).add("huge", changed(good, tmp_path, change))


def test_a_list_is_no_longer_than_the_file_has_numbers(served: ModelRunner, good: Path, tmp_path: Path) -> None:
    change = {
        "peft_type": "TRAINABLE_TOKENS",
        "token_indices": list(range(60_000)),
        "target_modules": ["embed_tokens"],
    }
    with pytest.raises(AdapterError, match="token_indices has 60000 items, more than its file has numbers"):
        AdapterRegistry(served).add("long", changed(good, tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [{"target_modules": "(([a-z0-9_.])+)+!"}, {"rank_pattern": {"(m|m)*(o|o)*((d|.)+)+!": 4}}, {"modules_to_save": ["(x|x)*"]}],
)  # fmt: skip
def test_what_never_ends_begins_no_run(good: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    """Of whoever trains, as of whoever is served: given, or read from a folder."""
    given = {"r": 2, "target_modules": ["q_proj"], **change}
    with symbiosis.training.Engine(tiny_llama()) as engine:
        with pytest.raises(AdapterError, match="takes too long|only names of modules"):
            engine.create(LoraConfig(**given))
        with pytest.raises(AdapterError, match="takes too long|only names of modules"):
            engine.load(changed(good, tmp_path, change))
        run = engine.create(LoraConfig(r=2, target_modules=r".*\.(q|v)_proj"))
        run.save(tmp_path / "kept")
        assert (
            json.loads((tmp_path / "kept" / "adapter_config.json").read_text())["target_modules"] == r".*\.(q|v)_proj"
        )
