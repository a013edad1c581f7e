"""sys.stdin is read to its end by every rank: filters that accept a configuration on stdin."""

import sys

text = sys.stdin.read()
print("read", len(text))
