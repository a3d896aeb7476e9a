"""What executors see and what clients get with `privacy=` and `verify=`: masked, exact, pinned to an operator, used once."""

import copy
import fcntl
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

import symbiosis
from symbiosis import cli
from symbiosis.audit.exact import Unmasked
from symbiosis.client.noise import gaussian
from symbiosis.client.pads import AT_ONCE, PadFile
from symbiosis.client.session import sessions
from symbiosis.client.verify import Proofs
from symbiosis.demo_data import base_text, blocks
from symbiosis.errors import CallError, Code, ConfigError, PadsUsedUp, WrapError
from symbiosis.executor.load import DEMO_MODEL
from symbiosis.pads import input_groups, make
from symbiosis.protocol import Call, Op
from tests.conftest import tiny_gpt2, tiny_llama, tiny_mixtral
from tests.processes import until

BITS = pytest.mark.parametrize("bits", [8, 16])
MODELS = pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
TOKENS = 400


def recorded(executor: symbiosis.Executor) -> list[tuple[Call, Tensor | None]]:
    """From now on, what this executor is sent."""
    log: list[tuple[Call, Tensor | None]] = []
    server = executor.server
    arrived = server.arrived

    def record(peer: Any, seq: int, call: Call, payload: tuple[Tensor, ...]) -> None:
        log.append((call, payload[0].clone() if payload else None))
        arrived(peer, seq, call, payload)

    server.arrived = record  # type: ignore[method-assign]
    return log


@pytest.fixture
def two(serve: Callable) -> Callable[[nn.Module], tuple[symbiosis.Executor, symbiosis.Executor]]:
    """Executors of two operators."""

    def start(model: nn.Module, **options: Any) -> tuple[symbiosis.Executor, symbiosis.Executor]:
        options = {"integers": [8, 16], **options}
        return serve(model, operator="one", **options), serve(model, operator="two", **options)

    return start


@pytest.fixture
def pads(tmp_path: Path) -> Callable[..., Path]:
    """A file of pads for a model, with gradients."""

    def build(model: nn.Module, tokens: int = TOKENS, bits: int = 8, name: str = "x.pads") -> Path:
        if not (tmp_path / "model").exists():
            model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
        make(str(tmp_path / "model"), tokens, tmp_path / name, bits, training=True)
        return tmp_path / name

    return build


def lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))  # type: ignore[arg-type]


