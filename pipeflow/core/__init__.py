"""The values: what a plan is made of. Standard library only; nothing here computes a plan or runs one."""
