"""One pass over a pickle's opcodes before it is loaded: what it declares must fit what it holds.

Python's unpickler trusts declared sizes: ten bytes (LONG_BINPUT 2147483647) make it allocate and
touch 32 GiB of memo. The pass is a regular expression over the fixed-size opcodes and takes as long
as loading: 0.4 s for a list of five million floats (benchmarks/rollout_formats.py).
"""

from __future__ import annotations

import pickletools
import re
from typing import Any

_WIDTH = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
_CHECKED = {"PUT", "LONG_BINPUT", "STOP"}


def _tables() -> tuple[re.Pattern[bytes], dict[int, int], set[int]]:
    fixed: dict[int, list[bytes]] = {}
    counted, lines = {}, set()
    for op in pickletools.opcodes:
        code = ord(op.code)
        if op.name in _REFUSED | _CHECKED:
            continue
        length = 0 if op.arg is None else op.arg.n
        if length >= 0:
            fixed.setdefault(length, []).append(re.escape(bytes([code])))
        elif length == pickletools.UP_TO_NEWLINE:
            lines.add(code)
        else:
            counted[code] = _WIDTH[length]
    # GLOBAL and INST take two lines; pickletools gives both one argument.
    parts = [b"[%s].{%d}" % (b"".join(codes), n) for n, codes in sorted(fixed.items())]
    return re.compile(b"(?:" + b"|".join(parts) + b")*+", re.DOTALL), counted, lines


_FIXED, _COUNTED, _LINES = _tables()
_TWO_LINES = {ord("c"), ord("i")}


def scan(data: Any, start: int = 0) -> int:
    """Offset behind the pickle that starts at ``start`` of ``data`` (bytes or a memory map).

    Raises ValueError for an unknown opcode, a length beyond the data, a memo slot beyond the number
    of opcodes, a missing STOP.
    """
    end, at = len(data), start
    while True:
        found = _FIXED.match(data, at)
        at = found.end() if found else at
        if at >= end:
            raise ValueError("the pickle is cut off")
        code = data[at]
        at += 1
        if code == ord("."):
            return at
        if code in _COUNTED:
            width = _COUNTED[code]
            size = int.from_bytes(data[at : at + width], "little")
            at += width
            if size > end - at:
                raise ValueError(f"an element declares {size} bytes, but {max(end - at, 0)} follow")
            at += size
        elif code in _LINES:
            for _ in range(2 if code in _TWO_LINES else 1):
                at = _line_end(data, at, end)
        elif code == ord("r"):
            slot = int.from_bytes(data[at : at + 4], "little")
            at += 4
            _check_slot(slot, at - start)
        elif code == ord("p"):
            stop = _line_end(data, at, end)
            text = bytes(data[at : stop - 1])
            if not text.isdigit() or len(text) > 12:
                raise ValueError("a memo slot is no number")
            _check_slot(int(text), stop - start)
            at = stop
        else:
            raise ValueError(
                f"byte {code:#04x} at offset {at - 1} is no pickle opcode that is read"
            )


def _line_end(data: Any, at: int, end: int) -> int:
    stop: int = data.find(b"\n", at, end)
    if stop < 0:
        raise ValueError("a text argument has no end")
    return stop + 1


def _check_slot(slot: int, seen: int) -> None:
    if slot > seen:
        raise ValueError(f"memo slot {slot} after {seen} bytes")
