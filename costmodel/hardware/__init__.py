"""The GPUs and toolchains that kernels are compiled for."""
