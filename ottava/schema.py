"""Typed sections: dataclasses whose keys carry their meaning, choices and range.

Nothing here knows what a run is: `key` declares one, `build` reads nested plain data into sections,
`check_values` tests choices and ranges, `apply_override` edits the plain data.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """The request was wrong. Carries exactly one line."""


def key(
    default: Any = MISSING,
    doc: str = "",
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    factory: Any = MISSING,
) -> Any:
    """One key: default, meaning, choices, and range (low <= x <= high, above < x < below)."""
    limits = {"low": low, "high": high, "above": above, "below": below}
    return field(
        default=default,
        default_factory=factory,
        metadata={"doc": doc, "choices": choices, "limits": limits},
    )  # type: ignore[call-overload]


def nearest(name: str, choices: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", or nothing."""
    near = difflib.get_close_matches(name, list(choices), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_values(section: Any, prefix: str = "") -> None:
    """Test every key's choices and range, sections inside included. Raises ConfigError."""
    for f in fields(section):
        value, name = getattr(section, f.name), prefix + f.name
        if is_dataclass(value):
            check_values(value, f"{name}.")
            continue
        choices = f.metadata["choices"]
        for one in value if isinstance(value, tuple) else (value,):
            if choices and one not in choices:
                raise ConfigError(
                    f"{name}: {one!r} is not one of {', '.join(choices)}{nearest(one, choices)}"
                )
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_range(name, number, **f.metadata["limits"])


def _check_range(name: str, x: float, low: Any, high: Any, above: Any, below: Any) -> None:
    inside = (low is None or x >= low) and (high is None or x <= high)
    inside = inside and (above is None or x > above) and (below is None or x < below)
    if inside and float("-inf") < x < float("inf"):
        return
    named = {"at least": low, "above": above, "at most": high, "below": below}
    bounds = " and ".join(f"{word} {limit:g}" for word, limit in named.items() if limit is not None)
    raise ConfigError(f"{name}: {x} is out of range; use a number {bounds or 'that is finite'}")


def to_dict(value: Any) -> Any:
    """Sections as nested plain data (dicts, lists, numbers, text) that `build` reads back equal."""
    if is_dataclass(value):
        return {f.name: to_dict(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: to_dict(v) for k, v in value.items()}
    return [to_dict(v) for v in value] if isinstance(value, tuple | list) else value


def build(root: type, data: Mapping[str, Any]) -> Any:
    """The `root` section that nested plain data describes. Raises ConfigError."""
    return _build(root, data, "", root)


def _build(cls: type, data: Any, prefix: str, root: type) -> Any:
    if not isinstance(data, Mapping):
        name = prefix.rstrip(".")
        raise ConfigError(f"{name}: is a section, not a value; set {name}.{fields(cls)[0].name}")
    hints = get_type_hints(cls)
    values = {}
    for name, value in data.items():
        if name not in hints:
            raise ConfigError(_unknown(prefix, name, cls, root, isinstance(value, Mapping)))
        if is_dataclass(hints[name]):
            values[name] = _build(hints[name], value, f"{prefix}{name}.", root)
        else:
            values[name] = _typed(value, hints[name], prefix + name)
    return cls(**values)


def _unknown(prefix: str, name: str, cls: type, root: type, is_section: bool) -> str:
    names = [f.name for f in fields(cls)]
    near = difflib.get_close_matches(name, names, 1)
    sections = {n: t for n, t in get_type_hints(root).items() if is_dataclass(t)}
    elsewhere = [s for s, t in sections.items() if name in {f.name for f in fields(t)}]
    if elsewhere:
        hint = f"did you mean {elsewhere[0]}.{name}?"
    elif near:
        hint = f"did you mean {prefix}{near[0]}?"
    else:
        hint = f"choose one of {', '.join(names)}"
    return f"{prefix}{name}: unknown {'section' if is_section else 'key'}; {hint}"


_WORDS = {
    str: ("text", "texts"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
}


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as the key's type; only whole numbers widen (to float), and lists become tuples."""
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        many = kinds[-1] is Ellipsis
        if not isinstance(value, list | tuple) or (not many and len(value) != len(kinds)):
            size = "" if many else f"{len(kinds)} "
            raise ConfigError(f"{name}: {value!r} must be a list of {size}{_WORDS[kinds[0]][1]}")
        return tuple(_typed(v, kinds[0], name) for v in value)
    if get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: {value!r} must be a table, such as {name}.some_key=1")
        return dict(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name}: {value!r} must be {_WORDS[hint][0]}")
    return value


def apply_override(root: type, data: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in the nested data. Raises ConfigError.

    The value is read as the key's own type: text is taken as it stands, a list of texts may be
    written with commas, anything else is TOML.
    """
    path, equals, raw = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override!r}: an override is written section.key=value")
    target: Any = data
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{path}: {part} is a value, not a section")
    hint: Any = root
    for part in parts:
        hint = get_type_hints(hint).get(part) if is_dataclass(hint) else None
    target[parts[-1]] = _parse(raw.strip(), hint)


def _parse(raw: str, hint: Any) -> Any:
    quoted = raw[:1] in ("'", '"', "[")
    if hint is str and not quoted:
        return raw
    if get_origin(hint) is tuple and not quoted:
        texts = get_args(hint)[0] is str
        return [t for t in raw.split(",") if t] if texts else _parse(f"[{raw}]", None)
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
