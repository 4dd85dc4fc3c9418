"""Recurrent layers (Mamba, gated DeltaNet, ...): hosts them, and converts them for our kernels."""
