"""Which layers are served: patterns with exclusions, and heads, which stay with the client unless they are named.

A head is what a task adds to a base model. Its gradients show the labels, and tasks and PEFT train it. Executor and client find heads by
the same rule, from the model's structure: every part that is neither the base model nor another transformers model, the output embeddings,
and whatever has the name of a head inside the base.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import MODEL_MAPPING, PreTrainedModel

# What PEFT trains with a task, wherever it lies, and what makes one row of a whole sequence for a task.
HEADS = frozenset(("classifier", "head", "pooler", "qa_outputs", "score"))


def head_names(model: nn.Module) -> set[str]:
    """Return the names of the modules that are heads.

    >>> from transformers import LlamaConfig, LlamaForSequenceClassification
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    >>> head_names(LlamaForSequenceClassification(config))
    {'score'}
    """
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if (output is not None and module is output) or path.rpartition(".")[2] in HEADS:
            found.add(path)
        if isinstance(module, PreTrainedModel):
            found |= {f"{path}.{name}".lstrip(".") for name in _parts_of_a_task(module)}
    return found


def is_in(name: str, modules: Collection[str]) -> bool:
    """Whether a layer is one of the modules, or lies in one.

    >>> is_in("classifier.dense", {"classifier"}), is_in("classifiers", {"classifier"})
    (True, False)
    """
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _parts_of_a_task(model: PreTrainedModel) -> list[str]:
    """Return the parts beside the base, and beside other whole models that this one is made of."""
    base = model.base_model
    if base is model and _is_bare(model):
        return []
    whole = {id(module) for module in model.modules() if isinstance(module, PreTrainedModel)} - {id(model)}
    if base is not model:
        whole.add(id(base))
    return list(_beside(model, whole)) if whole else []


def _is_bare(model: PreTrainedModel) -> bool:
    """Whether `AutoModel` would make a model of this class from its configuration."""
    kind = type(model.config)
    bare = MODEL_MAPPING.get(kind, ())
    return type(model) in (bare if isinstance(bare, tuple) else (bare,))


def _beside(module: nn.Module, whole: set[int], path: str = "") -> Iterator[str]:
    """Yield the largest modules in which none of `whole` lies."""
    for name, child in module.named_children():
        if id(child) in whole:
            continue
        if any(id(part) in whole for part in child.modules()):
            yield from _beside(child, whole, f"{path}{name}.")
        else:
            yield path + name


def choose(patterns: Sequence[str], names: Mapping[str, Iterable[str]], default: Collection[str]) -> set[str]:
    """Return the layers that the patterns choose. `names` are those that each layer goes by. `!PATTERN` excludes; if all patterns do,
    they exclude from the default.

    >>> sorted(choose(["*_proj", "!k_*"], {name: [name] for name in ("q_proj", "k_proj", "score")}, ["q_proj"]))
    ['q_proj']
    """
    wanted = [pattern for pattern in patterns if not excludes(pattern)]
    chosen = {name for name, also in names.items() if matches(also, wanted)} if wanted else set(default)
    return {name for name in chosen if not matches(names[name], [p[1:] for p in patterns if excludes(p)])}


def excludes(pattern: str) -> bool:
    return pattern.startswith("!")


def matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
