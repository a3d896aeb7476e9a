"""A model that several ranks hold: clients get the results of the unsplit model, bit for bit, and are told what is wrong."""

import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import symbiosis
from symbiosis.client.session import Session
from symbiosis.client.weights.remote_weight import remote_weights
from symbiosis.errors import CallError, ConfigError, ExecutorUnavailable, WrapError
from symbiosis.executor.loop import ExecutorLoop
from symbiosis.executor.model.sample import sample_of
from symbiosis.executor.model.stripes import StripedModel
from symbiosis.protocol import ELSEWHERE, Hello, Op
from symbiosis.transport.local.striped_weights import PAGE
from symbiosis.transport.reply_checks import accepted
from tests.conftest import MODELS, tiny_llama
from tests.processes import save_tiny_llama, until
from tests.quantised import write
from tests.ranks import free_port, ranks_of

pytestmark = pytest.mark.long

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "mixtral": ["q_proj", "o_proj"]}


def trained(model: nn.Module, targets: list[str], ids: Tensor) -> list[Tensor]:
    """The losses of some steps, and the adapter that they make."""
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))  # type: ignore[assignment]
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in own)]


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 2.0, 1.0)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_is_bit_equal_whatever_rank_holds_what(name: str, shares: tuple[float, ...], ids: Tensor) -> None:
    model, url = MODELS[name](), f"inproc://ranks-{name}"
    expected = trained(MODELS[name](), TARGETS[name], ids)
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    with ranks_of(model, url, shares) as servers:
        split = symbiosis.wrap(MODELS[name](), url)
        assert len({weight.handle.session for weight in remote_weights(split)}) > 1
        assert torch.equal(split.generate(ids, max_new_tokens=5, do_sample=False), tokens)
        assert same(trained(split, TARGETS[name], ids), expected)
        assert torch.equal(symbiosis.from_executor(url)(ids).logits, model(ids).logits)
        assert all(sum(totals.calls for totals in server.ledger.totals.values()) for server in servers)
        assert sum(server.store.nbytes for server in servers) == sum(
            t.nbytes for t in {t.data_ptr(): t for t in model.state_dict().values()}.values()
        )


def test_mapped_weights_of_all_ranks_are_multiplied_directly(tmp_path: Path, ids: Tensor) -> None:
    url, expected = f"local://{tmp_path}/a.sock", trained(tiny_llama(), TARGETS["llama"], ids)
    with ranks_of(tiny_llama(), url):
        split = symbiosis.from_executor(url)
        assert same(trained(split, TARGETS["llama"], ids), expected)
        figures = symbiosis.stats(split)
        assert figures.calls == 0 and figures.direct > 0


@pytest.mark.parametrize("name", ["--quantize nf4", "gptq", "fp8 blocks", pytest.param("int4", marks=pytest.mark.full)])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_packed_weights_lie_on_several_ranks(family: str, name: str, tmp_path: Path, ids: Tensor) -> None:
    """In whole layers. Each rank packs its own, and together they hold no more than one executor does."""
    words: dict[str, Any] = {"quantize": name.removeprefix("--quantize ")} if name.startswith("--quantize") else {}
    if words:
        MODELS[family]().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    else:
        write(MODELS[family](), tmp_path / "model", name)
    targets = TARGETS[family]
    with symbiosis.Executor(str(tmp_path / "model"), **words) as one:
        expected = trained(symbiosis.from_executor(one.endpoint), targets, ids)
        fingerprint, nbytes = one.server.store.fingerprint, one.server.store.nbytes
    for at in ("inproc://packed", f"local://{tmp_path}/a.sock"):
        with ranks_of(tmp_path / "model", f"{at}-{family}", **words) as servers:
            split = symbiosis.from_executor(f"{at}-{family}")
            assert same(trained(split, targets, ids), expected)
            stores = [server.store for server in servers]
            assert {store.fingerprint for store in stores} == {fingerprint}
            assert sum(store.nbytes for store in stores) == nbytes and all(store.packed for store in stores)
            assert (symbiosis.stats(split).direct > 0) == at.startswith("local")


