"""Many requests at once: each one's text, logits and activations are those of running alone."""

import threading

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, TextIteratorStreamer
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.model_runner import ModelRunner

from bridge import TransformerBridge
from bridge.generation import batch
from bridge.generation.batch import Capacity, capacity_for
from bridge.interventions import Add, Mean, Scale, Zero
from tests.adapters.unknown_classes.parts import randomised
from tests.conftest import tiny
from tests.tiny_models import tiny_model

GREEDY = {"do_sample": False, "verbose": False, "stop_at_eos": False}
NEW = 6
LENGTHS = (5, 21, 3, 14, 21)
#: Grouped queries, one norm for two parts, learned places; windows alone and with full attention;
#: mixtures; sinks.
FAMILIES = [
    ("llama", None),
    ("gpt2", None),
    ("gpt_neox", None),
    ("qwen3", None),
    ("phi3", None),
    ("olmo2", None),
    ("mistral", None),
    ("gemma2", "eager"),
    ("gemma3_text", None),
    ("mixtral", None),
    ("qwen3_moe", None),
    ("gpt_oss", "eager"),
    ("cohere2", None),
    ("granite", None),
]
POINTS = [
    "hook_embed",
    *(f"blocks.0.attn.hook_{name}" for name in ("q", "k", "rot_q", "rot_k", "pattern")),
    *(f"blocks.1.attn.hook_{name}" for name in ("pattern", "attn_scores", "z", "result")),
    *(
        f"blocks.1.{name}"
        for name in ("mlp.hook_post", "hook_resid_mid", "hook_resid_post", "ln2.hook_normalized")
    ),
    "ln_final.hook_scale",
    "unembed.hook_out",
]


def prompts():
    drawn = torch.Generator().manual_seed(0)
    made = [torch.randint(3, 60, (n,), generator=drawn).tolist() for n in LENGTHS]
    made[4] = made[1]  # the same prompt under another edit: nothing of it may be shared
    return made


def knock(z, hook):
    z[:, :, 1] = 0


def first_key(pattern, hook):
    pattern = pattern.clone()
    pattern[..., 0] *= 0.5
    return pattern


EACH = [
    [],
    [("blocks.0.hook_resid_post", Add(torch.arange(32.0).sin(), positions=-1))],
    [("blocks.1.attn.hook_z", knock)],
    [
        ("blocks.0.attn.hook_pattern", first_key),
        ("blocks.1.hook_resid_post", Scale(0.5, part="generated")),
    ],
    [
        ("blocks.0.hook_resid_post", Add(torch.arange(32.0).cos(), from_step=2)),
        ("blocks.1.attn.hook_z", Zero(heads=0)),
    ],
]


def alone(bridge, prompt, hooks, points):
    tokens = torch.tensor([prompt])
    with bridge.hooks(fwd_hooks=hooks):
        made = bridge.generate(tokens, NEW, output_logits=True, **GREEDY)
        _, cache = bridge.generate(tokens, NEW, return_cache=True, names_filter=points, **GREEDY)
    return made.sequences[0, len(prompt) :], torch.cat(made.logits), cache


