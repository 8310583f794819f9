"""Which models of other packages can be scored and generated with."""
