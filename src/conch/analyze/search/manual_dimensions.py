"""The dimensions that ``model_config_parameters`` names: fields of a configuration with the values to try.

Pure.  As in model analyzer, a list where the configuration has one value is a list of values to try; where the
configuration has a list (``preferred_batch_size``, ``instance_group``) it is that list, and a list of lists is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from conch.analyze.options.values import OptionProblem, wrong
from conch.analyze.search.overrides import Path, at, message, put
from conch.analyze.search.space import Dimension
from conch.config.schema import ModelConfig
from conch.errors import ConchError, did_you_mean

#: The longest list of alternatives of one field; a sweep of more would never end.
_MOST: Final = 1000


def manual_dimensions(model: str, tree: Mapping[str, Any], config: Mapping[str, Any]) -> list[Dimension]:
    """The dimensions of a model, one for each field that is named; a field with one value is set in every candidate.

    ``config`` is the repository's.  Raises INVALID_ARG for a field that configurations have not, with the nearest one.
    """
    where = f"profile_models.{model}.model_config_parameters"
    fields = _fields(ModelConfig.DESCRIPTOR, tree, where)
    return [_dimension(model, where, path, values, config) for path, values in fields]


def _dimension(model: str, where: str, path: Path, values: list[Any], config: Mapping[str, Any]) -> Dimension:
    for value in values:
        probe: dict[str, Any] = {}
        put(probe, path, value)
        try:
            message(probe)
        except ConchError as error:
            raise OptionProblem(f"{where}: {error.message}", f"{where}.{path[0]}") from None
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    tried = sorted(set(values)) if numbers else values
    own = at(config, path)
    start = tried.index(own) if own in tried else 0
    if numbers and isinstance(own, int | float):
        start = min(range(len(tried)), key=lambda index: abs(tried[index] - own))
    return Dimension(model, path, tuple(tried), start, ordered=numbers)


def _fields(kind: Descriptor, tree: Any, where: str, path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """Each field that is named below a message, with the values to try."""
    if not isinstance(tree, Mapping):
        raise wrong(where, tree, "a mapping of fields of a configuration")
    for key, value in tree.items():
        field = _field(kind, key, where)
        here: Path = (*path, field.name)
        inside = f"{where}.{key}"
        if _is_map(field):
            yield from _entries(field, value, inside, here)
        elif not _is_list(field) and field.message_type is not None and isinstance(value, Mapping) and value:
            yield from _fields(field.message_type, value, inside, here)
        else:
            yield here, _limited(_alternatives(field, value, inside), inside)


def _entries(field: FieldDescriptor, tree: Any, where: str, path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """The entries of a map, as ``parameters: {threads: [1, 2]}``; a parameter's text may be written without its
    ``string_value``."""
    if not isinstance(tree, Mapping):
        raise wrong(where, tree, "a mapping")
    assert field.message_type is not None
    below = field.message_type.fields_by_name["value"]
    for key, value in tree.items():
        inside, here = f"{where}.{key}", (*path, str(key))
        if below.message_type is None:
            yield here, _limited(_alternatives(below, value, inside), inside)
        elif isinstance(value, Mapping):
            yield from _fields(below.message_type, value, inside, here)
        else:
            given = value if isinstance(value, list) else [value]
            texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in given]
            yield (*here, "string_value"), _limited(texts, inside)


def _alternatives(field: FieldDescriptor, value: Any, where: str) -> list[Any]:
    """The values to try of a field that is not looked into: scalars, lists, and messages as a whole."""
    if _is_list(field):
        lists = value if isinstance(value, list) and value and all(isinstance(one, list) for one in value) else [value]
        return [list(chosen) for one in lists for chosen in _elements(field, one, where)]
    given = value if isinstance(value, list) else [value]
    return [found for one in given for found in _values(field, one, where)]


def _elements(field: FieldDescriptor, value: Any, where: str) -> Iterator[Sequence[Any]]:
    """The lists that a list stands for, where its elements have values to try."""
    if not isinstance(value, list):
        value = [value]
    return product(*(_values(field, one, where) for one in value))


def _values(field: FieldDescriptor, value: Any, where: str) -> list[Any]:
    if field.message_type is None:
        return [value]
    if not isinstance(value, Mapping):
        raise wrong(where, value, "a mapping of fields of a configuration")
    names = [_field(field.message_type, key, where) for key in value]
    choices = [
        _alternatives(name, one, f"{where}.{name.name}") for name, one in zip(names, value.values(), strict=True)
    ]
    return [dict(zip((name.name for name in names), chosen, strict=True)) for chosen in product(*choices)]


def _limited(values: list[Any], where: str) -> list[Any]:
    if not 0 < len(values) <= _MOST:
        raise OptionProblem(f"{where}: there are {len(values)} values to try; 1 to {_MOST} are possible", where)
    return values


def _field(kind: Descriptor, key: Any, where: str) -> FieldDescriptor:
    field = kind.fields_by_name.get(str(key))
    if field is None:
        hint = did_you_mean(str(key), kind.fields_by_name, f"it has {', '.join(kind.fields_by_name)}")
        raise OptionProblem(f"{where}: a configuration has no '{key}' there; {hint}", f"{where}.{key}")
    return field


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_list(field: FieldDescriptor) -> bool:
    return isinstance(field.default_value, list)