def one_step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The logits and every gradient of a step."""
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    return [result.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@BITS
@MODELS
def test_masks_leave_nothing_behind(
    build: Callable, bits: int, verify: bool, two: Callable, pads: Callable, ids: Tensor
) -> None:
    """Logits and gradients of `Split` and `Pads` are those of the integer model without masks, bit for bit."""
    model = build()
    one, other = two(model)
    levels = [Unmasked(bits), symbiosis.Split(other.endpoint, bits), symbiosis.Pads(pads(model, bits=bits))]
    results = []
    for level in levels:
        wrapped = lora(symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=level, verify=verify))
        for _ in range(3):  # from the second step on, calls are made in groups
            wrapped.zero_grad()
            result = one_step(wrapped, ids)
        results.append(result)
        symbiosis.unwrap(wrapped, copy.deepcopy(model).state_dict())
    for result in results[1:]:
        assert len(result) == len(results[0]) > 10
        assert all(map(torch.equal, result, results[0]))


def hard_rows(rows: int) -> Tensor:
    """The largest, the smallest, zero, one massive channel, and many at random, of every size."""
    info, generator = torch.finfo(torch.float32), torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator)
    x[300:] *= 10.0 ** torch.randint(-44, 38, (len(x[300:]), 1), generator=generator)
    for row, value in enumerate((0.0, info.max, -info.max, info.tiny, 1e-45, 1e30)):
        x[row] = value
    x[6] = torch.eye(64)[3] * 1e38
    return x


@pytest.mark.parametrize("rows", [300, pytest.param(250_000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))])
@pytest.mark.parametrize("level", ["split", "pads"])
@BITS
def test_hard_rows_are_exact(bits: int, level: str, rows: int, two: Callable, pads: Callable) -> None:
    """In the long form, a million of them in all."""
    model = tiny_llama()
    one, other = two(model)
    x = hard_rows(rows)
    choices = {
        "split": lambda: symbiosis.Split(other.endpoint, bits),
        "pads": lambda: symbiosis.Pads(pads(model, tokens=rows + 100, bits=bits)),
    }
    found = []
    for privacy in (Unmasked(bits), choices[level]()):
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=privacy)
        layer = wrapped.model.layers[0].mlp.gate_proj
        with torch.no_grad():
            found.append(torch.cat([layer(some) for some in x.split(5000)]))
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.parametrize("asked", [{"privacy": symbiosis.Noise()}, {"verify": True}])
def test_privacy_without_the_weights_is_refused_not_ignored(asked: dict[str, Any], serve: Callable) -> None:
    executor = serve(tiny_llama())
    with pytest.raises(WrapError, match=f"knows no {next(iter(asked))}.*: wrap a model from a checkpoint for that"):
        symbiosis.from_executor(executor.endpoint, **asked)
    with pytest.raises(WrapError, match="knows no atn_implementation, nor does the configuration of LlamaForCausalLM$"):
        symbiosis.from_executor(executor.endpoint, atn_implementation="eager")


def test_an_infinite_gradient_stays_one_and_is_not_sent(two: Callable, ids: Tensor) -> None:
    """As loss scaling needs it."""
    model = tiny_llama()
    one, other = two(model)
    log = recorded(one)
    layer = symbiosis.wrap(model, one.endpoint, privacy=symbiosis.Split(other.endpoint)).model.layers[0].mlp.gate_proj
    x = torch.randn(4, 64, requires_grad=True)
    gradient = torch.ones(4, 96)
    gradient[2, 5] = math.inf
    layer(x).backward(gradient)
    assert x.grad is not None and x.grad[2].isnan().all() and x.grad[[0, 1, 3]].isfinite().all()
    assert [call.dtype for call, _ in log] == ["int32", "int32"]


def test_quantised_weights_are_closer_to_float32_than_bfloat16_is(two: Callable) -> None:
    """By the divergence of the predictions, on text of the kind that the model was trained on."""
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    one, other = two(reference)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = torch.tensor(blocks(base_text(), tokenizer, 96, 16, seed=1))
    with torch.no_grad():
        expected = reference(ids).logits.log_softmax(-1)

        def divergence(model: nn.Module) -> float:
            found = model(ids).logits.float().log_softmax(-1)
            return (expected.exp() * (expected - found)).sum(-1).mean().item()

        bfloat16 = divergence(copy.deepcopy(reference).bfloat16())
        wrapped = [
            divergence(
                symbiosis.wrap(copy.deepcopy(reference), one.endpoint, privacy=symbiosis.Split(other.endpoint, bits))
            )
            for bits in (8, 16)
        ]
    assert wrapped[0] < bfloat16
    assert wrapped[1] < 1e-4 * bfloat16


def trained(model: nn.Module, ids: Tensor, steps: int = 8) -> tuple[list[float], Tensor]:
    model = lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_training_follows_float32(two: Callable, ids: Tensor) -> None:
    model = tiny_llama()
    one, other = two(model)
    losses, adapter = trained(copy.deepcopy(model), ids)
    for bits, most, cosine in ((8, 1e-2, 0.999), (16, 1e-4, 0.999999)):
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(other.endpoint, bits))
        found, other_adapter = trained(wrapped, ids)
        assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < most
        assert torch.cosine_similarity(adapter.double(), other_adapter.double(), dim=0) > cosine
    assert losses[-1] < losses[0] - 0.2


def test_joined_gradients_are_taken_apart_again(two: Callable, ids: Tensor) -> None:
    """`exact=False` makes one call of a group's gradients; every member's rows are masked by themselves."""
    model = tiny_llama()
    one, other = two(model)
    results = []
    for exact in (True, False):
        wrapped = lora(
            symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(other.endpoint, 16), exact=exact)
        )
        for _ in range(3):
            wrapped.zero_grad()
            result = one_step(wrapped, ids)
        results.append(result)
    for mine, others in zip(*results, strict=True):
        torch.testing.assert_close(mine, others, atol=1e-5, rtol=1e-4)


def test_generating_needs_no_other_calls(two: Callable, ids: Tensor) -> None:
    model = tiny_llama()
    one, other = two(model)
    logs = recorded(one), recorded(other)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Split(other.endpoint, 16))
    assert torch.equal(wrapped.generate(ids, max_new_tokens=8, do_sample=False), expected)
    for log in logs:
        assert {(call.op, call.dtype) for call, _ in log} == {(Op.FORWARD, "int64")}
    assert {call.seeded for call, _ in logs[0]} == {False} and {call.seeded for call, _ in logs[1]} == {True}


# ---------------------------------------------------------------- what is sent


def test_only_layers_whose_rows_can_be_masked_are_sent(two: Callable) -> None:
    one, other = two(tiny_mixtral(), serve=["*"])
    wrapped = symbiosis.wrap(tiny_mixtral(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    report = symbiosis.report(wrapped)
    private_ones = {name for name, reason in report.kept.items() if reason == "private"}
    assert {"lm_head", "model.embed_tokens"} <= private_ones
    assert any("experts" in name for name in private_ones)
    assert report.wrapped and all("proj" in name for name in report.wrapped)


@pytest.mark.parametrize("verify", [False, True])
def test_calls_that_cannot_be_masked_are_refused(verify: bool, two: Callable) -> None:
    one, other = two(tiny_llama())
    log = recorded(one)
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint), verify=verify)
    weight = wrapped.model.layers[0].mlp.gate_proj.weight
    session = weight.handle.session
    x = torch.ones(2, 64)
    for attempt in (
        lambda: x[:, :32] @ weight[:, :32].t(),
        lambda: weight @ x.t(),
        lambda: session.call(Op.ECHO, 0, x),
        lambda: session.call(Op.FORWARD, weight.handle.index, x, bias=True),
        lambda: session.call(Op.LOOKUP, 0, torch.tensor([1])),
    ):
        with pytest.raises(CallError, match="not masked") as refused:
            attempt()
        assert refused.value.code is Code.NOT_ALLOWED
    assert not log
    assert (x @ weight.t()).shape == (2, 96)  # which is the layer's own product
    assert [call.dtype for call, _ in log] == ["int32"]


@pytest.mark.parametrize("value", [0, -1])
def test_sums_with_the_mask_wrap(value: int, two: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics do not show a sum that does not wrap; masks of all ones and of nothing do."""
    monkeypatch.setattr(
        "symbiosis.client.split.keystream", lambda key, shape, dtype: torch.full(shape, value, dtype=dtype)
    )
    one, other = two(tiny_llama())
    log = recorded(one)
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    x = torch.eye(64)[:1] * 1e30
    wrapped.model.layers[0].mlp.gate_proj(x)
    sent = log[0][1]
    assert sent is not None and sent.dtype is torch.int32
    assert int(sent[0, 1]) == value  # 0 + r
    assert 0 < int(sent[0, 0]) - value < 2**31


