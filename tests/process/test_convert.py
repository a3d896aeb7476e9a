"""Distributed checkpoints, as FSDP writes them, become models that executors read; nothing that is in them is run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from symbiosis.cli.convert import convert
from symbiosis.cli.main import app
from symbiosis.errors import ConfigError
from symbiosis.executor.model.distributed_checkpoint import DistributedCheckpoint
from symbiosis.executor.options import load_options
from symbiosis.executor.preflight import check
from tests.conftest import MODELS, tiny_llama
from tests.processes import context


def saved(model: Any, folder: Path, **more: Any) -> Path:
    """A checkpoint of one process, with the model's configuration beside it."""
    dcp.save({"model": model.state_dict(), **more}, checkpoint_id=folder, no_dist=True)
    model.config.save_pretrained(folder)
    return folder


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return one.state_dict().keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items()
    )


@pytest.mark.parametrize("name", [*MODELS, "tied"])
def test_a_checkpoint_becomes_a_model(name: str, tmp_path: Path) -> None:
    """Beside what a trainer keeps there; tied tensors are tied again, and experts have the names of the model's files."""
    model = tiny_llama(tied=True) if name == "tied" else MODELS[name]()
    optimizer = {"state": {"model.embed_tokens.weight": {"exp_avg": torch.ones(3)}}, "step": 7}
    folder = saved(model, tmp_path / "checkpoint", optim=optimizer)
    (folder / "tokenizer.json").write_text("{}")
    convert(folder, tmp_path / "made", None)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "made"), model)
    assert (tmp_path / "made" / "tokenizer.json").is_file()
    assert not (tmp_path / "made" / ".metadata").exists()


def shard_and_save(rank: int, store: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model: Any = tiny_llama().bfloat16()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    dist.barrier()
    dist.destroy_process_group()


def test_pieces_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """As FSDP2 writes them, from two processes, in the dtype of the checkpoint; by the command."""
    folder, store = tmp_path / "checkpoint", f"{tmp_path}/store"
    ranks = [context.Process(target=shard_and_save, args=(rank, store, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    model = tiny_llama().bfloat16()
    model.config.save_pretrained(tmp_path / "config")
    assert any(len(told.chunks) == 2 for told in DistributedCheckpoint(folder).tensors.values())
    words = ["convert", str(folder), "-o", str(tmp_path / "made"), "--model", str(tmp_path / "config")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and f"{len(model.state_dict())} tensors" in result.output
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "made"), model)
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(ConfigError, match="cannot read .*__1_0.distcp: No such file"):
        convert(folder, tmp_path / "again", str(tmp_path / "config"))


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    folder, trap = saved(tiny_llama(), tmp_path / "checkpoint"), tmp_path / "trap"
    told = pickle.loads((folder / ".metadata").read_bytes())
    told.planner_data = Runs(trap)
    (folder / ".metadata").write_bytes(pickle.dumps(told))
    with pytest.raises(ConfigError, match=r"is no metadata of a checkpoint: it names posix\.mkdir"):
        convert(folder, tmp_path / "made", None)
    saved(tiny_llama(), folder)
    (file,) = folder.glob("*.distcp")
    for place in DistributedCheckpoint(folder)._places.values():
        with file.open("r+b") as opened:
            opened.seek(place.offset)
            opened.write(pickle.dumps(Runs(trap)))
    with pytest.raises(ConfigError, match="is damaged where .* lies"):
        convert(folder, tmp_path / "made", None)
    assert not trap.exists() and not (tmp_path / "made").exists()


def changed(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        told = pickle.loads((folder / ".metadata").read_bytes())
        change(told)
        (folder / ".metadata").write_bytes(pickle.dumps(told))

    return apply


NAME = "model.model.layers.1.mlp.up_proj.weight"


def _grow(told: Any) -> None:
    told.state_dict_metadata[NAME].size = torch.Size((200, 64))


def _leave(told: Any) -> None:
    told.storage_data = {
        index: place.__class__("../outside", place.offset, place.length) for index, place in told.storage_data.items()
    }


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (changed(lambda told: told.state_dict_metadata.pop(NAME)), "lacks model.layers.1.mlp.up_proj.weight of the model"),
        (changed(_grow), "holds only a part of"),
        (changed(_leave), "is damaged where"),
        (changed(lambda told: told.storage_data.clear()), "does not hold .* as plain pieces"),
        (lambda folder: (folder / ".metadata").write_bytes(b"junk"), "is no metadata of a checkpoint"),
        (lambda folder: (folder / ".metadata").unlink(), "cannot read .*: No such file"),
        (lambda folder: os.truncate(folder / "__0_0.distcp", 5000), "is damaged where"),
        (lambda folder: (folder.parent / "made" / "x").mkdir(parents=True), "is there already, and not empty"),
    ],
    ids=["lacks", "part", "outside", "no pieces", "junk", "none", "cut", "output"],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_is_refused(harm: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path / "checkpoint")
    harm(folder)
    with pytest.raises(ConfigError, match=says):
        convert(folder, tmp_path / "made", None)


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path / "checkpoint")
    tiny_llama(32).config.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has shape .* in the checkpoint, and .* in the model"):
        convert(folder, tmp_path / "made", str(tmp_path / "other"))


def test_an_executor_says_how_to_convert(tmp_path: Path) -> None:
    folder = saved(tiny_llama(), tmp_path / "checkpoint")
    options = load_options({"model": str(folder), "listen": [f"local://{tmp_path}/a.sock"]})
    with pytest.raises(
        ConfigError, match="there are none in .*, and a distributed checkpoint, which `symbiosis convert`"
    ):
        check(options)


def test_numbers_of_all_kinds_come_back(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "a": torch.arange(7), "b": torch.randn(2, 3, 4).half(), "c": torch.tensor(1.5), "d": torch.zeros(0, 3), "e": torch.ones(3) > 0,
    }  # fmt: skip
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    read = DistributedCheckpoint(tmp_path)
    assert all(
        torch.equal(read.read(name), tensor) and read.read(name).dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
