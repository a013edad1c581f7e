"""Volcengine's ML Platform as its command `volc` shows it."""