@pytest.mark.parametrize(("kind", "attention"), FAMILIES)
def test_each_request_as_if_alone(kind, attention):
    model = tiny_model(kind, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    bridge = TransformerBridge(model)
    before = model.config._attn_implementation
    points = [name for name in POINTS if name in bridge.hook_dict]
    assert len(points) > 10
    plain = {
        answer.index: answer
        for answer in bridge.generate_batch(prompts(), NEW, output_logits=True, **GREEDY)
    }
    answers = list(
        bridge.generate_batch(
            prompts(), NEW, each=EACH, capture=points, output_logits=True, **GREEDY
        )
    )
    assert sorted(answer.index for answer in answers) == list(range(5))
    for answer in answers:
        assert answer.error is None
        tokens, logits, cache = alone(bridge, prompts()[answer.index], EACH[answer.index], points)
        assert torch.equal(answer.tokens, tokens)
        torch.testing.assert_close(answer.logits, logits, rtol=1e-5, atol=1e-5)
        assert list(answer.cache) == list(cache)
        for name in points:
            torch.testing.assert_close(
                answer.cache[name],
                cache[name],
                rtol=1e-5,
                atol=1e-5,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        if EACH[answer.index]:
            assert (
                plain[answer.index].logits - answer.logits
            ).abs().max() > 1e-4  # the edit does something
    assert model.config._attn_implementation == before
    assert not bridge.wiring.listening
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.fixture
def bridge():
    return TransformerBridge(tiny("llama"))


def test_hooks_that_a_run_would_see_are_those_of_every_request(bridge):
    """Added, and of a `with` statement that is open in the calling thread."""
    with bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_z", knock)]):
        wanted = [bridge.generate(torch.tensor([p]), NEW, **GREEDY)[0, len(p) :] for p in prompts()]
        scoped = {a.index: a.tokens for a in bridge.generate_batch(prompts(), NEW, **GREEDY)}
    free = {a.index: a.tokens for a in bridge.generate_batch(prompts(), NEW, **GREEDY)}
    bridge.add_hook("blocks.0.attn.hook_z", knock)
    added = {a.index: a.tokens for a in bridge.generate_batch(prompts(), NEW, **GREEDY)}
    for index, tokens in enumerate(wanted):
        assert torch.equal(scoped[index], tokens)
        assert torch.equal(added[index], tokens)
    assert any(not torch.equal(free[index], tokens) for index, tokens in enumerate(wanted))


def test_little_room_is_kept_to(bridge, monkeypatch):
    """A pass of 21 tokens and pages for two requests: prompts wait, and none is split or put
    out.
    """
    small = Capacity(21, 6, 16)
    # A model whose room is small, whatever machine the test runs on.
    monkeypatch.setattr("bridge.generation.batch.capacity_for", lambda *_: small)
    seen = []
    handle = bridge.blocks[0].hook_resid_pre.add_hook(lambda x, hook: seen.append(x.shape[1]))
    found = {
        a.index: a
        for a in bridge.generate_batch(prompts(), NEW, each=EACH, output_logits=True, **GREEDY)
    }
    handle.remove()
    assert sorted(n for n in seen if n > 1) == sorted(LENGTHS)
    for index, prompt in enumerate(prompts()):
        tokens, logits, _ = alone(bridge, prompt, EACH[index], ["hook_embed"])
        assert torch.equal(found[index].tokens, tokens)
        torch.testing.assert_close(found[index].logits, logits, rtol=1e-5, atol=1e-5)


def test_room_follows_from_model_and_memory(bridge):
    room = capacity_for(bridge.core, LENGTHS, NEW)
    assert room.tokens == sum(LENGTHS)
    assert room.pages == sum(room.pages_of(length, NEW) for length in LENGTHS)
    with pytest.raises(
        ValueError, match="the longest prompt has 21 tokens, and with 6 new ones it needs"
    ):
        capacity_for(bridge.core, LENGTHS, NEW, free=10000)


def test_a_request_that_fails_fails_alone(bridge):
    def breaks(x, hook):
        if bridge.step == 2:
            raise ZeroDivisionError("mine")

    each = [
        [],
        [("blocks.1.hook_resid_post", breaks)],
        [],
        [("blocks.1.hook_resid_post", lambda x, hook: x[:, :1, :3])],
        [],
    ]
    rows = [prompts()[0], prompts()[1], [], prompts()[3], list(range(3, 43))]
    found = {
        answer.index: answer for answer in bridge.generate_batch(rows, NEW, each=each, **GREEDY)
    }
    assert isinstance(found[1].error, ZeroDivisionError)
    assert "no tokens" in str(found[2].error)
    assert "returned shape [1, 1, 3]" in str(found[3].error)
    assert "has a context of 40" in str(found[4].error)
    assert found[0].error is None
    assert torch.equal(
        found[0].tokens, bridge.generate(torch.tensor([rows[0]]), NEW, **GREEDY)[0, 5:]
    )
    assert not bridge.wiring.listening


def test_leaving_the_loop_ends_it(bridge):
    threads = threading.active_count()
    answers = bridge.generate_batch(prompts(), NEW, each=EACH, **GREEDY)
    next(answers)
    answers.close()
    assert threading.active_count() == threads
    assert not bridge.wiring.listening


def test_text_endings_and_sampling():
    bridge = TransformerBridge.boot_embedded()
    texts = ["When Mary and John went to the store, John gave a drink to", "Mary and"]
    found = {a.index: a for a in bridge.generate_batch(texts, 5, do_sample=False, verbose=False)}
    for index, text in enumerate(texts):
        assert text + found[index].text == bridge.generate(text, 5, do_sample=False, verbose=False)
    stop = int(found[0].tokens[1])
    short = {
        a.index: a
        for a in bridge.generate_batch(texts, 5, do_sample=False, verbose=False, eos_token_id=stop)
    }
    assert short[0].tokens.tolist() == found[0].tokens[:2].tolist()
    tops = {
        a.index: a.tokens
        for a in bridge.generate_batch(texts, 5, do_sample=True, top_k=1, verbose=False)
    }
    assert all(torch.equal(tops[index], found[index].tokens) for index in tops)


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
def test_what_would_be_wrong_is_refused_before_anything_runs(bridge):
    mixtral = TransformerBridge(tiny_model("mixtral"))
    experts = next(
        name for name, hook in mixtral.hook_dict.items() if hook.point.axes.startswith("row ")
    )
    for model, arguments, said in (
        (mixtral, {"capture": [experts]}, "cannot be told apart"),
        (mixtral, {"interventions": [(experts, Zero())]}, "cannot be told apart"),
        (
            bridge,
            {"interventions": [("blocks.0.hook_resid_post", Mean("rows"))]},
            "rows of one batch",
        ),
        (
            bridge,
            {"interventions": [("blocks.0.hook_resid_post", Add(torch.ones(2, 1, 32)))]},
            "rows of one batch",
        ),
        (
            bridge,
            {"interventions": [("blocks.0.hook_resid_post", Zero(rows=1))]},
            "rows of one batch",
        ),
        (
            bridge,
            {"interventions": [("blocks.0.hook_resid_post", Add("vector"))]},
            "asks for inputs",
        ),
        (bridge, {"each": [[]]}, "each has 1 sets of interventions, and there are 5 prompts"),
        (TransformerBridge(tiny_model("t5", "seq2seq")), {}, "bridge.generate continues several"),
    ):
        with pytest.raises(ValueError, match=said):
            model.generate_batch(prompts(), NEW, **arguments)
    bridge.core.generation_config.repetition_penalty = 1.3
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor is not available"):
        bridge.generate_batch(prompts(), NEW)
    gradients = [("blocks.0.hook_resid_post", lambda gradient, hook: None)]
    with bridge.hooks(bwd_hooks=gradients), pytest.raises(ValueError, match="hook of gradients"):
        bridge.generate_batch(prompts(), NEW)


def test_hooks_of_a_whole_model_that_is_its_own_base_are_in_either_order():
    """The hook that begins a batch's pass and the one that watches for direct calls stand at one
    module there.
    """
    bridge, prompts = TransformerBridge(tiny_model("mllama")), [[1, 2, 3], [4, 5, 6, 7]]
    how = {"max_new_tokens": 3, "do_sample": False}
    edit = [("ln_final.hook_normalized", Scale(-1.0))]
    alone = bridge.generate(torch.tensor([prompts[0]]), return_type="tokens", **how)[0, 3:]
    with bridge.hooks(fwd_hooks=edit):
        edited = bridge.generate(torch.tensor([prompts[0]]), return_type="tokens", **how)[0, 3:]
    assert not torch.equal(alone, edited)
    first, _ = bridge.generate_batch(prompts, each=[edit, []], **how)
    assert first.error is None and torch.equal(first.tokens, edited)
    with bridge.hooks(fwd_hooks=[("hook_embed", Scale(1.0))]):
        first, _ = bridge.generate_batch(prompts, **how)
    assert first.error is None and torch.equal(first.tokens, alone)


@pytest.mark.parametrize("scoped", [True, False])
def test_the_models_own_generate_batch_is_refused_while_hooks_are_on(bridge, scoped):
    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)

    def run():
        found = bridge.core.generate_batch(
            [[5, 6], [7]], generation_config=config, continuous_batching_config=pages
        )
        return list(found.values())

    handles = [] if scoped else bridge.add_hook("blocks.0.attn.hook_z", knock)
    with bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_z", knock)] if scoped else []):
        for output in run():
            assert "use bridge.generate_batch" in output.error
            assert output.generated_tokens == []
    for handle in handles:
        handle.remove()
    for output, prompt in zip(run(), ([5, 6], [7]), strict=True):
        assert output.error is None
        wanted = bridge.generate(torch.tensor([prompt]), 3, **GREEDY)[0, len(prompt) :]
        assert output.generated_tokens == wanted.tolist()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_usual_thread_of_a_streamer_is_refused_while_hooks_are_on():
    bridge = TransformerBridge.boot_embedded()
    tokens = bridge.to_tokens("Mary and")

    def pieces():
        streamer = TextIteratorStreamer(bridge.tokenizer, timeout=20)
        given = {
            "input_ids": tokens,
            "max_new_tokens": 3,
            "do_sample": False,
            "streamer": streamer,
            "pad_token_id": 0,
        }
        thread = threading.Thread(target=bridge.core.generate, kwargs=given)
        thread.start()
        made = "".join(streamer)
        thread.join()
        return made

    said = []
    hook, threading.excepthook = threading.excepthook, lambda args: said.append(args.exc_value)
    try:
        with bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_z", knock)]):
            assert (
                pieces() == "<bos>Mary and"
            )  # the prompt, which it is shown before the model runs
    finally:
        threading.excepthook = hook
    assert "contextvars.copy_context().run" in str(said[0])
    assert len(pieces()) > len("<bos>Mary and")  # and with none open, it is nobody's business


def test_features_of_each_request_are_its_own(bridge):
    """In a pass of many requests a basis is given all of them as one row."""
    W = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) / 6
    apart = bridge.add_basis(
        "blocks.0.hook_resid_post", "own", encode=lambda x: (x @ W).relu(), decode=lambda f: f @ W.T
    )
    each = [
        [],
        [(apart.name, Scale(3.0))],
        [(apart.name, Zero(features=1, positions=-1))],
        [],
        [(apart.name, Add(1.0))],
    ]
    for answer in bridge.generate_batch(
        prompts(), NEW, each=each, capture=apart.name, output_logits=True, **GREEDY
    ):
        tokens, logits, cache = alone(
            bridge, prompts()[answer.index], each[answer.index], apart.name
        )
        assert torch.equal(answer.tokens, tokens)
        torch.testing.assert_close(answer.logits, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            answer.cache[apart.name], cache[apart.name], rtol=1e-5, atol=1e-5
        )
    mixed = bridge.add_basis(
        "blocks.1.hook_resid_post",
        "mixed",
        encode=lambda x: (x - x.mean(1, keepdim=True)) @ W,
        decode=lambda f: f @ W.T,
    )
    for options in ({"capture": mixed.name}, {"interventions": [(mixed.name, Scale(0.5))]}):
        for answer in bridge.generate_batch(prompts(), NEW, **options, **GREEDY):
            assert "makes of a position what depends on others" in str(answer.error)
    assert not bridge.wiring.listening


