"""The configuration that an executor tells, as far as a client takes it: values for the fields of transformers' own classes, and numbers,
flags and words besides, since models read more than their classes declare.

Nothing in it names code, files or repositories: what would is left out, or refused. How attention is computed, in which dtype,
and where things come from is for the client to say. Sizes are bounded before anything is built by them.
"""

import dataclasses
import json
import logging
from fnmatch import fnmatchcase
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from symbiosis.errors import WrapError
from symbiosis.protocol import Welcome
from symbiosis.text import shown

logger = logging.getLogger("symbiosis")
# What the client decides, or what says where a checkpoint came from: of no use here, whatever it says.
OUR_OWN = frozenset(
    ("_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype", "model_type", "transformers_version")
    + (
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "torchscript",
    )
)
# How texts are made, and how many and how long ones, unless a class declares a field of this name.
GENERATION = frozenset(name for name in GenerationConfig().to_dict() if not name.endswith(("token_id", "token_ids")))
# what is computed
ALTERS = frozenset(("quantization_config", "use_pretrained_backbone", "backbone", "backbone_kwargs"))
# Of what a class does not declare: names of code, files and loaders, and what the client decides.
NEVER = ("_*", "auto_map", "trust_*", "use_kernels", "kernel_*", "custom_*", "*attn_impl*", "*experts_impl*", "*_class", "*_module", "*_repo*", "*path*", "*file*", "*url*", "*pretrained*", "*backbone*", "*quant*", "*dtype*", "*device*", "*revision*", "*remote*")  # fmt: skip
LABELS = frozenset(("id2label", "label2id"))  # texts that people read
COUNTED = 1 << 16  # the largest number of anything that a model has several of
LARGE = ("*vocab*", "*token*", "*_id", "*_ids", "*position*", "*len*", "*size*", "*theta*", "*dim*", "*window*", "*ctx*", "*rate*", "*max*", "*context*", "*base*", "*seed*", "*scale*", "*factor*")  # fmt: skip
LARGEST = 1 << 31
# Of the lists of one field: their entries, and these times the sum of what is counted there. transformers repeats some lists so often.
MOST_ENTRIES, MOST_REPEATED = 1 << 14, 1 << 24
LONGEST_WORD, DEEPEST = 128, 8  # characters of a word; and so deep may parts lie in parts


def told_config(welcome: Welcome, changes: dict[str, Any], where: str) -> PreTrainedConfig:
    """Return the configuration that the executor at `where` tells, with the client's own `changes`."""
    try:
        told = json.loads(welcome.config)
    except (ValueError, RecursionError) as error:
        raise WrapError(f"{where} sends a configuration that is not JSON: {shown(str(error))}") from None
    if not isinstance(told, dict) or "model_type" not in told:
        raise WrapError(f"{where} serves a {welcome.model_class}, not a transformers model: use wrap instead")
    config_class = _config_class(told["model_type"], where)
    taken = _Taken(where, is_packed=any(layer.packed for layer in welcome.manifest))
    values = taken.fields(config_class, told)
    if taken.left_out:
        logger.warning("left out of the configuration that %s sends: %s", where, ", ".join(sorted(taken.left_out)[:8]))
    try:
        config = config_class(**values)
        if unknown := sorted(name for name in changes if not hasattr(config, name)):
            raise WrapError(
                f"from_executor knows no {', '.join(unknown)}, nor does the configuration of {welcome.model_class}"
                + (": wrap a model from a checkpoint for that" if {"privacy", "verify"} & {*unknown} else "")
            )
        return config_class(**{**values, **changes}) if changes else config
    except WrapError:
        raise
    except Exception as error:  # whatever transformers makes of it
        text = shown(f"{type(error).__name__} {error}")
        raise WrapError(f"transformers cannot make a configuration from what {where} sends: {text}") from error


def told_generation(generation: GenerationConfig) -> GenerationConfig:
    """Return the part of what a model's configuration makes of generation that is not for the client to say: the special tokens."""
    return GenerationConfig(**{k: v for k, v in generation.to_dict().items() if k.endswith(("token_id", "token_ids"))})


def told_class(name: str, config: PreTrainedConfig, where: str) -> Any:
    """Return the class of this name, if it is one that transformers' own auto classes choose for such a configuration."""
    for mapping_name in dir(modeling_auto):
        mapping = getattr(modeling_auto, mapping_name)
        if mapping_name.startswith("MODEL_") and isinstance(mapping, _LazyAutoMapping):
            names = mapping._model_mapping.get(str(config.model_type), ())
            if name in ((names,) if isinstance(names, str) else names) and (found := getattr(transformers, name, None)):
                return found
    raise WrapError(
        f"{where} serves a {name!r}, which is not one of the classes that transformers {transformers.__version__} has for a "
        f"{config.model_type}: install another release, or wrap a model from a checkpoint"
    )


def _config_class(model_type: object, where: str) -> type[PreTrainedConfig]:
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise WrapError(
            f"transformers {transformers.__version__} does not know the model_type {shown(str(model_type), LONGEST_WORD)!r}, which {where} names: "
            "install another release, or wrap a model from a checkpoint"
        )
    return CONFIG_MAPPING[model_type]  # type: ignore[no-any-return]