def test_nothing_is_masked_alike(two: Callable, pads: Callable, ids: Tensor) -> None:
    """The same prompt again and again: no row comes twice, on any level."""
    model = tiny_llama()
    for privacy in (symbiosis.Split, symbiosis.Pads):
        one, other = two(model)
        log = recorded(one)
        given = other.endpoint if privacy is symbiosis.Split else pads(model, name=f"{privacy.__name__}.pads")
        wrapped = symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=privacy(given))
        for _ in range(4):
            wrapped(ids)
        rows = [tuple(row.tolist()) for _, sent in log if sent is not None for row in sent]
        assert len(rows) > 400 and len(set(rows)) == len(rows)


def test_a_forked_child_masks_otherwise(two: Callable, tmp_path: Path) -> None:
    """What would be the same in parent and child shows the difference of their rows."""
    one, other = two(tiny_llama(), listen=["tcp://127.0.0.1:0"])
    log = recorded(one)
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    layer, x = wrapped.model.layers[0].mlp.gate_proj, torch.ones(1, 64)
    expected = layer(x)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if torch.equal(layer(x), expected) else 3)
        except BaseException:
            os._exit(4)
    assert torch.equal(layer(x), expected)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len({tuple(sent.flatten().tolist()) for _, sent in log if sent is not None}) == len(log) == 3