def test_a_run_beside_it_waits_for_its_turn(bridge):
    """While a packed pass is under way transformers has the model's configuration say that it is
    not causal.
    """
    tokens = torch.tensor([list(range(3, 20))])
    with torch.no_grad():
        right = bridge(tokens)
        found, started = [], threading.Event()

        def run():
            with torch.no_grad():
                while not started.wait(0.01):
                    pass
                for _ in range(60):
                    found.append(bridge.original_model(tokens).logits)

        def slow(x, hook):
            started.set()
            threading.Event().wait(0.002)

        beside = threading.Thread(target=run)
        beside.start()
        answers = list(
            bridge.generate_batch(
                prompts(), 15, interventions=[("blocks.0.hook_resid_post", slow)], **GREEDY
            )
        )
        beside.join()
        assert all(answer.error is None for answer in answers)
        assert len(found) == 60 and all(torch.equal(logits, right) for logits in found)
        for answer in bridge.generate_batch(prompts(), NEW, **GREEDY):  # the same in the loop
            assert answer.error is None and torch.equal(bridge(tokens), right)
    assert not hasattr(bridge.core.config, "is_causal")


def test_a_run_that_waits_while_the_last_answer_is_given_keeps_nobody_waiting(monkeypatch):
    """Its turn comes when the hooks that would give the turn back are gone.

    Patched: the moment between the two is too short to be met by chance.
    """
    bridge, tokens = TransformerBridge(tiny_model("gemma2")), torch.tensor([[3, 4, 5]])
    batch.check_batches(bridge)  # which is a batch of its own
    begin, stop, asked = batch._Batch._begin, batch._Batch.stop, threading.Event()
    beside = threading.Thread(target=lambda: bridge.original_model(tokens), daemon=True)

    def seen(self, module, args, kwargs):
        if threading.current_thread() is beside:
            asked.set()
        return begin(self, module, args, kwargs)

    def ends(self):
        with batch._TURN:
            beside.start()
            assert asked.wait(60)
            stop(self)
        beside.join(60)

    monkeypatch.setattr(batch._Batch, "_begin", seen)
    monkeypatch.setattr(batch._Batch, "stop", ends)
    assert all(answer.error is None for answer in bridge.generate_batch(prompts(), NEW, **GREEDY))
    assert not beside.is_alive()
    free = batch._TURN.acquire(timeout=1)
    if free:
        batch._TURN.release()
    assert free


