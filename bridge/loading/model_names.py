"""Short names of models, as HookedTransformer has them, and the hub names that they stand for."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

#: For each organisation on the hub, its models, and the other names that each goes by.
_TABLE: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
#: What the hub names of models in HookedTransformer's own format begin with.
OWN_FORMAT = ("NeelNanda/", "ArthurConmy/redwood_attn_2l", "Baidicoot/Othello-GPT-Transformer-Lens")
#: For each of the models' names on the hub, the other names that it goes by.
MODEL_ALIASES = {
    f"{organisation}/{name}" if organisation else name: others.split()
    for organisation, models in _TABLE.items()
    for name, others in models.items()
}
#: The models' names on the hub.
OFFICIAL_MODEL_NAMES = list(MODEL_ALIASES)
#: Every name of a model, in small letters, and the hub name that it stands for.
BY_NAME = {name.lower(): hub for hub in OFFICIAL_MODEL_NAMES for name in (hub, *MODEL_ALIASES[hub])}


def hub_name(name: str) -> str:
    """The hub name that a short name stands for. Any other name, such as a folder's, stays as it is.

    Args:
        name: of a model; small and capital letters are the same.

    Example:
        >>> from bridge.loading.model_names import hub_name
        >>> hub_name("pythia-70m"), hub_name("somebody/some-model")
        ('EleutherAI/pythia-70m', 'somebody/some-model')
    """
    return name if os.path.isdir(name) else BY_NAME.get(name.lower(), name)