def test_a_private_session_is_not_copied_into_other_processes(two: Callable) -> None:
    one, other = two(tiny_llama())
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    with pytest.raises(WrapError, match="secrets of this process"):
        pickle.dumps(wrapped)


# ---------------------------------------------------------------- two operators


def test_two_executors_of_one_operator_are_refused(serve: Callable) -> None:
    names: dict[str, Any] = {}
    for name in ("one", "", "two"):
        names[name] = serve(tiny_llama(), integers=[8], operator=name)
    again = serve(tiny_llama(), integers=[8], operator="one")
    names["ONE"], names["space"] = (serve(tiny_llama(), integers=[8], operator=name) for name in ("ONE\t", " "))
    for first, second, words in (
        (names["one"], names["ONE"], "both run by 'one'"),
        (names["one"], names["space"], "does not say who runs it"),
        (names["one"], again, "both run by 'one'"),
        (names["one"], names["one"], "both run by 'one'"),
        (names["one"], names[""], "does not say who runs it"),
        (names[""], names["two"], "does not say who runs it"),
    ):
        with pytest.raises(WrapError, match=words):
            symbiosis.wrap(tiny_llama(), first.endpoint, privacy=symbiosis.Split(second.endpoint))
    for executor in (*names.values(), again):
        until(lambda executor=executor: not executor.server.sessions, "the end of every session")


def test_an_executor_without_integers_is_refused(serve: Callable) -> None:
    one, other = serve(tiny_llama(), operator="one", integers=[8]), serve(tiny_llama(), operator="two")
    with pytest.raises(WrapError, match="--integers 8"):
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    with pytest.raises(WrapError, match="--integers 16"):
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint, 16))


def test_another_model_as_second_half_is_refused(serve: Callable) -> None:
    torch.manual_seed(1)
    changed = tiny_llama()
    with torch.no_grad():
        changed.model.layers[0].mlp.gate_proj.weight[0, 0] += 1
    one, other = serve(tiny_llama(), operator="one", integers=[8]), serve(changed, operator="two", integers=[8])
    with pytest.raises(CallError) as refused:
        symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(other.endpoint))
    assert refused.value.code is Code.WRONG_MODEL


def test_a_successor_of_another_operator_gets_nothing(serve: Callable, tmp_path: Path) -> None:
    """Were the second executor replaced by one of the first operator's, who has one half already."""
    address = f"local://{tmp_path}/second.sock"
    one = serve(tiny_llama(), operator="one", integers=[8])
    other = serve(tiny_llama(), operator="two", integers=[8], listen=[address])
    wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=symbiosis.Split(address))
    layer, x = wrapped.model.layers[0].mlp.gate_proj, torch.ones(1, 64)
    expected = layer(x)
    other.close()
    usurper = serve(tiny_llama(), operator="one", integers=[8], listen=[address])
    log = recorded(usurper)
    with pytest.raises(CallError, match="run by 'one'") as refused:
        layer(x)
    assert refused.value.code is Code.NOT_ALLOWED and not log
    usurper.close()
    rightful = serve(tiny_llama(), operator="two", integers=[8], listen=[address])
    assert torch.equal(layer(x), expected)
    rightful.close()


