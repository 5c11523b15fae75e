"""Rows of unequal length: each is what it is alone, whichever side is padded, with beams, sampling
and caches.
"""

import pytest
import torch
import transformers
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from bridge import TransformerBridge
from bridge.generation import options
from bridge.interventions import Add, Interventions, Scale, Zero
from tests.adapters.unknown_classes.parts import randomised
from tests.adapters.unknown_classes.plain_modules import HundredLines
from tests.conftest import beside, seeds, tiny
from tests.tiny_images import image_inputs
from tests.tiny_models import tiny_model

GREEDY = {"do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
TWO = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
BART = {
    "d_model": 32,
    **TWO,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODERS_DECODERS = {
    "BartForConditionalGeneration": ("BartConfig", {}),
    "MBartForConditionalGeneration": ("MBartConfig", {}),
    "MarianMTModel": ("MarianConfig", {}),
    "PegasusForConditionalGeneration": ("PegasusConfig", {}),
    "BlenderbotForConditionalGeneration": ("BlenderbotConfig", {}),
    "M2M100ForConditionalGeneration": ("M2M100Config", {}),
}
DECODERS = ["gpt2", "llama", "mixtral", "gemma2"]
LENGTHS = (8, 5, 3)


def shaken(model, by=0.2):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * by
    return model.float().eval()


def made(family):
    if family == "t5":
        sizes = {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        }
        config = transformers.T5Config(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=2)
        return shaken(transformers.T5ForConditionalGeneration(config))
    if family in DECODERS:
        return tiny_model(family)
    config, more = ENCODERS_DECODERS[family]
    return shaken(getattr(transformers, family)(getattr(transformers, config)(**BART, **more)))


def padded(side, seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 60, (3, max(lengths)), generator=generator)
    mask = torch.zeros_like(tokens)
    rows = []
    for i, length in enumerate(lengths):
        where = slice(max(lengths) - length, None) if side == "left" else slice(0, length)
        mask[i, where] = 1
        rows.append(tokens[i : i + 1, where].clone())
    return tokens.masked_fill(mask == 0, 0), mask, rows


def new_of(bridge, out, length):
    """What a generation adds: all of a decoder's own tokens, or what stands behind the prompt."""
    return out if bridge.core.config.is_encoder_decoder else out[..., length:]


def draw(drawn, *several):
    return several[int(torch.randint(0, len(several), (), generator=drawn))]


def edits_of(drawn, first, name):
    """Edits of a batch (None), and those of its row `i` alone."""
    v = torch.randn(32, generator=torch.Generator().manual_seed(5))
    at = draw(drawn, -1, -2, 0, 1)
    whose = draw(drawn, 0, 1, 2)
    return draw(
        drawn,
        lambda i: [],
        lambda i: [(first, Add(3 * v, positions=at))],
        lambda i: [(name, Scale(0.5))],
        lambda i: (
            [(first, Add(3 * v, positions=at, rows=[whose] if i is None else None))]
            * (i in (None, whose))
        ),
    )


def compare(family, numbers):
    """Padded rows in a batch and each alone, by the text, the scores and what is kept, while
    another thread runs.
    """
    bridge = TransformerBridge(made(family))
    both, tokens = bridge.core.config.is_encoder_decoder, torch.tensor([[5, 6, 7, 8]])
    name = "decoder.1.hook_resid_post" if both else "blocks.1.hook_resid_post"
    first = "encoder.1.hook_resid_post" if both else name
    given = {"decoder_input_ids": tokens[:, :2]} if both else {}
    runs = (
        lambda: bridge(tokens, **given),
        lambda: bridge.run_with_hooks(tokens, fwd_hooks=[(first, Scale(0.5))], **given),
        lambda: bridge.run_with_cache(tokens, names_filter=first, **given)[1][first],
    )
    with beside(*runs):
        for seed in numbers:
            compare_one(bridge, seed, first, name)


def compare_one(bridge, seed, first, name):
    drawn = torch.Generator().manual_seed(seed)
    side, lengths = (
        draw(drawn, "left", "right"),
        torch.randint(2, 10, (3,), generator=drawn).tolist(),
    )
    tokens, mask, rows = padded(side, seed, lengths)
    of_row = edits_of(drawn, first, name)
    edits = of_row(None)
    way = draw(
        drawn,
        {"output_logits": True},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"output_logits": True, "use_past_kv_cache": False},
        {"return_cache": True},
        {"do_sample": True},
    )
    if "return_cache" in way:
        way["names_filter"] = [first, name]

    def written(rows, edits, **more):
        torch.manual_seed(seed)
        with bridge.hooks(fwd_hooks=Interventions(edits, bridge)):
            return bridge.generate(rows, 5, padding_side="left", **more, **(GREEDY | way))

    together, where = (
        written(tokens, edits, attention_mask=mask),
        (type(bridge.core).__name__, seed, side, way, edits),
    )
    if "do_sample" in way:
        sampled_agree(bridge, rows, together, edits, seed)
        return
    for i, row in enumerate(rows):
        alone, n = written(row, of_row(i)), tokens.shape[1]
        if "output_logits" in way:
            for ours, theirs in zip(together.logits, alone.logits, strict=True):
                torch.testing.assert_close(
                    ours[i : i + 1], theirs, rtol=1e-3, atol=1e-3, msg=str(where)
                )
        if "return_cache" in way:
            same_activations(bridge, together[1], alone[1], mask[i].bool(), i, where)
        texts = [
            x[0] if "return_cache" in way else x if torch.is_tensor(x) else x.sequences
            for x in (together, alone)
        ]
        copies = len(texts[0]) // 3
        got = new_of(bridge, texts[0][i * copies : (i + 1) * copies], n)
        assert torch.equal(got, new_of(bridge, texts[1], row.shape[1])), (*where, i)


def same_activations(bridge, together, alone, real, i, where):
    """What is kept of a padded row, at its tokens, is what is kept of it alone."""
    for name in alone:
        ours = together[name][i]
        if name.startswith("encoder"):
            ours = ours[real]
        elif not name.startswith("decoder"):
            ours = ours[len(real) - int(real.sum()) :]
        torch.testing.assert_close(
            ours, alone[name][0], rtol=1e-3, atol=1e-3, msg=f"{where}, {i}, {name}"
        )


def sampled_agree(bridge, rows, together, edits, seed):
    """Drawn with a seed, rows are those of the model's own `generate`, or of the bridge, padded on
    its side.
    """
    side = "right" if bridge.core.config.is_encoder_decoder else "left"
    pad = torch.nn.utils.rnn.pad_sequence
    own = pad([row[0] for row in rows], batch_first=True, padding_side=side)
    mask = pad([row[0] * 0 + 1 for row in rows], batch_first=True, padding_side=side)
    torch.manual_seed(seed)
    if edits:
        with bridge.hooks(fwd_hooks=Interventions(edits, bridge)):
            right = bridge.generate(
                own, 5, attention_mask=mask, padding_side=side, **(GREEDY | {"do_sample": True})
            )
    else:
        way = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
        right = bridge.original_model.generate(own, attention_mask=mask, **way)
    assert torch.equal(
        new_of(bridge, together, own.shape[1]), new_of(bridge, right, own.shape[1])
    ), (seed, edits)


#: For each, which part of the sound or the images of two rows is that of one of them.
SEEN = {
    "gemma3": lambda name, value, i: value[i : i + 1],
    "llava": lambda name, value, i: value[i : i + 1],
    "qwen2_audio": lambda name, value, i: value[i : i + 1],
    "qwen2_vl": lambda name, value, i: (
        value[16 * i : 16 * i + 16] if name == "pixel_values" else value[i : i + 1]
    ),
}
#: What says which tokens are an image's.
ALONG = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids"}


def compare_seen(family, numbers):
    """Prompts of unequal length, with an image or a sound in each."""
    model = shaken(tiny_model(family, "seq2seq" if family == "qwen2_audio" else "image_text"))
    if (
        family == "gemma3"
    ):  # tied to the embeddings it would say each last token again, whatever it sees
        weight = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(3))
        model.lm_head.weight = torch.nn.Parameter(weight)
    model.generation_config.suppress_tokens = [5]  # no image is written
    bridge, (tokens, given) = TransformerBridge(model), image_inputs(family)
    given.pop("mm_token_type_ids", None)
    name, v = (
        "blocks.1.hook_resid_post",
        torch.randn(32, generator=torch.Generator().manual_seed(5)),
    )
    ways = [
        {},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"use_past_kv_cache": False},
    ]
    edits = [
        [],
        [(name, Add(3 * v, positions=-1))],
        [(name, Add(3 * v, positions=0))],
        [(name, Scale(0.5))],
    ]

    def all_of(ids):
        return {ALONG[family]: (ids == 5).int()} if family in ALONG else {}

    for seed in numbers:
        side, way, edit = ("left", "right")[seed % 2], ways[seed // 2 % 4], edits[seed // 3 % 4]
        drawn, rows = torch.Generator().manual_seed(seed), []
        for _ in range(2):
            before, after = torch.randint(1, 5, (2,), generator=drawn).tolist()
            text = torch.randint(9, 60, (before + after,), generator=drawn)
            rows.append(torch.cat([text[:before], tokens[0][tokens[0] == 5], text[before:]]))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
        mask = torch.nn.utils.rnn.pad_sequence(
            [row * 0 + 1 for row in rows], batch_first=True, padding_side=side
        )
        with bridge.hooks(fwd_hooks=Interventions(edit, bridge)):
            together = bridge.generate(
                ids,
                5,
                attention_mask=mask,
                padding_side="left",
                **given,
                **all_of(ids),
                **way,
                **GREEDY,
            )
            for i, row in enumerate(rows):
                own = {name: SEEN[family](name, value, i) for name, value in given.items()}
                alone = bridge.generate(row[None], 5, **own, **all_of(row[None]), **way, **GREEDY)
                got = together[i * len(alone) : (i + 1) * len(alone), ids.shape[1] :]
                assert torch.equal(got, alone[:, len(row) :]), (family, seed, side, way, edit, i)


def compare_plain(numbers):
    """A module of nobody's class: rows of one length, drawn ones too, and edits of one row."""
    module = randomised(HundredLines())
    bridge, tokens = TransformerBridge(module), torch.tensor([[5, 6, 7, 8]])
    name = next(name for name in bridge.hook_dict if name.endswith("1.hook_resid_post"))
    with beside(
        lambda: bridge(tokens),
        lambda: bridge.run_with_hooks(tokens, fwd_hooks=[(name, Scale(0.5))]),
        lambda: bridge.run_with_cache(tokens, names_filter=name)[1][name],
    ):
        for seed in numbers:
            drawn = torch.Generator().manual_seed(seed)
            rows = torch.randint(
                3, 40, (3, int(torch.randint(1, 8, (), generator=drawn))), generator=drawn
            )
            whose, edit = draw(drawn, 0, 1, 2), draw(drawn, {}, {"positions": -1}, {"positions": 0})
            kinds = draw(
                drawn, [], [(name, Scale(3.0, **edit))], [(name, Scale(-2.0, rows=[whose], **edit))]
            )
            ways = draw(
                drawn,
                {},
                {"return_cache": True, "names_filter": name},
                {"use_past_kv_cache": False},
            )
            with bridge.hooks(fwd_hooks=kinds):
                together = bridge.generate(rows, 5, **ways, **GREEDY)
            for i in range(3):
                own = [
                    (at, Scale(op.by, **edit)) for at, op in kinds if op.rows is None or i == whose
                ]
                with bridge.hooks(fwd_hooks=own):
                    alone = bridge.generate(rows[i : i + 1], 5, **ways, **GREEDY)
                if "return_cache" in ways:
                    torch.testing.assert_close(
                        together[1][name][i], alone[1][name][0], rtol=1e-3, atol=1e-3
                    )
                    assert torch.equal(together[0][i], alone[0][0]), (seed, i)
                else:
                    assert torch.equal(together[i], alone[0]), (seed, i)


def test_each_row_of_a_plain_module_is_continued_as_it_would_be_alone():
    compare_plain(range(12))


@pytest.mark.slow
def test_many_rows_of_a_plain_module_are_continued_as_they_would_be_alone():
    compare_plain(seeds(500))


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
@pytest.mark.parametrize("family", ["bart", "xlnet", "reformer", "rwkv", "recurrent_gemma"])
def test_a_model_that_continues_a_padded_row_otherwise_than_alone_says_so(family, monkeypatch):
    """transformers' own `generate` does: no argument for positions, a mask that is dropped, a state
    of the padding.
    """
    bridge, tried = TransformerBridge(tiny_model(family)), []
    monkeypatch.setattr(
        options,
        "_row_warning",
        lambda *given, made=options._row_warning: tried.append(1) or made(*given),
    )
    tokens, mask, rows = padded("left")
    name = type(bridge.core).__name__
    said = (
        rf"{name} continues a padded row of a batch otherwise than alone .* rows of one length"
        r" together, or one by"
    )
    for run in (bridge.generate, bridge.hf_generate):
        with pytest.warns(UserWarning, match=said):
            run(tokens, max_new_tokens=2, attention_mask=mask, do_sample=False)
    with pytest.warns(UserWarning, match=said):
        next(
            bridge.generate_stream(
                tokens, max_new_tokens=2, attention_mask=mask, padding_side="left", **GREEDY
            )
        )
    assert len(tried) == 1
    for row in rows:
        bridge.generate(row, 2, **GREEDY)  # no warning, which would be an error
    if family == "rwkv":
        with pytest.warns(
            UserWarning, match=f"{name} continues a row of a batch otherwise than alone"
        ):
            bridge.generate(torch.cat([rows[0], rows[0] + 1]), 2, **GREEDY)
    else:
        bridge.generate(torch.cat([rows[0], rows[0] + 1]), 2, **GREEDY)


def test_what_cannot_be_tried_of_a_padded_row_is_said():
    bridge = TransformerBridge(tiny_model("kosmos-2", "image_text"))
    tokens, mask, _ = padded("left")
    given = {
        "pixel_values": torch.zeros(3, 3, 224, 224),
        "image_embeds_position_mask": torch.zeros_like(tokens),
    }
    with pytest.warns(
        UserWarning,
        match="as it would be alone could not be tried .ValueError: You have to specify pixel",
    ):
        options.warn_of_rows(
            bridge, options.prompt_of(bridge, tokens, options.TextOptions(), mask, given), given
        )


def test_a_row_that_is_as_alone_is_tried_once_for_each_model_and_nothing_is_said(monkeypatch):
    bridge, tried = TransformerBridge(tiny("llama")), []
    monkeypatch.setattr(
        options,
        "_row_warning",
        lambda *given, made=options._row_warning: tried.append(1) or made(*given),
    )
    tokens, mask, _ = padded("right")
    seen = []
    with bridge.hooks(
        fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: seen.append(x.shape))]
    ):
        for _ in range(2):
            torch.manual_seed(3)
            state = torch.get_rng_state()
            bridge.generate(tokens, 2, attention_mask=mask, **GREEDY)
            assert torch.equal(torch.get_rng_state(), state)
    assert tried == [1] and [shape[:2] for shape in seen] == [(3, 8), (3, 1)] * 2


