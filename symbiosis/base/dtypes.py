"""The floating-point types that a model's weights may have, by the names that users write."""

from symbiosis.errors import ConfigError

DTYPE_BITS = {"float64": 64, "double": 64, "float32": 32, "float": 32, "float16": 16, "half": 16, "bfloat16": 16}


def check_dtype(name: str | None) -> None:
    """Raise `ConfigError` unless `name` is a floating-point type, or None for the checkpoint's."""
    if name is not None and name not in DTYPE_BITS:
        raise ConfigError(f"--dtype {name!r} is not a floating-point type: float32, bfloat16, float16 or float64")