# ---------------------------------------------------------------- pads


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
    server, arrived = executor.server, executor.server.arrived

    def look(*call: Any) -> None:
        left.append([file.left(stream) for stream in range(len(file.contents.streams))])
        arrived(*call)

    server.arrived = look  # type: ignore[method-assign]
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Pads(file.path))
    wrapped.model.layers[0].mlp.down_proj(torch.ones(70, 96))
    wrapped.model.layers[0].mlp.down_proj(torch.ones(3, 96))
    assert [min(found) for found in left] == [TOKENS - 70, TOKENS - 70 - AT_ONCE]


def test_no_pad_is_given_twice_to_threads_and_processes(pads: Callable) -> None:
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
    pid = os.fork()
    if pid == 0:
        first = files[0].take(0, 7)
        os.write(write, first.to_bytes(8, "little"))
        os._exit(0)
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


def test_a_file_of_pads_has_its_name_when_it_is_finished(tmp_path: Path) -> None:
    file, part = tmp_path / "my.pads", tmp_path / "my.pads.part"
    command = [sys.executable, "-m", "symbiosis", "pads", "demo", "--tokens", "20000", "-o", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(part.exists)
        process.kill()
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
    with pytest.raises(ConfigError, match="what it has for model.layers.0.mlp.down_proj is not what was written"):
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
    with pytest.raises(ConfigError, match="no file of pads"):
        PadFile(DEMO_MODEL / "config.json")
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
    result = CliRunner().invoke(cli.app, [*command, "--bits", "7"])
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


# ---------------------------------------------------------------- noise


def test_known_noise_must_be_asked_for(serve: Callable) -> None:
    executor = serve(tiny_llama())
    with pytest.raises(WrapError, match="allow_known_noise"):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Noise(effects="same"))
    with pytest.raises(WrapError, match="two operators"):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Noise(effects=serve(tiny_llama()).endpoint))


def test_effects_come_from_a_known_other_operator_or_as_said(serve: Callable) -> None:
    executors = {name: serve(tiny_llama(), operator=name) for name in ("", "north", " North ", "south")}
    for name, other, words in (
        ("", "south", "does not say who runs it"),
        ("north", "", "does not say who runs it"),
        ("north", " North ", "both run by 'north'"),
        ("north", "north", "both run by 'north'"),
    ):
        here, effects = executors[name].endpoint, executors[other].endpoint
        with pytest.raises(WrapError, match=words):
            symbiosis.wrap(tiny_llama(), here, privacy=symbiosis.Noise(effects=effects))
        symbiosis.wrap(tiny_llama(), here, privacy=symbiosis.Noise(effects=effects, allow_known_noise=True))
    symbiosis.wrap(
        tiny_llama(), executors["north"].endpoint, privacy=symbiosis.Noise(effects=executors["south"].endpoint)
    )


@pytest.mark.parametrize(
    "options", [{}, {"every": 5}, {"effects": "same", "allow_known_noise": True}, {"effects": "other"}]
)
@MODELS
def test_noise_is_taken_away_again(build: Callable, options: dict[str, Any], serve: Callable, ids: Tensor) -> None:
    model = build()
    one, other = serve(model, operator="one"), serve(model, operator="two")
    if options.get("effects") == "other":
        options = {"effects": other.endpoint}
    log = recorded(one)
    expected = one_step(lora(copy.deepcopy(model)), ids)
    wrapped = lora(symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=symbiosis.Noise(scale=16.0, **options)))
    rows = len(log)
    found = one_step(wrapped, ids)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-3 * float(theirs.abs().max()), rtol=0)
    assert (rows > 0) == (options.get("effects") == "same")  # the noise itself was sent
    assert all(call.dtype == "float32" and not call.bias for call, _ in log)


