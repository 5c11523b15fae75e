"""A notebook that works out how the model finds the indirect object, by attribution and by
patching.
"""

from functools import partial

import einops
import pytest
import torch

from bridge.legacy import ActivationCache, patching, utils
from bridge.legacy.hook_points import HookPoint

TEMPLATES = (
    "When Mary and John went to the store,{} gave a drink to",
    "When Tom and James went to the park,{} gave the ball to",
)
NAMES = ((" Mary", " John"), (" Tom", " James"))


class Notebook:
    """The variables of the notebook's first cells."""

    def __init__(self, model):
        self.model = model
        self.prompts, self.answers = [], []
        for template, names in zip(TEMPLATES, NAMES, strict=True):
            for i in range(2):
                self.answers.append((names[i], names[1 - i]))
                self.prompts.append(template.format(self.answers[-1][1]))
        self.answer_tokens = torch.tensor(
            [[model.to_single_token(name) for name in pair] for pair in self.answers]
        )
        self.tokens = model.to_tokens(self.prompts, prepend_bos=True)
        self.original_logits, self.cache = model.run_with_cache(self.tokens)
        self.corrupted_tokens = self.tokens[[1, 0, 3, 2]]
        self.corrupted_logits, _ = model.run_with_cache(self.corrupted_tokens, return_type="logits")
        self.clean_score = self.ave_logit_diff(self.original_logits)
        self.corrupted_score = self.ave_logit_diff(self.corrupted_logits)

    def ave_logit_diff(self, logits, per_prompt=False):
        final_logits = logits[:, -1, :]
        answer_logits = final_logits.gather(dim=-1, index=self.answer_tokens)
        answer_logit_diff = answer_logits[:, 0] - answer_logits[:, 1]
        return answer_logit_diff if per_prompt else answer_logit_diff.mean()

    def normalized(self, logits):
        """0 is the corrupted run, 1 the clean one."""
        return (self.ave_logit_diff(logits) - self.corrupted_score) / (
            self.clean_score - self.corrupted_score
        )

    def residual_stack_to_logit_diff(self, stack, cache: ActivationCache):
        scaled = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)
        directions = self.model.tokens_to_residual_directions(self.answer_tokens)
        logit_diff_directions = directions[:, 0] - directions[:, 1]
        return einops.einsum(
            scaled, logit_diff_directions, "... batch d_model, batch d_model -> ..."
        ) / len(self.prompts)


@pytest.fixture(scope="module")
def notebook(model):
    with torch.no_grad():
        return Notebook(model)


def test_the_model_does_the_task(model, notebook, capsys):
    utils.test_prompt(notebook.prompts[0], notebook.answers[0][0], model, prepend_bos=True)
    assert "Rank: 0" in capsys.readouterr().out
    assert (notebook.ave_logit_diff(notebook.original_logits, per_prompt=True) > 1).all()
    assert notebook.corrupted_score < 0
    assert model.to_str_tokens(notebook.prompts[0])[10] == " John"


def test_attribution_of_layers_and_heads(model, notebook):
    cache = notebook.cache
    final = notebook.residual_stack_to_logit_diff(cache["resid_post", -1][:, -1, :], cache)
    torch.testing.assert_close(final, notebook.clean_score, atol=1e-3, rtol=1e-3)

    accumulated, labels = cache.accumulated_resid(
        layer=-1, incl_mid=True, pos_slice=-1, return_labels=True
    )
    lens = notebook.residual_stack_to_logit_diff(accumulated, cache)
    assert len(labels) == len(lens) == 2 * model.cfg.n_layers + 1
    torch.testing.assert_close(lens[-1], notebook.clean_score, atol=1e-3, rtol=1e-3)
    assert lens[0].abs() < notebook.clean_score / 4  # the last token's embedding does not know

    per_layer, labels = cache.decompose_resid(layer=-1, pos_slice=-1, return_labels=True)
    by_layer = notebook.residual_stack_to_logit_diff(per_layer, cache)
    torch.testing.assert_close(by_layer.sum(), notebook.clean_score, atol=1e-3, rtol=1e-3)

    per_head, labels = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    by_head = notebook.residual_stack_to_logit_diff(per_head, cache)
    by_head = einops.rearrange(by_head, "(layer head) -> layer head", layer=model.cfg.n_layers)
    attention = [
        i for i, label in enumerate(cache.decompose_resid(return_labels=True)[1]) if "attn" in label
    ]
    torch.testing.assert_close(by_head.sum(-1), by_layer[attention], atol=1e-3, rtol=1e-3)
    layer, head = divmod(by_head.argmax().item(), model.cfg.n_heads)
    assert by_head.max() > 0.2 * notebook.clean_score

    # The head that decides between the names looks at one of them.
    for prompt, names in enumerate(notebook.answers):
        position = cache["pattern", layer, "attn"][prompt, head, -1].argmax()
        assert model.to_str_tokens(notebook.prompts[prompt])[position] in names


