"""A notebook that finds induction heads on random tokens that repeat, by hooks, and ablates
them.
"""

import einops
import pytest
import torch

import bridge.legacy as transformer_lens
from bridge.legacy import utils

SEQ_LEN, BATCH = 20, 4


@pytest.fixture(scope="module")
def repeated_tokens(model):
    generator = torch.Generator().manual_seed(0)
    special = len(model.tokenizer.all_special_ids)
    random_tokens = torch.randint(special, model.cfg.d_vocab, (BATCH, SEQ_LEN), generator=generator)
    repeated = einops.repeat(random_tokens, "batch seq_len -> batch (2 seq_len)")
    return torch.cat([torch.full((BATCH, 1), model.tokenizer.bos_token_id), repeated], dim=1)


@pytest.fixture(scope="module")
def induction_score_store(model, repeated_tokens):
    scores = torch.zeros((model.cfg.n_layers, model.cfg.n_heads), device=model.cfg.device)

    def induction_score_hook(pattern, hook: transformer_lens.hook_points.HookPoint):
        # From each token to the one after its first occurrence.
        induction_stripe = pattern.diagonal(dim1=-2, dim2=-1, offset=1 - SEQ_LEN)
        scores[hook.layer(), :] = einops.reduce(
            induction_stripe, "batch head_index position -> head_index", "mean"
        )

    with torch.no_grad():
        model.run_with_hooks(
            repeated_tokens,
            return_type=None,  # for efficiency: only the hooks count
            fwd_hooks=[(lambda name: name.endswith("pattern"), induction_score_hook)],
        )
    return scores


def test_the_second_half_is_predicted(model, repeated_tokens):
    logits = model(repeated_tokens, return_type="logits")
    correct_log_probs = model.loss_fn(logits, repeated_tokens, per_token=True)
    assert correct_log_probs.shape == (BATCH, 2 * SEQ_LEN)
    by_position = einops.reduce(correct_log_probs, "batch pos -> pos", "mean")
    first, second = by_position[:SEQ_LEN].mean(), by_position[SEQ_LEN + 1 :].mean()
    assert second < first / 3


def test_induction_heads_are_found(model, repeated_tokens, induction_score_store):
    assert induction_score_store.max() > 0.5
    _, cache = model.run_with_cache(
        repeated_tokens, names_filter=lambda name: name.endswith("hook_pattern")
    )
    for layer in range(model.cfg.n_layers):
        pattern = cache["pattern", layer]
        queries = torch.arange(SEQ_LEN - 1, 2 * SEQ_LEN + 1)
        right = pattern[:, :, queries, queries - SEQ_LEN + 1].mean((0, -1))
        torch.testing.assert_close(induction_score_store[layer], right)


def test_ablating_them_breaks_it(model, repeated_tokens, induction_score_store):
    def head_ablation_hook(heads):
        def ablate(value, hook):
            for layer, head in heads:
                if layer == hook.layer():
                    value[:, :, head, :] = 0.0
            return value

        return ablate

    def loss_of_second_half(heads):
        model.reset_hooks()
        model.add_hook(lambda name: name.endswith("attn.hook_v"), head_ablation_hook(heads))
        loss = model(repeated_tokens, return_type="loss", loss_per_token=True)
        model.reset_hooks()
        return loss[:, SEQ_LEN + 1 :].mean()

    induction = [(int(layer), int(head)) for layer, head in (induction_score_store > 0.5).nonzero()]
    others = [
        tuple(pair)
        for pair in (induction_score_store < 0.1).nonzero().tolist()
        if pair[0] == induction[0][0]
    ]
    original = model(repeated_tokens, return_type="loss", loss_per_token=True)[
        :, SEQ_LEN + 1 :
    ].mean()
    torch.testing.assert_close(loss_of_second_half([]), original)
    ablated = loss_of_second_half(induction)
    assert ablated > original + 2
    if others:
        assert loss_of_second_half(others) < ablated
    torch.testing.assert_close(
        model(repeated_tokens, return_type="loss", loss_per_token=True).mean(),
        model(repeated_tokens, return_type="loss"),
    )


def test_a_head_can_be_ablated_by_position_and_by_name(
    model, repeated_tokens, induction_score_store
):
    layer, head = divmod(induction_score_store.argmax().item(), model.cfg.n_heads)

    def zero_last(z, hook):
        z[:, -1, head] = 0

    ablated = model.run_with_hooks(
        repeated_tokens, fwd_hooks=[(utils.get_act_name("z", layer), zero_last)]
    )
    plain = model(repeated_tokens)
    torch.testing.assert_close(ablated[:, :-1], plain[:, :-1])
    assert not torch.allclose(ablated[:, -1], plain[:, -1])
