"""Find the callers of a function from a copy of its thread and the rules of ELF files.

DWARF 5, 6.4: each function has instructions that tell for each of its addresses where it has
saved the registers of its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clusterjob.node.stacks import elf
from clusterjob.node.stacks.elf import Cursor, Image, Rules
from clusterjob.node.stacks.frames import MAX_FRAMES
from clusterjob.node.stacks.thread_copies import PROGRAM_COUNTER, STACK_POINTER, ThreadCopy

_MASK = (1 << 64) - 1
# The formats of the operands of instructions: U and S are unsigned and signed LEB128, u and s the
# same, multiplied by the factor of the rules; X is an expression; others are formats of `struct`.
_OPERANDS = {
    0x00: "", 0x02: "B", 0x03: "H", 0x04: "I", 0x05: "Uu", 0x06: "U", 0x07: "U", 0x08: "U",
    0x09: "UU", 0x0A: "", 0x0B: "", 0x0C: "UU", 0x0D: "U", 0x0E: "U", 0x0F: "X", 0x10: "UX",
    0x11: "Us", 0x12: "Us", 0x13: "s", 0x14: "Uu", 0x15: "Us", 0x16: "UX", 0x2D: "", 0x2E: "U",
}  # fmt: skip
_ADVANCE = (0x02, 0x03, 0x04)
_RESTORE, _SAME_VALUE, _REMEMBER_STATE, _RESTORE_STATE = 0x06, 0x08, 0x0A, 0x0B
# Instructions that tell how a register of the caller is found.
_SAVED = {
    0x05: "offset", 0x11: "offset", 0x14: "value", 0x15: "value", 0x07: "undefined",
    0x09: "register", 0x10: "saved_at", 0x16: "expression",
}  # fmt: skip
# Instructions that tell the address of the frame, from the last one and the operands.
_FRAME: dict[int, Callable[[Any, list[Any]], tuple[str, Any]]] = {
    0x0C: lambda _, values: ("sum", (values[0], values[1])),
    0x0D: lambda frame, values: ("sum", (values[0], frame[1][1])),
    0x0E: lambda frame, values: ("sum", (frame[1][0], values[0])),
    0x0F: lambda _, values: ("expression", values[0]),
    0x12: lambda _, values: ("sum", (values[0], values[1])),
    0x13: lambda frame, values: ("sum", (frame[1][0], values[0])),
}
# Operations of expressions, as far as signal handlers and linkers use them.
_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: lambda a, b: a & b,
    0x1C: lambda a, b: a - b,
    0x22: lambda a, b: a + b,
    0x24: lambda a, b: a << (b & 63),
    0x2A: lambda a, b: int(a >= b),
}
_CONSTANTS = {0x08: "B", 0x09: "b", 0x0A: "H", 0x0B: "h", 0x0C: "I", 0x0D: "i"}


@dataclass
class _Row:
    """How the frame's address and the caller's registers are found: pairs of a way and a value."""

    frame: tuple[str, Any] = ("", 0)
    registers: dict[int, tuple[str, Any]] = field(default_factory=dict)


def addresses(copy: ThreadCopy, image_at: Callable[[int], tuple[Image, int] | None]) -> list[int]:
    """Return the addresses of a thread's calls, the innermost first, as far as they are known.

    Args:
        copy: the thread.
        image_at: returns the ELF file at an address of the process, and what to subtract from the
            address.
    """
    found: list[int] = []
    registers, at = dict(copy.registers), copy.registers[PROGRAM_COUNTER]
    try:
        while at > 0 and len(found) < MAX_FRAMES:
            found.append(at)
            image = image_at(at)
            rules = image and image[0].rules(at - image[1])
            if not (image and rules):
                break
            stack_pointer = registers[STACK_POINTER]
            registers = _caller(_row(rules, at - image[1]), registers, copy)
            # The first function of a thread has no return address.
            called_at = registers.get(rules.return_register, 0)
            # The call is before the return address, which may be in the next function.
            at = called_at if rules.signal else called_at - 1
            if registers[STACK_POINTER] < stack_pointer:
                break
    except elf.MALFORMED:
        pass
    return found


def _row(rules: Rules, address: int) -> _Row:
    """Run the instructions up to an address."""
    row = _Row()
    _run(rules, rules.initial, row, address=address, initial=_Row())
    initial = _Row(row.frame, dict(row.registers))
    _run(rules, rules.instructions, row, address=address, initial=initial)
    return row


def _run(rules: Rules, instructions: bytes, row: _Row, *, address: int, initial: _Row) -> None:
    cursor, at = Cursor(instructions), rules.begin
    remembered: list[_Row] = []
    while cursor.at < len(instructions):
        code = cursor.read("B")
        formats = _OPERANDS.get(code, "")
        values: list[Any] = []
        if code >= 0x40:  # the short forms of three instructions contain the first operand
            values.append(code & 0x3F)
            code, formats = {1: (0x02, ""), 2: (0x05, "u"), 3: (_RESTORE, "")}[code >> 6]
        values += [_operand(cursor, each, rules.data_factor) for each in formats]
        if code in _ADVANCE:
            at += values[0] * rules.code_factor
            if at > address:
                return
        elif code in _SAVED:
            row.registers[values[0]] = (_SAVED[code], values[-1])
        elif code in (_RESTORE, _SAME_VALUE):
            row.registers.pop(values[0], None)
            if code == _RESTORE and values[0] in initial.registers:
                row.registers[values[0]] = initial.registers[values[0]]
        elif code == _REMEMBER_STATE:
            remembered.append(_Row(row.frame, dict(row.registers)))
        elif code == _RESTORE_STATE:
            row.frame, row.registers = remembered[-1].frame, remembered.pop().registers
        elif code in _FRAME:
            row.frame = _FRAME[code](row.frame, values)
        elif code not in _OPERANDS:
            raise ValueError(f"unknown instruction {code:#x}")


def _operand(cursor: Cursor, form: str, factor: int) -> Any:
    if form == "X":
        return cursor.bytes(cursor.leb())
    if form in "UuSs":
        return cursor.leb(signed=form in "Ss") * (factor if form.islower() else 1)
    return cursor.read(form)


def _caller(row: _Row, registers: dict[int, int], copy: ThreadCopy) -> dict[int, int]:
    """Return the registers of the caller."""
    way, value = row.frame
    is_sum = way == "sum"
    frame = registers[value[0]] + value[1] if is_sum else _evaluated(value, registers, copy)
    found = registers | {STACK_POINTER: frame}
    for register, (way, value) in row.registers.items():
        if way == "undefined":
            found.pop(register, None)
        elif way == "offset":
            found[register] = copy.word(frame + value)
        elif way == "value":
            found[register] = frame + value
        elif way == "register":
            found[register] = registers[value]
        else:
            result = _evaluated(value, registers, copy, frame)
            found[register] = copy.word(result) if way == "saved_at" else result
    return found


def _evaluated(expression: bytes, registers: dict[int, int], copy: ThreadCopy, *stack: int) -> int:
    """Return the value of a DWARF expression; those of signal handlers and of linkers are known."""
    cursor, values = Cursor(expression), list(stack)
    while cursor.at < len(expression):
        code = cursor.read("B")
        if code in _BINARY:
            second, first = values.pop(), values.pop()
            values.append(_BINARY[code](first, second) & _MASK)
        elif code == 0x06:
            values.append(copy.word(values.pop()))
        elif code in _CONSTANTS:
            values.append(cursor.read(_CONSTANTS[code]))
        elif code == 0x23:
            values.append(values.pop() + cursor.leb())
        elif 0x30 <= code < 0x50:
            values.append(code - 0x30)
        elif 0x70 <= code < 0x90:
            values.append(registers[code - 0x70] + cursor.leb(signed=True) & _MASK)
        else:
            raise ValueError(f"unknown operation {code:#x}")
    return values[-1]
