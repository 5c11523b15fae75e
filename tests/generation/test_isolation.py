"""Requests of one batch: hostile ones beside healthy ones, which are what they are alone; models
that are refused.
"""

import threading

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CompileConfig,
    GPTJConfig,
    GPTJForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from bridge import TransformerBridge
from bridge.generation import batch
from bridge.generation.packed import is_wrong
from bridge.interventions import Add, Probe, Scale, Set
from tests.adapters.unknown_classes.parts import randomised
from tests.adapters.unknown_classes.plain_modules import HundredLines
from tests.conftest import beside, seeds, tiny, torch_hooks
from tests.tiny_images import image_inputs
from tests.tiny_models import tiny_model

GREEDY = {"do_sample": False, "verbose": False, "stop_at_eos": False}
NEW = 5
RESID = "blocks.1.hook_resid_post"


def raising(error, at):
    def breaks(x, hook, calls=[]):  # noqa: B006
        calls.append(1)
        if len(calls) > at:
            raise error("mine")

    return breaks


def hostile(bridge, drawn):
    """A set of edits that fails, and what its error says; None: it may as well go well."""
    step, width = int(torch.randint(0, 3, (), generator=drawn)), 32
    probe = Probe(torch.arange(32.0).sin(), "p")
    # Its squares are infinite, of which torch's LayerNorm makes no numbers, and others make zeros:
    # as in a run alone.
    large = [(RESID, Add(torch.full((width,), 1e20)))]
    with torch.no_grad():
        finite = bool(
            bridge.run_with_hooks(torch.tensor([[5, 6]]), fwd_hooks=large).isfinite().all()
        )
    kinds = [
        ([(RESID, Scale(float("nan"), from_step=step))], "is not finite"),
        (large, None if finite else "is not finite"),
        ([("blocks.0.attn.hook_rot_k", lambda x, hook: x / 0)], "is not finite"),
        ([("blocks.0.attn.hook_v", Set(float("inf")))], "is not finite"),
        ([("blocks.1.attn.hook_pattern", Set(float("nan")))], "is not finite"),
        ([("blocks.1.attn.hook_attn_scores", Set(float("nan")))], "is not finite"),
        ([("unembed.hook_out", Scale(float("nan")))], "is not finite"),
        ([("ln_final.hook_scale", Set(0.0))], "is not finite"),
        ([(RESID, lambda x, hook: x[:, :1, :3])], "returned shape"),
        ([(RESID, lambda x, hook: "no tensor")], "returned"),
        ([(RESID, raising(ZeroDivisionError, step))], "mine"),
        ([(RESID, raising(KeyboardInterrupt, step))], "mine"),
        ([(RESID, raising(SystemExit, step))], "mine"),
        ([(RESID, raising(StopIteration, step))], "mine"),
        ([(RESID, Scale(1.0, positions=30))], "there are"),
        ([(RESID, Add(1.0, where=Probe(torch.ones(width), "never") > 0.0))], "it has read nothing"),
        # Legal each alone, in the same run not: one changes the norm, one what heads read through
        # it.
        ([("blocks.1.ln1.hook_normalized", Scale(0.5))], None),
        ([("blocks.1.hook_q_input", Scale(0.5))], None),
        ([("blocks.1.hook_attn_in", lambda x, hook: x * 0.5)], None),
        ([("blocks.1.attn.hook_result", Scale(0.5, heads=1))], None),
        ([("blocks.0.hook_resid_post", probe), (RESID, Scale(0.5, where=probe > 0.0))], None),
    ]
    kinds = [
        (edits, said) for edits, said in kinds if all(name in bridge.hook_dict for name, _ in edits)
    ]
    return kinds[int(torch.randint(0, len(kinds), (), generator=drawn))]


def alone(bridge, prompt, edits, **way):
    with bridge.hooks(fwd_hooks=edits):
        return bridge.generate(torch.tensor([prompt]), NEW, **(GREEDY | way))[
            0, len(prompt) :
        ].tolist()


