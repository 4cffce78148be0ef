"""Folders of any architecture, loaded by the lowered road."""
