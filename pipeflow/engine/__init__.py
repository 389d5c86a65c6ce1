"""The engine, which runs a schedule on ranks. `parallel` is this process among the others, `stages` cuts a module,
`tensor` has layers of which several ranks hold parts, `deferral` computes weight gradients later, `runtime` runs the
step, and `torch_private` has the private names of torch. Must not contain: a schedule by its name.
"""
