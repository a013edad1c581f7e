"""Imported by train_siblings.py."""


def greeting():
    return f"hello from {__name__}"
