"""YAML in and out, as contracts use it: YAML 1.2's plain values, with the line of every place.

PyYAML alone reads ``1e-6`` as a text and ``no`` as false (YAML 1.1), keeps the last of two equal
keys without a word, and forgets lines. Here numbers are numbers, a key given twice is a mistake,
tags are refused, and depth, size and alias expansion are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from kernel_contracts.cross_checks import Mistake, Place, field_text

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24
MAX_NODES = 20_000
MAX_NUMBER = 80
"""Bounds on a document; the largest real contract uses a hundredth of them."""

_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
)
"""Core schema of YAML 1.2: (kind, pattern, first characters; NUL stands for the empty text)."""


class YamlMistake(Exception):
    """The text is not a document that can be read. line: from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message, self.line = message, line


@dataclass
class Source:
    """A document: its data, where each place starts, and what was wrong in its YAML already."""

    data: Any
    lines: dict[Place, int] = field(default_factory=dict)
    key_lines: dict[Place, int] = field(default_factory=dict)
    mistakes: list[tuple[int, Mistake]] = field(default_factory=list)

    def line(self, place: Place, *, of_key: bool = False) -> int:
        """Line of a place, or of the nearest thing around it that is in the document."""
        if of_key and place in self.key_lines:
            return self.key_lines[place]
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)

    def rename(self, holder: Place, old: str, new: str) -> None:
        """Another key for a value of the mapping at ``holder``, its lines going with it."""
        mapping = self.data
        for part in holder:
            mapping = mapping[part]
        mapping[new] = mapping.pop(old)
        depth = len(holder)
        for lines in (self.lines, self.key_lines):
            for place in [p for p in lines if p[: depth + 1] == (*holder, old)]:
                lines[(*holder, new, *place[depth + 1 :])] = lines[place]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class copies it a class)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if getattr(event, "tag", None) is not None:
            raise YamlMistake(f"tags such as {event.tag} are not used in contracts", line)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YamlMistake(f"nested more than {MAX_DEPTH} deep", line)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class copies it a class)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes the line breaks of Unicode in single quotes, where they read as a space.
        style = '"' if any(c in data for c in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


for _kind, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}",
            re.compile(_pattern),
            ["" if c == "\0" else c for c in _first],
        )


def read_yaml(text: str) -> Source:
    """The document of a text. Raises YamlMistake where the text cannot be read at all."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ": ".join(p for p in (error.context, error.problem) if p)
        line = min(mark.line + 1, len(text.splitlines())) if mark else 1
        raise YamlMistake(f"not valid YAML: {message}", line) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlMistake(f"not valid YAML: {error.reason}", line) from None
    if node is None:
        raise YamlMistake("the file is empty", 1)
    source = Source(None)
    source.data = _Plain(source).convert(node, ())
    return source


def write_yaml(document: Any) -> str:
    """A document as YAML that ``read_yaml`` reads back to the same data."""
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=100,
    )
    return text


class _Plain:
    """Nodes to plain data, noting lines. An alias is expanded, within the bounds."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.nodes = 0

    def convert(self, node: yaml.Node, place: Place) -> Any:
        line = node.start_mark.line + 1
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise YamlMistake(f"more than {MAX_NODES} values, aliases expanded", line)
        if len(place) > MAX_DEPTH:
            raise YamlMistake("an alias that contains itself, or nests too deep", line)
        self.source.lines[place] = line
        if isinstance(node, yaml.MappingNode):
            return dict(self.pairs(node, place))
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item, (*place, i)) for i, item in enumerate(node.value)]
        return self.scalar(node, place)

    def pairs(self, node: yaml.MappingNode, place: Place) -> Iterator[tuple[str, Any]]:
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise YamlMistake("a key must be a plain text", line)
            key = key_node.value
            here = (*place, key)
            if key in first:
                self.source.mistakes.append(
                    (
                        line,
                        Mistake(
                            here,
                            f"the key is given twice, first in line {first[key]}",
                            "keep one of them",
                        ),
                    )
                )
                continue
            first[key] = line
            self.source.key_lines[here] = line
            yield key, self.convert(value_node, here)

    def scalar(self, node: yaml.Node, place: Place) -> Any:
        text: str = node.value
        kind = node.tag.rpartition(":")[2]
        if kind in ("int", "float") and len(text) > MAX_NUMBER:
            raise YamlMistake(
                f"{field_text(place)}: not a number one can use", node.start_mark.line + 1
            )
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text)
            case "float":
                return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()))
        return text
