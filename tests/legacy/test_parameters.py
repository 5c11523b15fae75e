"""The parameters of a model in its tree: what optimizers, other modules and filters by name
find.
"""

import copy
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from bridge.legacy import HookedEncoder, HookedEncoderDecoder, HookedTransformer
from tests.reference import DATA, reference

ROOT = Path(__file__).resolve().parents[2]
TOKENS = reference("gpt2")["tokens"]
GROKKING = {
    "n_layers": 1,
    "n_heads": 2,
    "d_model": 16,
    "d_head": 8,
    "d_mlp": 32,
    "act_fn": "relu",
    "normalization_type": None,
    "d_vocab": 8,
    "d_vocab_out": 7,
    "n_ctx": 3,
    "seed": 999,
    "device": "cpu",
}


def fresh(family="gpt2"):
    return HookedTransformer.from_pretrained_no_processing(str(DATA / family), device="cpu")


def ids(parameters):
    return {id(parameter) for parameter in parameters}


def test_biases_are_frozen_by_their_names():
    """The second cell of the notebook on grokking."""
    model = HookedTransformer(GROKKING)
    assert {name for name, _ in model.named_parameters()} == set(model.state_dict())
    for name, parameter in model.named_parameters():
        if "b_" in name:
            parameter.requires_grad = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model(torch.tensor([[1, 2, 7], [3, 6, 7]]))[:, -1, 0].sum().backward()
        optimizer.step()
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {name for name in before if ".b_" not in name}


@pytest.mark.parametrize(
    ("family", "some"),
    [
        (
            "gpt2",
            {
                "blocks.0.attn.W_Q+W_K+W_V",
                "blocks.1.attn.b_Q+b_K+b_V",
                "blocks.0.ln1.w",
                "pos_embed.W_pos",
            },
        ),
        ("llama", {"blocks.0.attn.W_Q", "blocks.0.attn._W_K", "blocks.1.mlp.W_gate", "ln_final.w"}),
        (
            "gemma2",
            {"blocks.0.ln1.weight", "blocks.0.mlp.W_in", "embed.weight"},
        ),  # computed from what is stored
    ],
)
def test_each_parameter_is_there_once_where_its_weight_is(family, some):
    model = fresh(family)
    named, theirs = list(model.named_parameters()), list(model.original_model.parameters())
    assert ids(p for _, p in named) == ids(theirs) and len(named) == len(theirs)
    assert some <= {name for name, _ in named}
    for name, parameter in named:
        last = name.rpartition(".")[2]
        if "+" not in last and name in model.weights.getters:
            assert sorted(model.weights[name].flatten().tolist()) == sorted(
                parameter.flatten().tolist()
            )
    blocks = {p for name, p in named if name.startswith("blocks.")}
    assert ids(model.blocks.parameters()) == ids(blocks)
    assert ids(model.blocks[1:].parameters()) | ids(model.blocks[0].parameters()) == ids(blocks)
    assert ids(model.unembed.parameters()) == ids(
        [model.core.get_output_embeddings().weight]
    )  # tied, or not


def test_every_parameter_of_an_encoder_is_there():
    model = HookedEncoder.from_pretrained(str(DATA / "bert"), device="cpu")
    assert ids(model.parameters()) == ids(model.original_model.parameters())
    model.load_state_dict(model.state_dict())


