"""The wire format of protocol buffers, in which SentencePiece stores its models."""

from collections.abc import Iterator
from typing import NamedTuple


class Field(NamedTuple):
    """A field of a message."""

    number: int
    value: bytes | int  # a number of variable length, or the bytes of anything else
    encoded: bytes  # the whole field


def read_fields(data: bytes) -> Iterator[Field]:
    """Yield the fields of a message.

    Raises:
        ValueError: the data is not a protocol buffer.
    """
    position = 0

    def read_varint() -> int:
        nonlocal position
        value = shift = 0
        while shift < 70 and position < len(data):
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        raise ValueError("invalid varint")

    while position < len(data):
        start = position
        key = read_varint()
        wire_type = key & 7
        value: bytes | int
        if wire_type == 0:
            value = read_varint()
        elif wire_type in (1, 2, 5):
            size = {1: 8, 2: None, 5: 4}[wire_type]
            size = read_varint() if size is None else size
            if size > len(data) - position:
                raise ValueError("a field is longer than the data")
            value = data[position : position + size]
            position += size
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        yield Field(key >> 3, value, data[start:position])


def encode_field(number: int, value: bytes | int) -> bytes:
    """Return a field with bytes, or with a number of variable length."""
    if isinstance(value, int):
        return encode_varint(number << 3) + encode_varint(value)
    return encode_varint(number << 3 | 2) + encode_varint(len(value)) + value


def encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
