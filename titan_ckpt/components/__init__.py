"""The parts of a checkpoint besides the weights, and the names of the files that hold them."""
