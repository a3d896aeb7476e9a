"""What happens when a program calls `SomeClass.from_pretrained(...)`: whether the model shares an executor's layers, and how."""

import time
from collections.abc import Callable
from typing import Any

from symbiosis.client.wrap import wrap
from symbiosis.errors import SymbiosisError
from symbiosis.run.outcome import left_alone, shared
from symbiosis.run.settings import Settings


def load(
    cls: Any, original: Callable[..., Any], name_or_path: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
    settings: Settings,
) -> Any:  # fmt: skip
    """Return what `original`, the `from_pretrained` of `cls`, returns; its frozen layers are the executor's, if it has them.

    Says what it did by `outcome.shared` or `outcome.left_alone`.
    """
    begun = time.monotonic()
    loaded = original(name_or_path, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    try:
        wrap(model, settings.endpoint)
    except SymbiosisError as error:
        left_alone(name_or_path, str(error), settings)
    else:
        shared(name_or_path, model, settings.endpoint[0], 0, time.monotonic() - begun)
    return loaded
