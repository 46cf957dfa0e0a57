"""Hopper kernels in Pallas Mosaic GPU: arrays, static numbers and functions in, arrays out. They know no training library."""
