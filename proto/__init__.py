"""The wire: protobuf messages and gRPC stubs, generated from `paceline/v1/*.proto` by `make proto`."""

if __name__ != "paceline.proto":
    raise ImportError(f"import this package as paceline.proto, not {__name__}")
