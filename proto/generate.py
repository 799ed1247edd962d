"""Generate the stubs beside the .proto files: run by `make proto` with the pinned generator.

The .proto files import each other as `paceline/v1/...`, the canonical layout for clients in any language. The Python
stubs live in the package `paceline.proto.paceline.v1`, so their imports are rewritten to that name.
"""

import re
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
FOLDER = ROOT / "paceline" / "v1"


def main() -> int:
    """Regenerate every stub; returns protoc's exit status."""
    protos = sorted(str(path) for path in FOLDER.glob("*.proto"))
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    well_known = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, *protos])
    for stub in sorted([*FOLDER.glob("*_pb2*.py"), *FOLDER.glob("*_pb2*.pyi")]):
        text = stub.read_text()
        text = re.sub(r"^from paceline\.v1 import", "from paceline.proto.paceline.v1 import", text, flags=re.M)
        stub.write_text(text)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
