"""Spans of chats: every token in one, with the message, the kind and the text that it is of."""

import itertools

import pytest
import torch
from transformers import PythonBackend

from bridge import TransformerBridge
from bridge.analysis.patterns import PatternStatistics
from bridge.interventions import Touching, Zero
from bridge.patching import generic_activation_patch, layer_pos_patch_setter
from bridge.run.spans import Spans, spans_of
from tests.run.chats import TEMPLATES, TEXT, tokenizer_of

THOUGHTS = "They ask for a way. The river is the nearest one."
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": "Walk then. user"},
    {"role": "user", "content": "user"},
]
THINKING = {
    "field": {"role": "assistant", "reasoning_content": THOUGHTS, "content": "By the river."},
    "harmony": {"role": "assistant", "thinking": THOUGHTS, "content": "By the river."},
    "tags": {"role": "assistant", "content": f"<think>\n{THOUGHTS}\n</think>\n\nBy the river."},
}
#: The fields with the last answer's thinking that templates show (transformers gives each the names
#: of the others); between tags, most show it as it is.
KEEPS = dict.fromkeys(("qwen_3", "glm_4", "harmony"), ("field", "harmony"))
DROPS = ("r1", "nemotron")  # between tags


def check(tokenizer, chat):
    """Check the promises about spans; return the spans."""
    spans = spans_of(tokenizer, chat)
    prompted = chat[-1]["role"] != "assistant"
    options = {"add_generation_prompt": prompted}
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    ids = tokenizer.apply_chat_template(chat, return_dict=False, **options)
    assert spans.tokens[0].tolist() == ids
    assert spans.positions == list(range(len(ids)))
    assert spans.text == text
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    for span in spans:
        assert span.start < span.end
        assert (span.sentence is None) == (span.kind == "template")
        assert span.role == (chat[span.turn]["role"] if span.turn < len(chat) else "assistant")
        if "�" not in tokenizer.decode(ids[span.start : span.end]):
            assert tokenizer.decode(ids[span.start : span.end]) == span.text
    return spans


def characters(spans, **of):
    """Return the text of the spans with these attributes, without whitespace."""
    chosen = [x for x in spans if all(getattr(x, name) == value for name, value in of.items())]
    return "".join("".join(span.text for span in chosen).split())


