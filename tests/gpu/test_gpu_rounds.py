"""Captured steps whose calls the GPU answers as rounds, under MPS: alone, together, and over the death of either side.

All that uses CUDA is a process of its own: it joins MPS only when it starts.
"""

import copy
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import symbiosis
from symbiosis.errors import ConfigError
from symbiosis.executor import mps
from symbiosis.executor.model.load import load_model
from symbiosis.executor.model.packed_tensor import PackedTensor
from symbiosis.kernels.gpu import shareable_memory
from symbiosis.kernels.packing import FORMATS
from symbiosis.transport.cuda import captured_step as cuda_step
from tests.conftest import tiny_llama, wide_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_line import (
    ENOUGH,
    WAIT_S,
    holds_no_more,
    line_of,
    lora,
    losses,
    next_loss,
    serve_forever,
    told,
    train_forever,
    trainer,
)
from tests.inproc.test_quantised import with_values
from tests.processes import until, watching

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROUNDING = {torch.float32: 3e-5, torch.bfloat16: 0.05}  # of a few products, as a part of the greatest logit


@pytest.fixture(scope="module", autouse=True)
def shared_gpu() -> Iterator[None]:
    """MPS, for the processes that are started."""
    before = {name: os.environ.get(name) for name in (mps.PIPES, mps.LOGS)}
    with tempfile.TemporaryDirectory() as folder:
        if before[mps.PIPES] is None:
            os.environ.update({mps.PIPES: f"{folder}/pipes", mps.LOGS: f"{folder}/logs"})
        try:
            with mps.running():
                yield
        except ConfigError as error:
            pytest.skip(str(error))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def decoders(split: nn.Module, plain: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    return [symbiosis.capture(torch.no_grad()(lambda ids, model=model: model(ids).logits)) for model in (split, plain)]


def decode(
    endpoint: str, said: Any, seed: int, steps: int, all_there: Any = None, dtype: torch.dtype = torch.float32
) -> None:
    """How far captured logits are from those of the unsplit model, at worst, as a part of the greatest; and how its calls met
    others. When captured, it waits until all are there."""
    split = symbiosis.wrap(tiny_llama().to("cuda", dtype), endpoint)
    captured, reference = decoders(split, tiny_llama().to("cuda", dtype))
    ids = torch.randint(3, 100, (2, 1), generator=torch.Generator().manual_seed(seed)).cuda()
    worst = 0.0
    for turn in range(steps):
        x = (ids + turn) % 100
        expected = reference(x)
        worst = max(worst, ((captured(x) - expected).abs().max() / expected.abs().max()).item())
        if turn == 3:
            said.put("captured")
            if all_there:
                all_there.wait(WAIT_S)
    said.put((worst, symbiosis.stats(split).mean_batch, line_of(split).steps.rounds))


def made_whole(folder: str, format: str) -> nn.Module:
    """The model of a checkpoint with what its packed weights stand for, on the GPU."""
    packed = load_model(folder, None, "cuda", (), format)
    values = {name: p.whole() for name, p in packed.named_parameters() if isinstance(p, PackedTensor)}
    assert values
    return with_values(load_model(folder, None, "cuda"), values)


def decode_beside(endpoint: str, said: Any, seed: int, steps: int, all_there: Any, packed: Any = None) -> None:
    """How far captured logits in bfloat16 are from the unsplit model's in float32, over how far its own in bfloat16 are. `packed`: a checkpoint and
    the format in which it is held, if it is."""
    if packed is None:
        split = symbiosis.wrap(wide_llama().to("cuda", torch.bfloat16), endpoint)
        plain, exact = wide_llama().to("cuda", torch.bfloat16), wide_llama().cuda()
    else:
        split, plain = symbiosis.from_executor(endpoint), made_whole(*packed)
        exact = copy.deepcopy(plain).float()
    captured, reference = decoders(split, plain)
    ids = torch.randint(3, 100, (1 + seed, 1), generator=torch.Generator().manual_seed(seed)).cuda()
    for _ in range(4):
        captured(ids)
    all_there.wait(WAIT_S)
    split_off, plain_off = 0.0, 0.0
    for turn in range(steps):
        x = (ids + turn) % 100
        with torch.no_grad():
            expected = exact(x).logits
        split_off += (captured(x) - expected).square().mean().item()
        plain_off += (reference(x) - expected).square().mean().item()
    said.put(((split_off / plain_off) ** 0.5, symbiosis.stats(split).mean_batch, line_of(split).steps.rounds))


def decode_shapes(endpoint: str, said: Any, seed: int, steps: int) -> None:
    """Captured steps of two shapes, in bfloat16: how many differ from the unsplit model's; and how many rounds there are."""
    split = symbiosis.wrap(wide_llama().to("cuda", torch.bfloat16), endpoint)
    captured, reference = decoders(split, wide_llama().to("cuda", torch.bfloat16))
    ids = torch.randint(3, 100, (16, 1), generator=torch.Generator().manual_seed(seed)).cuda()
    wrong = 0
    for turn in range(steps):
        x = (ids[: (2, 16)[turn % 2]] + turn) % 100
        wrong += not torch.equal(captured(x), reference(x))
    said.put((wrong, line_of(split).steps.rounds))


def train(endpoint: str, said: Any, memory: str = "shared", steps: int = 12) -> None:
    """How many losses of a captured split trainer are not those of a captured unsplit one. `memory`: how its calls share it."""
    if memory != "apart":
        cuda_step.MOST_APART = 0
    if memory == "copied":
        shareable_memory.new_pool = lambda: None  # type: ignore[assignment]
    models = [lora(model) for model in (symbiosis.wrap(tiny_llama().cuda(), endpoint), tiny_llama().cuda())]
    captured = [symbiosis.capture(trainer(model)) for model in models]
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()
    wrong = 0
    for turn in range(steps):
        split, plain = (run((ids + turn) % 100).item() for run in captured)
        wrong += split != plain
        if turn == 3:
            said.put("captured")
    line = line_of(models[0])
    said.put((wrong, line.steps.rounds, bool(line.steps._captured[0].segments)))


def capture_many(endpoint: str, said: Any) -> None:
    """Steps of more shapes than are kept: what the session shares of memory, and what torch holds, after each; and when all are
    dropped."""
    cuda_step.MOST_APART = 0
    split = lora(symbiosis.wrap(tiny_llama().cuda(), endpoint))
    step, found = symbiosis.capture(trainer(split), max_graphs=2), []
    for length in [*range(4, 12), *range(4, 12)]:
        ids = torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(length)).cuda()
        for _ in range(4):
            loss = step(ids)
        assert loss.isfinite()
        torch.cuda.synchronize()
        found.append(
            (len(line_of(split)._link.segments), line_of(split).steps.rounds, torch.cuda.memory_reserved() >> 20)
        )
    del step
    gc.collect()
    split(input_ids=ids)
    torch.cuda.synchronize()
    said.put((found, len(line_of(split)._link.segments), line_of(split).steps.rounds))


