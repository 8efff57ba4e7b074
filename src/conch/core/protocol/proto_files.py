"""The ``.proto`` files of this package: a reader of the part of the language that they use, and their messages.

That part is proto3 with messages, enums, services, ``oneof``, ``map`` and ``repeated``, without options. The messages
are in a descriptor pool of their own: those of ``tritonclient`` have the same names, and both can be imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

POOL: Final = DescriptorPool()

#: Comments and spaces, which are skipped; a string, a word or a sign.
_TOKEN: Final = re.compile(r'(?://[^\n]*|\s+)|"([^"]*)"|([\w.]+|[{}()<>=,;])')
_SCALARS: Final = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def load(name: str, package: str = "") -> FileDescriptor:
    """Add a file of this package, and those that it imports, to the pool; ``package`` replaces the one it names."""
    text = Path(__file__).with_name(name).read_text("utf-8")
    file = read_file(name, re.sub(r"package [\w.]+;", f"package {package};", text) if package else text)
    for imported in file.dependency:
        load(imported)
    if "." in file.package:  # gRPC's own services, whose files are in folders
        file.name = f"{file.package.replace('.', '/')}/{name}"
    POOL.AddSerializedFile(file.SerializeToString())
    return POOL.FindFileByName(file.name)


def members(file: FileDescriptor) -> dict[str, Any]:
    """Return the classes of a file's messages, its enums and their values, by name."""
    found: dict[str, Any] = {
        name: message_factory.GetMessageClass(message) for name, message in file.message_types_by_name.items()
    }
    for name, enum in file.enum_types_by_name.items():
        found |= {name: EnumTypeWrapper(enum)} | {value.name: value.number for value in enum.values}
    return found


def read_file(name: str, text: str) -> FileDescriptorProto:
    """Return the description of a ``.proto`` file, with full names of types. Raises ValueError for unknown language."""
    file = FileDescriptorProto(name=name)
    _ProtoReader(text, file).read()
    return file


class _ProtoReader:
    def __init__(self, text: str, file: FileDescriptorProto) -> None:
        self._tokens: list[str] = [quoted or plain for quoted, plain in _TOKEN.findall(text) if quoted or plain][::-1]
        self._file = file
        #: The kind of each declared type, by its name in the package.
        self._types: dict[str, int] = {}
        #: The fields whose type is a declared one, with the type's name and the message that it is looked up from.
        self._references: list[tuple[FieldDescriptorProto, str, str]] = []

    def read(self) -> None:
        file, kinds = self._file, FieldDescriptorProto.Type
        while self._tokens:
            match self._next():
                case "syntax":
                    self._expect("=")
                    file.syntax = self._next()
                    self._expect(";")
                case "package":
                    file.package = self._next()
                    self._expect(";")
                case "import":
                    file.dependency.append(self._next())
                    self._expect(";")
                case "enum":
                    self._enum(file.enum_type.add(), "")
                case "message":
                    self._message(file.message_type.add(), "")
                case "service":
                    self._service(file.service.add(name=self._next()))
                case word:
                    raise ValueError(f"{file.name}: unexpected {word!r}")
        for field, name, scope in self._references:
            full = self._resolve(name, scope)
            # A type of another file is a message.
            field.type = FieldDescriptorProto.Type.ValueType(self._types.get(full, kinds.Value("TYPE_MESSAGE")))
            field.type_name = f".{file.package}.{full}"

    def _next(self) -> str:
        if not self._tokens:
            raise ValueError(f"{self._file.name}: the file ends too early")
        return self._tokens.pop()

    def _expect(self, sign: str) -> None:
        if (token := self._next()) != sign:
            raise ValueError(f"{self._file.name}: {sign!r} expected, not {token!r}")

    def _resolve(self, name: str, scope: str) -> str:
        """Return the name in the package of a type that a message, ``scope``, names: the innermost one."""
        while scope and f"{scope}.{name}" not in self._types:
            scope = scope.rpartition(".")[0]
        return f"{scope}.{name}" if scope else name

    def _enum(self, enum: Any, scope: str) -> None:
        enum.name = self._next()
        self._types[f"{scope}.{enum.name}".lstrip(".")] = FieldDescriptorProto.TYPE_ENUM
        self._expect("{")
        while (value := self._next()) != "}":
            enum.value.add(name=value, number=self._number())

    def _message(self, message: DescriptorProto, scope: str) -> None:
        message.name = self._next()
        scope = f"{scope}.{message.name}".lstrip(".")
        self._types[scope] = FieldDescriptorProto.TYPE_MESSAGE
        self._expect("{")
        while (word := self._next()) != "}":
            match word:
                case "enum":
                    self._enum(message.enum_type.add(), scope)
                case "message":
                    self._message(message.nested_type.add(), scope)
                case "oneof":
                    message.oneof_decl.add(name=self._next())
                    self._expect("{")
                    while (kind := self._next()) != "}":
                        self._field(message, scope, kind).oneof_index = len(message.oneof_decl) - 1
                case "map":
                    self._map(message, scope)
                case "repeated":
                    self._field(message, scope, self._next()).label = FieldDescriptorProto.LABEL_REPEATED
                case kind:
                    self._field(message, scope, kind)

    def _field(self, message: DescriptorProto, scope: str, kind: str) -> FieldDescriptorProto:
        name = self._next()
        return self._add_field(message, scope, kind, name, self._number())

    def _add_field(
        self, message: DescriptorProto, scope: str, kind: str, name: str, number: int
    ) -> FieldDescriptorProto:
        field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            self._references.append((field, kind, scope))
        return field

    def _map(self, message: DescriptorProto, scope: str) -> None:
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        name = self._next()
        # Protobuf's rule: a map is a list of entries, a message named after the field.
        entry = message.nested_type.add(name="".join(word.capitalize() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        self._types[f"{scope}.{entry.name}"] = FieldDescriptorProto.TYPE_MESSAGE
        self._add_field(entry, scope, key, "key", 1)
        self._add_field(entry, scope, value, "value", 2)
        self._add_field(message, scope, entry.name, name, self._number()).label = FieldDescriptorProto.LABEL_REPEATED

    def _number(self) -> int:
        self._expect("=")
        number = int(self._next())
        self._expect(";")
        return number

    def _service(self, service: Any) -> None:
        self._expect("{")
        while self._next() != "}":  # "rpc"
            method = service.method.add(name=self._next())
            method.input_type, client_streaming = self._message_of_call()
            self._expect("returns")
            method.output_type, server_streaming = self._message_of_call()
            self._expect(";")
            if client_streaming:
                method.client_streaming = True
            if server_streaming:
                method.server_streaming = True

    def _message_of_call(self) -> tuple[str, bool]:
        self._expect("(")
        name = self._next()
        streaming = name == "stream"
        if streaming:
            name = self._next()
        self._expect(")")
        return f".{self._file.package}.{name}", streaming
