"""What bench_shard.py measures on GPUs: products of the layers of a service, one after another, as its client on the first GPU sees them."""

import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import symbiosis
from symbiosis.client.session import Session
from symbiosis.protocol import Op

WARM_UP = 4  # runs: the executor makes graphs, and learns


def save_wide(folder: Path, hidden: int, inner: int, layers: int) -> None:
    """A Llama in bfloat16 whose products are of this width."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128, vocab_size=256, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)


class LayerByLayer:
    """Calls of all gate and up projections of a model, in its order, with rows that stay the same."""

    def __init__(self, endpoint: str, device: str) -> None:
        torch.cuda.set_device(device)
        self._session, self._device = Session(endpoint), device
        names = ("gate_proj", "up_proj")
        self._numbers = [n for n, layer in enumerate(self._session.manifest) if layer.name.endswith(names)]
        self._width = self._session.manifest[self._numbers[0]].shape[1]

    @torch.no_grad()
    def layer_us(self, rows: int, captured: bool, runs: int) -> float:
        """The median over the runs of what one product takes."""
        x = torch.randn(rows, self._width, dtype=torch.bfloat16, device=self._device)

        def run() -> list[torch.Tensor]:
            return [self._session.holder(number).call(Op.FORWARD, number, x) for number in self._numbers]

        step = symbiosis.capture(run) if captured else run
        times = []
        for _ in range(WARM_UP + runs):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) / len(self._numbers))
        return statistics.median(times[WARM_UP:]) * 1e6
