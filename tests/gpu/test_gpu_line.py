"""Clients on a GPU whose calls no CPU waits for: eager, captured, several at once, and over the death of either side."""

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import StaticCache

import symbiosis
from symbiosis.client import capture as client_capture
from symbiosis.client.capture import MOST_WARMING
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import CallError, CaptureError
from symbiosis.executor.gpu.launcher import Launcher
from symbiosis.kernels.gpu.graphs import capturing
from symbiosis.protocol import Op
from symbiosis.transport.cuda import client as cuda_client
from symbiosis.transport.cuda.driver import PinnedMemory
from symbiosis.transport.cuda.words import ANSWERED, ENQUEUED
from tests.conftest import tiny_llama, tiny_mixtral, wide_llama
from tests.gpu import memory
from tests.gpu.conftest import Processes
from tests.processes import until, watching

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WAIT_S = 60


def line_of(model: nn.Module) -> Any:
    return next(remote_weights(model)).handle.session.lines[0]


def lora(model: nn.Module, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()


def trainer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A whole training step on a LoRA adapter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, capturable=True)

    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return step


# ---------------------------------------------------------------- processes


MODELS = {"llama": tiny_llama, "wide": wide_llama, "mixtral": tiny_mixtral}


def serve_forever(
    where: str,
    ready: Any,
    policy: str = "opportunistic",
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    batch_below: int | None = None,
    **options: Any,
) -> None:
    """Until the parent ends, or a SIGTERM, which lets calls be answered. `batch_below`: from so many rows on calls are large."""
    if batch_below is not None:
        Launcher.batch_below = property(lambda self: batch_below)  # type: ignore[assignment]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    model = MODELS[name]().to("cuda", dtype)
    url = where if "://" in where else f"local://{where}"
    with symbiosis.Executor(model, listen=[url], policy=policy, heartbeat_s=2.0, **options) as executor:
        ready.put(executor.endpoint)
        while os.getppid() != 1 and not ended.wait(0.1):
            pass


def train_forever(endpoint: str, said: Any, steps: int, captured: bool) -> None:
    step = trainer(lora(symbiosis.wrap(tiny_llama().cuda(), endpoint)))
    run = symbiosis.capture(step) if captured else step
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1)).cuda()
    for turn in range(steps):
        loss = run((ids + turn) % 100)
        if turn % 10 == 9 or turn < 4:
            said.put((turn, loss.item()))
    said.put("done")


def holdings(executor: Any) -> tuple[int, int]:
    """How many descriptors it has open, and how many pages of clients' words it maps."""
    proc = Path(f"/proc/{executor.pid}")
    return len(list((proc / "fd").iterdir())), (proc / "maps").read_text().count("symbiosis-words")


def holds_no_more(executor: Any, held: list[tuple[int, int]]) -> None:
    """... than after the first clients that were killed; what these had is given back soon."""
    if not held:
        time.sleep(1.0)
        held.append(holdings(executor))
    held.append(holdings(executor))
    end = time.monotonic() + 10
    while any(now > then for now, then in zip(held[-1], held[0], strict=True)):
        assert time.monotonic() < end, held
        time.sleep(0.1)
        held[-1] = holdings(executor)


@pytest.fixture(scope="module")
def executor_of_all(tmp_path_factory: pytest.TempPathFactory) -> Any:
    started = Processes()
    _, ready = started.start(serve_forever, f"{tmp_path_factory.mktemp('executor')}/executor.sock")
    yield ready.get(timeout=WAIT_S)
    started.end()


@pytest.fixture
def endpoint(executor_of_all: str) -> str:
    return executor_of_all


