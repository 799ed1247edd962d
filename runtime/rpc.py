"""gRPC in one place: errors to status codes and back, limits, listening addresses.

Every server and client of Paceline goes through these, so that a rule holds for all of them.
"""

import asyncio
import functools
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from paceline.runtime.errors import (
    Busy,
    Conflict,
    CorruptFile,
    InvalidRequest,
    NotFound,
    PacelineError,
    Unreachable,
    WorkerFailure,
)

MESSAGE_LIMIT = 4 * 2**20
"""Largest message in either direction, bytes. Large state never travels in one message."""

DEADLINE_SECONDS = 30.0
"""Deadline of every unary call, s."""

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
]
SERVER_OPTIONS = [
    *CHANNEL_OPTIONS,
    # Without this two servers may share a port, and the second would silently take half of the calls.
    ("grpc.so_reuseport", 0),
]

_STATUS: list[tuple[type[PacelineError], grpc.StatusCode]] = [
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (Busy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unreachable, grpc.StatusCode.UNAVAILABLE),
    (CorruptFile, grpc.StatusCode.DATA_LOSS),
    (WorkerFailure, grpc.StatusCode.ABORTED),
    (PacelineError, grpc.StatusCode.INTERNAL),
]


def status_of(error: PacelineError) -> grpc.StatusCode:
    """The status code that an error travels as."""
    return next(status for error_type, status in _STATUS if isinstance(error, error_type))


def error_from_rpc(error: grpc.RpcError, address: str) -> PacelineError:
    """The error that a failed call to `address` stands for."""
    code, details = error.code(), error.details() or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unreachable(f"no Paceline server answers at {address}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"the server at {address} does not offer this service: {details}")
    for error_type, status in _STATUS:
        if status is code:
            return error_type(details)
    return PacelineError(f"{address}: {code.name}: {details}")


def unary(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate an async unary handler: a PacelineError becomes its status."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await handler(self, request, context)
        except PacelineError as error:
            await context.abort(status_of(error), str(error))

    return wrapped


def streaming(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Decorate an async server-streaming handler: a PacelineError becomes its status."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for message in handler(self, request, context):
                yield message
        except PacelineError as error:
            await context.abort(status_of(error), str(error))

    return wrapped


def parse_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises InvalidRequest."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest(f"address {address!r} must be HOST:PORT; for example 127.0.0.1:7077")
    return host.strip("[]"), int(port)


def check_listen_address(address: str, *, allow_insecure: bool) -> tuple[str, int]:
    """Check an address to listen on before anything starts; returns host and port.

    Raises InvalidRequest when others could reach it unencrypted without this having been asked for, and Conflict
    when the port is in use.
    """
    host, port = parse_address(address)
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not allow_insecure:
        raise InvalidRequest(
            f"listening on {host} without TLS would let everyone on the network in; "
            "use 127.0.0.1, or pass --insecure if that is meant"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Conflict(f"cannot listen on {address}: {error.strerror}; use port 0 for any free one") from None
    return host, port


def write_port_file(path: Path, port: int) -> None:
    """Tell a waiting parent which port was taken; complete or absent, never half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f"{port}\n")
    temporary.replace(path)


async def stop_gracefully(server: grpc.aio.Server, seconds: float = 2.0) -> None:
    """Stop a server: refuse new calls, give running ones `seconds`, then cancel them."""
    await server.stop(seconds)
    await asyncio.sleep(0)
