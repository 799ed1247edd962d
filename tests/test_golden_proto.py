"""The wire is frozen: message, field and method names, numbers and types.

To change it on purpose, run this and commit the result:
`make test ARGS=tests/test_golden_proto.py PACELINE_UPDATE_GOLDEN=1`
"""

import json
import os
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from paceline.proto.paceline.v1 import control_pb2, policy_pb2, runtime_pb2, types_pb2

GOLDEN = Path(__file__).parent / "golden" / "proto.json"


def field(found: FieldDescriptor) -> str:
    kind = FieldDescriptorProto.Type.Name(found.type).removeprefix("TYPE_").lower()
    target = found.message_type.full_name if found.message_type else kind
    if found.is_repeated:
        return f"{found.number} repeated {target}"
    if found.containing_oneof is None:
        return f"{found.number} {target}"
    synthetic = found.containing_oneof.name == f"_{found.name}"
    return (
        f"{found.number} optional {target}"
        if synthetic
        else f"{found.number} {target} of {found.containing_oneof.name}"
    )


def messages(found: Descriptor) -> dict[str, dict[str, str]]:
    own = {found.full_name: {item.name: field(item) for item in found.fields}}
    for nested in found.nested_types:
        own |= messages(nested)
    return own


def service(found: ServiceDescriptor) -> dict[str, str]:
    return {
        method.name: f"{'stream ' * method.client_streaming}{method.input_type.full_name} -> "
        f"{'stream ' * method.server_streaming}{method.output_type.full_name}"
        for method in found.methods
    }


def describe(file: FileDescriptor) -> dict[str, Any]:
    return {
        "messages": {
            name: fields
            for message in file.message_types_by_name.values()
            for name, fields in messages(message).items()
        },
        "services": {found.full_name: service(found) for found in file.services_by_name.values()},
    }


def test_wire_is_what_was_published() -> None:
    files = [module.DESCRIPTOR for module in (control_pb2, policy_pb2, runtime_pb2, types_pb2)]
    present = {file.name: describe(file) for file in files}
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(present, indent=2) + "\n")
    assert present == json.loads(GOLDEN.read_text())
