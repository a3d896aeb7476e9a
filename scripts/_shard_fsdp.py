"""One LoRA trainer by torch's FSDP, for comparison: a process for each GPU, started by torchrun, which share a base model and an adapter.

    torchrun --standalone --nproc-per-node 2 scripts/_shard_fsdp.py JOB.json

Each process trains on sequences of its own. All layers are sharded by `fully_shard` each. When the job is warm it makes a file `ready` beside JOB.json,
waits until there is one called `go`, trains for some seconds, and writes what it did to `done`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _gpu import Shape
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

WARM_UP = 3
WAIT_S = 600.0


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    device = torch.device(job["device"], int(os.environ["LOCAL_RANK"]) if job["device"] == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = sharded(Shape(**job["shape"]), job["targets"], device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(3, job["shape"]["vocabulary"], (job["batch"], job["length"]), device=device)

    def steps(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        float(loss)
        return time.perf_counter() - begun

    steps(WARM_UP)
    first = dist.get_rank() == 0
    if first:
        (path.parent / "ready").touch()
    end = time.monotonic() + WAIT_S
    while not (path.parent / "go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    steps(1)  # beside others it takes longer
    count = torch.tensor([max(2, int(job["seconds"] / steps(1)))], device=device)
    dist.broadcast(count, 0)
    elapsed = steps(int(count))
    if first:
        tokens = int(count) * ids.numel() * dist.get_world_size()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        told = path.parent / "telling"
        told.write_text(json.dumps({"tokens_per_s": tokens / elapsed, "steps": int(count), "peak_bytes": peak}))
        told.rename(path.parent / "done")
    dist.destroy_process_group()


def sharded(shape: Shape, targets: list[str], device: torch.device) -> Any:
    """A base with random weights and an adapter; no process ever holds all of it."""
    config = LoraConfig(r=8, target_modules=targets, init_lora_weights="gaussian")
    model = get_peft_model(shape.build("meta"), config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    inner: Any = model.base_model.model.model
    for layer in inner.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    inner.rotary_emb = type(inner.rotary_emb)(config=inner.config).to(device)  # has numbers that no one draws
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    return model.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