FAMILIES = [*ENCODERS_DECODERS, "t5", *DECODERS]


@pytest.mark.parametrize("family", SEEN)
def test_each_row_with_an_image_is_continued_as_it_would_be_alone(family):
    compare_seen(family, range(24))


@pytest.mark.slow
@pytest.mark.parametrize("family", SEEN)
def test_many_rows_with_images_are_continued_as_they_would_be_alone(family):
    compare_seen(family, seeds(500))


def compare_heard(numbers):
    """What a decoder writes of what an encoder hears: nothing is padded."""
    bridge = TransformerBridge(tiny_model("whisper", "speech"))
    bridge.core.generation_config.suppress_tokens = [
        0
    ]  # transformers ends in an error where padding is all it writes
    v = torch.randn(32, generator=torch.Generator().manual_seed(5))
    ways = [
        {},
        {"num_beams": 3},
        {"use_past_kv_cache": False},
        {"num_beams": 3, "num_return_sequences": 2},
    ]
    edits = [
        [],
        [("encoder.1.hook_resid_post", Add(3 * v, positions=-1))],
        [("decoder.1.hook_resid_post", Scale(0.5))],
        [("decoder.0.hook_resid_post", Add(v, positions=0))],
    ]
    for seed in numbers:
        drawn, way, edit = torch.Generator().manual_seed(seed), ways[seed % 4], edits[seed // 2 % 4]
        features = torch.randn(3, 80, 128, generator=drawn)
        begins = torch.randint(3, 60, (3, 1 + seed % 3), generator=drawn)
        with bridge.hooks(fwd_hooks=Interventions(edit, bridge)):
            together = bridge.generate(begins, 5, input_features=features, **way, **GREEDY)
            for i in range(3):
                one, copies = slice(i, i + 1), len(together) // 3
                alone = bridge.generate(
                    begins[one], 5, input_features=features[one], **way, **GREEDY
                )
                assert torch.equal(together[i * copies : (i + 1) * copies], alone), (
                    seed,
                    way,
                    edit,
                    i,
                )


def test_each_row_of_sound_is_written_as_it_would_be_alone():
    compare_heard(range(8))


def test_several_sequences_of_each_sound_are_those_of_rows_that_are_given_several_times():
    """transformers' own Whisper repeats the sound, and not what its decoder begins with: it ends in
    an error there.
    """
    bridge = TransformerBridge(tiny_model("whisper", "speech"))
    bridge.core.generation_config.suppress_tokens = [0]
    features = torch.randn(3, 80, 128, generator=torch.Generator().manual_seed(1))
    begins = torch.tensor([[5, 6], [7, 8], [9, 10]])
    edits = [[], [("encoder.1.hook_resid_post", Add(torch.arange(32.0).sin() * 3, rows=[1]))]]
    for edit in edits:
        for way in ({"do_sample": True}, {"num_beams": 2, "do_sample": False}):
            with bridge.hooks(fwd_hooks=edit):
                torch.manual_seed(0)
                ours = bridge.generate(
                    begins, 5, input_features=features, num_return_sequences=2, **(GREEDY | way)
                )
            with bridge.hooks(fwd_hooks=[(name, Add(op.value, rows=[2, 3])) for name, op in edit]):
                torch.manual_seed(0)
                twice = {"input_features": features.repeat_interleave(2, 0)}
                theirs = bridge.generate(
                    begins.repeat_interleave(2, 0), 5, **twice, **(GREEDY | way)
                )
            assert ours.shape[0] == 6 and torch.equal(ours, theirs)
    assert not torch.equal(
        ours[2], bridge.generate(begins[1:2], 5, input_features=features[1:2], **GREEDY)[0]
    )


@pytest.mark.slow
def test_many_rows_of_sound_are_written_as_they_would_be_alone():
    compare_heard(seeds(500))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_continued_as_it_would_be_alone(family):
    compare(family, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_rows_are_continued_as_they_would_be_alone(family):
    compare(family, seeds(500))


@pytest.mark.parametrize("family", [*ENCODERS_DECODERS, "t5"])
def test_an_encoder_decoder_says_what_hugging_face_says(family):
    bridge = TransformerBridge(made(family))
    tokens, mask, _ = padded("right")
    for way in ({}, {"num_beams": 3}):
        own = bridge.original_model.generate(
            tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, **way
        )
        assert torch.equal(bridge.generate(tokens, 5, attention_mask=mask, **way, **GREEDY), own)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["t5", "BartForConditionalGeneration", "llama"])
def test_a_cache_has_each_token_where_it_was_given(family, side):
    bridge = TransformerBridge(made(family))
    tokens, mask, rows = padded(side)
    out, cache = bridge.generate(tokens, 4, attention_mask=mask, return_cache=True, **GREEDY)
    both = bridge.core.config.is_encoder_decoder
    for i, row in enumerate(rows):
        real = mask[i].bool()
        if both:
            _, run = bridge.run_with_cache(row, decoder_input_ids=out[i : i + 1, :-1])
            pairs = [
                (f"decoder.0.{part}", slice(None)) for part in ("attn.hook_z", "cross_attn.hook_z")
            ]
            pairs += [(f"encoder.1.{part}", real) for part in ("hook_resid_post", "attn.hook_q")]
            pattern = cache["encoder.0.attn.hook_pattern"][i][:, real][:, :, real]
            expected = run["encoder.0.attn.hook_pattern"][0]
        else:
            whole = (
                new_of(bridge, out, 8)[i]
                if side == "left"
                else out[i, row.shape[1] : row.shape[1] + 4]
            )
            _, run = bridge.run_with_cache(torch.cat([row[0], whole])[None, :-1])
            at = torch.arange(11)
            real = (at >= 8 - row.shape[1]) if side == "left" else (at < row.shape[1] + 3)
            pairs = [("blocks.1.hook_resid_post", real), ("blocks.0.attn.hook_k", real)]
            pattern = cache["blocks.0.attn.hook_pattern"][i][:, real][:, :, real]
            expected = run["blocks.0.attn.hook_pattern"][0]
        torch.testing.assert_close(pattern, expected, rtol=1e-3, atol=1e-4)
        for name, where in pairs:
            torch.testing.assert_close(cache[name][i][where], run[name][0], rtol=1e-3, atol=1e-4)


def test_what_goes_along_the_tokens_moves_with_them():
    bridge = TransformerBridge(tiny("gpt2"))
    tokens, mask, rows = padded("right")
    types = torch.randint(3, 60, tokens.shape, generator=torch.Generator().manual_seed(9))
    together = bridge.generate(
        tokens, 4, attention_mask=mask, token_type_ids=types, padding_side="left", **GREEDY
    )
    for i, row in enumerate(rows):
        alone = bridge.generate(row, 4, token_type_ids=types[i : i + 1, : row.shape[1]], **GREEDY)
        assert torch.equal(together[i, 8:], alone[0, row.shape[1] :])
    embeddings = bridge.core.get_input_embeddings()(tokens)
    made = bridge.generate(embeddings, 4, attention_mask=mask, **GREEDY)
    for i, row in enumerate(rows):
        assert torch.equal(made[i], bridge.generate(row, 4, **GREEDY)[0, row.shape[1] :])
    with pytest.raises(
        ValueError,
        match="mine has the shape of the tokens: whether it goes along them is not known",
    ):
        bridge.hf_generate(tokens, attention_mask=mask, mine=types)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_rows_are_those_that_were_given(kind):
    bridge = TransformerBridge(made(kind))
    both = bridge.core.config.is_encoder_decoder
    name = "decoder.1.hook_resid_post" if both else "blocks.1.hook_resid_post"
    tokens = padded("left")[0][:, 5:]
    vectors = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(1)) * 3
    for way in ({"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        for op, one in (
            (Add(vectors[1, 0], rows=[1]), lambda i: Add(float(i == 1) * vectors[1, 0])),
            (Add(vectors), lambda i: Add(vectors[i, 0])),
        ):
            with bridge.hooks(fwd_hooks=[(name, op)]):
                together = bridge.generate(tokens, 4, **way, **GREEDY)
            alone = []
            for i in range(3):
                with bridge.hooks(fwd_hooks=[(name, one(i))]):
                    alone.append(bridge.generate(tokens[i : i + 1], 4, **way, **GREEDY))
            assert torch.equal(together, torch.cat(alone))


def test_keys_of_cross_attention_are_edited_under_beams():
    bridge = TransformerBridge(made("t5"))
    tokens, mask, rows = padded("right")
    for pair in (
        ("decoder.1.cross_attn.hook_pattern", Scale(0.3, keys=-1)),
        ("decoder.1.cross_attn.hook_k", Zero(positions=-1)),
    ):
        with bridge.hooks(fwd_hooks=[pair]):
            together = bridge.generate(tokens, 4, attention_mask=mask, num_beams=2, **GREEDY)
            assert torch.equal(
                together,
                torch.cat([bridge.generate(row, 4, num_beams=2, **GREEDY) for row in rows]),
            )


def sound():
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=[16] * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        vocab_size=40,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    return shaken(Wav2Vec2ForCTC(config), 0.1)


def compare_padded_sound(numbers):
    """Runs of an encoder of sound: each row's frames, and an edit of them, are those of a run
    alone.
    """
    bridge, name = TransformerBridge(sound()), "blocks.1.hook_resid_pre"
    lengths_of = bridge.core._get_feat_extract_output_lengths
    for seed in numbers:
        drawn = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2000, 6000, (3,), generator=drawn)
        rows = [torch.randn(int(n), generator=drawn) for n in lengths]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(row)).long() for row in rows], batch_first=True
        )
        edit = (name, Add(torch.arange(32.0).sin(), positions=(-1, 0, 2)[seed % 3]))
        with bridge.hooks(fwd_hooks=[edit]):
            together = bridge(x, attention_mask=mask)
            for i, row in enumerate(rows):
                alone = bridge(row[None], attention_mask=torch.ones(1, len(row)).long())
                assert alone.shape[1] == int(lengths_of(lengths[i]))
                torch.testing.assert_close(
                    together[i : i + 1, : alone.shape[1]], alone, rtol=1e-3, atol=1e-4
                )


