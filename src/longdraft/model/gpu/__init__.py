"""What makes a target fast on a GPU, and exact: recorded forwards, layers in few launches, forwards of one size."""
