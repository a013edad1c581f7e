"""Read an ELF file: its addresses, the rules to unwind its functions, and its symbols."""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from mmap import mmap

# The errors for a malformed file.
MALFORMED = (ValueError, ArithmeticError, LookupError, TypeError, struct.error)
_LOAD, _EH_FRAME = 1, 0x6474E550  # types of program headers
_SYMBOLS, _DYNAMIC_SYMBOLS = 2, 11  # types of sections
_FUNCTIONS = (2, 10)  # types of symbols: FUNC, GNU_IFUNC
_MAX_FUNCTION = 1 << 20  # bytes
_MAX_NAME = 4096
_MAX_BYTES = 1 << 20  # of the instructions of a function
_MAX_LEB_BITS = 70
_SORTED_TABLE = b"\x03\x3b"  # the encoding of the table of functions that all linkers write
# Formats of pointers in .eh_frame, by the low half of their encoding.
_POINTERS = {0x00: "Q", 0x02: "H", 0x03: "I", 0x04: "Q", 0x0A: "h", 0x0B: "i", 0x0C: "q"}
_RELATIVE = 0x10  # a pointer is relative to its own address


class Cursor:
    """A position in data that grows with each value that is read.

    Args:
        data: the data, in little-endian order.
        at: the position.
    """

    def __init__(self, data: bytes | mmap, at: int = 0) -> None:
        self.data = data
        self.at = at

    def read(self, form: str) -> int:
        """Return a number in a format of `struct`."""
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize(form)
        return int(value)

    def leb(self, *, signed: bool = False) -> int:
        """Return a number in the format LEB128."""
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > _MAX_LEB_BITS:
                raise ValueError("a number is too long")
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    def bytes(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > _MAX_BYTES:
            raise ValueError("too many bytes")
        self.at += count
        return self.data[self.at - count : self.at]


@dataclass(frozen=True)
class Rules:
    """How to find the caller of a function, from the section .eh_frame.

    Attributes:
        begin: the address of the function.
        code_factor, data_factor: the factors of the instructions' operands.
        return_register: the register with the address in the caller.
        signal: whether this is the caller of a signal handler.
        initial, instructions: the instructions of all functions with these rules, and of this one.
    """

    begin: int
    code_factor: int
    data_factor: int
    return_register: int
    signal: bool
    initial: bytes
    instructions: bytes


class Image:
    """An ELF file in 64 bits; addresses are those in the file.

    Args:
        data: the content.

    Raises:
        one of MALFORMED: the content is malformed. All methods do so.
    """

    def __init__(self, data: bytes | mmap) -> None:
        self._data = data
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no ELF file in 64 bits and little-endian order")
        begin, self._sections_at = struct.unpack_from("<QQ", data, 32)
        size, count, self._section_size, self._sections = struct.unpack_from("<HHHH", data, 54)
        self._loaded: list[tuple[int, int, int]] = []  # offset, address, size
        self._functions: int | None = None  # the address of the table of functions
        for index in range(count):
            kind, _, offset, address, _, length = struct.unpack_from(
                "<IIQQQQ", data, begin + index * size
            )
            if kind == _LOAD:
                self._loaded.append((offset, address, length))
            elif kind == _EH_FRAME:
                self._functions = address

    def address(self, offset: int) -> int | None:
        """Return the address of an offset in the file."""
        for begin, address, length in self._loaded:
            if begin <= offset < begin + length:
                return address + offset - begin
        return None

    def _offset(self, address: int) -> int:
        for offset, begin, length in self._loaded:
            if begin <= address < begin + length:
                return offset + address - begin
        raise ValueError("an address outside of the file")

    # -- rules -------------------------------------------------------------------------------------

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def rules(self, address: int) -> Rules | None:
        """Return the rules of the function at an address; None if there are none."""
        if self._functions is None:
            return None
        table = self._offset(self._functions)
        if self._data[table + 2 : table + 4] != _SORTED_TABLE:
            return None
        # An encoded pointer follows the four bytes of the header.
        header = Cursor(self._data, table + 4)
        self._pointer(header, self._data[table + 1])
        count, first = header.read("I"), header.at
        wanted = address - self._functions
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            (begin,) = struct.unpack_from("<i", self._data, first + 8 * middle)
            low, high = (middle + 1, high) if begin <= wanted else (low, middle)
        if low == 0:
            return None
        (at,) = struct.unpack_from("<i", self._data, first + 8 * low - 4)
        return self._function(self._offset(self._functions + at), address)

    def _function(self, at: int, address: int) -> Rules | None:
        entry = Cursor(self._data, at)
        end = entry.read("I") + entry.at  # a length of 64 bits is used nowhere
        common = Cursor(self._data, entry.at)
        common.at -= entry.read("I")
        common_end = common.read("I") + common.at
        common.read("I")
        version = common.read("B")
        text = common.bytes(8).partition(b"\0")[0]
        common.at += len(text) + 1 - 8
        code_factor, data_factor = common.leb(), common.leb(signed=True)
        return_register = common.read("B") if version == 1 else common.leb()
        encoding = 0
        after = None
        for letter in text.decode("ascii", "replace"):
            if letter == "z":
                after = common.leb() + common.at
            elif letter == "R":
                encoding = common.read("B")
            elif letter == "P":
                self._pointer(common, common.read("B"))
            elif letter == "L":
                common.read("B")
        if after is not None:
            common.at = after
        begin = self._pointer(entry, encoding)
        if not begin <= address < begin + self._pointer(entry, encoding & 0x0F):
            return None
        if after is not None:
            entry.bytes(entry.leb())
        return Rules(
            begin,
            code_factor,
            data_factor,
            return_register,
            signal=b"S" in text,
            initial=common.bytes(common_end - common.at),
            instructions=entry.bytes(end - entry.at),
        )

    def _pointer(self, cursor: Cursor, encoding: int) -> int:
        at = cursor.at
        value = cursor.read(_POINTERS[encoding & 0x0F])
        return value + self.address(at) if encoding & 0x70 == _RELATIVE else value  # type: ignore[operator]

    # -- symbols -----------------------------------------------------------------------------------

    def names(self, addresses: Iterable[int]) -> dict[int, str]:
        """Return the names of the functions at some addresses, as the linker knows them."""
        wanted = sorted(set(addresses))
        found: dict[int, str] = {}
        for kind in (_SYMBOLS, _DYNAMIC_SYMBOLS):
            wanted = [address for address in wanted if address not in found]
            if wanted:
                for offset, size, strings in self._tables(kind):
                    found.update(self._names(wanted, self._data[offset : offset + size], strings))
        return found

    def _tables(self, kind: int) -> Iterator[tuple[int, int, int]]:
        """Yield the offset and the size of tables of symbols, and the offset of their names."""

        def section(index: int) -> tuple[int, int, int, int]:
            at = self._sections_at + index * self._section_size
            _, kind, _, _, offset, size, link = struct.unpack_from("<IIQQQQI", self._data, at)
            return kind, offset, size, link

        for index in range(self._sections):
            found, offset, size, link = section(index)
            if found == kind:
                yield offset, size - size % 24, section(link)[1]

    def _names(self, wanted: list[int], table: bytes, strings: int) -> Iterator[tuple[int, str]]:
        low, high = wanted[0] - _MAX_FUNCTION, wanted[-1]
        near = sorted(
            (begin, size, name)
            for name, info, _, _, begin, size in struct.iter_unpack("<IBBHQQ", table)
            if low <= begin <= high and info & 0x0F in _FUNCTIONS
        )
        for address in wanted:
            # A function may have several names.
            index = bisect.bisect(near, (address, 1 << 64)) - 1
            if index >= 0 and address < near[index][0] + near[index][1]:
                at = strings + near[index][2]
                text = self._data[at : at + _MAX_NAME].partition(b"\0")[0]
                yield address, text.decode(errors="replace")