def test_patching_by_hand_equals_the_module(model, notebook):
    def patch_residual_component(corrupted_residual_component, hook: HookPoint, pos, clean_cache):
        corrupted_residual_component[:, pos, :] = clean_cache[hook.name][:, pos, :]
        return corrupted_residual_component

    n_layers, length = model.cfg.n_layers, notebook.tokens.shape[1]
    patched_residual_stream_diff = torch.zeros(n_layers, length)
    for layer in range(n_layers):
        for position in range(length):
            patched_logits = model.run_with_hooks(
                notebook.corrupted_tokens,
                fwd_hooks=[
                    (
                        utils.get_act_name("resid_pre", layer),
                        partial(patch_residual_component, pos=position, clean_cache=notebook.cache),
                    )
                ],
                return_type="logits",
            )
            patched_residual_stream_diff[layer, position] = notebook.normalized(patched_logits)

    every = patching.get_act_patch_block_every(
        model, notebook.corrupted_tokens, notebook.cache, notebook.normalized
    )
    torch.testing.assert_close(every[0], patched_residual_stream_diff, atol=1e-4, rtol=1e-4)


def test_patching_the_residual_stream_recovers_the_answer(model, notebook):
    stream = patching.get_act_patch_resid_pre(
        model, notebook.corrupted_tokens, notebook.cache, notebook.normalized
    )
    second_name, last = 10, notebook.tokens.shape[1] - 1
    expected = torch.zeros(last + 1)
    expected[second_name] = 1  # the prompts differ in nothing else
    torch.testing.assert_close(stream[0], expected, atol=1e-4, rtol=0)
    # It moves from the second name to the end, and little is anywhere else.
    assert stream[-1, last] > 0.3 and stream[-1, second_name] < stream[0, second_name]
    assert (stream[:, [second_name, last]].sum(-1) > 0.7).all()


def test_patching_heads(model, notebook):
    arguments = (model, notebook.corrupted_tokens, notebook.cache, notebook.normalized)
    every = patching.get_act_patch_attn_head_all_pos_every(*arguments)
    assert every.shape == (5, model.cfg.n_layers, model.cfg.n_heads)
    out = every[0]
    layer, head = divmod(out.argmax().item(), model.cfg.n_heads)
    assert out.max() > 0.2
    by_pos = patching.get_act_patch_attn_head_out_by_pos(*arguments)
    assert by_pos.shape == (model.cfg.n_layers, notebook.tokens.shape[1], model.cfg.n_heads)

    # That head alone, by hand.
    def patch_head_vector(corrupted_head_vector, hook, head_index, clean_cache):
        corrupted_head_vector[:, :, head_index, :] = clean_cache[hook.name][:, :, head_index, :]
        return corrupted_head_vector

    hook_fn = partial(patch_head_vector, head_index=head, clean_cache=notebook.cache)
    logits = model.run_with_hooks(
        notebook.corrupted_tokens, fwd_hooks=[(utils.get_act_name("z", layer, "attn"), hook_fn)]
    )
    torch.testing.assert_close(notebook.normalized(logits), out[layer, head], atol=1e-4, rtol=1e-4)