class Probe(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(model.cfg.d_vocab_out, 2)

    def forward(self, tokens):
        return self.head(self.model(tokens))


def test_a_module_around_the_model_has_its_parameters():
    model = fresh()
    probe, hf = Probe(model), list(model.original_model.parameters())
    assert ids(probe.parameters()) == ids([*hf, *probe.head.parameters()])
    before = model.W_in.clone()
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    probe(TOKENS)[..., 0].mean().backward()
    optimizer.step()
    assert not torch.equal(model.W_in, before)
    probe.zero_grad()
    assert all(parameter.grad is None for parameter in hf)
    model.blocks.requires_grad_(False)
    frozen = {name for name, p in model.original_model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.original_model.named_parameters() if ".h." in name}
    alone, changed = copy.deepcopy(probe), fresh()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(2)
    average = torch.optim.swa_utils.AveragedModel(fresh())
    average.update_parameters(changed)
    assert torch.equal(average(TOKENS), changed(TOKENS))
    assert torch.equal(alone(TOKENS), probe(TOKENS))


def test_what_was_put_in_is_there_and_what_it_replaced_is_not():
    model = fresh()
    old = ids(model.blocks[0].mlp.parameters())
    model.blocks[0].mlp = nn.Linear(model.cfg.d_model, model.cfg.d_model)
    model.blocks[0].attn.tally = nn.Parameter(torch.ones(2))
    named = dict(model.named_parameters())
    assert named["blocks.0.mlp.weight"] is model.blocks[0].mlp.weight
    assert named["blocks.0.attn.tally"] is model.blocks[0].attn.tally
    assert not ids(named.values()) & old
    state = model.state_dict()
    assert {"blocks.0.attn.tally", "blocks.0.attn.W_Q"} <= set(state)
    model.extra = nn.Parameter(torch.ones(3))
    for changed in (copy.deepcopy(model).double(), copy.deepcopy(model).to("cpu", torch.float64)):
        assert {parameter.dtype for parameter in changed.parameters()} == {torch.float64}
    del model.extra
    copied = copy.deepcopy(model)
    assert set(copied.state_dict()) == set(state)
    assert copied.blocks[0].attn.tally is not model.blocks[0].attn.tally
    model.load_state_dict(state | {"blocks.0.attn.tally": torch.zeros(2)})
    assert model.blocks[0].attn.tally.tolist() == [0, 0]
    del state["blocks.0.attn.tally"]
    with pytest.raises(RuntimeError, match=r"Missing .*blocks\.0\.attn\.tally"):
        model.load_state_dict(state)
    adapted = model.original_model.transformer.h[
        1
    ].attn  # as adapters of the Hugging Face model are
    adapted.c_proj.added = nn.Linear(2, 2)
    assert (
        dict(model.named_parameters())["blocks.1.attn.c_proj.added.bias"]
        is adapted.c_proj.added.bias
    )


def test_what_would_change_nothing_is_refused():
    model = fresh()
    plain, own = model(TOKENS), dict(model.named_parameters())
    for change in (
        lambda: torch.func.functional_call(
            model, {name: 2 * x for name, x in own.items()}, (TOKENS,)
        ),
        lambda: nn.utils.parametrize.register_parametrization(
            model.blocks[0].mlp, "W_in", nn.Identity()
        ),
        lambda: delattr(model.embed, "W_E"),
        lambda: model.embed.register_parameter("W_E", nn.Parameter(model.W_E.clone())),
    ):
        with pytest.raises((TypeError, KeyError), match=r"cannot be exchanged here|already exists"):
            change()
    for change in (
        lambda: model.blocks.__delitem__(1),
        lambda: model.blocks.append(nn.Identity()),
        lambda: model.blocks.pop(0),
        lambda: model.blocks.insert(0, nn.Identity()),
        lambda: setattr(model, "blocks", model.blocks[:1]),
        lambda: model.blocks.add_module("2", nn.Identity()),
        lambda: delattr(model.blocks, "1"),
    ):
        with pytest.raises(TypeError, match="blocks are as many as the model has: stop_at_layer"):
            change()
    for change in (
        lambda: delattr(model.blocks[0], "mlp"),
        lambda: delattr(model, "unembed"),
        lambda: delattr(model, "hook_embed"),
    ):
        with pytest.raises(
            TypeError, match="is the Hugging Face model's: put a module in its place"
        ):
            change()
    assert torch.equal(model(TOKENS), plain)


PLACES = {
    "an assignment": lambda model, new: setattr(model.blocks[0], "mlp", new),
    "add_module": lambda model, new: model.blocks[0].add_module("mlp", new),
    "register_module": lambda model, new: model.blocks[0].register_module("mlp", new),
    "set_submodule": lambda model, new: model.set_submodule("blocks.0.mlp", new),
    "a block": lambda model, new: setattr(model.blocks, "0", new),
    "a block by set_submodule": lambda model, new: model.set_submodule("blocks.0", new),
    "of the model": lambda model, new: model.add_module("embed", new),
}


class Zeros(nn.Module):
    def __init__(self, width=None):
        super().__init__()
        self.width = width

    def forward(self, x):
        return torch.zeros(*x.shape, self.width) if self.width else x * 0


@pytest.mark.parametrize("way", PLACES)
def test_every_way_to_exchange_a_module_acts(way):
    model = fresh()
    PLACES[way](model, Zeros(32 if way == "of the model" else None))
    point = {"of the model": "hook_embed"}.get(
        way, "blocks.0.hook_resid_post" if "block" in way else "blocks.0.hook_mlp_out"
    )
    hooks = [(point, lambda x, hook: x * 0)]
    assert torch.equal(model(TOKENS), fresh().run_with_hooks(TOKENS, fwd_hooks=hooks))


def test_torch_hooks_of_gradients_before_a_part_are_called():
    model, seen = fresh(), []
    handle = model.blocks[0].mlp.register_full_backward_pre_hook(
        lambda part, gradient: seen.append(gradient[0])
    )
    model.add_hook("blocks.0.hook_mlp_out", lambda gradient, hook: seen.append(gradient), "bwd")
    model(TOKENS, return_type="loss").backward()
    handle.remove()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])


