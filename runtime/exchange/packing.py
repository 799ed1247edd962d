"""Payloads as the one tensor that travels."""

import torch
from torch import Tensor

from paceline.runtime.compress.base import BlockCodec, Payload


class Packing:
    """Joins the tensors of a codec's payloads into bytes, and parts them again."""

    def __init__(self, codec: BlockCodec) -> None:
        self._codec = codec
        self._templates: dict[int, list[tuple[torch.dtype, int]]] = {}

    def pack(self, payload: Payload) -> Tensor:
        """All tensors one after the other, as uint8."""
        return torch.cat([tensor.view(torch.uint8) for tensor in payload])

    def unpack(self, packed: Tensor, elements: int) -> Payload:
        """Undo `pack` for a payload of so many elements, without a copy."""
        template = self._templates.get(elements)
        if template is None:
            # Payloads of equally many elements are alike but for their content.
            payload = self._codec.encode(torch.zeros(elements))
            template = [(tensor.dtype, tensor.numel() * tensor.element_size()) for tensor in payload]
            self._templates[elements] = template
        pieces = packed.split([size for _, size in template])
        return tuple(piece.view(dtype) for piece, (dtype, _) in zip(pieces, template, strict=True))