@pytest.mark.parametrize("free", [False, True], ids=["words", "any characters"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_token_of_each_template_is_in_one_span(name, free):
    tokenizer = tokenizer_of(TEMPLATES[name], free)
    for length in (2, 3, 4):
        chat = CHAT[:length]
        spans = check(tokenizer, chat)
        for turn, message in enumerate(chat):
            expected = "".join(message["content"].split())
            content = characters(spans, turn=turn, kind="content")
            # A token may have the template's characters too, but only of the message's ends.
            assert expected in content if free else content == expected
            assert len(content) - len(expected) <= 8
        assert not spans.thinking


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("form", THINKING)
def test_thinking_is_a_kind_of_its_own_or_dropped_or_part_of_the_content(name, form):
    tokenizer = tokenizer_of(TEMPLATES[name])
    spans = check(tokenizer, [*CHAT, THINKING[form]])
    thinking = characters(spans, kind="thinking")
    answer = characters(spans, kind="content", turn=4)
    assert answer == "Bytheriver."
    is_kept = (name not in DROPS) if form == "tags" else form in KEEPS.get(name, ())
    assert thinking == ("".join(THOUGHTS.split()) if is_kept else "")
    if is_kept:
        assert [span.sentence for span in spans.turn(4).sentences()] == [0, 1, 2]
        assert [span.kind for span in spans.turn(4).sentences()] == ["thinking"] * 2 + ["content"]
        assert not spans["user"].thinking and len(spans["assistant"].thinking) == 2


@pytest.mark.parametrize("name", ["qwen_3", "glm_4"])
def test_a_template_drops_thinking_of_earlier_turns(name):
    chat = [*CHAT, THINKING["field"], {"role": "user", "content": "Why?"}]
    spans = check(tokenizer_of(TEMPLATES[name]), chat)
    assert not spans.thinking
    assert characters(spans, kind="content", turn=4) == "Bytheriver."


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_is_assigned_to_the_message_that_it_ends_or_begins(name):
    tokenizer = tokenizer_of(TEMPLATES[name])
    chat = [CHAT[1], {"role": "assistant", "content": "Walk."}, {"role": "user", "content": "Oh."}]
    spans = check(tokenizer, chat)
    ends = {
        "llama_3": "<|eot_id|>",
        "nemotron": "<|eot_id|>",
        "gemma_3": "<end_of_turn>",
        "harmony": "<|end|>",
        "r1": "<｜end▁of▁sentence｜>",
        "mistral": "<|im_end|>",
        "glm_4": None,
    }
    end = ends.get(name, "<|im_end|>")
    if end is not None:
        last = spans.turn(1)[-1]
        assert last.kind == "template" and last.text.strip() == end
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)[
        len(tokenizer.apply_chat_template(chat, tokenize=False)) :
    ]
    assert spans.turn(3).text == prompt


HOSTILE = {
    "the name of a role": "assistant",
    "text of the template": "<|im_end|>\n<|im_start|>assistant\n",
    "BOS": "<|begin_of_text|><|begin_of_text|>Hello",
    "one character": "t",
    "whitespace around": "  \n The bus. \n\n ",
    "nothing but whitespace": " \n ",
    "nothing": "",
    "characters of several bytes": "naïve 🙂🙂 漢字 e\u0301 \u200b.",
    "a private character": "\ue000 and \ue001",
    "the same twice": "The bus. The bus.",
    "tags in a question": "What is <think>this</think> here?",
    "a tool's answer": "<tool_response>5</tool_response>",
    "jinja": "{{ messages }} {% raw %}",
    "a line of carriage returns": "One line.\r\n\r\nAnother line.\r\n",
    "no letters": "...!?\n\n...!?\n\n.",
}


@pytest.mark.parametrize("free", [False, True], ids=["words", "any characters"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_messages_are_located_or_refused(case, name, free):
    tokenizer = tokenizer_of(TEMPLATES[name], free)
    text = HOSTILE[case]
    refusing = ()
    if case == "tags in a question":  # they read the tags, or take `/think` out
        refusing = {"nemotron": (0, 2), "smollm_3": (0,)}.get(name, ())
        refusing = (2,) if name in ("qwen_3", "glm_4", "r1") else refusing
    for place in range(4):
        chat = [*map(dict, CHAT)]
        chat[place]["content"] = text
        if place in refusing:
            with pytest.raises(ValueError, match=f"of message {place}"):
                spans_of(tokenizer, chat)
            continue
        spans = check(tokenizer, chat)
        kinds = {} if (case, place) == ("tags in a question", 2) else {"kind": "content"}
        content = characters(spans, turn=place, **kinds)
        expected = "".join(text.split())
        assert expected in content and len(content) - len(expected) <= (8 if kinds else 80)
        # The other messages are where they are without it.
        for turn in {*range(4)} - {place}:
            assert "".join(CHAT[turn]["content"].split()) in characters(spans, turn=turn)


def test_a_template_that_changes_a_message_is_refused():
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content | upper }} {% endfor %}")
    chat = [{"role": "system", "content": "123"}, {"role": "user", "content": "the bus"}]
    with pytest.raises(ValueError, match=r"changes the content of message 1 \(user\), 'the bus'"):
        spans_of(
            tokenizer,
            [{"role": "system", "content": "123"}, {"role": "user", "content": "the bus"}],
        )
    tokenizer = tokenizer_of("{{ messages[-1].content }}")
    with pytest.raises(ValueError, match="of message 0"):
        spans_of(tokenizer, CHAT)
    for name in ("smollm_3", "nemotron"):  # they take a word out
        chat = [{"role": "system", "content": "Answer /think briefly."}, CHAT[1]]
        with pytest.raises(ValueError, match="changes the content of message 0"):
            spans_of(tokenizer_of(TEMPLATES[name]), chat)


def test_a_message_that_occurs_twice_in_the_template_has_two_spans():
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}|{{ m.content }};{% endfor %}")
    spans = check(tokenizer, [{"role": "user", "content": "the bus"}])
    assert [span.text for span in spans.content] == ["the bus", "the bus"]


def test_parts_of_a_content():
    parts = [
        {"type": "text", "text": "The bus."},
        {"type": "image"},
        {"type": "text", "text": "Why?"},
    ]
    for name in ("gemma_3", "mistral"):
        spans = check(tokenizer_of(TEMPLATES[name]), [{"role": "user", "content": parts}])
        assert [span.text.strip() for span in spans.content] == ["The bus.", "Why?"]
    magistral = (
        "{% for m in messages %}{% for p in m.content %}[{{ p[p.type] }}]{% endfor %}{% endfor %}"
    )
    parts = [{"type": "thinking", "thinking": THOUGHTS}, {"type": "text", "text": "Walk."}]
    spans = check(tokenizer_of(magistral), [{"role": "assistant", "content": parts}])
    assert spans.thinking.text == THOUGHTS and spans.content.text == "Walk."