def test_calls_go_over_the_line(endpoint: str, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    with torch.no_grad():
        for _ in range(6):  # singles, groups, and what the executor makes graphs of
            assert torch.equal(split(ids).logits, model(ids).logits)
    assert line_of(split).recorded == 0
    assert symbiosis.stats(split).batched_calls == symbiosis.stats(split).calls


def test_leaving_and_joining_again(endpoint: str, ids: Tensor) -> None:
    model, pinned = tiny_llama().cuda(), len(PinnedMemory._mapped)
    for _ in range(5):
        split = symbiosis.wrap(copy.deepcopy(model), endpoint)
        with torch.no_grad():
            assert torch.equal(split(ids).logits, model(ids).logits)
        assert line_of(split)
        next(remote_weights(split)).handle.session.close()
        gc.collect()
    assert len(PinnedMemory._mapped) <= pinned


@pytest.mark.parametrize("stream", ["torch's own", "another"])
def test_leaving_at_once(stream: str, endpoint: str, ids: Tensor) -> None:
    """Calls that are enqueued are answered, whichever stream makes them, and what it uses is not taken away before."""
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    session, chosen = next(remote_weights(split)).handle.session, torch.cuda.Stream()
    if stream == "torch's own":
        chosen = torch.cuda.default_stream()  # type: ignore[assignment]
    with torch.no_grad():
        expected = model(ids).logits
        for turn in range(5):
            torch.cuda.synchronize()
            with torch.cuda.stream(chosen):
                torch.cuda._sleep(10**8)  # so none of the calls has been made when we leave
                logits = split(ids).logits
            session.close()
            assert not session.lines
            torch.cuda.synchronize()
            assert torch.equal(logits, expected), turn


def test_growing(endpoint: str) -> None:
    session = symbiosis.client.session.Session(endpoint)
    weight = tiny_llama().cuda().model.layers[0].mlp.up_proj.weight
    number = next(n for n, layer in enumerate(session.manifest) if layer.name == "model.layers.0.mlp.up_proj")
    for rows in (1, 100, 300_000, 7):
        x = torch.randn(rows, 64, device="cuda")
        assert torch.equal(session.call(Op.FORWARD, number, x), x @ weight.t())


def test_a_wrong_call_is_refused(endpoint: str) -> None:
    session = symbiosis.client.session.Session(endpoint)
    with pytest.raises(CallError, match="takes rows of 64"):
        session.call(Op.FORWARD, 3, torch.ones(2, 63, device="cuda"))
    number = next(n for n, layer in enumerate(session.manifest) if layer.kind == "linear")
    assert session.call(Op.FORWARD, number, torch.ones(2, 64, device="cuda")).shape[0] == 2


def test_captured_training(endpoint: str, ids: Tensor) -> None:
    steps = [trainer(lora(tiny_llama().cuda())), trainer(lora(symbiosis.wrap(tiny_llama().cuda(), endpoint)))]
    captured = symbiosis.capture(steps[1])
    for turn in range(8):
        batch = (ids + turn) % 100
        expected, got = steps[0](batch), captured(batch)
        assert torch.equal(expected, got), turn


def test_captured_decoding(endpoint: str, ids: Tensor) -> None:
    def tokens(model: nn.Module, wrap: Callable[[Callable], Callable]) -> list[list[int]]:
        cache = StaticCache(config=model.config, max_cache_len=64)
        position = torch.full((1,), ids.shape[1], device="cuda")
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)

            def step() -> Tensor:
                with torch.no_grad():
                    out = model(token, past_key_values=cache, use_cache=True, position_ids=position[None].expand(2, 1))
                token.copy_(out.logits[:, -1:].argmax(-1))
                position.add_(1)
                return token

            run = wrap(step)
            return [run().flatten().tolist() for _ in range(10)]

    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    expected = tokens(tiny_llama().cuda(), lambda step: step)
    assert tokens(split, symbiosis.capture) == expected
    assert line_of(split).recorded > 0


def test_new_shapes_are_captured_anew(endpoint: str, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)

    def forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return symbiosis.capture(torch.no_grad()(lambda ids: model(ids).logits), max_graphs=2)

    captured, reference = forward(split), forward(model)  # while capturing, attention may choose another kernel
    for length in (3, 5, 7, 3, 5, 7) * 3:
        assert torch.equal(captured(ids[:, :length]), reference(ids[:, :length]))
    assert len(captured._graphs) == 2


def test_captured_arguments_by_name_and_in_containers(endpoint: str, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)

    @torch.no_grad()
    def forward(batch: dict[str, Tensor], *, shift: int = 0) -> Tensor:
        return split((batch["ids"] + shift) % 100).logits - split(batch["others"]).logits

    captured = symbiosis.capture(forward)
    for turn in range(4):
        for batch in ({"ids": ids + turn, "others": ids}, {"others": ids, "ids": ids + turn}):
            for shift in (0, 1):
                assert torch.allclose(captured(batch, shift=shift), forward(batch, shift=shift), atol=1e-5)
    assert len(captured._graphs) == 4


