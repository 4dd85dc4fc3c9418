"""Layers whose weights stay quantised: ours in the format of their file, and layers that other packages compute."""
