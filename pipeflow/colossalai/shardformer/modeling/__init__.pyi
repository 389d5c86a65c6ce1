# Written by `make stubs` from the table of the package.

__all__ = []
