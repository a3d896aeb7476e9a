"""Checks what strangers wrote into configurations: expressions, some of which never end, and sizes.

PEFT builds larger expressions out of what it finds there, and matches them with every layer's name. So none reaches it but plain names, and
what was tried in a process of its own, which can be stopped.
"""

import json
import re
from collections.abc import Collection
from subprocess import TimeoutExpired
from typing import Any

from symbiosis.base.procs import tried
from symbiosis.errors import AdapterError
from symbiosis.text import shown

PLAIN = re.compile(r"[\w.-]*")
LONGEST_S = 2  # of a processor, for all of them
LONGEST_MATCH_S = 0.05  # of the processor, for one that PEFT matches once more, where all others wait
MOST = 10**6
FEW = 1024  # items that a list may have in any case
RANKS = ("r", "rank", "init_r", "target_r", "hybrid_r", "subspace_rank")
# what is done, or made, so many times at a layer
REPEATS = {"num_cayley_neumann_terms": 32, "depth": 32, "num_B": 256, "boft_n_butterfly_factor": 32}
# each is a list of names, or an expression for whole names
WHOLE = ("target_modules", "feedforward_modules", "exclude_modules")
NAMES = ("layers_pattern", "modules_to_save", "target_parameters")  # which PEFT puts into expressions of its own
UNREAD = ("megatron_config", "megatron_core", "auto_mapping")  # PEFT imports modules of these names
TRY = r"""
import json, re, sys, time
whole, keys, names = json.load(sys.stdin)
chosen = {}
for field, pattern in whole.items():
    compiled = re.compile(pattern)
    chosen[field] = [name for name in names if compiled.fullmatch(name)]
took = {}
for key in keys:
    forms = [re.compile(form % key) for form in (r"(.*\.)?(%s)$", r".*\.%s$", "%s")]
    began = time.process_time()
    for name in names:
        forms[0].match(name), forms[1].match(name), forms[2].search(name)
    took[key] = time.process_time() - began
print(json.dumps([chosen, took]))
"""


