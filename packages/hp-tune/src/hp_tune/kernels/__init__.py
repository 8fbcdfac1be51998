"""Compile the kernels of hp-comm without a device, and say what the compilers say about them.

``python -m hp_tune.kernels.check`` is the program. Importing this package imports neither torch nor
triton: the one door to triton is `hp_tune.kernels._triton_door`, opened inside functions.
"""