@torch.no_grad()
def test_padded_sound_is_what_it_is_alone():
    compare_padded_sound(range(4))


@torch.no_grad()
@pytest.mark.slow
def test_much_padded_sound_is_what_it_is_alone():
    compare_padded_sound(seeds(500))


def test_positions_of_padded_sound_are_counted_in_its_frames():
    bridge, name = TransformerBridge(sound()), "blocks.1.hook_resid_pre"
    x = torch.randn(2, 6000, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 6000, dtype=torch.long)
    mask[1, 4000:], x[1, 4000:] = 0, 0
    frames = [
        int(bridge.core._get_feat_extract_output_lengths(torch.tensor(n))) for n in (6000, 4000)
    ]
    given = {"input_values": x, "attention_mask": mask, "names_filter": name}
    _, plain = bridge.run_with_cache(**given)
    for position in (-1, 0):
        with bridge.hooks(fwd_hooks=[(name, Add(torch.ones(32), positions=position))]):
            _, edited = bridge.run_with_cache(**given)
        for i, n in enumerate(frames):
            found = (edited[name] - plain[name]).abs().amax(-1)[i].nonzero().flatten().tolist()
            assert found == [position % n]
    holes = mask.clone()
    holes[0, :100] = 0
    with (
        bridge.hooks(fwd_hooks=[(name, Add(1.0, positions=-1))]),
        pytest.raises(ValueError, match="positions are not"),
    ):
        bridge.run_with_cache(**{**given, "attention_mask": holes})


def test_a_hook_of_the_users_own_sees_no_trial():
    bridge = TransformerBridge(tiny_model("llama"))
    seen = []
    handle = bridge.original_model.register_forward_hook(lambda *call: seen.append(1))
    tokens = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = (tokens > 0).long()
    bridge.hf_generate(
        tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    handle.remove()
    assert len(seen) == 3