def test_masked_rows_are_mostly_noise(serve: Callable) -> None:
    executor = serve(tiny_llama())
    log = recorded(executor)
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Noise(scale=16.0, pool=4))
    x = torch.randn(200, 64)
    wrapped.model.layers[0].mlp.gate_proj(x)
    sent = log[-1][1]
    assert sent is not None
    sizes = (sent - x).square().mean(1).sqrt() / x.square().mean(1).sqrt()
    assert 8 < float(sizes.min()) < float(sizes.max()) < 32
    directions = torch.nn.functional.normalize(sent - x, dim=1)
    assert int((directions @ directions[0] > 0.999).sum()) in range(20, 90)  # one of four vectors


def test_noise_is_normally_distributed() -> None:
    values = gaussian(100, 1001).double().flatten()
    assert abs(float(values.mean())) < 0.02 and abs(float(values.var()) - 1) < 0.03
    assert abs(float((values.abs() < 1).double().mean()) - 0.6827) < 0.01
    assert float(values.abs().max()) > 3.5


# ---------------------------------------------------------------- verified answers


LEVELS: dict[str, Callable[[symbiosis.Executor], Any]] = {
    "none": lambda _: None,
    "noise": lambda _: symbiosis.Noise(),
    "split": lambda other: symbiosis.Split(other.endpoint),
    "split16": lambda other: symbiosis.Split(other.endpoint, 16),
}


def tampered(executor: symbiosis.Executor, change: Callable[[Tensor], Tensor]) -> None:
    """From now on this executor changes its answers, as an operator could."""
    engine = executor.server.engine
    compute = engine._compute

    def lie(slices: Any) -> None:
        compute(slices)
        for piece in slices:
            piece.item.work.out.copy_(change(piece.item.work.out))

    engine._compute = lie  # type: ignore[method-assign]


def one_value_off(y: Tensor) -> Tensor:
    y = y.clone()
    y[-1, 0] += 1 if not y.is_floating_point() else 0.05 * y.std()
    return y


def highest_bit(y: Tensor) -> Tensor:
    """Modulo 2^k half of all columns do not see it."""
    y = y.clone()
    y[-1, 0] ^= torch.iinfo(y.dtype).min
    return y


LIES = {"one value": one_value_off, "rows swapped": lambda y: y.roll(1, 0), "zeros": torch.zeros_like}


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
@pytest.mark.parametrize("lie", [*LIES, "highest bit"])
@pytest.mark.parametrize("name", LEVELS)
def test_a_wrong_answer_is_an_error_that_names_the_call(name: str, lie: str, op: Op, two: Callable) -> None:
    if lie == "highest bit" and "split" not in name:
        pytest.skip("floating point has no highest bit that wraps")
    one, other = two(tiny_llama())
    for liar in (one, other) if "split" in name else (one,):
        wrapped = symbiosis.wrap(tiny_llama(), one.endpoint, privacy=LEVELS[name](other), verify=True)
        layer, x = wrapped.model.layers[1].mlp.gate_proj, torch.randn(6, 64, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        honest = liar.server.engine._compute
        tampered(liar, LIES.get(lie, highest_bit))
        with pytest.raises(
            CallError, match=rf"{liar.endpoint} answered {op.name} of model.layers.1.mlp.gate_proj"
        ) as found:
            layer(x) if op is Op.FORWARD else gradient_of(layer, len(x))
        assert found.value.code is Code.WRONG_ANSWER
        liar.server.engine._compute = honest


def gradient_of(layer: Any, rows: int) -> None:
    """The gradient's call alone."""
    handle = layer.weight.handle
    handle.session.call(Op.DGRAD, handle.index, torch.randn(rows, layer.out_features))


def test_other_weights_are_noticed(serve: Callable) -> None:
    """As of an operator who saves memory."""
    executor = serve(tiny_llama())
    wrapped = symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True)
    layer, x = wrapped.model.layers[0].mlp.gate_proj, torch.randn(3, 64)
    layer(x)
    with torch.no_grad():
        for weight in executor.server.store.weights:
            weight.copy_(weight.bfloat16())
    with pytest.raises(CallError, match="are not the product of what was sent"):
        layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LEVELS)
