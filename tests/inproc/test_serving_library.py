"""Adapters are refused when they are loaded, with what is wrong; versions do not change; folders are looked into when asked."""

import json
import os
import shutil
import struct
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoHaConfig, LoraConfig, TaskType
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.errors import AdapterError, ConfigError, UnknownAdapter
from symbiosis.serving import Engine
from symbiosis.serving.lora import adapter_files
from symbiosis.serving.lora import registry as library_module
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.adapter_files import check_finite
from symbiosis.serving.lora.adapter_folder import Folder, State
from symbiosis.serving.lora.adapter_kinds import LoadedAdapter
from symbiosis.serving.lora.gpu_staging import Fetcher
from symbiosis.serving.lora.refusals import MANY, REFUSED_S
from symbiosis.serving.lora.registry import FIXED_BYTES, AdapterRegistry
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.model_runner import ModelRunner
from symbiosis.serving.runner.shared_inputs import find_groups
from tests.adapters import off, run, saved, sequence_of

MEMORY = 1 << 22
PROMPT = [5, 6, 7, 8, 9]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": TaskType.CAUSAL_LM, "r": 4, "target_modules": ["q_proj", "v_proj"], **options})


@pytest.fixture(scope="module")
def served() -> ModelRunner:
    return make_ready(llama(), MEMORY)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama(), lora(), tmp_path_factory.mktemp("good") / "a")[0]


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "adapters" / "mine"))


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = load_file(folder / "adapter_model.safetensors")
        found = {name: tensor.clone() for name, tensor in found.items()}
        change(found)
        save_file(found, folder / "adapter_model.safetensors")

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def cut_off(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def linked(folder: Path) -> None:
    elsewhere = folder.parent.parent / "elsewhere"
    (folder / "adapter_model.safetensors").rename(elsewhere)
    (folder / "adapter_model.safetensors").symlink_to(elsewhere)


Q = "base_model.model.model.layers.0.self_attn.q_proj."
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "a pickle": (pickled, "a pickle, which could run anything: save it again"),
    "cut off": (cut_off, "cut off"),
    "not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "is not JSON"),
    "of something else": (lambda f: (f / "adapter_config.json").write_text("[1]"), "has no peft_type"),
    "of an unknown kind": (config(peft_type="MAGIC"), "^adapter 'mine': MAGIC cannot be served: PEFT .* has no such kind"),
    "linked": (linked, "a link to a file outside of its folder"),
    "not a number": (tensors(lambda t: t[Q + "lora_A.weight"].fill_(torch.nan)), "infinite or not numbers"),
    "half": (tensors(lambda t: t.pop(Q + "lora_A.weight")), "only one of lora_A and lora_B"),
    "a layer lost": (
        tensors(lambda t: [t.pop(Q + f"lora_{which}.weight") for which in "AB"]),
        "no weights for model.layers.0.self_attn.q_proj",
    ),
    "another base's size": (
        tensors(lambda t: t.update({Q + "lora_A.weight": torch.ones(4, 65)})),
        "4 x 65, and this base needs 4 x 64",
    ),
    "another base's layers": (
        tensors(lambda t: t.update({Q.replace("layers.0", "layers.7") + "lora_A.weight": torch.ones(4, 64)})),
        "model.layers.7.self_attn.q_proj, which LlamaForCausalLM does not have",
    ),
    "unknown targets": (config(target_modules=["q_proj", "v_proj", "query"]), "target module query is nowhere"),
    "another rank than it says": (config(r=5), "are of rank 4, and its adapter_config.json says 5: correct r"),
    "a base that it changes": (config(init_lora_weights="pissa"), "path_initial_model_for_weight_conversion"),
    "tokens that switch it on": (config(alora_invocation_tokens=[5]), "from certain tokens of a prompt on"),
    "other layers": (config(layer_replication=[[0, 2], [1, 2]]), "changes the model's layers"),
    "a mixture": (config(peft_type="XLORA"), "cannot be served together with others: it weighs several adapters"),
    "a number that is a text": (config(lora_alpha="x"), "says what PEFT does not write there .*ValueError: could not"),
    "a list that is a number": (config(target_modules=5), "says what PEFT does not write there .*TypeError"),
    "a number that is a list": (config(lora_alpha=[1]), "says what PEFT does not write there"),
    "a foreign tensor": (
        tensors(lambda t: t.update({Q + "lora_C.weight": torch.ones(1)})), "nothing of this base's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for at in (0, 31, 998):
            values = torch.randn(999)
            check_finite([("good", values.to(dtype)), ("empty", values[:0].to(dtype))], "")
            values[at] = bad
            with pytest.raises(AdapterError, match="bad has values that are infinite or not numbers"):
                check_finite([("bad", values.to(dtype)), ("bad", torch.ones(3))], "why")


@pytest.mark.parametrize(
    "change",
    [config(lora_alpha=1e6), tensors(lambda t: t.update({Q + "lora_B.weight": torch.full((64, 4), 3e38)}))],
    ids=["scaled", "large"],
)
def test_values_that_are_not_finite_once_scaled(change: Callable[[Path], None], folder: Path) -> None:
    served = make_ready(llama().to(torch.float16), MEMORY)
    change(folder)
    tensors(
        lambda t: t.update(
            {Q + "lora_A.weight": torch.full((4, 64), 1.0), Q + "lora_B.weight": t[Q + "lora_B.weight"] + 1}
        )
    )(folder)
    with pytest.raises(AdapterError, match="infinite or not numbers: scaled, they are beyond what torch.float16 holds"):
        AdapterRegistry(served).add("mine", folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_is_said_when_it_is_loaded(name: str, served: ModelRunner, folder: Path) -> None:
    damage, message = DAMAGES[name]
    damage(folder)
    library = AdapterRegistry(served)
    with pytest.raises(AdapterError, match=message) as refusal:
        library.add("mine", folder)
    assert str(refusal.value).startswith("adapter 'mine': ") and "\n" not in str(refusal.value)
    with pytest.raises(UnknownAdapter):
        library.get("mine")


def test_a_tensor_of_another_shape_is_said_to_be_so_where_peft_computes(served: ModelRunner, tmp_path: Path) -> None:
    mine, _ = saved(llama(), LoHaConfig(r=4, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM), tmp_path / "a")
    tensors(lambda t: t.update({Q + "hada_w1_a": torch.ones(3, 5)}))(mine)
    with pytest.raises(
        AdapterError, match="^adapter 'mine': [a-z0-9_.]*hada_w1_a is 3 x 5, and this base needs 64 x 4"
    ):
        AdapterRegistry(served).add("mine", mine)


def test_a_file_may_be_as_large_as_the_memory_or_the_option_allows(
    served: ModelRunner, good: Path, folder: Path
) -> None:
    size = (good / "adapter_model.safetensors").stat().st_size
    too_little: dict[str, Any] = {"most_file_bytes": size - 1}
    enough: list[dict[str, Any]] = [{"most_file_bytes": size}, {**too_little, "memory": size + FIXED_BYTES}]
    for limits in enough:
        assert AdapterRegistry(served, folder.parent, **limits).get("mine").name == "mine"
        assert AdapterRegistry(served, **limits).add("other", good).name == "other"
    with pytest.raises(
        AdapterError, match=f"has {size} bytes, and may have {size - 1}: start the server with more --ada"
    ):
        AdapterRegistry(served, **too_little).add("other", good)
    library = AdapterRegistry(served, folder.parent, **too_little)
    with pytest.raises(AdapterError, match="--max-adapter-bytes"):
        library.get("mine")
    assert list(library.look(lambda: False).problems) == ["mine"]


def test_an_engine_reads_files_as_large_as_it_is_told(good: Path) -> None:
    size = (good / "adapter_model.safetensors").stat().st_size
    for most, is_good in ((size, True), (size - 1, False)):
        says = "all may have" if is_good else f"may have {size - 1}: start"
        with (
            Engine(llama(), memory=MEMORY, adapter_memory=size - 1, max_adapter_bytes=most) as engine,
            pytest.raises(AdapterError, match=says),
        ):
            engine.add("mine", good)


def test_ranks_above_the_limit(served: ModelRunner, good: Path) -> None:
    with pytest.raises(AdapterError, match="rank is 4 .*, and this server takes 3 at most"):
        AdapterRegistry(served, max_rank=3).add("mine", good)


def test_more_than_the_memory_holds(tmp_path: Path) -> None:
    small, (large, _) = make_ready(llama(), 24 << 10), saved(llama(), lora(r=64), tmp_path)
    with pytest.raises(AdapterError, match=r"pages of \d+ bytes, more than half .* give the server more memory"):
        AdapterRegistry(small).add("mine", large)


@pytest.mark.parametrize(
    "name", ["", ".hidden", "../mine", "a/b/c", "a b", "a\x1b[2J", "x" * 200, "/etc", "a/../b", "ä"]
)
def test_names_with_odd_characters(name: str, served: ModelRunner, good: Path, folder: Path) -> None:
    with pytest.raises(AdapterError, match="cannot be named") as refusal:
        AdapterRegistry(served).add(name, good)
    assert str(refusal.value).isprintable()
    with pytest.raises(UnknownAdapter):
        AdapterRegistry(served, folder.parent).get(name)


def test_no_adapter_has_the_bases_name(served: ModelRunner, good: Path, folder: Path) -> None:
    shutil.copytree(good, folder.parent / "base")
    library = AdapterRegistry(served, folder.parent, base="base")
    with pytest.raises(AdapterError, match="cannot be named 'base', which is the base's name"):
        library.add("base", good)
    for ask in (library.get, library.check):
        with pytest.raises(AdapterError, match="adapter 'base': an adapter cannot be named 'base'"):
            ask("base")
    assert library.names() == ["mine"] and not library.has("base")
    assert list(library.look(lambda: False).problems) == ["base"]


def test_publish_does_not_take_the_bases_name() -> None:
    model = peft.get_peft_model(llama(), lora())
    with Engine(llama(), memory=MEMORY, name="base") as engine:
        with pytest.raises(AdapterError, match="the base's name"):
            symbiosis.publish(model, "base", engine)
        symbiosis.publish(model, "other", engine)
        assert engine.adapter_names() == ["other"]


def test_a_name_that_leads_out_of_the_folder(served: ModelRunner, good: Path, folder: Path) -> None:
    (folder.parent / "out").symlink_to(good)
    library = AdapterRegistry(served, folder.parent)
    assert library.names() == ["mine"]
    with pytest.raises(
        AdapterError,
        match="adapter 'out': it is a link to a folder outside of that of --adapters: move it there, or name it: --adapters NAME=PATH",
    ):
        library.get("out")


def test_another_load_of_a_name_is_another_version(served: ModelRunner, good: Path) -> None:
    library = AdapterRegistry(served)
    replaced = []
    library.on_replaced = replaced.append
    first = library.add("mine", good)
    second = library.add("mine", good)
    assert first.version != second.version and library.get("mine") is second and replaced == [first]
    library.remove("mine")
    assert library.names() == [] and replaced == [first, second]
    with pytest.raises(UnknownAdapter, match="there are none"):
        library.remove("mine")


def test_a_folder_is_looked_into_when_asked(served: ModelRunner, good: Path, folder: Path) -> None:
    library = AdapterRegistry(served, folder.parent)
    assert library.names() == ["mine"] and library.loaded() == []
    first = library.get("mine")
    assert library.get("mine") is first and library.loaded() == [first]
    shutil.copytree(good, folder.parent / "later")
    assert library.get("later").name == "later" and library.names() == ["later", "mine"]
    state = (folder / "adapter_config.json").stat()
    os.utime(folder / "adapter_config.json", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert library.get("mine").version != first.version
    shutil.rmtree(folder)
    with pytest.raises(UnknownAdapter, match="there are later"):
        library.get("mine")


def test_one_that_was_removed_comes_back_when_its_folder_changes(served: ModelRunner, folder: Path) -> None:
    library = AdapterRegistry(served, folder.parent)
    library.remove("mine")
    assert library.names() == []
    with pytest.raises(UnknownAdapter):
        library.get("mine")
    config(lora_alpha=9)(folder)
    assert library.get("mine").name == "mine" and library.names() == ["mine"]


def test_one_whose_folder_is_gone_leaves_the_memory_when_it_is_removed(served: ModelRunner, folder: Path) -> None:
    library, replaced = AdapterRegistry(served, folder.parent), []
    library.on_replaced = replaced.append
    mine = library.get("mine")
    shutil.rmtree(folder)
    for _ in range(2):
        with pytest.raises(UnknownAdapter, match="there are none"):
            library.remove("mine")
        assert replaced == [mine] and library.loaded() == []


def test_asking_for_one_of_thousands_scans_no_folder(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = AdapterRegistry(served, folder.parent)
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("the folder was scanned"))
    library.get("mine")
    library.get("mine")


def test_thousands_are_listed_once_for_all_who_ask(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2000):
        copy = folder.parent / f"a{number}"
        copy.mkdir()
        for file in folder.iterdir():
            os.link(file, copy / file.name)
    library = AdapterRegistry(served, folder.parent)
    scans, scandir = [], os.scandir

    def counted(path: Path) -> Any:
        scans.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    begun = time.monotonic()
    for _ in range(50):
        assert len(library.names()) == 2001
        with pytest.raises(UnknownAdapter, match="and 1991 more"):
            library.get("unknown")
    assert len(scans) <= 2 + time.monotonic() - begun


class CountedStates(UserDict[str, State]):
    """Counts how many of the names somebody looks at."""

    looked_at = 0

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.looked_at += 1
            yield name


def test_an_unknown_name_makes_no_list_of_thousands(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, (state,) = AdapterRegistry(served, folder.parent), Folder(folder.parent).states().values()
    states = CountedStates({"mine": state, **{f"n{number:04}": state for number in range(5000)}})
    monkeypatch.setattr(Folder, "states", lambda self: states)
    library.add("added", folder)
    with pytest.raises(UnknownAdapter, match="there are added, mine, n0000, n0001, .* n0007 and 4992 more"):
        library.get("unknown")
    assert states.looked_at < 100
    assert library.names() == ["added", *states]


def test_a_folder_that_takes_long_to_list_is_listed_seldom(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, lists = [100.0], []

    def slow(self: Folder, path: Path, made: Any = Folder._list) -> Any:
        lists.append(path)
        now[0] += 0.5
        return made(self, path)

    monkeypatch.setattr(Folder, "_list", slow)
    monkeypatch.setattr("symbiosis.serving.lora.adapter_folder.time.monotonic", lambda: now[0])
    adapters = Folder(folder.parent)
    for _ in range(100):
        assert list(adapters.states()) == ["mine"]
        now[0] += 0.1
    assert len(lists) <= 3
    copies(folder, "later")
    assert list(adapters.states()) == ["later", "mine"], "what comes is seen at once"


def copies(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(folder, folder.parent / name)


def test_what_lies_in_the_folder_is_let_go_for_others_and_read_again(served: ModelRunner, folder: Path) -> None:
    copies(folder, "b", "c")
    size = AdapterRegistry(served, folder.parent).get("mine").bytes + FIXED_BYTES
    library = AdapterRegistry(served, folder.parent, memory=2 * size)
    mine, b = library.get("mine"), library.get("b")
    assert library.get("mine") is mine
    library.get("c")
    assert [each.name for each in library.loaded()] == ["mine", "c"] and library.bytes == 2 * size
    assert library.names() == ["b", "c", "mine"]
    again = library.get("b")
    assert again is not b and again.version == b.version, "what was made by it is still right"
    config(lora_alpha=9)(folder)
    library.get("c")
    assert library.get("mine").version != mine.version


@pytest.fixture
def packs() -> ModelRunner:
    """A model with what packs adapters for a GPU."""
    model, served = llama(), make_ready(llama(), MEMORY)
    served.fetcher = Fetcher(served.arena, find_groups(model, lambda: model(input_ids=torch.tensor([PROMPT])), None))
    return served


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [4, 11])
def test_only_numbers_are_read_again_into_pages(
    packs: ModelRunner, folder: Path, alpha: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    config(lora_alpha=alpha)(folder)
    copies(folder, "b")
    with monkeypatch.context() as patch:
        patch.setattr("symbiosis.kernels.file_rows.can_read", lambda *_: False)
        by_torch = AdapterRegistry(packs).add("mine", folder).packed
    library = AdapterRegistry(packs, folder.parent, memory=AdapterRegistry(packs).add("b", folder).bytes + FIXED_BYTES)
    first = library.get("mine")
    library.get("b")
    with monkeypatch.context() as patch:
        patch.setattr("symbiosis.serving.lora.registry.read_adapter", None)
        again = library.get("mine")
    assert again.version == first.version and again.parts.keys() == first.parts.keys()
    for each in by_torch.layout.runs:
        at = each.page, slice(each.offset, each.offset + each.rows * each.width)
        for packed in (first.packed, again.packed):
            assert torch.equal(packed.pages[at], by_torch.pages[at])


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(b"short"), lambda file: file.touch(), lambda file: file.unlink()]
)
def test_an_adapter_that_changes_while_it_is_read_again_is_another(
    packs: ModelRunner, folder: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(folder, "b")
    library = AdapterRegistry(packs, folder.parent, memory=AdapterRegistry(packs).add("b", folder).bytes + FIXED_BYTES)
    version, file = library.get("mine").version, folder / "adapter_model.safetensors"
    library.get("b")
    whole, read_again = file.read_bytes(), packs.fetcher.read_again

    def damaged(*args: Any) -> Any:
        damage(file)
        try:
            return read_again(*args)
        finally:
            file.write_bytes(whole)

    monkeypatch.setattr(packs.fetcher, "read_again", damaged)
    assert library.get("mine").version != version


def test_numbers_are_looked_at_again_only_if_the_files_changed(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    monkeypatch.setattr("symbiosis.serving.lora.loader.check_finite", lambda values, why: looked.append(why))
    copies(folder, "b")
    library = AdapterRegistry(
        served, folder.parent, memory=AdapterRegistry(served, folder.parent).get("mine").bytes + FIXED_BYTES
    )
    version = library.get("mine").version
    assert looked
    library.get("b")  # "mine" is let go for it
    looked.clear()
    assert library.get("mine").version == version and not looked
    library.get("b")
    (folder / "adapter_model.safetensors").touch()
    assert library.get("mine").version != version and looked


def slow_to_read(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let the files of an adapter be read no further until the second event is set. The first one tells that somebody reads them."""
    is_reading, may_go_on, read = threading.Event(), threading.Event(), adapter_files._read

    def slow(file: Path, most: int) -> memoryview:
        if file.parent.name == name:
            is_reading.set()
            assert may_go_on.wait(20)
        return read(file, most)

    monkeypatch.setattr(adapter_files, "_read", slow)
    return is_reading, may_go_on


def test_an_adapter_that_takes_long_to_read_holds_up_no_other(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(folder, "other")
    is_reading, may_go_on = slow_to_read("mine", monkeypatch)
    library = AdapterRegistry(served, folder.parent)
    with ThreadPoolExecutor(2) as pool:
        mine = [pool.submit(library.get, "mine") for _ in range(2)]
        assert is_reading.wait(20)
        try:
            assert library.get("other").name == "other" and not any(each.done() for each in mine)
            assert library.has("other") and not library.has("mine")
        finally:
            may_go_on.set()
        assert mine[0].result(20) is mine[1].result(20), "and it is read once"
    assert library.has("mine")


def test_what_is_read_again_because_it_has_changed_is_not_there(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for it wait where those for others do not."""
    library = AdapterRegistry(served, folder.parent)
    library.get("mine")
    os.utime(folder / "adapter_model.safetensors")
    is_reading, may_go_on = slow_to_read("mine", monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(library.get, "mine")
        assert is_reading.wait(20)
        there = library.has("mine")
        may_go_on.set()
        assert mine.result(20).version and not there and library.has("mine")


def test_a_defect_in_one_ends_no_look_at_the_others(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies(folder, "a", "z")
    read = library_module.read_adapter

    def broken(path: Path, *rest: Any) -> Any:
        if path.name == "a":
            raise RuntimeError("Stride calculation overflowed")
        return read(path, *rest)

    monkeypatch.setattr(library_module, "read_adapter", broken)
    library = AdapterRegistry(served, folder.parent)
    assert library.look(lambda: False).problems == {"a": "adapter 'a': RuntimeError"}
    assert {adapter.name for adapter in library.loaded()} == {"mine", "z"}


@pytest.mark.parametrize("how", ["found", "found again", "given"])
def test_what_is_removed_while_it_is_read_stays_removed(
    how: str, served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, replaced = AdapterRegistry(served, folder.parent), []
    library.on_replaced = replaced.append
    if how == "found again":
        library.get("mine")
        config(lora_alpha=9)(folder)
    is_reading, may_go_on = slow_to_read("mine", monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(library.add, "mine", folder) if how == "given" else pool.submit(library.get, "mine")
        assert is_reading.wait(20)
        removal = pool.submit(library.remove, "mine")
        wait([removal], 0.2)  # it may wait for what is read
        may_go_on.set()
        removal.result(20)
        adapter = mine.result(20)
    assert library.names() == [] and not library.has("mine") and replaced[-1:] == [adapter]
    with pytest.raises(UnknownAdapter):
        library.get("mine")


def test_a_refused_adapter_is_not_read_again_at_each_request(
    served: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads = [100.0], []
    monkeypatch.setattr("symbiosis.serving.lora.refusals.time.monotonic", lambda: now[0])
    monkeypatch.setattr(adapter_files, "_read", lambda *of, read=adapter_files._read: reads.append(of) or read(*of))
    whole, file = (folder / "adapter_model.safetensors").read_bytes(), folder / "adapter_model.safetensors"
    file.write_bytes(whole[:100])
    library = AdapterRegistry(served, folder.parent)

    def ask() -> int:
        reads.clear()
        with pytest.raises(AdapterError, match="adapter 'mine': adapter_model.safetensors cannot be read"):
            library.get("mine")
        return len(reads)

    assert ask() and not ask()
    now[0] += REFUSED_S
    assert ask(), "what was wrong may have passed"
    file.write_bytes(whole)
    assert library.get("mine").name == "mine", "a change is seen at once"


def test_what_was_refused_is_not_offered_until_it_changes(served: ModelRunner, good: Path, folder: Path) -> None:
    library, cut = AdapterRegistry(served, folder.parent), Path(shutil.copytree(good, folder.parent / "cut"))
    cut_off(cut)
    assert library.names() == ["cut", "mine"], "nobody has looked at it yet"
    library.check("cut")
    with pytest.raises(AdapterError, match="cut off"):
        library.get("cut")
    assert library.names() == ["mine"] and library.loaded() == []
    with pytest.raises(AdapterError, match="adapter 'cut': .* cut off") as refusal:
        library.check("cut")
    assert not isinstance(refusal.value, UnknownAdapter)
    assert "cut" in library.look(lambda: False).problems, "it is named among what is wrong all the same"
    shutil.copy(good / "adapter_model.safetensors", cut)
    assert library.get("cut").name == "cut" and library.names() == ["cut", "mine"]
    library.check("cut")


def test_a_folder_that_is_no_adapter_says_so_when_it_is_asked_for(
    served: ModelRunner, good: Path, folder: Path
) -> None:
    library = AdapterRegistry(served, folder.parent)
    (folder.parent / "empty").mkdir()
    (folder.parent / "out").symlink_to(good)
    (folder.parent / "file").write_text("")
    assert library.names() == ["mine"]
    for name, why in (("empty", "'empty' has no adapter_config.json"), ("out", "a link to a folder outside")):
        for ask in (library.get, library.check):
            with pytest.raises(AdapterError, match=f"adapter '{name}': .*{why}") as refusal:
                ask(name)
            assert not isinstance(refusal.value, UnknownAdapter)
    (folder.parent / "loop").symlink_to(folder.parent / "loop")
    for name in ("nobody", "out/of", "../empty", "file", "loop", "loop/mine"):
        with pytest.raises(UnknownAdapter):
            library.get(name)


def test_refusals_of_what_has_gone_are_forgotten(served: ModelRunner, folder: Path) -> None:
    cut_off(folder)
    library = AdapterRegistry(served, folder.parent)
    for number in range(3 * MANY):
        moved = folder.rename(folder.parent / f"a{number}")
        with pytest.raises(AdapterError, match="cut off"):
            library.get(moved.name)
        folder = moved
    assert len(library._refusals) <= MANY + 1


def test_all_are_looked_at_before_they_are_asked_for(served: ModelRunner, good: Path, folder: Path) -> None:
    parent = folder.parent
    for name, damage in (
        ("cut", cut_off),
        ("named so!", lambda _: None),
        ("odd", config(peft_type="ODD")),
        ("other", lambda _: None),
    ):
        damage(Path(shutil.copytree(good, parent / name)))
    (parent / "pickle").mkdir()
    (parent / "pickle" / "adapter_config.json").write_text("{}")
    (parent / "pickle" / "adapter_model.bin").write_text("")
    (parent / "link").symlink_to(good)
    (parent / ".git").mkdir()
    (parent / "loop").symlink_to(parent / "loop")
    library = AdapterRegistry(served, parent)
    looked = library.look(lambda: False)
    assert sorted(adapter.name for adapter in library.loaded()) == ["mine", "other"] and not looked.left
    assert sorted(looked.problems) == ["cut", "link", "named so!", "odd", "pickle"]
    wanted = {"cut": "cut off", "odd": "ODD", "pickle": "a pickle", "link": "outside", "named so!": "cannot be named"}
    assert all(text in looked.problems[name] for name, text in wanted.items()), looked.problems
    asked = iter([False])
    assert AdapterRegistry(served, parent).look(lambda: next(asked, True)).left == 3
    full = AdapterRegistry(served, parent, memory=library.bytes - 1)
    assert full.look(lambda: False).left and len(full.loaded()) == 1


def test_what_was_sent_stays_and_more_than_fits_is_refused(served: ModelRunner, good: Path, folder: Path) -> None:
    size = AdapterRegistry(served).add("mine", good).bytes + FIXED_BYTES
    library = AdapterRegistry(served, folder.parent, memory=2 * size)
    library.get("mine")
    for name in ("a", "b"):
        library.add(name, good)
    library.add("a", good)  # in its own place
    for refused in (lambda: library.add("c", good), lambda: library.get("mine")):
        with pytest.raises(AdapterError, match=r"DELETE /v1/adapters/NAME\), or start .* more --adapter-memory"):
            refused()
    assert [each.name for each in library.loaded()] == ["b", "a"]
    library.remove("b")
    assert library.get("mine").name == "mine"


def test_the_model_looks_as_before(served: ModelRunner, good: Path) -> None:
    model = llama()
    names, structure = list(model.state_dict()), str(model)
    made = make_ready(model, MEMORY)
    library, sites = AdapterRegistry(made), None
    residency = AdapterCache(made.arena)
    sites = TargetLayers(made, residency)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = library.add("mine", good)
    assert residency.fetch(adapter)
    sites.add(adapter)
    run(made, [(sequence_of(PROMPT, adapter), 5)])
    assert (list(model.state_dict()), str(model)) == (names, structure)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hooked = [name for name, module in model.named_modules() if module._forward_hooks]
    assert hooked == [f"model.layers.{i}.self_attn.{which}_proj" for i in (0, 1) for which in "qv"]


KINDS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lora,
    "DoRA": lambda: lora(use_dora=True),
    "IA3": lambda: peft.IA3Config(task_type=TaskType.CAUSAL_LM, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "OFT": lambda: peft.OFTConfig(task_type=TaskType.CAUSAL_LM, oft_block_size=8, target_modules=["q_proj"]),
    "saved module": lambda: lora(modules_to_save=["lm_head"]),
}  # fmt: skip


def test_a_base_that_an_executor_holds(tmp_path: Path) -> None:
    base = llama()
    made = {name: saved(base, kind(), tmp_path / name) for name, kind in KINDS.items()}
    with symbiosis.Executor(deepcopy(base)) as executor:
        served = make_ready(symbiosis.from_executor(executor.endpoint), MEMORY)
        library, residency = AdapterRegistry(served), AdapterCache(served.arena)
        TargetLayers(served, residency)
        adapters = {name: library.add(name.replace(" ", "-"), folder) for name, (folder, _) in made.items()}
        assert all(residency.fetch(adapter) for adapter in adapters.values())
        logits = run(served, [(sequence_of(PROMPT, adapter), 5) for adapter in adapters.values()])
    with torch.no_grad():
        for mine, (name, (_, model)) in zip(logits, made.items(), strict=True):
            assert off(mine, model(input_ids=torch.tensor([PROMPT])).logits[0, -1]) < 1e-5, name


# ---------------------------------------------------------------- adapters that PEFT computes, in pages of the one memory

PAGE = 4096  # bytes, of this model
BY_PEFT = [
    lambda: peft.LoHaConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=["q_proj", "down_proj"]),
    KINDS["OFT"],
    KINDS["saved module"],
]


@pytest.fixture(scope="module")
def by_peft(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Tensor]]:
    """Adapters, and what PEFT makes of the prompt by each."""
    folder, made = tmp_path_factory.mktemp("by-peft"), []
    for number in range(6):
        path, model = saved(llama(), BY_PEFT[number % 3](), folder / f"a{number}", seed=number)
        with torch.no_grad():
            made.append((path, model(input_ids=torch.tensor([PROMPT])).logits[0, -1]))
    return made


def lie_within(adapter: LoadedAdapter, memory: Tensor) -> list[bool]:
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    held = [place[name] for own in adapter.own for place, name in own.places]
    return [begin <= tensor.data_ptr() < end for tensor in held]


def test_more_adapters_of_peft_than_there_are_pages_come_and_go(by_peft: list[tuple[Path, Tensor]]) -> None:
    served = make_ready(llama(), 20 * PAGE)
    library, residency, pool = (
        AdapterRegistry(served),
        AdapterCache(served.arena, served.blocks.make_room),
        served.arena.pool,
    )
    TargetLayers(served, residency)
    adapters = [library.add(f"a{number}", path) for number, (path, _) in enumerate(by_peft)]
    assert sum(residency.pages_of(adapter) for adapter in adapters) > pool.total
    for _ in range(2):
        for adapter, (_, wanted) in zip(adapters, by_peft, strict=True):
            assert residency.fetch(adapter) and all(lie_within(adapter, served.arena.flat))
            residency.pin(adapter)
            sequence = sequence_of(PROMPT, adapter)
            assert off(run(served, [(sequence, 5)])[0], wanted) < 1e-5
            served.release(sequence)
            residency.unpin(adapter)
    assert residency.evictions >= 6 and residency.count < len(adapters)
    gone = [adapter for adapter in adapters if not residency.is_here(adapter)]
    assert gone and not any(within for adapter in gone for within in lie_within(adapter, served.arena.flat))
    for adapter in adapters:
        residency.forget(adapter.version)
    assert served.blocks.make_room(pool.total) and pool.free == pool.total


def test_a_tensor_that_finds_no_pages_in_a_row_counts_all_the_same(by_peft: list[tuple[Path, Tensor]]) -> None:
    served = make_ready(llama(), 64 * PAGE)
    library, residency, pool = AdapterRegistry(served), AdapterCache(served.arena), served.arena.pool
    TargetLayers(served, residency)
    pages = pool.take(pool.total)
    pool.give_back(page for page in pages if page % 2)
    path, wanted = by_peft[2]
    adapter, free = library.add("head", path), pool.free
    assert residency.fetch(adapter) and free - pool.free == residency.pages_of(adapter) >= 6
    pool.give_back(page for page in pages if not page % 2)
    assert off(run(served, [(sequence_of(PROMPT, adapter), 5)])[0], wanted) < 1e-5


def test_what_is_larger_than_half_of_the_memory_is_refused(by_peft: list[tuple[Path, Tensor]]) -> None:
    with pytest.raises(AdapterError, match=r"it takes \d+ pages .* more than half of the server's memory"):
        AdapterRegistry(make_ready(llama(), 10 * PAGE)).add("head", by_peft[2][0])


def test_one_that_is_let_go_while_it_is_used_comes_again_as_itself(
    served: ModelRunner, by_peft: list[tuple[Path, Tensor]]
) -> None:
    parent = by_peft[0][0].parent
    memory = max(AdapterRegistry(served).add("a", path).bytes for path, _ in by_peft) + FIXED_BYTES
    library, residency = AdapterRegistry(served, parent, memory=memory), AdapterCache(served.arena)
    library.on_let_go = lambda old: residency.forget(old.version)
    first = library.get("a0")
    assert residency.fetch(first)
    residency.pin(first)
    library.get("a1")
    assert first not in library.loaded() and all(lie_within(first, served.arena.flat))
    assert library.get("a0") is first, "a request that comes now runs beside those that have it"
    library.get("a1")
    residency.unpin(first)
    assert not residency.is_here(first), "it does not stay for its own sake"
    version = first.version
    del first
    assert library.get("a0").version == version


# ---------------------------------------------------------------- published by a program that trains


def test_publish_copies_the_adapter_as_it_is_now(served: ModelRunner) -> None:
    library = AdapterRegistry(served)
    model = peft.get_peft_model(llama(), lora())
    parameters = [p for p in model.parameters() if p.requires_grad]
    versions = []
    for value in (1.0, 2.0):
        with torch.no_grad():
            for parameter in parameters:
                parameter.fill_(value)
        symbiosis.publish(model, "mine", library)
        versions.append(library.get("mine"))
    downs = [next(iter(version.parts.values())).down for version in versions]
    assert [float(down.mean()) for down in downs if down is not None] == [1.0, 2.0]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_published_is_what_would_be_saved(name: str, served: ModelRunner, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), KINDS[name]())
    library = AdapterRegistry(served)
    symbiosis.publish(model, "mine", library)
    model.save_pretrained(tmp_path)
    mine, theirs = library.get("mine"), library.add("saved", tmp_path)
    assert (mine.kind, mine.rank, mine.bytes) == (theirs.kind, theirs.rank, theirs.bytes)
    for layer, part in mine.parts.items():
        assert all(torch.equal(a, b) for a, b in zip(part.tensors, theirs.parts[layer].tensors, strict=True))


class Server(BaseHTTPRequestHandler):
    """Takes adapters, and keeps what came."""

    came: list[tuple[str, str | None, bytes]]
    answer: int

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.came.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.answer)
        self.end_headers()
        self.wfile.write(json.dumps({"error": {"message": "the memory is full"}}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Server]]]:
    class Own(Server):
        came, answer = [], 200

    http = HTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", Own
    http.shutdown()
    thread.join()
    http.server_close()


def test_publish_to_a_url(server: tuple[str, type[Server]], served: ModelRunner) -> None:
    url, there = server
    model = peft.get_peft_model(llama(), lora())
    symbiosis.publish(model, "team/mine", url, key="secret")
    ((path, authorization, body),) = there.came
    assert (path, authorization) == ("/v1/adapters/team%2Fmine", "Bearer secret")
    (length,) = struct.unpack("<Q", body[:8])
    told = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["adapter_config"])
    assert (told["peft_type"], told["r"], told["target_modules"]) == ("LORA", 4, ["q_proj", "v_proj"])
    assert load(body).keys() == peft.get_peft_model_state_dict(model).keys()
    there.answer = 507
    with pytest.raises(AdapterError, match="does not take the adapter 'mine': the memory is full"):
        symbiosis.publish(model, "mine", url)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_publish_to_one_model_of_several(server: tuple[str, type[Server]], end: str) -> None:
    url, there = server
    model = peft.get_peft_model(llama(), lora())
    symbiosis.publish(model, "mine", url + end, base="a model")
    symbiosis.publish(model, "mine", f"{url}{end}?model=other")
    assert [path for path, _, _ in there.came] == [
        "/v1/adapters/mine?model=a+model",
        "/v1/adapters/mine?model=other",
    ]


def test_publish_refuses(served: ModelRunner) -> None:
    model = peft.get_peft_model(llama(), lora())
    with pytest.raises(AdapterError, match=r"LlamaForCausalLM has no adapter: publish takes what peft.get_peft_model"):
        symbiosis.publish(llama(), "mine", AdapterRegistry(served))
    with pytest.raises(AdapterError, match="it has default"):
        symbiosis.publish(model, "mine", AdapterRegistry(served), adapter="other")
    with pytest.raises(AdapterError, match="cannot be named"):
        symbiosis.publish(model, "../mine", AdapterRegistry(served))
    for url in ("localhost:8000", "http://", "http://[::1", "symbiosis://demo"):
        with pytest.raises(ConfigError, match="not the URL of a server"):
            symbiosis.publish(model, "mine", url)
    with pytest.raises(ConfigError, match="publish takes the URL of a server such as .*, or an Engine, not None"):
        symbiosis.publish(model, "mine", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no server answers"):
        symbiosis.publish(model, "mine", "http://127.0.0.1:none")
    with pytest.raises(ConfigError, match="base= is for clusters"):
        symbiosis.publish(model, "mine", AdapterRegistry(served), base="demo")