def asked(bridge, prompts, drawn):
    """Prompts as lists or as one padded tensor, and how they are continued: to an end, to the last
    token, drawn.
    """
    kind = int(torch.randint(0, 6, (), generator=drawn))
    if kind == 1:  # padded on either side
        side, rows = (
            ("left", "right")[int(torch.randint(0, 2, (), generator=drawn))],
            list(map(torch.tensor, prompts)),
        )
        mask = torch.nn.utils.rnn.pad_sequence(
            [row * 0 + 1 for row in rows], batch_first=True, padding_side=side
        )
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
        return tokens, {"attention_mask": mask}
    if kind == 2:  # they end at different times
        return prompts, {"stop_at_eos": True, "eos_token_id": alone(bridge, prompts[0], [])[1]}
    return prompts, (
        {
            "do_sample": True,
            "temperature": 1.5,
            "output_logits": True,
        }
        if kind == 3
        else {}
    )


def compare_one(bridge, seed):
    """A random batch: what of it is wrong."""
    drawn = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 7, (), generator=drawn))
    prompts = [
        torch.randint(
            3, 60, (int(torch.randint(1, 13, (), generator=drawn)),), generator=drawn
        ).tolist()
        for _ in range(count)
    ]
    prompts[-1] = prompts[
        int(torch.randint(0, count, (), generator=drawn))
    ]  # of one prompt several
    bad = torch.rand(count, generator=drawn) < 0.4
    each, said = zip(
        *[hostile(bridge, drawn) if bad[i] else ([], None) for i in range(count)], strict=True
    )
    given, way = asked(bridge, prompts, drawn)
    left_at = count if torch.rand((), generator=drawn) < 0.9 else 1
    answers, found = bridge.generate_batch(given, NEW, each=each, **(GREEDY | way)), {}
    for answer in answers:
        found[answer.index] = answer
        if len(found) == left_at:
            break  # nobody wants the others
    answers.close()
    assert sorted(found) == list(range(count)) or len(found) == left_at, seed
    ends = {name: way[name] for name in ("stop_at_eos", "eos_token_id") if name in way}
    for i, answer in found.items():
        ended = answer.error is None and answer.tokens[-1:].tolist() == [ends.get("eos_token_id")]
        if said[i] is not None and not ended:  # it may end before the step that it would fail in
            assert answer.error is not None and said[i] in str(answer.error), (
                seed,
                i,
                said[i],
                answer,
            )
            assert not len(answer.tokens)
        elif said[i] is not None:
            continue
        elif "do_sample" in way:
            assert answer.error is None, (seed, i, answer.error)
            if not each[i]:
                with torch.no_grad():
                    right = bridge(torch.tensor([prompts[i] + answer.tokens[:-1].tolist()]))[
                        0, len(prompts[i]) - 1 :
                    ]
                torch.testing.assert_close(
                    answer.logits, right, rtol=1e-4, atol=1e-4, msg=f"{seed}, {i}"
                )
        else:
            assert answer.error is None, (seed, i, answer.error)
            assert answer.tokens.tolist() == alone(bridge, prompts[i], each[i], **ends), (
                seed,
                i,
                each[i],
            )


FAMILIES = [
    "llama",
    "gpt2",
    "mixtral",
    "gemma2",
    "gpt_neox",
    "qwen3",
    "gemma3_text",
    "qwen2",
    "mistral",
    "phi3",
    "olmo2",
    "cohere",
    "granite",
]
#: Of models that see, requests are text.
SEEING = ["gemma3", "qwen2_vl"]