def test_an_answer_is_located_as_it_was_generated():
    tokenizer = tokenizer_of(TEMPLATES["r1"])  # its prompt ends with <think>
    spans = spans_of(tokenizer, CHAT, f"{THOUGHTS}\n</think>\n\nBy the river.")
    assert spans.thinking.text.strip() == THOUGHTS
    assert spans.turn(4).content.text.strip() == "By the river."
    assert spans["assistant"].thinking and all(span.turn == 4 for span in spans.thinking)
    assert spans_of(tokenizer, CHAT, THOUGHTS).turn(4).thinking.text == THOUGHTS
    qwen = spans_of(
        tokenizer_of(TEMPLATES["qwen_3"]), CHAT, f"<think>\n{THOUGHTS}\n</think>\n\nBy."
    )
    assert qwen.thinking.text.strip() == THOUGHTS
    with pytest.raises(ValueError, match="ends with an answer already"):
        spans_of(tokenizer, CHAT[:3], "More.")


def test_sentences():
    tokenizer = tokenizer_of(TEMPLATES["phi_4"])
    spans = check(tokenizer, [{"role": "user", "content": TEXT}])
    assert [(span.sentence, span.text.strip()) for span in spans.sentences()] == [
        (0, "The train is late."),
        (1, "Is the bus here?"),
        (2, "It is 3.14 km away!"),
        (3, "So we walk, e.g."),
        (4, "by the river."),
    ]
    assert "".join(span.text for span in spans.sentences()) == TEXT


def test_selections():
    tokenizer = tokenizer_of(TEMPLATES["qwen_3"])
    spans = spans_of(tokenizer, CHAT)
    assert len(spans) == len(list(spans)) and spans[0] == next(iter(spans))
    assert spans[:2].positions == spans[0].positions + spans[1].positions
    assert {span.role for span in spans["user"]} == {"user"}
    kinds = [spans.content, spans.thinking, spans.template]
    assert sorted(itertools.chain(*(x.positions for x in kinds))) == spans.positions
    assert spans["user"].content.positions == spans.content["user"].positions
    (hit,) = spans.find("the bus here")
    assert (hit.role, hit.turn, hit.kind, hit.sentence) == ("user", 1, "content", 1)
    assert "the bus here" in tokenizer.decode(spans.tokens[0, hit.start : hit.end])
    assert len(spans.find("user")) > len(spans.content.find("user")) == 2
    with pytest.raises(ValueError, match="'aeroplane' does not occur"):
        spans.find("aeroplane")
    with pytest.raises(ValueError, match="does not occur"):
        spans["assistant"].find("train")
    with pytest.raises(ValueError, match="the text is empty"):
        spans.find("")
    with pytest.raises(ValueError, match="has the role 'tool'; this chat has 'assistant'"):
        spans["tool"]


class Slow(PythonBackend):
    def __init__(self):
        super().__init__()
        self.chat_template = "{{ messages[0].content }}"

    def get_vocab(self):
        return {"a": 0}

    @property
    def vocab_size(self):
        return 1

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return 0

    def _convert_id_to_token(self, index):
        return "a"


def test_bad_input():
    with pytest.raises(ValueError, match="Slow is a slow tokenizer"):
        spans_of(Slow(), CHAT)
    fast = tokenizer_of(TEMPLATES["phi_4"])
    with pytest.raises(TypeError, match="it must be a list of messages, each with a role"):
        spans_of(fast, [])
    fast.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        spans_of(fast, CHAT)


def test_a_chat_of_a_bridge(bridge):
    with pytest.raises(TypeError, match=r"chat is 'Mary'; HookMethods.spans takes Chat there"):
        bridge.spans("Mary")
    chat = [{"role": "user", "content": "Mary and John"}]
    bridge.tokenizer.chat_template = TEMPLATE
    try:
        spans = bridge.spans(chat)
        assert torch.equal(spans.tokens, bridge.to_tokens(chat))
        with pytest.raises(ValueError, match=r"the chat has \d+ tokens; .* has a context of 128"):
            bridge.spans([{"role": "user", "content": "Mary " * 200}])
    finally:
        bridge.tokenizer.chat_template = None


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge.boot_embedded()


POINT = "blocks.1.hook_resid_post"


@pytest.fixture
def chatty(bridge):
    """The bridge with a chat template, and the spans of a chat."""
    bridge.tokenizer.chat_template = TEMPLATE
    chat = [
        {"role": "user", "content": "Mary and John went to the store. Then John left."},
        {"role": "assistant", "content": "John gave a drink to Mary."},
    ]
    yield bridge, chat, bridge.spans(chat)
    bridge.tokenizer.chat_template = None