class _Taken:
    """Takes values from an executor's configuration, and collects the names of those left out."""

    def __init__(self, where: str, is_packed: bool = False) -> None:
        """`is_packed`: whether the executor holds packed weights, which a client knows as whole ones."""
        self._where = where
        self._skips = {"quantization_config"} if is_packed else set()
        self.left_out: set[str] = set()

    def fields(self, config_class: type[PreTrainedConfig], told: dict[str, Any], path: str = "") -> dict[str, Any]:
        """Return values for the class's own fields."""
        allowed, taken = _field_names(config_class), {}
        for name, value in told.items():
            full = shown(path + name, LONGEST_WORD)
            if name in ALTERS and value and name not in self._skips:
                raise WrapError(
                    f"{self._where} names {full}, which from_executor does not build: wrap a model from a checkpoint"
                )
            if name in OUR_OWN or name in ALTERS:
                continue
            if name.startswith(("_attn", "_experts", "attn_impl", "experts_impl")):
                continue
            if name not in allowed and not _is_plain(config_class, name, value):
                if name.isidentifier() and not name.startswith("_"):  # else no model computes by it
                    self.left_out.add(full)
                continue
            self._must_be_few(name, value, full)
            part = config_class.sub_configs.get(name)
            nested = part is not None or (isinstance(value, dict) and "model_type" in value)
            taken[name] = self._part(part, value, full) if nested else self._value(name, value, full)
        return taken

    def _part(self, part: Any, value: object, path: str) -> object:
        """Return the configuration of a part of the model."""
        if value is None:
            return None
        if not isinstance(value, dict) or path.count(".") > DEEPEST:
            raise WrapError(f"{self._where}: {path} is not the configuration of a part")
        fixed = part is not None and isinstance(part, type) and issubclass(part, PreTrainedConfig)
        if not fixed and "model_type" not in value:
            raise WrapError(f"{self._where}: {path} does not name its model_type")
        config_class = part if fixed else _config_class(value["model_type"], self._where)
        kind = {"model_type": value["model_type"]} if "model_type" in value else {}
        return {**self.fields(config_class, value, f"{path}."), **kind}

    def _value(self, name: str, value: object, path: str, deep: int = 0) -> object:
        if deep > DEEPEST:
            raise WrapError(f"{self._where}: {path} is nested too deeply")
        if isinstance(value, dict):
            return {
                key: self._value(f"{name}.{key}", one, f"{path}.{shown(key, LONGEST_WORD)}", deep + 1)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._value(name, one, path, deep + 1) for one in value]
        if isinstance(value, str) and name.partition(".")[0] not in LABELS:
            self._must_be_a_word(value, path)
        if isinstance(value, int) and abs(value) > COUNTED:
            self._must_be_a_size(name, value, path)
        return value

    def _must_be_few(self, name: str, value: object, path: str) -> None:
        """Refuse lists of which transformers could make any number of layers, or of entries of another list."""
        entries, counted, left = 0, 0, [value]
        while left:
            one = left.pop()
            if isinstance(one, dict) and name not in LABELS:
                left.extend(one.values())
            elif isinstance(one, list):
                entries += len(one)
                left.extend(one)
            elif isinstance(one, int) and not _may_be_large(name):
                counted += abs(one)
        if entries > MOST_ENTRIES or entries * counted > MOST_REPEATED:
            raise WrapError(f"{self._where}: {path} has lists of {entries} entries, more than any model has")

    def _must_be_a_word(self, value: str, path: str) -> None:
        if len(value) > LONGEST_WORD or not value.isprintable() or any(char in value for char in "/\\:"):
            raise WrapError(
                f"{self._where}: {path} is {shown(value, LONGEST_WORD)!r}: a path or a text where a word belongs"
            )

    def _must_be_a_size(self, name: str, value: int, path: str) -> None:
        if abs(value) > LARGEST or not _may_be_large(name):
            raise WrapError(f"{self._where}: {path} is {value:.3g}, more than any model has")


def _may_be_large(name: str) -> bool:
    """Whether a number of this name is a size, a place or a token, and no count of layers."""
    return any(fnmatchcase(name, pattern) for pattern in LARGE)


def _is_plain(config_class: type[PreTrainedConfig], name: str, value: object) -> bool:
    """Whether what the class does not declare is a number, a flag or a word, or some of them, under a name that is not the class's own."""
    if not name.isidentifier() or any(fnmatchcase(name, never) for never in NEVER) or hasattr(config_class, name):
        return False
    values = value if isinstance(value, list) else [value]
    return name not in GENERATION and all(one is None or isinstance(one, bool | int | float | str) for one in values)


def _field_names(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the names that a configuration of this class has values for: its fields, and those that it derives."""
    declared = (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )
    try:
        made = set(config_class().to_dict())
    except Exception:  # a class that cannot do without values
        made = set()
    return declared | made | set(config_class.attribute_map)