def compare(family, numbers):
    """Random batches, while another thread runs the same model."""
    bridge = TransformerBridge(tiny_model(family, "image_text" if family in SEEING else "causal"))
    before, tokens = bridge.core.config._attn_implementation, torch.tensor([[5, 6, 7, 8]])
    runs = (
        lambda: bridge(tokens),
        lambda: bridge.run_with_hooks(tokens, fwd_hooks=[(RESID, Scale(0.5))]),
        lambda: bridge.run_with_cache(tokens, names_filter=RESID)[1][RESID],
    )
    with beside(*runs):
        for seed in numbers:
            compare_one(bridge, seed)
    assert bridge.core.config._attn_implementation == before
    assert not bridge.wiring.listening and not torch_hooks(bridge.original_model)


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_requests_beside_hostile_ones(family):
    compare(family, range(4))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mistral", "gemma2", "qwen3"])
@pytest.mark.parametrize("backend", [None, "eager", "inductor"])
@pytest.mark.filterwarnings("ignore:a compiled pass of generate_batch failed")  # and is made again
def test_what_nobody_looks_into_beside_runs_with_hooks(family, backend):
    """Passes without functions, compiled or not, and with shared pages, leave other threads' runs
    as they are.
    """
    bridge = TransformerBridge(tiny_model(family, "causal"))
    if backend is not None:
        bridge.core.generation_config.compile_config = CompileConfig(
            backend=backend,
            mode=None if backend == "eager" else "default",
            fullgraph=False,
            dynamic=True,
        )
    start = list(range(3, 35))
    prompts = [[*start, *range(5, 6 + n)] for n in range(4)] + [[7, 8, 9]]
    wanted = [alone(bridge, prompt, []) for prompt in prompts]
    tokens, batched = torch.tensor([start]), []
    runs = (
        lambda: bridge(tokens),
        lambda: bridge.run_with_hooks(tokens, fwd_hooks=[(RESID, Scale(0.5))]),
        lambda: bridge.core(tokens, attention_mask=torch.ones_like(tokens)).logits,
        lambda: bridge.generate(tokens, 3, do_sample=False, verbose=False),
        lambda: bridge.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")[1][
            "pattern", 1
        ],
    )
    with beside(*runs, traced=backend == "inductor"):
        for _ in range(3):
            batched += list(bridge.generate_batch(prompts, NEW, **GREEDY))
    wrong = [
        (answer.index, answer.error)
        for answer in batched
        if answer.tokens.tolist() != wanted[answer.index]
    ]
    assert not wrong and len(batched) == 3 * len(prompts)
    assert not bridge.wiring.listening and not torch_hooks(bridge.original_model)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *SEEING])
