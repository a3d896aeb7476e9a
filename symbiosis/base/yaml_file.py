"""YAML files that an operator names. What would wait, grow or be guessed at when it is read is refused."""

from pathlib import Path

import yaml

LONGEST, MOST_VALUES = 1 << 20, 100_000


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML tells no types
    """Refuses a key that is there twice, of which YAML's own loader silently takes the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r:.80} is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def read_yaml(file: Path) -> object:
    """Return what a file says. Raises `OSError` or `yaml.YAMLError`."""
    with file.open("rb") as opened:
        told = opened.read(LONGEST + 1)  # a device may never end
    if len(told) > LONGEST:
        raise yaml.YAMLError(f"it has more than {LONGEST} bytes")
    try:
        values = _Loader(told.decode()).get_single_data()
        if _count(values, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"it stands for more than {MOST_VALUES} values")
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise yaml.YAMLError(f"a value in it is none: {error}") from None
    return values


def _count(value: object, known: dict[int, int]) -> int:
    """Return how many values there are where each alias stands for a copy. One that holds itself nests for ever."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(each, known) for each in parts)
    return known[id(value)]
