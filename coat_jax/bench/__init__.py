"""The bench: every kernel checked on this machine's GPU and timed against what that can do; the layer and the optimizer too."""
