"""Names that a cache does not have."""

import copy
import pickle

import pytest

from bridge import TransformerBridge


def test_an_unknown_name_suggests_what_to_use() -> None:
    _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
    with pytest.raises(AttributeError, match=r"has no 'logit_lens'\. Use bridge\.lens\(tokens\)"):
        _ = cache.logit_lens
    with pytest.raises(
        AttributeError, match=r"has no 'decompose_resit'\. Did you mean decompose_resid"
    ):
        _ = cache.decompose_resit
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.keys() == cache.keys() and not hasattr(other, "ssm_layers")
