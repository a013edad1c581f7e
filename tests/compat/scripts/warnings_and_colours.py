"""warnings.warn, ANSI colours, a line without an end, bytes that are no text: what loggers write to both streams."""

import sys
import warnings

warnings.warn("deprecated argument", stacklevel=1)
print("\x1b[32mgreen\x1b[0m ✓ 训练")
sys.stdout.flush()
sys.stdout.buffer.write(b"raw \xff\xfe bytes\n")
sys.stdout.buffer.flush()
sys.stdout.write("no end of line")