def test_a_client_may_name_any_rank(ids: Tensor) -> None:
    with ranks_of(tiny_llama(), "inproc://any", (1.0, 1.0, 1.0)):
        for url in ("inproc://any", "inproc://any.rank1", "inproc://any.rank2"):
            assert torch.equal(symbiosis.from_executor(url)(ids).logits, tiny_llama()(ids).logits)


@pytest.mark.parametrize("scheme", ["inproc://parts", "local://{}/parts.sock"])
def test_ranks_say_how_they_hold_the_model(scheme: str, tmp_path: Path, ids: Tensor, model: Path) -> None:
    """A client that heard otherwise would ask one rank for what another has."""
    url = scheme.format(tmp_path)
    with pytest.raises(ConfigError, match="by layers, and shard says fsdp"), ranks_of(tiny_llama(), url, shard="fsdp"):
        pass
    for how in ("layers", "fsdp"):
        with ranks_of(model, f"{url}.{how}", shard=how) as servers:
            assert {server.store.shard for server in servers} == {how}
            assert torch.equal(symbiosis.from_executor(f"{url}.{how}")(ids).logits, tiny_llama()(ids).logits)


def test_groups_that_lie_on_one_rank_stay_one_call(ids: Tensor) -> None:
    with ranks_of(tiny_llama(), "inproc://groups"):
        split = symbiosis.from_executor("inproc://groups")
        for _ in range(2):
            before = symbiosis.stats(split).calls
            split(ids)
        assert symbiosis.stats(split).calls - before == 2 * 4  # qkv, o, gate and up, down


def test_stats_are_those_of_all_ranks(ids: Tensor) -> None:
    with ranks_of(tiny_llama(), "inproc://stats") as servers:
        split = symbiosis.from_executor("inproc://stats")
        split(ids)
        assert symbiosis.stats(split).by_op["FORWARD"] == sum(
            totals.calls for server in servers for (_, op), totals in server.ledger.totals.items() if op is Op.FORWARD
        )


def test_a_rank_refuses_what_another_holds() -> None:
    with ranks_of(tiny_llama(), "inproc://refuses"):
        session = Session("inproc://refuses", whole=False)
        number = next(
            number
            for number, layer in enumerate(session.manifest)
            if layer.kind == ELSEWHERE and "up_proj" in layer.name
        )
        with pytest.raises(CallError, match="is held by another rank of this service"):
            session.call(Op.FORWARD, number, torch.zeros(1, 64))
        with pytest.raises(CallError, match="is held by another rank"):
            session.call(Op.READ, number, dtype=torch.float32)


def test_a_rank_that_is_not_there_is_named() -> None:
    with ranks_of(tiny_llama(), "inproc://lacks") as servers:
        servers[1].listeners[0].stop_accepting()
        with pytest.raises(ExecutorUnavailable, match="inproc://lacks.rank1"):
            symbiosis.from_executor("inproc://lacks", patience=0.1)


def test_another_executor_in_the_place_of_a_rank_is_refused(serve: Callable) -> None:
    with ranks_of(tiny_llama(), "inproc://other") as servers:
        servers[1].listeners[0].stop_accepting()
        serve(tiny_llama(), listen=["inproc://other.rank1"])
        with pytest.raises(
            CallError, match="where rank 1 of 2 of the service at inproc://other should be is rank 0 of 1"
        ):
            symbiosis.from_executor("inproc://other")


def test_a_model_of_several_ranks_is_pickled_and_unwrapped(ids: Tensor) -> None:
    with ranks_of(tiny_llama(), "inproc://whole", allow_read=True):
        split = symbiosis.from_executor("inproc://whole")
        again = pickle.loads(pickle.dumps(split))
        assert torch.equal(again(ids).logits, tiny_llama()(ids).logits)
        own = symbiosis.unwrap(split)
        assert same(list(own.state_dict().values()), list(tiny_llama().state_dict().values()))


