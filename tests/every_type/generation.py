"""What is written and kept: generation, harvest."""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor

from bridge.harvest import Activations, harvest
from tests.every_type.plain import seen
from tests.every_type.subject import Absent, Subject

_GREEDY = {"max_new_tokens": 3, "do_sample": False}


def _prompt(subject: Subject) -> tuple[Tensor, Tensor]:
    """A prompt, and what the plain model's own `generate` writes behind it."""
    subject.needs_tokens()
    if not subject.hf.can_generate():
        raise Absent("the model does not generate")
    prompt = subject.tokens[:2, :6]
    with subject.itself(), torch.no_grad():
        torch.manual_seed(0)
        written = subject.hf.generate(
            prompt, eos_token_id=None, attention_mask=torch.ones_like(prompt), **_GREEDY
        )
    return prompt, written


def generates_as_the_model(subject: Subject) -> None:
    """`generate` writes what the model's own `generate` writes."""
    prompt, written = _prompt(subject)
    with torch.no_grad():
        torch.manual_seed(0)
        ours = subject.bridge.generate(
            prompt, stop_at_eos=False, verbose=False, return_type="tokens", **_GREEDY
        )
    subject.same(ours.double(), written.double(), "tokens", near=None)


def generation_keeps_what_a_run_shows(subject: Subject) -> None:
    """The activations of a generation are those of a run over what was written."""
    prompt, _ = _prompt(subject)
    subject.needs_blocks()
    with torch.no_grad():
        torch.manual_seed(0)
        written, cache = subject.bridge.generate(
            prompt,
            stop_at_eos=False,
            verbose=False,
            return_type="tokens",
            return_cache=True,
            **_GREEDY,
        )

        def again() -> Tensor:
            if subject.main == "decoder":
                return subject.run(prompt, decoder_input_ids=written[:, :-1])
            return subject.run(written[:, :-1])

        places = {str(i): subject.border(path) for i, path in enumerate(subject.paths)}
        _, streams = seen(subject.hf, places, again)
    for layer, stream in streams.items():
        name = f"{subject.main}.{layer}.hook_resid_pre"
        if name in cache:
            subject.same(cache[name], stream, name, near=1e-3)
        else:
            subject.not_seen.append(f"the cache has no {name}")


def harvest_writes_what_a_run_shows(subject: Subject) -> None:
    """The rows of a harvest are what enters a block of the plain model: documents of any length,
    shards of any size.
    """
    subject.needs_tokens()
    stack = next(iter(subject.stacks))
    last = len(subject.stacks[stack]) - 1
    name = f"{stack}.{last}.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    subject.needs_blocks()
    documents = [
        subject.tokens[0],
        subject.tokens[1, :6],
        subject.tokens[2, :8],
        subject.tokens[0, :7],
    ]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with subject.itself():
            theirs = [_entering(subject, stack, last, document[None]) for document in documents]
        harvest(
            subject.bridge,
            [document.tolist() for document in documents],
            hook_points=[name],
            out=folder,
            pack=False,
            prepend_bos=False,
            dtype="float32",
            context_size=len(documents[0]),
            batch_size=1,
            tokens_per_shard=12,
        )
        rows = Activations(folder)
        ours = torch.stack([torch.as_tensor(rows[i][name]) for i in range(len(rows))])
    subject.same(ours, torch.cat(theirs), name)


def _entering(subject: Subject, stack: str, layer: int, document: Tensor) -> Tensor:
    """What enters a block of the plain model in a run over one document: ``[pos, d_model]``."""
    found: list[Tensor] = []
    more = {name: x[:1] for name, x in subject.more.items()}
    with subject.edited(layer, lambda x: found.append(x.detach().clone()), stack):
        subject.run(document, **more)
    return found[-1].reshape(-1, found[-1].shape[-1])


PROPERTIES = {
    "generation": generates_as_the_model,
    "generation cache": generation_keeps_what_a_run_shows,
    "harvest": harvest_writes_what_a_run_shows,
}
