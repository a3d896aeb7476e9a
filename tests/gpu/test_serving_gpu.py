"""The server on a GPU says what PEFT says, token by token, whatever else runs. With TRITON_INTERPRET=1 its kernels run on a CPU, too."""

import importlib.util
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, TaskType
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import symbiosis
from symbiosis.serving import Engine
from symbiosis.serving.lora.adapter_cache import AdapterCache
from symbiosis.serving.lora.registry import AdapterRegistry
from symbiosis.serving.lora.target_layers import TargetLayers
from symbiosis.serving.request import Request, Sampling
from symbiosis.serving.runner import cuda_graph_runner
from symbiosis.serving.runner.dense_runner import make_ready
from symbiosis.serving.runner.parallel_streams import ParallelStreams
from symbiosis.serving.sampling.sampler import begin_choice
from symbiosis.serving.scheduler.scheduler_output import Sequence
from tests.adapters import Made, off, run, saved, sequence_of, step_over
from tests.conftest import wide_llama
from tests.gpu.conftest import Processes
from tests.gpu.test_gpu_mapped import Served

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LLAMA = {**TINY, "intermediate_size": 112, "num_key_value_heads": 2}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
AS_ALONE = {
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}  # of the largest logit: sums in another order
DTYPES = [torch.float32] if INTERPRETED else list(AS_ALONE)


@pytest.fixture(autouse=True)
def kernels_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    if INTERPRETED:
        monkeypatch.setattr(
            "symbiosis.serving.runner.paged_runner.is_for", lambda device, dtype: dtype in cuda_graph_runner.DTYPES
        )
        monkeypatch.setattr("symbiosis.kernels.gpu.paged_attention.split_for", lambda *_: 1)


def llama(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes})).eval().to(DEVICE)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TINY)).eval().to(DEVICE)


def qwen() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(**{**LLAMA, "head_dim": 16, "num_key_value_heads": 1})
    return Qwen3ForCausalLM(config).eval().to(DEVICE)


def lora(rank: int, **options: object) -> LoraConfig:
    return LoraConfig(**{"task_type": TaskType.CAUSAL_LM, "r": rank, "target_modules": ALL, **options})


KINDS = {
    "rank 1": lora(1),
    "rank 7": lora(7, rank_pattern={"k_proj": 3}),
    "rank 65": lora(65),
    "lm_head": lora(4, target_modules=["lm_head", "v_proj"]),
    "DoRA": lora(5, use_dora=True),
    "lora_bias": lora(3, lora_bias=True),
    "IA3": peft.IA3Config(
        task_type=TaskType.CAUSAL_LM, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "OFT": peft.OFTConfig(task_type=TaskType.CAUSAL_LM, oft_block_size=8, r=0, target_modules=["q_proj", "v_proj"]),
    "prefix": peft.PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3),
}


def saved_kinds(base: nn.Module, folder: Path) -> dict[str, Made]:
    made = {name: saved(base, config, folder / name.replace(" ", "-")) for name, config in KINDS.items()}
    file = made["lm_head"][0] / "adapter_model.safetensors"
    own = {name: tensor for name, tensor in load_file(file).items() if "base_layer" not in name}
    save_file(own, file, {"format": "pt"})  # as with save_embedding_layers=False
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_every_kind_in_one_batch_has_the_logits_it_has_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    base = llama().to(dtype)
    made = saved_kinds(base, tmp_path)
    served = make_ready(deepcopy(base), 1 << 24)
    assert served.runner is not None and served.fetcher is not None
    residency = AdapterCache(served.arena, served.blocks.make_room, served.fetcher)
    sites = TargetLayers(served, residency)
    library = AdapterRegistry(served)
    served.serve(16, 128)
    generator = torch.Generator().manual_seed(3)
    asked = []
    for number, (name, (folder, alone)) in enumerate([("base", (None, base)), *made.items()]):
        adapter = None if folder is None else library.add(name.replace(" ", "-"), folder)
        if adapter is not None:
            assert residency.fetch(adapter)
            while not residency.is_here(adapter):
                pass
        prompt = torch.randint(3, 96, (5 + 7 * (number % 4),), generator=generator).tolist()
        asked.append((name, sequence_of(prompt, adapter), alone, prompt))
    assert {name for name, sequence, *_ in asked if sequence.adapter and sequence.adapter.packed is None} == {
        "IA3", "OFT", "prefix",
    }  # fmt: skip
    for subset in (asked, [one for one in asked if one[0] not in ("IA3", "OFT", "prefix")]):
        first = [(sequence, len(sequence.tokens) - sequence.computed) for _, sequence, _, _ in subset]
        logits = run(served, first)
        for mine, (name, sequence, alone, _) in zip(logits, subset, strict=True):
            tokens = sequence.tokens[sequence.virtual :]
            expected = alone(input_ids=torch.tensor([tokens], device=DEVICE)).logits[0, -1].float()
            assert off(mine, expected) < AS_ALONE[dtype], name
            sequence.tokens.append(int(expected.argmax()))
    assert sites is not None