def test_healthy_requests_beside_many_hostile_ones(family):
    compare(family, seeds(2000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_no_number_is_found_among_numbers_whose_sum_is_none(dtype):
    large = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    inf = float("inf")
    for values, wrong, wrong_beside_masks in (
        (large, False, False),
        (-large, False, False),
        (large * 0, False, False),
        (torch.tensor([1.0, inf], dtype=dtype), True, True),
        (torch.tensor([1.0, -inf], dtype=dtype), True, False),
        (torch.tensor([inf, -inf], dtype=dtype), True, True),
        (torch.tensor([float("nan")], dtype=dtype), True, True),
    ):
        assert is_wrong(values) == wrong and is_wrong(values, masks=True) == wrong_beside_masks


def test_an_end_for_no_number_names_the_point_and_the_step():
    bridge = TransformerBridge(tiny("llama"))
    prompts, each = (
        [[5, 6, 7], [8, 9], [10, 11, 12]],
        [[], [(RESID, Scale(float("nan"), from_step=2))], []],
    )
    found = sorted(
        bridge.generate_batch(prompts, NEW, each=each, **GREEDY), key=lambda answer: answer.index
    )
    assert f"{RESID} at step 2 of request 1 is not finite" in str(found[1].error)
    without = sorted(
        bridge.generate_batch(prompts, NEW, each=each, output_logits=True, **GREEDY),
        key=lambda a: a.index,
    )
    healthy = sorted(
        bridge.generate_batch(prompts, NEW, output_logits=True, **GREEDY), key=lambda a: a.index
    )
    for i in (0, 2):
        assert torch.equal(without[i].logits, healthy[i].logits)  # as if it had not been there


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=61)),
            r"MambaForCausalLM \(Mamba",
        ),
        (
            BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=61)),
            r"\(BloomAttention\)",
        ),
        (
            GPTJForCausalLM(
                GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=61)
            ),
            r"\(GPTJAttention\)",
        ),
    ],
)
def test_what_the_engine_cannot_batch_is_refused_by_name(model, said):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(0)
            )
    bridge = TransformerBridge(model.eval())
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=rf"generate_batch is not available for .*{said}.*bridge.generate continues",
        ):
            bridge.generate_batch([[5, 6, 7], [8, 9]], NEW, **GREEDY)
    assert bridge.core.config._attn_implementation in ("sdpa", "eager")
    assert bridge.generate(torch.tensor([[5, 6, 7]]), NEW, **GREEDY).shape == (1, 8)


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
def test_a_proof_is_made_once_and_asks_nothing_of_the_users_configuration(monkeypatch):
    bridge, made = TransformerBridge(tiny("llama")), []
    monkeypatch.setattr(
        batch,
        "_why_not",
        lambda bridge, turns, why=batch._why_not: made.append(1) or why(bridge, turns),
    )
    bridge.core.generation_config.repetition_penalty = 1.3
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor is not available"):
        bridge.generate_batch([[5, 6]], NEW, **GREEDY)
    bridge.core.generation_config.repetition_penalty = None
    for _ in range(2):
        assert all(
            answer.error is None for answer in bridge.generate_batch([[5, 6]], NEW, **GREEDY)
        )
    assert made == [1]


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bart", "seq2seq"),
        ("marian", "seq2seq"),
        ("pegasus", "seq2seq"),
        ("t5", "seq2seq"),
        ("whisper", "speech"),
    ],
)
def test_an_encoder_and_decoder_is_refused_by_name_before_anything_runs(family, task):
    bridge, ran = TransformerBridge(tiny_model(family, task)), []
    bridge.original_model.register_forward_pre_hook(lambda *given: ran.append(1))
    name = type(bridge.core).__name__
    for each in (None, [[], [("decoder.1.hook_resid_post", Scale(float("nan")))]]):
        with pytest.raises(
            ValueError, match=f"{name} cannot generate many .* only for decoders. bridge.generate"
        ):
            bridge.generate_batch([[5, 6, 7], [8, 9]], NEW, each=each, **GREEDY)
    assert not ran and not bridge.wiring.listening


def test_a_plain_module_is_refused_by_name_before_anything_runs():
    module = randomised(HundredLines())
    bridge, ran = TransformerBridge(module), []
    module.register_forward_pre_hook(lambda *given: ran.append(1))
    with pytest.raises(
        ValueError, match=r"HundredLines cannot generate many .* prompts of one length"
    ):
        bridge.generate_batch([[5, 6, 7], [8, 9]], NEW, **GREEDY)
    with pytest.raises(TypeError, match="'attention_mask' is an argument of neither"):
        bridge.generate(
            torch.tensor([[5, 6], [7, 0]]),
            NEW,
            attention_mask=torch.tensor([[1, 1], [1, 0]]),
            **GREEDY,
        )
    assert not ran


@pytest.mark.parametrize("family", SEEING)
def test_requests_of_a_model_with_images_are_text_and_images_are_refused(family):
    bridge = TransformerBridge(tiny_model(family, "image_text"))
    for seed in range(4):
        compare_one(bridge, seed)
    tokens, given = image_inputs(family)
    with pytest.raises(TypeError, match="unexpected keyword argument 'pixel_values'"):
        bridge.generate_batch(tokens, NEW, pixel_values=given["pixel_values"], **GREEDY)
    assert not bridge.wiring.listening
    compare_one(bridge, 5)


