"""Where things lie in the memory that a rank shares with its peers, and which shapes fit. Pure."""

from __future__ import annotations

import msgspec

from fastverify.errors import ConfigError

WORLDS = (2, 4, 8)
DTYPES = ("bfloat16", "float16")
MAX_ROWS = 64
HIDDEN_STEP = 256
UNIT_BYTES = 16
ISLAND = 4
MAX_PARTS = 16
CONTROL_BYTES = 4096
_ALIGN = 4096


class Layout(msgspec.Struct, frozen=True):
    """Memory of one rank: control words, then tags and data slots, each in two halves.

    world: 2, 4 or 8; hidden: values of a row, a multiple of 256; max_rows: most rows of a call,
    1-64. Values are two bytes wide. Raises ConfigError for anything else.
    """

    world: int
    hidden: int
    max_rows: int

    def __post_init__(self) -> None:
        if self.world not in WORLDS:
            raise ConfigError(
                f"Peer all-reduce needs 2, 4 or 8 ranks, not {self.world}: use NCCL for this group."
            )
        if self.hidden < HIDDEN_STEP or self.hidden % HIDDEN_STEP:
            raise ConfigError(
                f"Peer all-reduce needs a hidden size that is a multiple of {HIDDEN_STEP}, not"
                f" {self.hidden}: use NCCL for this model."
            )
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise ConfigError(
                f"Peer all-reduce takes 1 to {MAX_ROWS} rows, not {self.max_rows}: plan fewer rows."
            )

    @property
    def units(self) -> int:
        """16-byte units of a row."""
        return self.hidden * 2 // UNIT_BYTES

    @property
    def tag_bytes(self) -> int:
        """One half of the tags: 8 bytes for each row, owner and part."""
        return self.max_rows * self.world * MAX_PARTS * 8

    @property
    def slots(self) -> int:
        """Offset of the data slots."""
        used = CONTROL_BYTES + 2 * self.tag_bytes
        return -(-used // _ALIGN) * _ALIGN

    @property
    def half_bytes(self) -> int:
        """One half of the data slots: the island kernel needs 2.5 times the rows, two-shot 2."""
        return -(-self.max_rows * self.units * UNIT_BYTES * 5 // 2 // _ALIGN) * _ALIGN

    @property
    def size_bytes(self) -> int:
        return self.slots + 2 * self.half_bytes
