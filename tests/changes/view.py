"""What every view promises: what was read and is written back leaves the same bits, and an edit is
read again.
"""

import torch
from torch import nn

from adapters.views import Call, Third

view, call, x = Third(4, 1), Call(nn.Identity(), (), {}), torch.randn(2, 5, 96)
assert view.get(x, call).shape == (2, 5, 4, 8)
assert torch.equal(view.put(x, view.get(x, call), call), x)
new = torch.randn(2, 5, 4, 8)
assert torch.equal(view.get(view.put(x, new, call), call), new)