@torch.inference_mode()
def test_all_rows_of_a_long_prompt_have_the_logits_that_they_have_alone(tmp_path: Path) -> None:
    """As its log probabilities need them. There are more tiles of rows than there may be sequences, also where the head is adapted."""
    base = llama()
    made = saved_kinds(base, tmp_path)
    served = make_ready(deepcopy(base), 1 << 24)
    residency = AdapterCache(served.arena, served.blocks.make_room, served.fetcher)
    sites, library = TargetLayers(served, residency), AdapterRegistry(served)
    tokens = torch.randint(3, 96, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    for name in ("rank 7", "lm_head"):
        folder, alone = made[name]
        adapter = library.add(name.replace(" ", "-"), folder)
        assert residency.fetch(adapter) and sites
        sequence = sequence_of(tokens, adapter)
        assert served.blocks.grow(sequence, len(tokens))
        logits = served.logits(step_over([(sequence, len(tokens))]), torch.arange(len(tokens)))
        assert off(logits, alone(input_ids=torch.tensor([tokens], device=DEVICE)).logits[0].float()) < 2e-5, name
        served.release(sequence)


@torch.inference_mode()
def test_a_step_that_failed_leaves_nothing_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = llama()
    made = {name: saved(base, lora(4), tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))}
    served = make_ready(deepcopy(base), 1 << 24)
    residency = AdapterCache(served.arena, served.blocks.make_room, served.fetcher)
    sites, library = TargetLayers(served, residency), AdapterRegistry(served)
    adapters = {name: library.add(name, folder) for name, (folder, _) in made.items()}
    assert all(map(residency.fetch, adapters.values())) and sites
    run(served, [(sequence_of([5], adapters["a"]), 1)])
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr("symbiosis.serving.lora.gpu_lora.Records.fill", raises(MemoryError))
        run(served, [(sequence_of([5], adapters["b"]), 1)])
    logits = run(served, [(sequence_of([5], adapters["b"]), 1)])
    assert off(logits[0], made["b"][1](input_ids=torch.tensor([[5]], device=DEVICE)).logits[0, -1].float()) < 2e-5


def raises(error: type[Exception]) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.skipif(INTERPRETED, reason="torch compiles kernels for a GPU")
@torch.inference_mode()
def test_compiled_layers_compute_what_they_did(tmp_path: Path) -> None:
    base = llama()
    made = {f"r{rank}": saved(base, lora(rank), tmp_path / f"r{rank}", seed=rank) for rank in (3, 16)}
    with Engine(deepcopy(base), adapters=tmp_path, memory=1 << 24, max_batch=4, compiles=True) as engine:
        for _ in range(4):  # as it is, then captured, then replayed
            for name, prompt in answers_to(made):
                alone = base if name is None else made[name][1]
                ids = torch.tensor([prompt], device=DEVICE)
                told = alone.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
                )
                mine = engine.generate(prompt, adapter=name, max_tokens=8, temperature=0.0, ignore_eos=True)
                assert list(mine.tokens) == told[0, len(prompt) :].tolist(), (name, len(prompt))


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """Of an executor that shares the weights of `wide_llama`."""
    processes = Processes()
    yield Served(processes, tmp_path, "wide").endpoint
    processes.end()


