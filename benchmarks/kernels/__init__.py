"""`talon check --kernels`: every kernel of attention and of products against its definition in float64."""