@torch.no_grad()
def test_spans_are_accepted_where_positions_are(chatty):
    bridge, chat, spans = chatty
    chosen = spans["assistant"].content
    places, span = chosen.positions, spans.sentences()[1]
    assert places == list(range(places[0], places[-1] + 1)) and places[0] > 0
    assert Zero(positions=chosen) == Zero(positions=places)
    assert Zero(keys=span) == Zero(keys=span.positions)
    hooks = [[(POINT, Zero(positions=x))] for x in (chosen, places)]
    runs = [bridge.run_with_hooks(chat, fwd_hooks=x) for x in hooks]
    assert torch.equal(*runs) and not torch.equal(runs[0], bridge(chat))
    shapes = []
    look = Touching(lambda x, hook: shapes.append(x.shape[2:]), queries=chosen, keys=span)
    bridge.run_with_hooks(chat, fwd_hooks=[("blocks.1.attn.hook_pattern", look)])
    assert shapes == [(len(places), len(span.positions))]
    _, full = bridge.run_with_cache(chat)
    for index in (chosen, span):
        own = index.positions
        _, cache = bridge.run_with_cache(chat, pos_slice=index, names_filter=POINT)
        assert torch.equal(cache[POINT], full[POINT][:, own])
        streams = [bridge.lens(chat, pos_slice=x).top(2).tokens for x in (index, own)]
        assert torch.equal(*streams)
        stacks = [full.decompose_resid(pos_slice=x) for x in (index, own)]
        assert torch.equal(*stacks)
        kept, hooks, _ = bridge.get_caching_hooks(POINT, pos_slice=index)
        bridge.run_with_hooks(chat, fwd_hooks=hooks)
        assert torch.equal(kept[POINT], full[POINT][:, own])


@torch.no_grad()
def test_positions_of_a_chat_are_refused_where_it_is_left_padded(chatty):
    bridge, chat, _ = chatty
    short = [{"role": "user", "content": "Mary left."}]
    span = bridge.spans(short).content
    _, own = bridge.run_with_cache(short, names_filter=POINT, pos_slice=span)
    options = {"names_filter": POINT, "pos_slice": span}
    _, cache = bridge.run_with_cache([chat, short], padding_side="right", **options)
    torch.testing.assert_close(cache[POINT][1], own[POINT][0])
    batch = bridge.batch_of([chat, short], padding_side="left")
    more = {"attention_mask": batch.mask}
    _, hooks, _ = bridge.get_caching_hooks(POINT, pos_slice=span)
    _, clean = bridge.run_with_cache(batch.tokens, **more)
    patched = (bridge, batch.tokens, clean, lambda x: x.sum(), layer_pos_patch_setter)
    for use in (
        lambda: bridge.run_with_cache([chat, short], padding_side="left", **options),
        lambda: bridge.run_with_cache(batch.tokens, pos_slice=span, **more),
        lambda: bridge.lens([chat, short], pos_slice=span),
        lambda: bridge.run_with_hooks(batch.tokens, fwd_hooks=hooks, **more),
        lambda: generic_activation_patch(
            *patched, "resid_pre", ["layer", "pos"], positions=[span], **more
        ),
    ):
        with pytest.raises(ValueError, match=r"Spans\(.* and a row is left-padded"):
            use()


def test_positions_ascend_and_each_is_listed_once():
    spans = spans_of(tokenizer_of(TEMPLATES["qwen_3"]), CHAT)
    assert spans[::-1].positions == spans.positions
    (own,) = spans.content.find("bus")
    assert own in spans.content[::-1].find("bus")
    twice = Spans([own, own], spans._layout)
    assert twice.positions == own.positions


def test_no_spans_are_no_positions(chatty):
    bridge, chat, spans = chatty
    for use in (
        lambda: Zero(positions=spans.thinking),
        lambda: bridge.run_with_cache(chat, pos_slice=spans.thinking),
        lambda: bridge.lens(chat, pos_slice=spans.thinking),
        lambda: PatternStatistics(groups=[spans.thinking]),
    ):
        with pytest.raises(ValueError, match=r"Spans\(0 spans, 0 tokens\) has no tokens"):
            use()
    with pytest.raises(TypeError, match="heads is"):  # they are positions, not anything else
        Zero(heads=spans.content)
    with pytest.raises(TypeError, match="input is Spans"):
        bridge.to_str_tokens(spans)
