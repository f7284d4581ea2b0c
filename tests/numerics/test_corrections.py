"""What Inductor computes wrongly, and backend `ipex` must not."""

import pytest
import torch
import torch.nn.functional as F

from ipex_inductor import decisions

POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
# Dimensions, window (the second is larger than what it is over), whether padding counts, dynamic.
CASES = [
    (2, (3, 2, 1), True, False),
    (2, (9, None, 0), True, True),
    (2, (3, 2, 1), False, False),
    (1, (2, 2, 0), True, False),
    (3, (2, 2, 0), True, False),
]


def gradient(fn, x, tangent):
    x = x.detach().requires_grad_()
    fn(x).backward(tangent)
    return x.grad


@pytest.mark.parametrize(("dims", "window", "counts", "dynamic"), CASES)
def test_gradients_of_average_pooling_at_the_border(dims, window, counts, dynamic):
    def pool(x):
        return POOLS[dims](x, *window, True, counts)

    compiled = torch.compile(pool, backend="ipex", dynamic=dynamic, options={"strict": True})
    for size in (5, 7)[: 1 + dynamic]:
        x = torch.randn(2, 3, *[size] * dims, dtype=torch.float64)
        tangent = torch.randn_like(pool(x))
        got, want = gradient(compiled, x, tangent), gradient(pool, x, tangent)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # quotients are in fp32
    fired = any("avg_pool_backward" in r.count("fired") for r in decisions.reports())
    assert fired == counts
