"""`Pads`: each pad is used once, by whomever, and a file that was changed is refused."""

import copy
import ctypes
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from typer.testing import CliRunner

import symbiosis
from symbiosis.cli import main
from symbiosis.cli.pad_files import input_groups, make
from symbiosis.client.connection.lifetime import sessions
from symbiosis.client.privacy.pads import AT_ONCE, PadFile
from symbiosis.errors import ConfigError, PadsUsedUp, WrapError
from symbiosis.executor.model.load import DEMO_MODEL
from tests.conftest import tiny_llama
from tests.private import BITS, TOKENS, lora, one_step, recorded
from tests.processes import Program, until
from tests.secret_files import write_secret


def test_pads_are_found_for_what_a_model_calls_together() -> None:
    model = tiny_llama().to("meta")
    assert input_groups(model)[:4] == [
        [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"],
        ["model.layers.0.self_attn.o_proj"],
        ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"],
        ["model.layers.0.mlp.down_proj"],
    ]


def test_pads_run_out(serve: Callable, pads: Callable, ids: Tensor) -> None:
    executor = serve(tiny_llama(), integers=[8])
    file = pads(tiny_llama(), tokens=2 * ids.numel() + 1)
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file))
    with torch.no_grad():
        assert torch.equal(wrapped(ids).logits, wrapped(ids).logits)
        with pytest.raises(PadsUsedUp, match="symbiosis pads"):
            wrapped(ids)


def test_a_pad_is_written_off_before_it_is_used(serve: Callable, pads: Callable) -> None:
    """Whoever looks at the disk while a call is on its way finds its pads gone."""
    executor = serve(tiny_llama(), integers=[8])
    file = PadFile(pads(tiny_llama()))
    left: list[list[int]] = []
    server, arrived = executor.server, executor.server.dispatch.arrived

    def look(*call: Any) -> None:
        left.append([file.left(stream) for stream in range(len(file.contents.streams))])
        arrived(*call)

    server.dispatch.arrived = look  # type: ignore[method-assign]
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file.path))
    wrapped.model.layers[0].mlp.down_proj(torch.ones(70, 96))
    wrapped.model.layers[0].mlp.down_proj(torch.ones(3, 96))
    assert [min(found) for found in left] == [TOKENS - 70, TOKENS - 70 - AT_ONCE]


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["Python's", "libc's"])
def test_no_pad_is_given_twice_to_threads_and_processes(fork: Callable[[], int], pads: Callable) -> None:
    path = pads(tiny_llama(), tokens=4000)
    files = [PadFile(path), PadFile(path)]
    given: list[int] = []
    lock = threading.Lock()

    def take(number: int) -> None:
        rows = 1 + number % 9
        first = files[number % 2].take(0, rows)
        with lock:
            given.extend(range(first, first + rows))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(120)))
    read, write = os.pipe()
    pid = fork()
    if pid == 0:
        signal.alarm(20)
        first = files[0].take(0, 7)
        os.write(write, first.to_bytes(8, "little"))
        os._exit(0)
    os.close(write)
    here = [files[0].take(0, 7), files[1].take(0, 7)]
    there = int.from_bytes(os.read(read, 8), "little")
    os.waitpid(pid, 0)
    given += [row for first in (*here, there) for row in range(first, first + 7)]
    given += [PadFile(path).take(0, 1)]
    assert len(given) > 500 and len(set(given)) == len(given)


def test_a_child_that_is_forked_while_a_thread_takes_pads_takes_its_own(pads: Callable) -> None:
    """Neither the thread's lock nor the file's, which both have open then, outlives the fork."""
    file = PadFile(pads(tiny_llama(), tokens=1000))
    before, given = file.take(0, 1), []
    thread = threading.Thread(target=lambda: given.append(file.take(0, AT_ONCE)))
    read, write = os.pipe()
    with file.path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread.start()
        until(file._lock.locked)
        until(lambda: [fd.resolve() for fd in Path("/proc/self/fd").iterdir()].count(file.path) == 2)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os.write(write, file.take(0, AT_ONCE).to_bytes(8, "little"))
            signal.pause()
        fcntl.flock(held, fcntl.LOCK_UN)
    thread.join(20)
    os.close(write)
    there = int.from_bytes(os.read(read, 8), "little")  # nothing, if the child is stuck
    given += [there, file.take(0, AT_ONCE)]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert there > 0
    rows = [before, *(row for first in given for row in range(first, first + AT_ONCE))]
    assert len(set(rows)) == len(rows) == 3 * AT_ONCE + 1


def test_a_file_of_pads_has_its_name_when_it_is_finished(processes: list, tmp_path: Path) -> None:
    file, part = tmp_path / "my.pads", tmp_path / "my.pads.part"
    processes.append(Program("pads", "demo", "--tokens", "20000", "-o", str(file)))
    until(part.exists)
    processes[0].kill()
    assert not file.exists() and part.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="my.pads.part exists: remove it"):
        make("demo", 1, file)
    part.unlink()
    make("demo", 1, file)
    assert file.stat().st_size == PadFile(file).contents.nbytes and not part.exists()


