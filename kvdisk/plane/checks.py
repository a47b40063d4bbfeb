"""Whether what a data plane's process says of a command can be: what the metadata plane goes by, and nothing more.

The process may be out of its mind. What is let through here must not trip the metadata plane. Whether it is true nobody
can tell; what it says of bytes on disk is verified when they are read. Pure.
"""

from kvdisk import codec, layout
from kvdisk.commands import Command, Completion, ReadChunks, WritePack
from kvdisk.plan import footprint, pack_size


def fits(command: Command, completion: Completion, packed_bytes: int | None) -> bool:
    """Whether a successful result has the shape that its command asks for.

    Args:
        command: that ended.
        completion: its result.
        packed_bytes: what was said before of a pack that is compressed.
    """
    if isinstance(command, ReadChunks):
        count = len(command.items)
        return len(completion.verified) == count and len(completion.errors) in (0, count)
    if isinstance(command, WritePack):
        count, checks, raw = len(command.chunks), completion.checksums, completion.pack_header
        if len(checks) != count or min(checks) < 0 or len(raw) != layout.PACK_HEADER_BYTES + layout.ENTRY_BYTES * count:
            return False
        # Of a pack as it was planned the header is only kept, for the footer. This one says where its chunks lie.
        return not command.compress or _is_packed(command, raw, packed_bytes)
    return True


def can_be_packed(command: WritePack, packed_bytes: int) -> bool:
    """Whether its chunks can take that much, compressed: blocks, one each at least, and no more than was planned."""
    alignment = command.header.alignment
    planned = _planned(command)
    smallest = pack_size([alignment] * len(planned), alignment)
    return packed_bytes % alignment == 0 and smallest <= packed_bytes <= pack_size(planned, alignment)


def _is_packed(command: WritePack, raw: bytes, packed_bytes: int | None) -> bool:
    """Whether `raw` heads its chunks, one behind the other, in as many bytes as was said."""
    pack = layout.decode_pack(raw, command.offset, command.header)
    planned = _planned(command)
    if pack is None or pack.pack_bytes != packed_bytes or len(pack.entries) != len(planned):
        return False
    stored, codecs = pack.entries["stored_bytes"].tolist(), pack.entries["codec"].tolist()
    if pack_size(stored, command.header.alignment) != packed_bytes:
        return False
    return all(
        kind in codec.KNOWN and (size == most if kind == codec.NONE else size < most)
        for kind, size, most in zip(codecs, stored, planned, strict=True)
    )


def _planned(command: WritePack) -> list[int]:
    """Stored bytes of each chunk as it is."""
    return [footprint(chunk.parts, command.header.alignment).stored_bytes for chunk in command.chunks]
