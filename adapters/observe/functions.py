"""The functions of torch that a run is recognised by."""

from __future__ import annotations

import torch
from torch import Tensor

#: Those that compute a softmax. The fused kernel computes one, too, and is watched for by itself.
SOFTMAXES = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
#: Those in which eager attention multiplies queries and keys.
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
#: The one that does so with the heads in the batch, ``[(batch head), query, key]``, behind what it adds to.
FLAT_PRODUCT = torch.baddbmm
#: Those in which a linear layer multiplies its input with its matrix.
LINEAR_PRODUCTS = {torch.nn.functional.linear, *PRODUCTS}
#: Those that choose the best of something, as a router its experts.
CHOICES = {torch.topk, Tensor.topk}
