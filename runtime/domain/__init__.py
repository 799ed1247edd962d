"""Frozen descriptions that every room shares. They import nothing of the runtime but its errors."""
