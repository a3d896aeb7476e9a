"""Models divided over ranks, which are threads here: each part computes what the whole model computes."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from symbiosis.errors import ConfigError
from symbiosis.serving.tensor_parallel.collectives import Collectives
from symbiosis.serving.tensor_parallel.divided_model import cut, structure_of
from symbiosis.serving.tensor_parallel.division import Division
from symbiosis.serving.tensor_parallel.rank_group import exchange_by_files, meeting_of
from symbiosis.serving.tensor_parallel.shares import HeadShares, shares
from tests.rank_threads import FAMILIES, ThreadGroup, family, on_ranks

IDS = torch.randint(2, 257, (1, 23), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")
TOLERANCE = 1e-5  # of the largest logit: sums are added up in another order


def of_ranks(model: Any, ranks: int, ids: Tensor = IDS) -> tuple[list[Tensor], list[Collectives], list[Any]]:
    """Return each rank's logits, what it did together with others, and its part."""
    division = Division.of(model, ranks)
    parts = [structure_of(model) for _ in range(ranks)]
    made = [Collectives(rank, ranks) for rank in range(ranks)]

    def run(rank: int, group: ThreadGroup) -> Tensor:
        cut(parts[rank], division, made[rank], CPU)
        made[rank].group = group
        return parts[rank](input_ids=ids, use_cache=False).logits

    return on_ranks(ranks, run), made, parts


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_of_a_model_compute_its_logits(name: str, ranks: int) -> None:
    model = family(name)
    whole = model(input_ids=IDS, use_cache=False).logits
    for logits in of_ranks(model, ranks)[0]:
        assert (logits - whole).abs().max() <= TOLERANCE * whole.abs().max()
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, whole)  # it stays as it was


@pytest.mark.parametrize(
    ("heads", "shared", "ranks"),
    [(8, 1, 4), (8, 2, 4), (6, 3, 2), (12, 3, 2)],
    ids=["one for all", "one for two", "uneven", "uneven groups"],
)
def test_heads_that_do_not_divide(heads: int, shared: int, ranks: int) -> None:
    model = family("llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=shared)
    whole = model(input_ids=IDS, use_cache=False).logits
    for logits in of_ranks(model, ranks)[0]:
        assert (logits - whole).abs().max() <= TOLERANCE * whole.abs().max()
    assert HeadShares.of(heads, shared, ranks).are_repeated == (shared < ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "mixtral"])
def test_a_rank_holds_its_share(name: str, ranks: int) -> None:
    """Norms, routers, positions and the biases of sums are whole on each rank; all else is divided."""
    model = family(name, vocab_size=256, **({} if name == "gpt2" else {"intermediate_size": 96}))
    alike = {
        p
        for n, p in model.named_parameters()
        if "norm" in n or "ln_" in n or "wpe" in n or n.endswith(("gate.weight", "c_proj.bias"))
    }
    bytes_alike = sum(p.nbytes for p in alike)
    whole = sum(p.nbytes for p in model.parameters()) - bytes_alike
    for part in of_ranks(model, ranks)[2]:
        assert sum(p.nbytes for p in part.parameters()) - bytes_alike <= 1.05 * whole / ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_what_ranks_send(ranks: int) -> None:
    """Two sums for each layer, one for the embedding, and the parts of the head's rows."""
    model = family("llama", vocab_size=256)
    row = 64 * 4
    for made in of_ranks(model, ranks)[1]:
        assert made.calls == {"attention": 2, "mlp": 2, "embedding": 1, "head": 1}
        tokens, ring = IDS.numel(), 2 * (ranks - 1) / ranks
        assert made.sent["attention"] == made.sent["mlp"] == 2 * ring * row * tokens
        assert made.sent["embedding"] == ring * row * tokens
        assert made.sent["head"] == (ranks - 1) / ranks * 256 * 4 * tokens


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt2", "gpt_oss"}))  # which have no such plan
def test_layers_are_divided_as_transformers_plans_it(name: str) -> None:
    """Where transformers has a plan, it divides the same layers by outputs and by inputs. (It gives whole experts to ranks, or packs them.)"""
    model: Any = family(name)
    plan = {
        "lm_head": "colwise",
        **{f"{model.base_model_prefix}.{n}": how for n, how in model.base_model.config.base_model_tp_plan.items()},
    }
    for layer, of in Division.of(model, 2).layers.items():
        how = plan[re.sub(r"\.\d+\.", ".*.", layer)]
        if "qkv" in layer or "gate_up" in layer:
            continue  # which it gathers whole
        assert of.by == ("inputs" if "rowwise" in how else "outputs"), (layer, how)


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    from transformers import AutoModelForCausalLM as Auto
    from transformers import DeepseekV3Config, Olmo2Config, OPTConfig

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    opt = OPTConfig(
        hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99, word_embed_proj_dim=64
    )
    for config, why in (
        (Olmo2Config(**sizes), "OLMo2.*q_norm is a norm over all heads"),
        (opt, "OPTForCausalLM.*fc2 lies in no module of its own"),
        (DeepseekV3Config(**sizes, n_routed_experts=8, first_k_dense_replace=1), "Deepseek.*latent"),
    ):
        with pytest.raises(ConfigError, match="(?i)" + why) as refused:
            Division.of(Auto.from_config(config), 2)
        assert "--executor" in str(refused.value)  # what would serve it
    with pytest.raises(ConfigError, match="8 heads with 4 of keys and values cannot be given to 6 ranks"):
        Division.of(family("llama"), 6)


def test_shares_lose_nothing() -> None:
    for count in (1, 7, 64, 257):
        for ranks in (1, 2, 3, 4, 8):
            assert [n for each in shares(count, ranks) for n in each] == list(range(count))


def test_compiled_parts_sum_as_others_do() -> None:
    model = family("llama")
    whole = model(input_ids=IDS, use_cache=False).logits
    division, parts = Division.of(model, 2), [structure_of(model) for _ in range(2)]
    made = [Collectives(rank, 2) for rank in range(2)]
    for rank, part in enumerate(parts):
        cut(part, division, made[rank], CPU)
        for layer in part.model.layers:  # type: ignore[union-attr]
            layer.forward = torch.compile(layer.forward, backend="eager", dynamic=True)  # type: ignore[union-attr]
        part(input_ids=IDS, use_cache=False)  # compiled one after another: torch does so in one thread at a time

    def run(rank: int, group: ThreadGroup) -> Tensor:
        made[rank].group = group
        return parts[rank](input_ids=IDS, use_cache=False).logits

    for logits in on_ranks(2, run):
        assert (logits - whole).abs().max() <= TOLERANCE * whole.abs().max()


def test_ranks_tell_each_other_by_files_round_after_round(tmp_path: Path) -> None:
    def run(rank: int) -> list[list[bytes]]:
        exchange = exchange_by_files(tmp_path, rank, 3, seconds=10)
        return [exchange(bytes([rank, turn])) for turn in range(3)]

    with ThreadPoolExecutor(3) as threads:
        for told in threads.map(run, range(3)):
            assert told == [[bytes([rank, turn]) for rank in range(3)] for turn in range(3)]
    with pytest.raises(RuntimeError, match="another rank has not come"):
        exchange_by_files(tmp_path, 3, 5, seconds=0.05)(b"alone")


def test_how_ranks_meet_follows_from_their_devices(tmp_path: Path) -> None:
    assert meeting_of(["cpu", "cpu"], tmp_path).by == "gloo"
    assert meeting_of(["cuda:0", "cuda:0"], tmp_path).by == "memory"
