"""`/openapi.json`: what the routes take, told from the structs that bodies are read as and from the limits that they are checked by."""

from collections.abc import Iterable
from typing import Any

import msgspec

from symbiosis import __version__
from symbiosis.server.body_readers import body_of
from symbiosis.server.openai_protocol import AS_ASKED
from symbiosis.serving.engine.limits import COUNTS, LENGTHS, LIMITS
from symbiosis.serving.request import MANY, Limit

REFERENCE = "#/components/schemas/{name}"
ERROR = "Error"
NUMBERS = LIMITS | {"n": LIMITS["completions"], "top_k": Limit(-1, MANY)}  # -1 is vLLM's word for 0
COUNTED = {AS_ASKED.get(name, name): name for name in COUNTS}
Table = Iterable[tuple[str, str, Any]]  # methods, paths, and what answers them


def document(table: Table, needs_keys: bool, root_path: str = "") -> dict[str, Any]:
    """Return the description of an app with these routes.

    Args:
        needs_keys: Whether requests have an API key.
        root_path: What a proxy puts before each path.
    """
    rows = list(table)
    kinds = list(dict.fromkeys(kind for _, _, route in rows if (kind := body_of(route)) is not None))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    of_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, route in rows:
        kind = body_of(route)
        operation = _operation(method, path, route, None if kind is None else of_kind[kind])
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Symbiosis", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**{name: _as_read(each) for name, each in components.items()}, ERROR: error}},
    }
    if root_path:
        told["servers"] = [{"url": root_path}]
    if needs_keys:
        told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        told["security"] = [{"key": []}]
    return told


def _operation(method: str, path: str, route: Any, schema: dict[str, Any] | None) -> dict[str, Any]:
    name = f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace(":path}", "").replace("}", "")
    failed = {"description": "It is refused, or has failed.", "content": {"application/json": {"schema": {"$ref": REFERENCE.format(name=ERROR)}}}}  # fmt: skip
    answer: dict[str, Any] = {"description": "The answer."} | ({} if method == "DELETE" else {"content": {"*/*": {}}})
    told: dict[str, Any] = {"operationId": name, "responses": {"2XX": answer, "4XX": failed, "5XX": failed}}
    if doc := (route.__doc__ or "").strip().partition("\n")[0]:
        told["summary"] = doc
    if "{" in path:
        parameter = path.partition("{")[2].partition("}")[0].removesuffix(":path")
        told["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    if schema is not None:
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif method == "PUT":
        told["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return told


def _as_read(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object as it is read: null stands for a field that is not there, and numbers, lists and texts have limits."""
    if "properties" not in schema:
        return schema
    required = schema.get("required", ())
    properties = {}
    for name, field in schema["properties"].items():
        field = _within_limits(name, field)
        if name not in required and field and not _takes_null(field):
            default = {key: field.pop(key) for key in ("default",) if key in field}
            field = {"anyOf": [field, {"type": "null"}], **default}
        properties[name] = field
    return {**schema, "properties": properties}


def _within_limits(name: str, field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field with the limits that are checked beyond its type."""
    kinds = [_within(name, dict(each)) for each in field.get("anyOf", (field,))]
    return {**field, "anyOf": kinds} if "anyOf" in field else kinds[0]


def _within(name: str, kind: dict[str, Any]) -> dict[str, Any]:
    if kind.get("type") in ("integer", "number") and name in NUMBERS:
        least, most, above = NUMBERS[name]
        return {**kind, "exclusiveMinimum" if above else "minimum": least, "maximum": most}
    if kind.get("type") == "array" and name in COUNTED:
        return {**kind, "maxItems": COUNTS[COUNTED[name]]}
    if kind.get("type") == "object" and name in COUNTED:
        return {**kind, "maxProperties": COUNTS[COUNTED[name]]}
    if kind.get("type") == "string" and name in LENGTHS:
        return {**kind, "maxLength": LENGTHS[name]}
    return kind


def _takes_null(field: dict[str, Any]) -> bool:
    return any(each.get("type") == "null" for each in field.get("anyOf", (field,)))