@pytest.mark.skipif(INTERPRETED, reason="a CPU has no streams")
@pytest.mark.parametrize("by_executor", [False, True])
@torch.inference_mode()
def test_layers_that_run_beside_one_another_compute_what_they_did(
    by_executor: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In graphs, with adapters and without, by weights of this program or by mapped ones."""
    folder, _ = saved(wide_llama(), lora(8), tmp_path / "r8")
    found, ran = [], list[int]()
    for beside in (True, False):
        model = wide_llama().eval().to(DEVICE)
        if by_executor:
            model = symbiosis.wrap(model, request.getfixturevalue("endpoint"))
        served = make_ready(model, 1 << 26)
        residency = AdapterCache(served.arena, served.blocks.make_room, served.fetcher)
        sites = TargetLayers(served, residency)
        adapter = AdapterRegistry(served).add("r8", folder)
        assert residency.fetch(adapter) and sites
        served.serve(4, 64)
        if beside:
            count_what_runs_beside(served.runner.adapting._beside, ran)
        else:
            served.runner.adapting._beside = ParallelStreams(torch.device("cpu"), 0, 0)
        sequences = [sequence_of(range(3, 3 + n), of) for n, of in ((5, adapter), (9, None), (12, adapter))]
        logits = [run(served, [(sequence, len(sequence.tokens)) for sequence in sequences])]
        for token in range(20, 28):  # as it is, then captured, then replayed
            for sequence in sequences:
                sequence.tokens.append(token)
            logits.append(run(served, [(sequence, 1) for sequence in sequences]).clone())
        found.append(torch.stack(logits))
    assert max(ran) == 4, "q, k, v, and what adapters make of their rows"
    assert torch.equal(*found)


def count_what_runs_beside(beside: ParallelStreams, ran: list[int]) -> None:
    run_all = beside.run

    def counting(*things: Any) -> list[Any]:
        ran.append(len(things))
        return run_all(*things)

    beside.run = counting  # type: ignore[method-assign]


@pytest.mark.skipif(INTERPRETED, reason="a CPU waits for nothing")
def test_a_step_does_not_wait_for_what_it_chooses() -> None:
    """However its tokens are chosen: greedy, drawn, with log probabilities. Only who asks for the tokens waits."""
    hows = [
        Sampling(temperature=0.0, logprobs=3), Sampling(temperature=0.7, top_k=5, seed=1), Sampling(top_p=0.9, min_p=0.1, logprobs=0),
    ]  # fmt: skip
    sequences = [Sequence(Request(id=n, prompt=(1,), sampling=how), 0, [1], None, 0.0) for n, how in enumerate(hows)]
    logits = torch.randn(3, 96, device=DEVICE)
    expected = begin_choice(logits.cpu(), sequences).tokens()
    begin_choice(logits, sequences).tokens()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            chosen = begin_choice(logits, sequences, frozenset(), {})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [each for each in waits if "synchroniz" in str(each.message)]
    assert [token and token.id for token in chosen.tokens()] == [token and token.id for token in expected]


def answers_to(names: Iterable[str]) -> Iterator[tuple[str | None, list[int]]]:
    for name in (None, *names):
        for length in (1, 6, 30):
            yield name, list(range(3, 3 + length))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("build", [llama, gpt2, qwen])
def test_the_engine_says_what_peft_says(build: Any, tmp_path: Path) -> None:
    base = build()
    modules = ["c_attn", "c_proj"] if build is gpt2 else ALL
    configs = {f"r{rank}": lora(rank, target_modules=modules, fan_in_fan_out=build is gpt2) for rank in (1, 3, 8, 70)}
    made = {
        name: saved(base, config, tmp_path / name, seed=number, spread=0.05)
        for number, (name, config) in enumerate(configs.items())
    }
    prompts = [list(range(3, 3 + n)) for n in (1, 5, 17, 35)]
    length = 3 if INTERPRETED else 24
    with Engine(deepcopy(base), adapters=tmp_path, memory=1 << 24, max_batch=4, prefill_tokens=32) as engine:
        assert engine._served.runner is not None  # type: ignore[attr-defined]
        engine._loop.ahead = True  # type: ignore[attr-defined]  # as on a GPU
        for _ in range(1 if INTERPRETED else 3):  # the graphs are made, and then replayed
            asked = list(answers(engine, [None, *made], prompts, length))
            for (name, prompt), tokens in asked:
                model = base if name is None else made[name][1]
                ids = torch.tensor([prompt], device=DEVICE)
                told = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False
                )
                assert tokens == told[0, len(prompt) :].tolist(), (name, len(prompt))


@pytest.mark.timeout(400)
def test_adapters_that_come_and_go_say_what_peft_says(tmp_path: Path) -> None:
    """There is room for about two of them: a step waits on the device for what is still on its way."""
    base, length = llama(), 2 if INTERPRETED else 12
    names = [f"a{number}" for number in range(3 if INTERPRETED else 6)]
    made = {name: saved(base, lora(8), tmp_path / name, seed=n, spread=0.05) for n, name in enumerate(names)}
    with Engine(deepcopy(base), adapters=tmp_path, memory=200 << 10, max_batch=2, prefill_tokens=32) as engine:
        engine._loop.ahead = True  # type: ignore[attr-defined]  # as on a GPU
        for _ in range(1 if INTERPRETED else 4):
            for (name, prompt), tokens in list(answers(engine, [*made], [list(range(3, 20)), [7, 8]], length)):
                ids = torch.tensor([prompt], device=DEVICE)
                told = made[name][1].generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False
                )
                assert tokens == told[0, len(prompt) :].tolist(), (name, len(prompt))
        assert engine.figures().adapter_evictions > 0


def answers(engine: Engine, names: list[str | None], prompts: list[list[int]], length: int) -> Iterator[Any]:
    """All at once."""
    pairs = [(name, prompt) for name in names for prompt in prompts][: 6 if INTERPRETED else None]
    with ThreadPoolExecutor(len(pairs)) as pool:
        waiting = [
            pool.submit(engine.generate, prompt, adapter=name, max_tokens=length, temperature=0.0)
            for name, prompt in pairs
        ]
        for pair, one in zip(pairs, waiting, strict=True):
            yield pair, list(one.result(110).tokens)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_a_published_adapter_is_multiplied_in_the_dtype_in_which_it_is_trained(dtype: torch.dtype) -> None:
    """Beside one of a folder's dtype, for prompts and for single rows; nearer to PEFT than the same adapter rounded."""
    base = llama().to(dtype)
    torch.manual_seed(1)
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=ALL, init_lora_weights=False)
    model = peft.get_peft_model(deepcopy(base), config).eval()
    rounded = deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype)
    served = make_ready(base, 1 << 24)
    library, cache = AdapterRegistry(served), AdapterCache(served.arena, fetcher=served.fetcher)
    TargetLayers(served, cache)
    served.serve(8, 64)
    wide, narrow = library.publish("wide", model), library.publish("narrow", rounded)
    assert cache.fetch(wide) and cache.fetch(narrow)
    assert cache.book(wide).is_wide and not cache.book(narrow).is_wide
    tokens = [5, 9, 33, 7, 61, 12]
    a, b = sequence_of(tokens, wide), sequence_of(tokens, narrow)
    found = [run(served, [(a, 5), (b, 5)]), run(served, [(a, 1), (b, 1)])]
    with torch.no_grad():
        logits = [each(torch.tensor([tokens], device=DEVICE)).logits[0, -2:].float() for each in (model, rounded)]
    for step, mine in enumerate(found):
        assert off(mine[0], logits[0][step]) < AS_ALONE[dtype] and off(mine[1], logits[1][step]) < AS_ALONE[dtype]


