"""`talon check --kernels` compares every kernel of attention and of products with its definition in float64."""
