"""What may differ between two computations of one number."""

from torch import Tensor
from torch.testing import assert_close


def assert_equal_but_for_rounding(computed: Tensor, expected: Tensor) -> None:
    """Checks that fp32 logits of a model and of its copy are equal but for the order of additions.

    A product of matrices adds in another order where a copy's weights begin elsewhere in memory, and on other
    processors; a copy that is another model differs a thousand times as much.
    """
    assert_close(computed, expected, rtol=1e-5, atol=1e-5)