def test_captured_with_numbers_that_never_come_again(endpoint: str, ids: Tensor, caplog: Any) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    captured = symbiosis.capture(torch.no_grad()(lambda ids, scale: split(ids).logits * scale))
    for turn in range(2 * MOST_WARMING):
        captured(ids, 1.0 + turn)
    assert len(captured._warming) == MOST_WARMING and not captured._graphs
    assert caplog.text.count("never came again") == 1


def test_what_cannot_be_captured_says_so(endpoint: str, ids: Tensor) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)

    @torch.no_grad()
    def forward(ids: Tensor) -> float:
        return split(ids).logits.sum().item()

    captured = symbiosis.capture(forward)
    captured(ids), captured(ids)
    with pytest.raises(symbiosis.SymbiosisError, match="cannot be captured"):
        captured(ids)
    with torch.no_grad():  # and nothing is broken
        assert torch.equal(split(ids).logits, tiny_llama().cuda()(ids).logits)


def fail_then_drop(endpoint: str, said: Any) -> None:
    """A step that cannot be captured, then steps that are captured and dropped: what is broken then, and what these leave."""
    split = lora(symbiosis.wrap(tiny_llama().cuda(), endpoint))
    ids = torch.randint(3, 100, (2, 9)).cuda()
    failing, before = symbiosis.capture(lambda ids: split(ids).logits.sum().item()), torch.cuda.current_stream()
    failing(ids), failing(ids)
    with pytest.raises(CaptureError, match="cannot be captured"):
        failing(ids)
    torch.rand(1, device="cuda")
    held: list[tuple[int, int]] = []
    for _ in range(4):
        step = symbiosis.capture(trainer(split))
        decode = symbiosis.capture(torch.no_grad()(lambda ids: split(ids).logits))
        for _ in range(5):
            step(ids), decode(ids[:, :1])
        del step, decode
        gc.collect()
        split(ids)  # the executor is told of those that are dropped
        torch.cuda.synchronize()
        held.append((torch.cuda.memory_reserved(), len(line_of(split)._link.segments)))
    said.put((torch.cuda.current_stream() == before, held))


def test_after_a_step_that_cannot_be_captured_others_end_without_harm(endpoint: str, processes: Processes) -> None:
    """Torch ends a process that frees a graph's memory while it believes that something is being captured."""
    _, said = processes.start(fail_then_drop, endpoint)
    same_stream, held = said.get(timeout=WAIT_S)
    assert same_stream
    assert all(now <= then for now, then in zip(held[-1], held[1], strict=True)), held


def test_graphs_are_freed_when_nothing_is_captured(endpoint: str, ids: Tensor) -> None:
    split = lora(symbiosis.wrap(tiny_llama().cuda(), endpoint))
    step = symbiosis.capture(trainer(split))
    for _ in range(4):
        step(ids)
    gc.collect()
    client_capture._free_ended()  # those of others
    captured_elsewhere, over = threading.Event(), threading.Event()

    def capture() -> None:
        with capturing:
            captured_elsewhere.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=capture)
    thread.start()
    captured_elsewhere.wait(WAIT_S)
    del step
    gc.collect()
    split(ids)
    waiting = len(client_capture._ended)
    over.set()
    thread.join(WAIT_S)
    client_capture._free_ended()
    assert waiting == 1 and not client_capture._ended


def test_the_first_that_a_thread_does_with_cuda_is_a_call(endpoint: str) -> None:
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    layer, plain = (model.model.layers[0].mlp.down_proj for model in (split, tiny_llama().cuda()))
    x, made = torch.randn(3, layer.in_features, device="cuda"), []

    @torch.no_grad()
    def call() -> None:
        made.append(layer(x))

    call()  # the line is there, and the call is known
    torch.cuda.synchronize()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(WAIT_S)
    torch.cuda.synchronize()
    assert len(made) == 2
    assert all(torch.equal(result, plain(x)) for result in made)


