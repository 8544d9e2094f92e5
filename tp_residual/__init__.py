"""Tensor-parallel decoding built around the residual stream.

This file imports nothing: the command line checks its arguments before torch is loaded.
"""

__version__ = "0.1.0"
