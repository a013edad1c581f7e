"""Imported by project.train."""


def build():
    return f"model of {__name__}"