def test_a_file_of_pads_that_is_cut_off_is_refused(serve: Callable, pads: Callable) -> None:
    executor, file = serve(tiny_llama(), integers=[8]), pads(tiny_llama())
    os.truncate(file, file.stat().st_size - 4096)
    before = set(sessions())
    with pytest.raises(ConfigError, match="bytes instead of .*: make another file with symbiosis pads") as found:
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file))
    assert found.tb and set(sessions()) == before  # which the traceback would keep: none was half made


@BITS
def test_a_bit_that_the_disk_has_changed_is_no_wrong_result(bits: int, serve: Callable, pads: Callable) -> None:
    executor, file = serve(tiny_llama(), integers=[bits]), pads(tiny_llama(), bits=bits)
    opened = PadFile(file)
    stream = next(stream for stream in opened.contents.streams if "down_proj" in stream.effects[0].layer)
    row = stream.effects[0].width * opened.contents.dtype.itemsize

    def call() -> None:
        wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file))
        wrapped.model.layers[0].mlp.down_proj(torch.ones(3, 96))

    call()
    flip(file, stream.effects[0].start + (AT_ONCE + 2) * row + 5)
    with pytest.raises(ConfigError, match="its data for model.layers.0.mlp.down_proj are not what was written"):
        call()
    call()  # by other pads
    flip(file, opened._counters + 12 * opened.contents.streams.index(stream))
    with pytest.raises(ConfigError, match="how many of its pads are used cannot be read; make another"):
        call()
    flip(file, 40)
    with pytest.raises(ConfigError, match="its head is damaged"):
        call()


def flip(file: Path, place: int) -> None:
    """One bit of a byte."""
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 4]))


def test_a_file_of_pads_is_its_owners_and_is_not_made_again(pads: Callable, tmp_path: Path) -> None:
    file = pads(tiny_llama())
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="must not be used twice"):
        make(str(tmp_path / "model"), 5, file)
    with pytest.raises(ConfigError, match="is not a pad file"):
        PadFile(write_secret(tmp_path / "config.json", (DEMO_MODEL / "config.json").read_text()))
    with pytest.raises(ConfigError, match="GB are free"):
        make(str(tmp_path / "model"), 10**12, tmp_path / "huge.pads")
    assert not (tmp_path / "huge.pads").exists()
    with pytest.raises(ConfigError, match="there is no folder .*: make it first"):
        make(str(tmp_path / "model"), 5, tmp_path / "new" / "my.pads")


@pytest.mark.parametrize("command", [["pads", "demo", "--tokens", "1", "-o", "my.pads"], ["audit", "--level", "pads"]])
def test_bits_that_there_are_not_are_said_in_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main.app, [*command, "--bits", "7"])
    assert result.exit_code == 2
    assert "error: weights are quantised to 8 or 16 bits, not to 7" in result.output


def test_pads_of_other_weights_are_refused(serve: Callable, pads: Callable) -> None:
    file = pads(tiny_llama())
    changed = tiny_llama()
    with torch.no_grad():
        changed.model.layers[0].mlp.gate_proj.weight[0, 0] += 1
    executor = serve(changed, integers=[8])
    with pytest.raises(WrapError, match="other weights"):
        symbiosis.wrap(copy.deepcopy(changed), executor.endpoint, privacy=symbiosis.Pads(file))


def test_pads_without_gradients_say_so(serve: Callable, tmp_path: Path, ids: Tensor) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    make(str(tmp_path / "model"), TOKENS, tmp_path / "x.pads")
    executor = serve(tiny_llama(), integers=[8])
    wrapped = lora(symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(tmp_path / "x.pads")))
    with pytest.raises(WrapError, match="--training"):
        one_step(wrapped, ids)


def some_steps(model: nn.Module, ids: Tensor, steps: int, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Training with dropout, from a checkpoint on if there is one; the checkpoint at the end."""
    torch.manual_seed(5)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2)).train()  # type: ignore[arg-type]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        for parameter, value in zip(trained, state["adapter"], strict=True):
            parameter.data.copy_(value)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapter = [p.detach().clone() for p in trained]
    return {"adapter": adapter, "optimizer": copy.deepcopy(optimizer.state_dict()), "rng": torch.get_rng_state()}


def test_training_goes_on_from_its_checkpoint_with_pads_that_were_not_used(
    serve: Callable, pads: Callable, ids: Tensor
) -> None:
    """Bit for bit as if it had not been interrupted; the first steps again, too, in case they are made twice."""
    executor = serve(tiny_llama(), integers=[8])
    log = recorded(executor)
    files = [pads(tiny_llama(), tokens=4000, name=f"{name}.pads") for name in ("calm", "interrupted")]

    def client(file: Path) -> nn.Module:
        return symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file))

    calm = some_steps(client(files[0]), ids, 6)
    log.clear()
    some_steps(client(files[1]), ids, 2)  # whose checkpoint was lost
    checkpoint = some_steps(client(files[1]), ids, 3)
    resumed = some_steps(client(files[1]), ids, 3, checkpoint)
    assert all(map(torch.equal, resumed["adapter"], calm["adapter"]))
    rows = [tuple(row.tolist()) for _, sent in log if sent is not None for row in sent]
    assert len(rows) > 1500 and len(set(rows)) == len(rows)
