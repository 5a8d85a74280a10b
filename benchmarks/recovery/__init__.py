"""Measures how long streams stand still when a process dies."""
