"""C of our own for the few loops that no composition of PyTorch's operators is fast at.

It is compiled once, for the processor it runs on, by whatever C compiler the machine has; nothing
here is needed to use the package.
"""