def layer_alone(endpoint: str, said: Any) -> None:
    """A step that calls the same layer twice, and returns what the executor wrote; and one that calls another every other time."""
    model = tiny_llama().cuda()
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    ours, theirs = (m.model.layers[0].self_attn for m in (model, split))
    x = torch.randn(2, ours.q_proj.in_features, device="cuda")

    def twice(of: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                first = of.q_proj(x)
                return first, of.q_proj(first)

        return step

    captured, reference = symbiosis.capture(twice(theirs)), symbiosis.capture(twice(ours))
    kept = []
    for turn in range(6):
        results, expected = captured(x + turn), reference(x + turn)
        kept.append(all(map(torch.equal, results, expected)))
    calls = []

    def changing(x: Tensor) -> Tensor:
        calls.append(len(calls))
        with torch.no_grad():
            return (theirs.q_proj if len(calls) % 2 else theirs.o_proj)(x)

    other = symbiosis.capture(changing)
    results = [other(x).clone() for _ in range(4)]
    with torch.no_grad():
        kept.append(torch.equal(results[-1], (ours.q_proj if len(calls) % 2 else ours.o_proj)(x)))
    said.put((kept, line_of(split).steps.rounds))


def served(processes: Any, tmp_path: Path, *how: Any, **options: Any) -> tuple[Any, str]:
    executor, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock", *how, rounds=True, **options)
    return executor, ready.get(timeout=WAIT_S)


def kill_two(start: Callable[[int], tuple[Any, Any]], endpoint: str, turn: int) -> None:
    """In the midst of their rounds, each time a little later; and wait until the executor has seen their end."""
    victims = [start(n) for n in range(2)]
    for _, said in victims:
        assert said.get(timeout=WAIT_S) == "captured"
    time.sleep(0.1 + 0.03 * (turn % 8))
    for process, _ in victims:
        process.kill()
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
    with watching(endpoint) as look:
        until(lambda: sum(not s.observer for s in look().sessions) <= 1, "the end of their sessions")


def test_alone_nothing_differs(processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path)
    _, said = processes.start(decode, endpoint, 1, 40)
    assert said.get(timeout=WAIT_S) == "captured"
    assert said.get(timeout=WAIT_S) == (0.0, 1.0, 1)


def test_rounds_of_several_shapes_at_once(processes: Processes, tmp_path: Path) -> None:
    """Whoever else computes at the same time: products of one stream have a workspace of their own."""
    _, endpoint = served(processes, tmp_path, "immediate", "wide", torch.bfloat16)
    queues = [processes.start(decode_shapes, endpoint, seed, 300)[1] for seed in range(3)]
    assert [said.get(timeout=WAIT_S) for said in queues] == [(0, 2)] * 3


LARGE = {"batch_below": 16}


@pytest.mark.parametrize("how", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("memory", ["apart", "shared", "copied"])
def test_training(memory: str, how: Any, processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path, **how)
    _, said = processes.start(train, endpoint, memory)
    assert said.get(timeout=WAIT_S) == "captured"
    shared = memory == "shared" or (memory == "apart" and bool(how))  # large calls never have places apart
    assert said.get(timeout=WAIT_S) == (0, 1, shared)


@pytest.mark.parametrize("how", [{}, LARGE], ids=["small", "large"])
def test_steps_that_are_dropped_give_back_what_they_held(how: Any, processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path, **how)
    _, said = processes.start(capture_many, endpoint)
    found, segments, rounds = said.get(timeout=WAIT_S)
    assert (segments, rounds) == (2, 0), "the words, and what calls use that are not captured"
    assert all(shared <= found[2][0] + 4 and rounds <= 3 for shared, rounds, _ in found), found
    assert max(held for *_, held in found) < 2 * found[3][2], found


@pytest.mark.parametrize("policy", ["opportunistic", "immediate"])
def test_large_rounds_beside_who_decodes(policy: str, processes: Processes, tmp_path: Path) -> None:
    """Call by call then; and the results are what they are."""
    _, endpoint = served(processes, tmp_path, policy, train_share=0.5, **LARGE)
    trainers = [processes.start(train, endpoint, "shared", 200)[1] for _ in range(2)]
    decoders = [processes.start(decode, endpoint, seed, 1000)[1] for seed in range(2)]
    for said in (*trainers, *decoders):
        assert said.get(timeout=WAIT_S) == "captured"
    for said in trainers:
        assert said.get(timeout=WAIT_S) == (0, 1, True)
    for said in decoders:
        worst, _, rounds = said.get(timeout=WAIT_S)
        assert worst < ROUNDING[torch.float32] and rounds == 1


@pytest.mark.fault
@pytest.mark.parametrize("order", ["kill", "terminate"])
@pytest.mark.parametrize("how", [{}, LARGE], ids=["small", "large"])
def test_training_goes_on_at_another_executor(how: Any, order: str, processes: Processes, tmp_path: Path) -> None:
    """In the midst of a step, and exactly where it was."""
    executor, endpoint = served(processes, tmp_path, **how)
    _, said = processes.start(train, endpoint, "shared", 1500)
    assert said.get(timeout=WAIT_S) == "captured"
    for _ in range(2):
        time.sleep(0.4)
        getattr(executor, order)()
        executor.join(20)
        executor, _ = served(processes, tmp_path, **how)
    assert said.get(timeout=WAIT_S) == (0, 1, True)


@pytest.mark.fault
def test_trainers_are_killed_in_the_midst_of_large_rounds(processes: Processes, tmp_path: Path) -> None:
    """Nobody else notices."""
    executor, endpoint = served(processes, tmp_path, **LARGE)
    _, bystander = processes.start(train, endpoint, "shared", 4000)
    assert bystander.get(timeout=WAIT_S) == "captured"
    held: list[tuple[int, int]] = []
    for turn in range(3):
        kill_two(lambda n: processes.start(train, endpoint, "shared", 10**6), endpoint, turn)
        holds_no_more(executor, held)
    assert bystander.get(timeout=WAIT_S) == (0, 1, True)
    assert executor.is_alive()


def test_steps_of_every_kind(processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path)
    _, said = processes.start(layer_alone, endpoint)
    kept, rounds = said.get(timeout=WAIT_S)
    assert all(kept), kept
    assert rounds == 1, "one of the two calls others each time"


@pytest.mark.parametrize("policy", ["immediate", "opportunistic", "lockstep"])
def test_together(policy: str, processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path, policy)
    all_there = processes.context.Barrier(3)
    queues = [processes.start(decode, endpoint, seed, 200, all_there)[1] for seed in range(3)]
    for said in queues:
        assert said.get(timeout=WAIT_S) == "captured"
    found = [said.get(timeout=WAIT_S) for said in queues]
    assert all(worst < ROUNDING[torch.float32] and rounds == 1 for worst, _, rounds in found), found
    if policy == "lockstep":
        assert max(batch for _, batch, _ in found) > 1.5, found
    if policy == "immediate":
        assert all(batch == 1 for _, batch, _ in found), found
    with watching(endpoint) as look:
        figures = look()
        assert figures.calls >= sum(200 * 8 for _ in queues), "each call of a round counts"


def test_together_but_invariant(processes: Processes, tmp_path: Path) -> None:
    _, endpoint = served(processes, tmp_path, batch_invariant=True)
    all_there = processes.context.Barrier(3)
    queues = [processes.start(decode, endpoint, seed, 200, all_there)[1] for seed in range(3)]
    for said in queues:
        assert said.get(timeout=WAIT_S) == "captured"
    for said in queues:
        worst, batch, _ = said.get(timeout=WAIT_S)
        assert (worst, batch) == (0.0, 1.0)


def test_together_in_bfloat16(processes: Processes, tmp_path: Path) -> None:
    """Rows of several are multiplied by one kernel of our own, which rounds no worse than anybody else's."""
    _, endpoint = served(processes, tmp_path, "lockstep", "wide", torch.bfloat16)
    all_there = processes.context.Barrier(3)
    queues = [processes.start(decode_beside, endpoint, seed, 100, all_there)[1] for seed in range(3)]
    found = [said.get(timeout=WAIT_S) for said in queues]
    assert all(ratio < 1.1 and rounds == 1 for ratio, _, rounds in found), found
    assert max(batch for _, batch, _ in found) > 1.5, found


def serve_packed(where: str, ready: Any, folder: str, format: str) -> None:
    how: Any = {"quantize": format, "device": "cuda", "policy": "lockstep"}
    with symbiosis.Executor(folder, listen=[f"local://{where}"], **how) as executor:
        ready.put(executor.endpoint)
        threading.Event().wait(10 * WAIT_S)


@pytest.mark.parametrize("format", FORMATS)
def test_together_by_packed_weights(format: str, processes: Processes, tmp_path: Path) -> None:
    """The values are those of whole weights, whoever makes them of the codes."""
    folder = str(tmp_path / "model")
    wide_llama().bfloat16().save_pretrained(folder)  # type: ignore[operator]
    _, ready = processes.start(serve_packed, f"{tmp_path}/executor.sock", folder, format)
    endpoint, all_there = ready.get(timeout=WAIT_S), processes.context.Barrier(3)
    queues = [processes.start(decode_beside, endpoint, seed, 100, all_there, (folder, format))[1] for seed in range(3)]
    found = [said.get(timeout=WAIT_S) for said in queues]
    assert all(ratio < 1.1 and rounds == 1 for ratio, _, rounds in found), found
    assert max(batch for _, batch, _ in found) > 1.5, found


@pytest.mark.fault
def test_the_executor_is_killed_in_the_midst_of_rounds(processes: Processes, tmp_path: Path) -> None:
    executor, endpoint = served(processes, tmp_path)
    _, queue = processes.start(train_forever, endpoint, 2000, True)
    disturbed = next_loss(queue)
    for pause, goes_on in ((0.05, True), (0.21, False), (0.1, True), (0.13, True)):
        time.sleep(pause)
        executor.kill()
        executor.join()
        disturbed |= told(queue)
        executor, _ = served(processes, tmp_path)
        if goes_on:  # else the next one dies while they join
            disturbed |= next_loss(queue)
    disturbed |= losses(queue)
    _, queue = processes.start(train_forever, endpoint, 2000, True)
    assert disturbed == losses(queue)


@pytest.mark.fault
def test_another_executor_goes_on_with_the_rounds(processes: Processes, tmp_path: Path) -> None:
    """The first one ends in order, however many rounds are under way; each goes on from where it is."""
    how = "opportunistic", "llama", torch.bfloat16
    executor, endpoint = served(processes, tmp_path, *how)
    queues = [processes.start(decode, endpoint, seed, 3000, dtype=torch.bfloat16)[1] for seed in range(3)]
    for said in queues:
        assert said.get(timeout=WAIT_S) == "captured"
    for _ in range(2):
        time.sleep(0.2)
        executor.terminate()
        executor.join(20)
        assert executor.exitcode == 0
        executor, _ = served(processes, tmp_path, *how)
    found = [said.get(timeout=WAIT_S) for said in queues]
    assert all(worst < ROUNDING[torch.bfloat16] and rounds == 1 for worst, _, rounds in found), found


@pytest.mark.fault
@pytest.mark.parametrize(
    ("policy", "dtype", "turns"),
    [
        ("opportunistic", torch.float32, 4),
        ("lockstep", torch.bfloat16, 4),
        pytest.param("opportunistic", torch.bfloat16, 25, marks=[pytest.mark.soak, ENOUGH]),
    ],
)
def test_clients_are_killed_in_the_midst_of_rounds(
    policy: str, dtype: torch.dtype, turns: int, processes: Processes, tmp_path: Path
) -> None:
    """Those who were answered together with them go on, with the right results."""
    executor, endpoint = served(processes, tmp_path, policy, "llama", dtype)
    _, bystander = processes.start(decode, endpoint, 0, 750 * turns, dtype=dtype)
    assert bystander.get(timeout=WAIT_S) == "captured"
    held: list[tuple[int, int]] = []
    for turn in range(turns):
        kill_two(lambda n: processes.start(decode, endpoint, 1 + n, 10**6, dtype=dtype), endpoint, turn)
        holds_no_more(executor, held)
    worst, _, rounds = bystander.get(timeout=WAIT_S)
    assert worst < ROUNDING[dtype] and rounds == 1
    assert executor.is_alive()


def wait_for(
    words: list[int], value: int, stop: bool, seconds: float, error: Tensor | None = None
) -> tuple[list[int], bool, float]:
    """What the executor's kernel does with these bells: whom the page answers afterwards, whether it gave up, and when."""
    from symbiosis.kernels.gpu import doorbell
    from symbiosis.kernels.gpu import gather as rows

    lies = torch.zeros(64 * len(words), dtype=torch.int32, device="cuda")
    table = torch.zeros(2, 2 * rows.PLACES, dtype=torch.int64, device="cuda")
    for number, word in enumerate(words):
        lies[64 * number] = word
        table[:, 2 * number] = lies[64 * number + 32 :].data_ptr()
        table[:, 2 * number + 1] = value
    turn = torch.zeros(1, dtype=torch.int64, device="cuda")
    late, stopped = (torch.full((1,), int(value), dtype=torch.int32).pin_memory() for value in (0, stop))
    torch.cuda.synchronize()
    begun = time.perf_counter()
    doorbell.wait(table, turn, stopped, late, -128, seconds, 0 if error is None else error.data_ptr(), 0xFFFF)
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    rows.answer(table, turn)
    return lies.view(-1, 64)[:, 32].tolist(), bool(late[0]), took


def test_the_kernel_waits_for_all_and_not_for_ever() -> None:
    from symbiosis.kernels.gpu import doorbell

    wait_for([1], 1, False, 1.0)  # compiles
    assert wait_for([7, 7, 7], 7, False, 5.0)[:2] == ([7, 7, 7], False)
    assert wait_for([7, 7, 7], 7, True, 5.0)[:2] == ([7, 7, 7], False), "nobody is missing: nothing to stop"
    answers, late, took = wait_for([7, 6, 7], 7, False, 0.2)
    assert answers == [0, 0, 0] and late and 0.2 <= took < 2.0
    answers, late, took = wait_for([7, 6, 7], 7, True, 5.0)
    assert answers == [0, 0, 0] and late and took < 1.0
    error = torch.zeros(1, dtype=torch.int32).pin_memory()
    assert wait_for([7], 7, False, 5.0, error)[:2] == ([7], False) and error[0] == 0
    answers, late, _ = wait_for([6], 7, False, 0.2, error)
    assert answers == [doorbell.LET_GO] and late and error[0] == 0xFFFF, "who is let go is told why"


def test_who_is_never_answered_is_told() -> None:
    from symbiosis.kernels.gpu import doorbell

    words, x = torch.zeros(3, 64, dtype=torch.int32, device="cuda"), torch.ones(2, 64, device="cuda")
    error = torch.zeros(1, dtype=torch.int32).pin_memory()
    mine = doorbell.DoorbellWords(words[0, :1], words[1, :1], words[2, :1], error.data_ptr(), 0xFFFF)
    doorbell.call(mine, 0.1, 1, x[0], x[1])
    doorbell.call(mine, 60.0, 2, x[0], x[1])  # and so are all after it
    torch.cuda.synchronize()
    assert error[0] == 0xFFFF and words[:, 0].tolist() == [2, 0, 1]


def test_without_mps_calls_go_one_by_one(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # forked ones have CUDA loaded, which has read where MPS listens
    monkeypatch.setattr(processes, "context", multiprocessing.get_context("spawn"))
    monkeypatch.setenv(mps.PIPES, str(tmp_path / "nothing"))
    _, endpoint = served(processes, tmp_path)
    _, said = processes.start(decode, endpoint, 1, 20)
    assert said.get(timeout=WAIT_S) == "captured"
    assert said.get(timeout=WAIT_S) == (0.0, 1.0, 0)