def test_a_graph_that_the_program_makes_itself(endpoint: str, ids: Tensor) -> None:
    """Its calls are not announced: they are answered all the same, and what comes later is as before."""
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    mine, stream, graph = ids.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                split(mine)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            logits = split(mine).logits
        for turn in range(20):
            mine.copy_((ids + turn) % 100)
            graph.replay()
            assert (
                logits - model(mine).logits
            ).abs().max() < 1e-5  # while capturing, attention may choose another kernel
            if turn % 5 == 4:
                assert torch.equal(split(ids).logits, model(ids).logits)
    words = line_of(split).words
    until(lambda: words[ENQUEUED] == words[ANSWERED], "the count of all that was announced")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts(dtype: torch.dtype, processes: Any, tmp_path: Path, ids: Tensor) -> None:
    model = tiny_mixtral().to("cuda", dtype)
    _, ready = processes.start(serve_forever, f"{tmp_path}/e.sock", "opportunistic", "mixtral", dtype)
    split = symbiosis.wrap(copy.deepcopy(model), ready.get(timeout=WAIT_S))
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(split(ids).logits, model(ids).logits)


def test_streams_take_turns(endpoint: str, ids: Tensor) -> None:
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.no_grad():
        expected = model(ids).logits
        torch.cuda.synchronize()
        results = []
        for turn in range(12):
            with torch.cuda.stream(streams[turn % 3]):
                results.append(split(ids).logits)
        torch.cuda.synchronize()
        assert all(torch.equal(result, expected) for result in results)


# ---------------------------------------------------------------- faults


def next_loss(queue: Any) -> dict[int, float]:
    """What a trainer tells next."""
    said = queue.get(timeout=WAIT_S)
    assert said != "done", "it was done before all was tried: let it make more steps"
    return dict([said])


def losses(queue: Any) -> dict[int, float]:
    """What a trainer tells until it is done."""
    return dict(iter(lambda: queue.get(timeout=WAIT_S), "done"))


def told(queue: Any) -> dict[int, float]:
    """What a trainer whose executor is dead has told by now."""
    time.sleep(0.3)
    found = {}
    while not queue.empty():
        found |= next_loss(queue)
    return found


@pytest.mark.fault
@pytest.mark.parametrize(("captured", "steps"), [(False, 400), (True, 2000)], ids=["eager", "captured"])
def test_the_executor_is_killed_and_the_stream_goes_on(
    captured: bool, steps: int, processes: Any, tmp_path: Path
) -> None:
    """Not a loss differs from the undisturbed run's, whenever the executor dies."""
    path = f"{tmp_path}/executor.sock"
    executor, ready = processes.start(serve_forever, path)
    endpoint = ready.get(timeout=WAIT_S)
    _, queue = processes.start(train_forever, endpoint, steps, captured)
    disturbed = next_loss(queue)
    for pause in (0.3, 0.4, 0.1):
        time.sleep(pause)
        executor.kill()
        executor.join()
        disturbed |= told(queue)
        executor, ready = processes.start(serve_forever, path)
        ready.get(timeout=WAIT_S)
        disturbed |= next_loss(queue)  # it goes on
    disturbed |= losses(queue)
    _, queue = processes.start(train_forever, endpoint, steps, captured)
    assert disturbed == losses(queue)


ENOUGH = pytest.mark.timeout(300, method="thread")  # a test that waits for a GPU hears no signal
SEGMENT = 64 << 20  # of a client's device memory, which the executor maps


def serve_and_tell(where: str, told: Any, asked: Any) -> None:
    """Whenever it is asked, how much memory of the GPU the executor's process holds, and how much of that is in use."""
    with symbiosis.Executor(tiny_llama().cuda(), listen=[f"local://{where}"], heartbeat_s=2.0) as executor:
        told.put(executor.endpoint)
        while asked.get(timeout=5 * WAIT_S):
            told.put((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))