def test_padding_is_told_or_refused():
    bridge = TransformerBridge.boot_embedded()
    texts = ["When Mary and John went to the store, John gave a drink to", "Mary and"]
    padded = bridge.batch_of(texts)

    def answers(prompts, **more):
        return [
            a.text
            for a in sorted(
                bridge.generate_batch(prompts, NEW, **more, **GREEDY), key=lambda a: a.index
            )
        ]

    with pytest.raises(ValueError, match="nothing says whether it is padding"):
        answers(padded.tokens)
    assert answers(padded.tokens, attention_mask=padded.mask) == answers(texts)
    for mask, said in ((padded.mask[:, 1:], "has shape"), (padded.mask * 2, "holds 2")):
        with pytest.raises(ValueError, match=said):
            answers(padded.tokens, attention_mask=mask)


def test_one_batch_at_a_time_and_one_that_nobody_goes_through_gives_the_model_back():
    bridge = TransformerBridge(tiny("llama"))
    prompts = [[5, 6, 7], [8, 9]]
    left = bridge.generate_batch(prompts, NEW, **GREEDY)
    with pytest.raises(ValueError, match="a batch of requests is under way on this model"):
        bridge.generate_batch(prompts, NEW, **GREEDY)
    found = []
    beside = threading.Thread(
        target=lambda: found.extend(bridge.generate_batch(prompts, NEW, **GREEDY))
    )
    beside.start()
    beside.join(0.5)
    assert beside.is_alive()  # it waits
    del left
    beside.join(60)
    assert len(found) == 2 and all(answer.error is None for answer in found)
    assert bridge.core.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_batches_beside_threads_of_runs(family):
    """Gemma 2 is of eager attention, which the engine exchanges: no other pass can be with what it
    sets.
    """
    bridge, tokens = TransformerBridge(tiny_model(family)), torch.tensor([[5, 6, 7, 8]])
    kernel = bridge.core.config._attn_implementation
    assert kernel == ("eager" if family == "gemma2" else "sdpa")
    with torch.no_grad():
        right = bridge(tokens)
    wrong, ends = [], threading.Event()

    def runs():
        while not ends.is_set():
            try:
                with torch.no_grad():
                    edited = bridge.run_with_hooks(tokens, fwd_hooks=[(RESID, Scale(0.5))])
                    if not torch.equal(bridge(tokens), right) or torch.equal(edited, right):
                        wrong.append("another result")
            except Exception as error:  # noqa: BLE001
                wrong.append(error)

    threads = [threading.Thread(target=runs) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        prompts, each = [[5, 6, 7], [8, 9]], [[], [(RESID, Scale(0.5))]]
        expected = None
        for _ in range(10):
            found = sorted(
                bridge.generate_batch(prompts, NEW, each=each, **GREEDY),
                key=lambda answer: answer.index,
            )
            tokens_of = [answer.tokens.tolist() for answer in found]
            expected = expected or tokens_of
            assert tokens_of == expected and all(answer.error is None for answer in found)
            assert tokens_of == [alone(bridge, prompts[i], each[i]) for i in range(2)]
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]
    assert bridge.core.config._attn_implementation == kernel
    assert not bridge.wiring.listening and not torch_hooks(bridge.original_model)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_model_is_as_it_was_between_two_answers_and_before_the_first(family):
    bridge, tokens = TransformerBridge(tiny_model(family)), torch.tensor([[5, 6, 7, 8]])
    kernel = bridge.core.config._attn_implementation
    with torch.no_grad():
        right = bridge(tokens), bridge.run_with_hooks(tokens, fwd_hooks=[(RESID, Scale(0.5))])

    def is_as_it_was():
        assert bridge.core.config._attn_implementation == kernel or family == "gemma2"
        with torch.no_grad():
            assert torch.equal(bridge(tokens), right[0])
            assert torch.equal(
                bridge.run_with_hooks(tokens, fwd_hooks=[(RESID, Scale(0.5))]), right[1]
            )

    answers = bridge.generate_batch([[5, 6, 7], [8, 9, 10, 11], [12]], NEW, **GREEDY)
    is_as_it_was()
    for answer in answers:
        assert answer.error is None
        is_as_it_was()
    assert bridge.core.config._attn_implementation == kernel