def test_threads_find_the_same_parameters():
    model, found, errors = fresh(), set(), []
    expected = len(list(model.original_model.parameters()))

    def look():
        try:
            for _ in range(40):
                found.add(len(list(model.named_parameters())))
        except KeyError as error:
            errors.append(error)

    def save():
        for _ in range(40):
            found.add(len(model.state_dict()) - len(keys) + expected)

    keys, before = model.state_dict(), sys.getswitchinterval()
    threads = [threading.Thread(target=target) for target in (look, look, save)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors and found == {expected}


def test_looking_an_attribute_up_lists_no_parameters(monkeypatch):
    model = fresh()
    monkeypatch.setattr(
        HookedTransformer, "_sort_parameters", lambda self: pytest.fail("parameters were listed")
    )
    assert (
        model.blocks[1].attn.W_Q.shape == (4, 32, 8)
        and model.hook_embed is model.hook_dict["hook_embed"]
    )
    model.note = 1
    assert not hasattr(model, "not_there")


ORDERS = json.loads((ROOT / "tests/data/hooked_transformer_order.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ORDERS["models"])
def test_names_come_in_hooked_transformers_order(kind):
    """The file holds what `named_parameters` and `state_dict` of TransformerLens 2.18 list, without
    masks.
    """
    made, theirs = ORDERS["models"][kind], ORDERS["models"][kind]["names"]
    make = {"bert": HookedEncoder, "t5": HookedEncoderDecoder}.get(kind, HookedTransformer)
    model = make(ORDERS["base"] | made["config"])
    ours = list(model.state_dict())
    assert [name for name in ours if name in theirs] == [name for name in theirs if name in ours]
    assert set(theirs) - set(ours) <= {name for name in theirs if kind == "t5" and ".b_" in name}
    named = [name for name, _ in model.named_parameters()]
    assert [name for name in named if name in theirs] == [name for name in theirs if name in named]
    assert [name for name, _ in copy.deepcopy(model).named_parameters()] == named


def test_a_loaded_models_names_come_in_this_order_too():
    model = fresh()
    inside = [
        name.removeprefix("blocks.0.")
        for name in model.state_dict()
        if name.startswith("blocks.0.")
    ]
    attn = [f"attn.{name}" for name in ["W_Q", "W_O", "b_Q", "b_O", "W_K", "W_V", "b_K", "b_V"]]
    mlp = [f"mlp.{name}" for name in ["W_in", "b_in", "W_out", "b_out"]]
    assert inside == ["ln1.w", "ln1.b", "ln2.w", "ln2.b", *attn, *mlp]
    named = [name for name, _ in model.named_parameters()]
    assert named[:4] == ["embed.W_E", "pos_embed.W_pos", "blocks.0.ln1.w", "blocks.0.ln1.b"]
    assert [name for name in named if "0.attn" in name] == [
        f"blocks.0.attn.{name}" for name in ("W_Q+W_K+W_V", "W_O", "b_Q+b_K+b_V", "b_O")
    ]
    assert [id(p) for p in model.parameters()] == [id(p) for _, p in model.named_parameters()]


def test_a_fill_after_a_seed_is_hooked_transformers():
    model = HookedTransformer(GROKKING)
    torch.manual_seed(3)
    model.load_state_dict(
        {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    )
    torch.manual_seed(3)
    drawn = [torch.randn(shape) for shape in ((8, 16), (3, 16), (2, 16, 8))]
    assert all(map(torch.equal, drawn, (model.W_E, model.W_pos, model.W_Q[0])))