def without_patterns(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the configuration with lists of names where it has expressions, and without what PEFT would import. Raises `AdapterError` for
    expressions that take long, or stand where names are expected.

    Args:
        names: Of the layers of the base.

    >>> without_patterns({"target_modules": r".*(q|v)_proj", "r": 4}, ["model.q_proj", "model.o_proj"])
    {'target_modules': ['model.q_proj'], 'r': 4}
    """
    config = {field: value for field, value in config.items() if field not in UNREAD}
    whole, keys = _expressions(config)
    tables = {
        field: value for field, value in config.items() if value and field.endswith("_pattern") and field not in NAMES
    }
    if tables:
        config = config | _with_used_keys(tables, names)
    if not whole and not keys:
        return config
    if "target_modules" in whole:
        config = _of_all_layers(config)
    chosen = _tried(whole, keys, names)
    if not chosen.get("target_modules", names):
        raise AdapterError(f"its pattern {shown(whole['target_modules'])} matches no layer: it is for another base")
    return _with_subset(config | chosen, names) if chosen else config


def _expressions(config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the expressions for whole names, by field, and those in tables. Raises `AdapterError` for expressions anywhere else."""
    whole: dict[str, str] = {}
    keys: list[str] = []
    for field, value in config.items():
        if field in WHOLE:
            if not isinstance(value, str | list | None):
                raise TypeError(f"{field} is a {type(value).__name__}")
            if isinstance(value, str) and not _is_plain(value):
                whole[field] = value
        elif field.endswith("_pattern") and field not in NAMES:
            if not isinstance(value, dict | None):
                raise AdapterError(f"its {shown(field)} is not a table of patterns and numbers")
            keys += [key for key in value or () if not _is_plain(key)]
        elif value and (isinstance(value, list | dict) or field in NAMES):
            _check_plain(field, value)
    return whole, keys


def _of_all_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without `layers_to_transform`. Where a pattern chooses layers PEFT does not look at it, and takes no LoRA
    with both."""
    if config.get("layers_to_transform") is not None and config.get("peft_type") == "LORA":
        raise AdapterError("its layers_to_transform needs a list of target_modules, not a pattern")
    return {field: value for field, value in config.items() if field != "layers_to_transform"}


def _with_subset(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the configuration with `feedforward_modules` that are a subset of `target_modules`, as PEFT wants lists of both to be."""
    targets, feedforward = config.get("target_modules"), config.get("feedforward_modules")
    if not isinstance(targets, list) or not isinstance(feedforward, list):
        return config
    targeted = [name for name in names if any(name == t or name.endswith(f".{t}") for t in targets)]
    found = [name for name in targeted if name.endswith(tuple(feedforward))]  # no dot before: PEFT's rule here
    added = [name for name in found if name not in targets]
    return config | {"target_modules": targets + added, "feedforward_modules": found}


def _tried(whole: dict[str, str], keys: list[str], names: Collection[str]) -> dict[str, list[str]]:
    """Return which names each expression matches, of those for whole names."""
    first = shown(next(iter([*whole.values(), *keys])))
    try:
        ran = tried(TRY, given=json.dumps([whole, keys, list(names)]).encode(), most_s=LONGEST_S)
    except TimeoutExpired:
        raise AdapterError(f"its pattern {first} takes too long: name the modules in a list") from None
    if ran.returncode:
        raise AdapterError(f"its pattern {first} is not a regular expression")
    chosen, took = json.loads(ran.stdout)
    if slow := [key for key, seconds in took.items() if seconds > LONGEST_MATCH_S]:
        raise AdapterError(f"its pattern {shown(slow[0])} takes too long: give the modules by their names")
    return chosen  # type: ignore[no-any-return]


def _with_used_keys(tables: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the tables without the names that are of no module: PEFT looks for each layer at all of them."""
    ends = {name[at:] for name in names for at in (0, *(match.end() for match in re.finditer(r"\.", name)))}
    return {
        field: {key: one for key, one in table.items() if key in ends or not _is_plain(key)}
        for field, table in tables.items()
    }


def _check_plain(field: str, value: Any) -> None:
    """Check what PEFT may put into expressions of its own: items of lists and of tables, whatever the field, because it iterates over
    what it finds."""
    waiting = list(value) if isinstance(value, dict) else [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, str) and not _is_plain(each):
            raise AdapterError(f"its {shown(field)} has {shown(each)}, where only names of modules can stand")


def _is_plain(pattern: str) -> bool:
    return PLAIN.fullmatch(pattern) is not None


def check_numbers(config: dict[str, Any], max_rank: int, held: int) -> None:
    """Raise `AdapterError` for sizes that nobody can mean, before anything is allocated for them, and if PEFT would make more than all that the
    file holds, which it does before it compares shapes: a bank of vectors, or one for each item of a list.

    Args:
        held: How many numbers the file has.

    >>> check_numbers({"peft_type": "VBLORA", "num_vectors": 16, "vector_length": 64}, max_rank=8, held=2000)
    """
    for name, told in config.items():
        if isinstance(told, list) and len(told) > max(held, FEW):
            raise AdapterError(f"its {shown(name)} has {len(told)} items, more than its file has numbers: {held}")
        for value in told.values() if isinstance(told, dict) else [told]:
            if not isinstance(value, int | float):
                continue
            if value > REPEATS.get(name, MOST):
                raise AdapterError(f"its {shown(name)} is {value}, and may be {REPEATS.get(name, MOST)} at most")
            if value > max_rank and (name in RANKS or name.endswith("rank_pattern")):
                raise AdapterError(
                    f"its rank is {value} ({shown(name)}), and this server takes {max_rank} at most: start it with a larger max_rank (--max-rank)"
                )
            if not abs(value) <= MOST:
                raise AdapterError(f"its {shown(name)} is {value}: numbers must be from {-MOST} to {MOST}")
    bank = config.get("num_vectors", 0), config.get("vector_length", 0)
    if all(isinstance(size, int) for size in bank) and bank[0] * bank[1] > held:
        raise AdapterError(
            f"its bank of {bank[0]} vectors of {bank[1]} numbers is larger than its file, which has {held}"
        )