def test_private_and_verified_sessions_are_refused(llama: nn.Module) -> None:
    with ranks_of(tiny_llama(), "inproc://private"):
        for words in ({"privacy": "noise"}, {"verify": True}):
            with pytest.raises(
                WrapError, match="need an executor that holds all layers, and inproc://private is a service"
            ):
                symbiosis.wrap(llama, "inproc://private", **words)
        assert next(remote_weights(llama), None) is None


def test_an_executor_in_a_program_has_one_rank() -> None:
    with pytest.raises(ConfigError, match="ranks are processes of symbiosis-executor"):
        symbiosis.Executor(tiny_llama(), ranks=2)


@pytest.fixture(scope="module", params=[*MODELS, "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    made = tiny_llama(tied=True) if request.param == "tied" else MODELS[request.param]()
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", ["layers", "fsdp"])
def test_what_ranks_load_of_a_checkpoint_is_the_model(how: str, checkpoint: Path, tmp_path: Path, ids: Tensor) -> None:
    """Called and mapped, with and without a checkpoint at the client. A rank holds its share of the tensors, and no more."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    url, expected, whole = f"local://{tmp_path}/a.sock", model(ids).logits, model.state_dict()
    nbytes = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in whole.values()}.values())
    with ranks_of(checkpoint, url, (1.0, 1.0, 1.0), shard=how) as servers:
        for share in (False, True):
            split = symbiosis.from_executor(url, share=share)
            assert torch.equal(split(ids).logits, expected)
            wrapped = symbiosis.wrap(AutoModelForCausalLM.from_pretrained(checkpoint), url, share=share)
            assert torch.equal(wrapped(ids).logits, expected)
        held = [server.store.nbytes for server in servers]
        if how == "layers":
            assert sum(held) == nbytes
        else:
            assert all(abs(part - nbytes / 3) <= (len(whole) + 2) * PAGE for part in held)


def test_a_rank_loads_a_few_whole_tensors_at_a_time(checkpoint: Path) -> None:
    """In as many turns as it takes; the parts are the same."""
    files = {}
    for at_once in (1, 1 << 16, 1 << 30):
        striped = StripedModel(str(checkpoint), None)
        parts = [striped.part((1.0, 1.0), rank, at_once) for rank in (0, 1)]
        files[at_once] = [part.seal().fileno() for part in parts]
        raw = [os.pread(file, 1 << 24, 0) for file in files[at_once]]
        assert raw == files.setdefault("first", raw)


@pytest.mark.parametrize("same_shapes", [True, False], ids=["other values", "other shapes"])
@pytest.mark.parametrize("how", ["layers", "fsdp"])
def test_a_rank_whose_checkpoint_differs_is_refused(how: str, same_shapes: bool, model: Path, tmp_path: Path) -> None:
    """Be it only in the values of its tensors."""
    other = tmp_path / "other"
    if same_shapes:
        save_tiny_llama(other, seed=7)
    else:
        tiny_llama(inner=64).save_pretrained(other)
    with (
        pytest.raises(ConfigError, match="rank [01] reads another checkpoint than rank [01]"),
        ranks_of([model, other], f"local://{tmp_path}/a.sock", shard=how),
    ):
        pass


@pytest.mark.parametrize("place", [0, 0.5, 1], ids=["beginning", "middle", "end"])
def test_a_sample_tells_checkpoints_apart_that_differ_in_one_tensor(model: Path, tmp_path: Path, place: float) -> None:
    tensors = load_file(model / "model.safetensors")
    changed = tensors["model.layers.1.mlp.down_proj.weight"].view(-1)
    changed[round(place * (len(changed) - 1))] += 1.0
    save_file(tensors, tmp_path / "changed.safetensors")
    assert sample_of([model / "model.safetensors"]) != sample_of([tmp_path / "changed.safetensors"])


def test_a_sample_is_the_same_however_tensors_lie_in_files(model: Path, tmp_path: Path) -> None:
    tensors = sorted(load_file(model / "model.safetensors").items())
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for file, some in zip(files, (tensors[5:], tensors[:5]), strict=True):
        save_file(dict(some), file)
    assert sample_of(files) == sample_of([model / "model.safetensors"])


def test_any_rank_answers_where_each_has_a_part_of_every_tensor(model: Path, tmp_path: Path, ids: Tensor) -> None:
    """Clients are spread over the ranks, and go on with another when theirs is gone."""
    url = f"local://{tmp_path}/a.sock"
    with ranks_of(model, url, shard="fsdp") as servers:
        clients = [symbiosis.from_executor(url, share=False, patience=5.0) for _ in range(4)]
        joined = [next(remote_weights(client)).handle.session.endpoint for client in clients]
        assert sorted(joined) == sorted([url, f"{url}.rank1"] * 2)
        expected = tiny_llama()(ids).logits
        servers[1].stop()
        assert all(torch.equal(client(ids).logits, expected) for client in clients)
        again = pickle.loads(pickle.dumps(clients[joined.index(f"{url}.rank1")]))
        assert torch.equal(again(ids).logits, expected)


def calls_of(server: ExecutorLoop, op: Op) -> int:
    return sum(totals.calls for (_, made), totals in server.ledger.totals.items() if made is op)


@pytest.mark.parametrize(
    ("dtype", "shares"), [(torch.float32, (1.0, 1.0)), (torch.bfloat16, (1.0, 3.0, 1.0))], ids=["float32", "bfloat16"]
)
def test_few_rows_go_to_all_ranks(
    checkpoint: Path, tmp_path: Path, ids: Tensor, shares: tuple[float, ...], dtype: torch.dtype
) -> None:
    """Results are those of one executor but for rounding, forward and backward; each rank makes its share of the products."""
    url, name = f"local://{tmp_path}/a.sock", str(dtype).removeprefix("torch.")
    with ranks_of(checkpoint, url, shares, shard="fsdp", spread_rows=2 * ids.numel(), dtype=name) as servers:
        split = symbiosis.from_executor(url, share=False)
        whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        losses = []
        for model in (whole, split):
            torch.manual_seed(0)
            adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))  # type: ignore[arg-type]
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append([loss.detach(), *(p.grad for p in adapted.parameters() if p.grad is not None)])
        made_of = lambda server: calls_of(server, Op.PRODUCT) + calls_of(server, Op.GROUPED)  # noqa: E731
        until(lambda: len(set(map(made_of, servers))) == 1, "that the last calls, which are answered, are counted, too")
        spread = list(map(made_of, servers))
        assert spread[0] > 0
        made = [server.sessions.usage[""].multiplications for server in servers]
        figures = symbiosis.stats(split)
        made_by = figures.by_op
        assert not made_by.keys() & {"FORWARD", "DGRAD"}
        assert made_by["PRODUCT"] + made_by.get("GROUPED", 0) == sum(spread)
    eps = torch.finfo(dtype).eps
    for mine, theirs in zip(*losses, strict=True):
        assert (mine - theirs).abs().max() <= 64 * eps * theirs.abs().max().clamp_min(1e-3)
    assert made[1] > 2 * made[0] if len(shares) == 3 else abs(made[1] / made[0] - 1) < 0.2


def test_sessions_with_all_ranks_end_with_the_first(model: Path, tmp_path: Path) -> None:
    url = f"local://{tmp_path}/a.sock"
    with ranks_of(model, url, shard="fsdp", spread_rows=8) as servers:
        session = Session(url, patience=5.0)
        number = next(n for n, layer in enumerate(session.manifest) if layer.kind == "linear")
        assert session.call(Op.FORWARD, number, torch.zeros(1, 64)).shape == (1, 64)
        assert [len(server.sessions) for server in servers] == [1, 1]
        gc.disable()
        try:
            del session
            until(lambda: [len(server.sessions) for server in servers] == [0, 0], "the end of both")
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "said", [{"shares": (1.0,)}, {"shares": (1.0, -1.0)}, {"shard": "layers"}, {"spread_rows": -3}], ids=str
)
def test_rows_that_cannot_be_spread_are_refused(said: dict[str, Any]) -> None:
    with ranks_of(tiny_llama(), "inproc://said"):
        told = Session("inproc://said", whole=False).welcome
    well = {"shard": "fsdp", "ranks": 2, "spread_rows": 4, "shares": (1.0, 3.0)}
    assert accepted(replace(told, **well), "inproc://said", Hello()).spread_rows == 4
    with pytest.raises(CallError, match="wants rows to be spread, and does not say over which ranks"):
        accepted(replace(told, **(well | said)), "inproc://said", Hello())


@pytest.mark.parametrize(
    "begins", [{0: (0, 8)}, {10**6: (0, 8)}, {1: (0,)}, {1: (8, 16)}, {1: (8, 8)}, {1: (0, 64)}, {1: (-8, 0)}], ids=str
)
def test_parts_that_cannot_be_are_refused(begins: dict[int, tuple[int, ...]]) -> None:
    with ranks_of(tiny_llama(), "inproc://said"):
        told = Session("inproc://said", whole=False).welcome
    told = replace(told, shard="fsdp", ranks=2, spread_rows=4, shares=(1.0, 3.0))
    assert [told.manifest[number].kind for number in (0, 1)] == ["client", "linear"]
    assert accepted(replace(told, begins={1: (8, 0)}), "inproc://said", Hello()).begins == {1: (8, 0)}
    with pytest.raises(CallError, match="divides layers among its ranks as they cannot be"):
        accepted(replace(told, begins=begins), "inproc://said", Hello())


def test_ranks_answer_on_the_hosts_that_welcomes_name(ids: Tensor) -> None:
    """Two addresses of this machine stand for hosts; a client may join either, and names both."""
    hosts = ("127.0.0.1", "127.0.0.2")
    port = free_port(*hosts)
    urls = [f"tcp://{host}:{port}?hosts={','.join(hosts)}" for host in hosts]
    with ranks_of(tiny_llama(), f"tcp://{hosts[0]}:{port}", hosts=hosts):
        for url in urls:
            split = symbiosis.from_executor(url)
            assert {weight.handle.session.endpoint for weight in remote_weights(split)} == set(urls)
            assert torch.equal(split(ids).logits, tiny_llama()(ids).logits)


@pytest.mark.parametrize("hosts", [("a",), ("a", "b", "c"), ("a", "b/c"), ("a", "")], ids=str)
def test_ranks_on_hosts_that_cannot_be_are_refused(hosts: tuple[str, ...]) -> None:
    with ranks_of(tiny_llama(), "inproc://hosts"):
        told = Session("inproc://hosts", whole=False).welcome
    assert accepted(replace(told, hosts=("a", "10.0.0.7")), "inproc://hosts", Hello()).hosts == ("a", "10.0.0.7")
    with pytest.raises(CallError, match="does not say on which host each of its ranks is"):
        accepted(replace(told, hosts=hosts), "inproc://hosts", Hello())


def test_ranks_that_do_not_share_hand_out_the_clients_own_only(model: Path, tmp_path: Path, ids: Tensor) -> None:
    url = f"local://{tmp_path}/a.sock"
    with ranks_of(model, url, shard="fsdp", share_weights=False):
        split = symbiosis.from_executor(url)
        assert torch.equal(split(ids).logits, tiny_llama()(ids).logits)
        session = next(remote_weights(split)).handle.session
        assert session.mapped is None and symbiosis.stats(split).direct == 0
        held = session.commons()
        assert held and all(session.manifest[number].kind == "client" for number in held)


def test_private_sessions_work_where_each_rank_answers_all(model: Path, tmp_path: Path, ids: Tensor) -> None:
    url = f"local://{tmp_path}/a.sock"
    with ranks_of(model, url, shard="fsdp"):
        split = symbiosis.wrap(tiny_llama(), url, verify=True)
        assert torch.equal(split(ids).logits, tiny_llama()(ids).logits)
