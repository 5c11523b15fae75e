"""Processed weights: the same model by its log probabilities and its sums."""

from __future__ import annotations

import torch

from tests.every_type.subject import Absent, Subject, Wrong
from tests.every_type.sums import attributions_sum_to_the_logits, terms_sum_to_the_stream


def processing_leaves_log_probabilities(subject: Subject) -> None:
    """`process_weights` changes no log probability; what it says it did is what was done; the sums
    still hold.
    """
    bridge = subject.new_bridge()
    before = {name: x.clone() for name, x in bridge.state_dict().items()}
    bridge.process_weights()
    with torch.no_grad():
        after = subject.ours(bridge)
    subject.same(
        after.log_softmax(-1), subject.logits.log_softmax(-1), "log probabilities", near=1e-3
    )
    changed = any(
        not torch.equal(x, before[name])
        for name, x in bridge.state_dict().items()
        if name in before
    )
    done = [name for name, said in bridge.cfg.processed.items() if said == "done"]
    if changed and not done:
        raise Wrong("weights were changed, and cfg.processed says that nothing was done")
    if not done:
        raise Absent("nothing is done to it")


def processed_models_sum(subject: Subject) -> None:
    """Terms and attributions of a processed model sum to its own streams and logits."""
    processed = Subject(subject.case)
    bridge = processed.new_bridge()
    bridge.process_weights()
    if not any(said == "done" for said in bridge.cfg.processed.values()):
        raise Absent("nothing is done to it")
    # Its own streams and logits, by plain hooks on the processed model: nobody else has these.
    processed.__dict__["bridge"] = bridge
    processed.__dict__["hf"] = bridge.core
    for holds in (terms_sum_to_the_stream, attributions_sum_to_the_logits):
        holds(processed)
    subject.compared += processed.compared


PROPERTIES = {
    "processing": processing_leaves_log_probabilities,
    "processed sums": processed_models_sum,
}