@pytest.mark.timeout(400)
def test_vectors_are_those_that_peft_makes_beside_texts_that_go_on(tmp_path: Path) -> None:
    """Their steps run as they are; those before and after are graphs."""
    base = llama()
    made = saved(base, lora(8), tmp_path / "mine", spread=0.05)[1]
    prompts = [list(range(3, 3 + n)) for n in (1, 7, 50)]
    length = 2 if INTERPRETED else 40
    with Engine(deepcopy(base), adapters=tmp_path, memory=1 << 24, max_batch=4, prefill_tokens=32) as engine:
        engine._loop.ahead = True  # type: ignore[attr-defined]  # as on a GPU
        texts = answers(engine, [None, "mine"], prompts, length)
        expected = list(answers(engine, [None, "mine"], prompts, length))
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(list, texts)
            for model, name in ((base, None), (made, "mine")):
                for prompt in prompts:
                    ids = torch.tensor([prompt], device=DEVICE)
                    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].detach().float().cpu()
                    for kind, whole in (("last", hidden[-1]), ("mean", hidden.mean(dim=0))):
                        mine = torch.tensor(engine.embed(prompt, adapter=name, pooling=kind, normalizes=False))  # type: ignore[arg-type]
                        assert off(mine, whole) < AS_ALONE[torch.float32]
            assert beside.result(300) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tokens_do_not_wait_for_other_work_of_the_program() -> None:
    """Such as the passes of a trainer, which uses the default stream."""
    with Engine(llama(), memory=1 << 26) as engine:
        expected = engine.generate([3, 4, 5], max_tokens=8, temperature=0.0)
        for _ in range(3):  # steps are captured by then
            engine.generate([3, 4, 5], max_tokens=8, temperature=0.0)
        torch.cuda._sleep(3_000_000_000)  # more than a second
        (over := torch.cuda.Event()).record()
        answer = engine.generate([3, 4, 5], max_tokens=8, temperature=0.0)
        assert not over.query()
        over.synchronize()
    assert answer.tokens == expected.tokens