def test_a_function_that_runs_the_model_inside_of_a_pass_is_refused(bridge):
    def runs(x, hook):
        bridge(torch.tensor([[5, 6]]))

    each = [[("blocks.0.hook_resid_post", runs)], [], [], [], []]
    found = {
        answer.index: answer
        for answer in bridge.generate_batch(prompts(), NEW, each=each, **GREEDY)
    }
    assert "inside of a pass of many requests" in str(found.pop(0).error)
    for index, answer in found.items():
        right = bridge.generate(torch.tensor([prompts()[index]]), NEW, **GREEDY)[
            0, LENGTHS[index] :
        ]
        assert answer.error is None and torch.equal(answer.tokens, right)


def test_what_nobody_looks_into_is_compiled_and_shares_its_pages(bridge, monkeypatch):
    """As transformers has it: one prompt's pages serve the others that begin so; with a function,
    neither is on.
    """
    bridge.core.generation_config.compile_config = CompileConfig(
        backend="eager", mode=None, fullgraph=False, dynamic=True
    )
    monkeypatch.setattr("bridge.generation.batch.capacity_for", lambda *_: Capacity(40, 24, 16))
    start = torch.randint(5, 60, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [[*start, *range(5, 7 + n)] for n in range(6)]
    wanted = [bridge.generate(torch.tensor([row]), NEW, **GREEDY)[0, len(row) :] for row in rows]
    seen, shared = [], []
    compute, match = ModelRunner.compute_batch, PagedAttentionCache.search_prefix_match

    def watched(self, model, batch):
        seen.append(
            (
                self._compiled_varlen is not None,
                self.cache.use_prefix_sharing,
                bool(model._forward_hooks),
            )
        )
        return compute(self, model, batch)

    def matched(*args):
        shared.append(match(*args))
        return shared[-1]

    monkeypatch.setattr(ModelRunner, "compute_batch", watched)
    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", matched)
    list(
        bridge.generate_batch(rows[:1], 1, output_logits=True, **GREEDY)
    )  # the proof, and what is looked at
    assert {its[:2] for its in seen} == {(False, False)}
    seen.clear()
    free = {a.index: a for a in bridge.generate_batch(rows, NEW, **GREEDY)}
    assert set(seen) == {(True, True, False)} and shared.count(16) >= 3  # tokens of one page
    for index, tokens in enumerate(wanted):
        assert free[index].error is None and torch.equal(free[index].tokens, tokens)
    edited = {
        a.index: a.tokens
        for a in bridge.generate_batch(
            rows, NEW, interventions=[("blocks.0.attn.hook_z", knock)], **GREEDY
        )
    }
    assert seen[-1][:2] == (False, False)
    with bridge.hooks(fwd_hooks=[("blocks.0.attn.hook_z", knock)]):
        for index, row in enumerate(rows):
            assert torch.equal(
                edited[index], bridge.generate(torch.tensor([row]), NEW, **GREEDY)[0, len(row) :]
            )


def compiling(family):
    """A bridge whose passes are compiled where nobody looks into them, and whose every weight
    counts.
    """
    made = TransformerBridge(randomised(tiny_model(family, "causal")))
    made.core.generation_config.compile_config = CompileConfig(
        backend="eager", mode=None, fullgraph=False, dynamic=True
    )
    rows = [
        torch.randint(3, 60, (24,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in range(12)
    ]
    list(made.generate_batch(rows[:1], 1, output_logits=True, **GREEDY))  # the proof
    return made, rows


@pytest.mark.filterwarnings("ignore:a compiled pass of generate_batch failed")
@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_a_compiled_pass_that_breaks_off_is_made_again_from_the_same_past(family, monkeypatch):
    """A window's new keys are written over old ones: made again, a part of a prompt would read
    itself as its past.
    """
    bridge, rows = compiling(family)
    wanted = [bridge.generate(torch.tensor([row]), 4, **GREEDY)[0, len(row) :] for row in rows]
    monkeypatch.setattr(
        "bridge.generation.batch.capacity_for", lambda *_: Capacity(36, 24, 16)
    )  # prompts are split
    compute, update, breaks, broken = (
        ModelRunner.compute_batch,
        PagedAttentionCache.update,
        [False],
        [],
    )

    def begins(self, model, batch):
        breaks[0] = self._compiled_varlen is not None
        return compute(self, model, batch)

    @torch.compiler.disable
    def breaks_off(*args, **more):
        found = update(*args, **more)
        if breaks[0] and more["layer_idx"] == 1:  # the first layer's keys are written
            breaks[0] = False
            broken.append(1)
            raise RuntimeError("the compiler gave up")
        return found

    monkeypatch.setattr(ModelRunner, "compute_batch", begins)
    monkeypatch.setattr(PagedAttentionCache, "update", breaks_off)
    answers = list(bridge.generate_batch(rows, 4, **GREEDY))
    assert broken and len(answers) == len(rows)
    for answer in answers:
        assert answer.error is None and torch.equal(answer.tokens, wanted[answer.index])


def test_torch_hooks_that_come_after_compilation_are_called():
    bridge, rows = compiling("llama")
    plain = {a.index: a.tokens for a in bridge.generate_batch(rows, 4, **GREEDY)}
    handle = bridge.core.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out * 0
    )
    hooked = {a.index: a.tokens for a in bridge.generate_batch(rows, 4, **GREEDY)}
    wanted = [bridge.generate(torch.tensor([row]), 4, **GREEDY)[0, len(row) :] for row in rows]
    handle.remove()
    assert all(torch.equal(hooked[index], tokens) for index, tokens in enumerate(wanted))
    assert any(not torch.equal(hooked[index], plain[index]) for index in plain)


def test_what_is_drawn_is_the_same_whether_or_not_it_is_looked_at(bridge):
    given, drawn = [], {"do_sample": True, "verbose": False, "stop_at_eos": False}
    list(bridge.generate_batch(prompts()[:1], 1, **GREEDY))  # the proof
    for looked_at in (False, True):
        torch.manual_seed(0)
        answers = bridge.generate_batch(prompts(), NEW, output_logits=looked_at, **drawn)
        given.append({a.index: a.tokens.tolist() for a in answers})
    assert given[0] == given[1]