@pytest.mark.fault
@pytest.mark.parametrize(("rounds", "at_once"), [(4, 2), pytest.param(5, 10, marks=[pytest.mark.soak, ENOUGH])])
def test_clients_are_killed_and_leave_nothing(rounds: int, at_once: int, processes: Any, tmp_path: Path) -> None:
    """With calls in flight, one after another: the executor's memory and the bystander's results are as before."""
    asked = processes.context.Queue()
    executor, told = processes.start(serve_and_tell, f"{tmp_path}/executor.sock", asked)
    endpoint = told.get(timeout=WAIT_S)
    bystander = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    ids = torch.randint(3, 100, (2, 9)).cuda()
    left: list[int] = []
    held: list[tuple[int, int]] = []

    def by_whom() -> str:
        asked.put(True)
        ours, its = torch.cuda.memory_reserved(), told.get(timeout=WAIT_S)
        return f"torch here {ours}, in the executor {executor.pid} {its}; left {left}; now {memory.held()}"

    with torch.no_grad(), watching(endpoint) as look:
        expected = bystander(ids).logits
        for _ in range(rounds):
            clients = [processes.start(train_forever, endpoint, 10**6, bool(n % 2)) for n in range(at_once)]
            for _, queue in clients:
                while queue.get(timeout=WAIT_S)[0] < 3:  # by then captured steps are replayed
                    pass
            for process, _ in clients:
                process.kill()
                beside_others = bystander(ids).logits
                assert (beside_others - expected).abs().max() < 1e-5, "one product's rounding, in float32"
                process.join(10)
                assert process.exitcode == -signal.SIGKILL
            until(lambda: sum(not session.observer for session in look().sessions) == 1, "the end of their sessions")
            holds_no_more(executor, held)
            for _ in range(3):
                assert torch.equal(bystander(ids).logits, expected)
            gc.collect()
            torch.cuda.empty_cache()
            if not left:
                time.sleep(1.0)  # what the killed had is all given back by then
                at_first = by_whom()
            end = time.monotonic() + 10
            while left and left[0] - memory.left() >= SEGMENT:
                assert time.monotonic() < end, f"after the first, {at_first}; later, {by_whom()}"
                time.sleep(0.1)
            left.append(memory.left())
    assert executor.is_alive()


@ENOUGH
def test_more_clients_and_steps_take_no_more_memory_of_the_executor(
    processes: Any, ids: Tensor, tmp_path: Path
) -> None:
    asked = processes.context.Queue()
    _, told = processes.start(serve_and_tell, f"{tmp_path}/executor.sock", asked)
    endpoint = told.get(timeout=WAIT_S)
    held: list[tuple[int, int]] = []
    with watching(endpoint) as look:
        for number in range(20):
            split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
            step = trainer(lora(split))
            run = symbiosis.capture(step) if number % 2 else step
            for _ in range(50):
                run(ids)
            torch.cuda.synchronize()
            asked.put(True)
            held.append(told.get(timeout=WAIT_S))
            next(remote_weights(split)).handle.session.close()
            until(lambda: all(session.observer for session in look().sessions), "the end of its session")
    asked.put(False)
    for kind in (0, 1):  # eager, captured
        reserved, used = zip(*held[kind + 2 :: 2], strict=True)
        assert max(reserved) == reserved[0] and max(used) == used[0], held


