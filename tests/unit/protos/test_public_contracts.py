"""The public contracts can be compiled in each language that gRPC has, and say where the code belongs."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from quire.admin.v1 import admin_pb2
from quire.inference.v1 import inference_pb2

ROOT = Path(__file__).parents[3]
CONTRACTS: dict[str, FileDescriptor] = {"admin": admin_pb2.DESCRIPTOR, "inference": inference_pb2.DESCRIPTOR}


def messages(descriptors: Sequence[Descriptor]) -> Iterator[Descriptor]:
    """The messages and those within them."""
    for descriptor in descriptors:
        yield descriptor
        yield from messages(descriptor.nested_types)


def java_getters(field: FieldDescriptor) -> set[str]:
    """The getters that protoc generates for a field in Java."""
    name = "get" + "".join(part[:1].upper() + part[1:] for part in field.name.split("_"))
    suffixes = [""]
    if field.is_repeated:
        suffixes += ["List", "Count"]
    if field.type == FieldDescriptor.TYPE_STRING:
        suffixes += ["Bytes"]
    elif field.type == FieldDescriptor.TYPE_ENUM:
        suffixes += ["Value", "ValueList"] if field.is_repeated else ["Value"]
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        suffixes += ["Map", "OrDefault", "OrThrow"]
    elif field.message_type is not None:
        suffixes += ["OrBuilder", "Builder", "BuilderList", "OrBuilderList"]
    return {name + suffix for suffix in suffixes}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_no_two_fields_have_the_same_getter_in_java(contract: str) -> None:
    for message in messages(list(CONTRACTS[contract].message_types_by_name.values())):
        getters = Counter(getter for field in message.fields for getter in java_getters(field))
        getters.update(f"get{oneof.name.title().replace('_', '')}Case" for oneof in message.oneofs)
        assert {getter for getter, number in getters.items() if number > 1} == set(), message.full_name


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_names_the_package_of_each_language(contract: str) -> None:
    file = FileDescriptorProto()
    CONTRACTS[contract].CopyToProto(file)
    options = file.options
    title = contract.title()
    assert options.java_package == f"quire.{contract}.v1"
    assert options.java_multiple_files
    assert options.java_outer_classname == f"{title}Proto"
    assert options.go_package == f"quire/{contract}/v1;{contract}v1"
    assert options.csharp_namespace == options.ruby_package.replace("::", ".") == f"Quire.{title}.V1"


@pytest.fixture(scope="module")
def descriptor_set() -> FileDescriptorSet:
    """What `make protos` writes for tools that take one."""
    # With this test's own environment of Python.
    command = ["make", "build/contracts.binpb", "STAMP=", f"BIN={Path(sys.executable).parent}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return FileDescriptorSet.FromString((ROOT / "build/contracts.binpb").read_bytes())


def shape(file: FileDescriptor) -> Mapping[str, Sequence[tuple[object, ...]]]:
    """The methods, fields and values of a contract, by the service, message or enum that has them."""
    found: dict[str, Sequence[tuple[object, ...]]] = {}
    for service in file.services_by_name.values():
        found[service.full_name] = [
            (one.name, one.input_type.full_name, one.output_type.full_name, one.client_streaming, one.server_streaming)
            for one in service.methods
        ]
    enums = list(file.enum_types_by_name.values())
    for message in messages(list(file.message_types_by_name.values())):
        found[message.full_name] = [
            (one.name, one.number, one.type, one.is_repeated, one.has_presence, _type_name(one))
            for one in message.fields
        ]
        enums += message.enum_types
    for enum in enums:
        found[enum.full_name] = [(value.name, value.number) for value in enum.values]
    return found


def _type_name(field: FieldDescriptor) -> str | None:
    kind = field.message_type or field.enum_type
    return None if kind is None else kind.full_name


def test_the_descriptor_set_has_the_public_contracts_with_all_that_they_import(
    descriptor_set: FileDescriptorSet,
) -> None:
    pool = DescriptorPool()
    for file in descriptor_set.file:  # fails if a file comes before one that it imports
        pool.AddSerializedFile(file.SerializeToString())
    own = {file.name: file for file in descriptor_set.file if file.package.startswith("quire.")}
    assert own.keys() == {f"quire/{name}/v1/{name}.proto" for name in CONTRACTS}
    for name, file in own.items():
        contract = next(one for one in CONTRACTS.values() if one.name == name)
        assert shape(pool.FindFileByName(name)) == shape(contract)
        assert contract.services_by_name
        documented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments}
        assert {(6, index) for index in range(len(file.service))} <= documented
        assert {(4, index) for index in range(len(file.message_type))} <= documented