def test_right_answers_pass(name: str, dtype: torch.dtype, two: Callable, ids: Tensor) -> None:
    model = tiny_llama().to(dtype)
    one, other = two(model)
    wrapped = lora(symbiosis.wrap(copy.deepcopy(model), one.endpoint, privacy=LEVELS[name](other), verify=True))
    for _ in range(10):
        one_step(wrapped, ids)
    level = next(
        m for m in wrapped.modules() if hasattr(m, "weight") and hasattr(m.weight, "handle")
    ).weight.handle.session.level
    assert level.proofs.checked >= 200


def test_rows_of_any_size_pass(serve: Callable) -> None:
    """No false alarm, whatever the scale is."""
    executor = serve(tiny_llama())
    layer = symbiosis.wrap(tiny_llama(), executor.endpoint, verify=True).model.layers[0].mlp.down_proj
    for scale in (0.0, 1e-38, 1e-20, 1.0, 1e20, 1e34):
        layer(torch.randn(512, 96) * scale)


def wide_llama(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=256, num_hidden_layers=1, num_attention_heads=8, vocab_size=64
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wrong_answer_in_half_precision_is_an_error(dtype: torch.dtype, serve: Callable) -> None:
    model = wide_llama(dtype)
    executor = serve(model)
    wrapped, ids = symbiosis.wrap(copy.deepcopy(model), executor.endpoint, verify=True), torch.arange(20)[None]
    assert torch.equal(wrapped(ids).logits, model(ids).logits)
    honest = executor.server.engine._compute
    for lie in (torch.zeros_like, lambda y: y.roll(1, 0), torch.neg, lambda y: 2 * y, lambda y: y.roll(1, 1)):
        tampered(executor, lie)
        with pytest.raises(CallError, match="20 of 20 rows"):
            wrapped(ids)
        executor.server.engine._compute = honest


FLOATS = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])


def learned(v_KN: Tensor) -> Proofs:
    proofs = Proofs()
    proofs.learn_floats(0, v_KN)
    return proofs


@FLOATS
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DGRAD])
@pytest.mark.parametrize("width", [64, 4096])
def test_lies_are_found_whatever_the_width(width: int, op: Op, dtype: torch.dtype) -> None:
    """Also beside a column of the layer that is much larger than the others."""
    v_KN, others_KN = ((torch.randn(width, width) / width**0.5).to(dtype) for _ in range(2))
    v_KN[:, 0] *= 20
    proofs, x_TK = learned(v_KN), torch.randn(5, width).to(dtype)
    y_TN, other_TN = (x_TK @ (v if op is Op.FORWARD else v.t()) for v in (v_KN, others_KN))
    lies = [
        torch.zeros_like(y_TN),
        -y_TN,
        2 * y_TN,
        y_TN.roll(1, 0),
        y_TN.roll(1, 1),
        other_TN,
        (1.25 * y_TN).to(dtype),
    ]
    lies += [torch.full_like(y_TN, value) for value in (math.inf, math.nan)]
    assert not proofs.wrong(op, 0, x_TK, y_TN).any()
    assert [proofs.wrong(op, 0, x_TK, lie).all() for lie in lies] == [True] * len(lies)
    for row in range(5):
        one_TN = y_TN.index_copy(0, torch.tensor([row]), other_TN[:1])
        assert proofs.wrong(op, 0, x_TK, one_TN).nonzero().flatten().tolist() == [row]