@pytest.mark.fault
def test_without_an_executor_the_stream_is_let_go(
    processes: Any, tmp_path: Path, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = len(PinnedMemory._mapped)
    executor, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock")
    endpoint = ready.get(timeout=WAIT_S)
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    next(remote_weights(split)).handle.session.patience = 1.0
    with torch.no_grad():
        for _ in range(3):  # all calls are known by then
            split(ids)
        executor.kill()
        executor.join()
        logits = split(ids).logits
        torch.cuda.synchronize()
        assert logits.isnan().all()
        assert "is void" in caplog.text and "no executor" in caplog.text
        with pytest.raises(symbiosis.SymbiosisError, match="no executor"):
            split(ids)
    next(remote_weights(split)).handle.session.close()
    assert len(PinnedMemory._mapped) <= pinned


def serve_without_memory(where: str, ready: Any, failing: Any) -> None:
    """While `failing` is set, products find no memory."""
    run = Launcher._run

    def run_or_fail(self: Launcher, work: Any) -> None:
        if failing.is_set():
            raise torch.OutOfMemoryError("none")
        run(self, work)

    Launcher._run = run_or_fail  # type: ignore[method-assign]
    serve_forever(where, ready)


@pytest.mark.fault
def test_what_a_refused_call_leaves_is_no_result(processes: Any, tmp_path: Path) -> None:
    """Also of a call that was answered before, in the same place."""
    failing = processes.context.Event()
    _, ready = processes.start(serve_without_memory, f"{tmp_path}/executor.sock", failing=failing)
    layer = symbiosis.wrap(tiny_llama().cuda(), ready.get(timeout=WAIT_S)).model.layers[0].mlp.up_proj
    x = torch.randn(3, 64, device="cuda")
    with torch.no_grad():
        expected = layer(x)
        torch.cuda.synchronize()
        failing.set()
        y = layer(x)
        torch.cuda.synchronize()
        assert y.isnan().all() and expected.isfinite().all()
        failing.clear()
        with pytest.raises(CallError, match="no memory"):
            layer(x)
        assert torch.equal(layer(x), expected)


def decode_forever(endpoint: str, said: Any, seed: int, steps: int, all_there: Any) -> None:
    torch.manual_seed(seed)
    split = symbiosis.wrap(tiny_llama().cuda(), endpoint)
    reference = tiny_llama().cuda()
    worst = 0.0
    all_there.wait(WAIT_S)
    with torch.no_grad():
        for turn in range(steps):
            ids = torch.randint(3, 100, (1 + turn % 3, 5)).cuda()
            worst = max(worst, (split(ids).logits - reference(ids).logits).abs().max().item())
    said.put((worst, symbiosis.stats(split).mean_batch))


@pytest.mark.parametrize("invariant", [False, True], ids=["joined", "invariant"])
@pytest.mark.parametrize("policy", ["immediate", "opportunistic", "lockstep"])
def test_several_clients_at_once(policy: str, invariant: bool, processes: Any, tmp_path: Path) -> None:
    _, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock", policy, batch_invariant=invariant)
    endpoint = ready.get(timeout=WAIT_S)
    all_there = processes.context.Barrier(4)
    queues = [processes.start(decode_forever, endpoint, seed, 60, all_there)[1] for seed in range(4)]
    results = [queue.get(timeout=WAIT_S) for queue in queues]
    if invariant:
        assert all(worst == 0.0 for worst, _ in results), results
        return
    assert max(worst for worst, _ in results) < 1e-5, results  # one product's rounding, in float32
    if policy == "lockstep":
        assert max(batch for _, batch in results) > 1.5, results


@pytest.mark.usefixtures("nobody_else")
def test_shapes_without_end(processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of shapes that do not come again make room for others; those of captured steps stay."""
    monkeypatch.setattr(cuda_client, "MOST_KEPT", 40)
    _, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock")
    split, plain = symbiosis.wrap(tiny_llama().cuda(), ready.get(timeout=WAIT_S)), tiny_llama().cuda()
    captured = symbiosis.capture(torch.no_grad()(lambda ids: split(ids).logits))
    kept = torch.randint(3, 100, (2, 5), device="cuda")
    with torch.no_grad():
        assert torch.equal(captured(kept), plain(kept).logits)
        line = line_of(split)
        captured(kept)
        expected = captured(kept).clone()
        assert torch.allclose(expected, plain(kept).logits, atol=1e-5), "capturing, transformers masks otherwise"
        calls = len(line.steps._captured[0].numbers)
        for length in [*range(1, 40), *range(1, 40)]:
            ids = torch.randint(3, 100, (1, length), device="cuda")
            assert torch.equal(split(ids).logits, plain(ids).logits)
            assert torch.equal(captured(kept), expected)
            assert len(line._prepared) - len(line._stay) <= 40
            assert len(line._link.places) - len(line._stay) - calls <= 40
    assert max(line._link.places) > 200


def test_a_client_that_changes_its_ways(processes: Any, tmp_path: Path, ids: Tensor) -> None:
    """Other flows, shapes and clients that come and go."""
    _, ready = processes.start(serve_forever, f"{tmp_path}/executor.sock")
    endpoint = ready.get(timeout=WAIT_S)
    model = tiny_llama().cuda()
    split = symbiosis.wrap(copy.deepcopy(model), endpoint)
    inputs = [ids, ids[:1], ids[:, :4], ids[:, :1]]
    with torch.no_grad():
        expected = [model(x).logits for x in inputs]
        for turn in range(60):
            which = 0 if turn % 7 else turn % 4
            assert torch.equal(split(inputs[which]).logits, expected[which]), turn
            if turn % 10 == 9:  # somebody else comes, computes, and goes
                other = symbiosis.wrap(tiny_llama().cuda(), endpoint)
                assert torch.equal(other(inputs[1]).logits, expected[1])
                next(remote_weights(other)).handle.session.close()
