"""A target on a GPU, fast and exact: recorded forwards, layers in few launches, forwards of one size."""
