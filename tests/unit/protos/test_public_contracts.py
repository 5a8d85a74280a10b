"""The public contracts can be compiled in each language that gRPC has, and say where the code belongs."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from quire.admin.v1 import admin_pb2
from quire.inference.v1 import inference_pb2

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