def rows_and_layer(kind: str, rows: int, width: int, columns: int) -> tuple[Tensor, Tensor]:
    x_TK, v_KN = torch.randn(rows, width), torch.randn(width, columns) / width**0.5
    if kind == "outliers":
        x_TK[:, 1] *= 200
        v_KN[:, 0] *= 50
    elif kind == "alike":  # every sum is rounded in the same direction
        x_TK, v_KN = torch.full_like(x_TK, 0.3), torch.full_like(v_KN, 0.1)
    elif kind == "cancelling":
        x_TK[:, width // 2 :] = -x_TK[:, : width // 2] + 0.02 * x_TK[:, width // 2 :]
        v_KN[width // 2 :] = v_KN[: width // 2]
    elif kind == "tiny":  # down to what processors take for zero
        x_TK *= torch.logspace(0, -40, rows)[:, None]
    return x_TK, v_KN


def in_parts(x_TK: Tensor, v_KN: Tensor, parts: int, in_place: bool) -> Tensor:
    """As GPUs may compute it: every part of the sum is rounded, or even every sum of parts."""
    sums = [
        (x.float() @ v.float()).to(x.dtype) for x, v in zip(x_TK.chunk(parts, 1), v_KN.chunk(parts, 0), strict=True)
    ]
    y_TN = sums[0].clone() if in_place else sums[0].float()
    for part in sums[1:]:
        y_TN += part
    return y_TN.to(x_TK.dtype)


@FLOATS
@pytest.mark.parametrize("kind", ["normal", "outliers", "alike", "cancelling", "tiny"])
def test_whatever_rounding_makes_of_a_right_answer_passes(kind: str, dtype: torch.dtype) -> None:
    for rows, width, columns in ((1, 64, 64), (40, 100, 32), (7, 4096, 128), (200, 2048, 64)):
        x_TK, v_KN = (t.to(dtype) for t in rows_and_layer(kind, rows, width, columns))
        proofs = learned(v_KN)
        answers = [x_TK @ v_KN, nn.functional.linear(x_TK, v_KN.t().contiguous()), (v_KN.t() @ x_TK.t()).t()]
        if dtype in (torch.bfloat16, torch.float16) and width % 1024 == 0:
            answers += [in_parts(x_TK, v_KN, parts, place) for parts in (2, 8, 32) for place in (False, True)]
        assert [int(proofs.wrong(Op.FORWARD, 0, x_TK, y).sum()) for y in answers] == [0] * len(answers)


def test_a_row_that_overflows_passes_where_it_can_overflow() -> None:
    """As gradients in float16 do before their scale is found."""
    v_KN = torch.randn(64, 64)
    proofs, x_TK = learned(v_KN.half()), torch.randn(4, 64) * torch.tensor([[1.0], [1e4], [6e4], [1.0]])
    x_TK = x_TK.clamp(-6e4, 6e4).half()
    y_TN = x_TK @ v_KN.half()
    assert y_TN.isinf().any(1).tolist() == [False, True, True, False]
    assert not proofs.wrong(Op.FORWARD, 0, x_TK, y_TN).any()
    y_TN[0, 0] = math.inf
    assert proofs.wrong(Op.FORWARD, 0, x_TK, y_TN).tolist() == [True, False, False, False]


def test_words_that_name_no_level_are_refused(serve: Callable) -> None:
    executor = serve(tiny_llama(), integers=[8])
    for privacy in ("split", "pads", "secret"):
        with pytest.raises(WrapError, match="symbiosis.Split"):
            symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=privacy)
    with pytest.raises(WrapError, match="8 or 16"):
        symbiosis.wrap(tiny_llama(), executor.endpoint, privacy=symbiosis.Split(executor.endpoint, 12))


@pytest.mark.parametrize("level", [symbiosis.Noise, symbiosis.Split, symbiosis.Pads])
def test_a_class_instead_of_a_level_is_told_how_to_write_it(level: type, serve: Callable) -> None:
    with pytest.raises(WrapError, match=rf"write {level.__name__}\(\.\.\.\)"):
        symbiosis.wrap(tiny_llama(), serve(tiny_llama()).endpoint, privacy=level)  # type: ignore[arg-type]
