"""Other people's repositories, with nothing changed but the import, give HookedTransformer's
numbers: `make programs`.

Each runs twice, in processes of their own: with TransformerLens 2.18 and with `bridge.legacy` under
its name.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tests.clients.programs import hub

ROOT = pathlib.Path(__file__).parent.parent.parent
#: Where checkouts are, the Python that has TransformerLens 2.18, packages that they need besides,
#: GPT-2's vocabulary.
FOLDER, THEIRS = os.environ.get("PROGRAMS"), os.environ.get("PROGRAMS_REFERENCE")
SITE, VOCABULARY = os.environ.get("PROGRAMS_SITE", ""), os.environ.get("PROGRAMS_VOCABULARY", "")
#: Each program, the folder in its repository that is imported from, and how far numbers may be from
#: each other, of the largest. (An effect of ACDC is the difference of two divergences in float32.)
PROGRAMS = {
    "acdc": ("Automatic-Circuit-Discovery", 1e-4),
    "activation_additions": ("activation_additions", 1e-5),
    "eap_ig": ("EAP-IG/src", 1e-5),
    "iit": ("iit", 1e-5),
    "interp_bench": ("InterpBench", 1e-5),
    "path_patching": ("path_patching", 1e-5),
    "transcoder_circuits": ("transcoder_circuits", 1e-5),
    "universal_neurons": ("universal-neurons", 1e-5),
}
DEMOS, ARENA = "TransformerLens/demos", "ARENA_3.0/chapter1_transformer_interp/exercises"
TRAINED = "says what a trained model does"
#: Notebooks and files of cells: how many layers GPT-2 has there, and which cells are not compared,
#: with the reason.
NOTEBOOKS = {
    f"{DEMOS}/Main_Demo.ipynb": (
        12,
        {
            23: "prints names and shapes of parameters, which are the model's own",
            57: "loads checkpoints",
            59: "loads checkpoints",
        },
    ),
    f"{DEMOS}/Exploratory_Analysis_Demo.ipynb": (
        12,
        {32: "stacks the best heads of middle layers: there are none"},
    ),
    f"{DEMOS}/Head_Detector_Demo.ipynb": (12, {1: "uses a name that it does not define"}),
    f"{DEMOS}/ARENA_Content.ipynb": (2, {}),
    f"{DEMOS}/Othello_GPT.ipynb": (2, {}),
    f"{ARENA}/part1_transformer_from_scratch/solutions.py": (
        12,
        {
            12: "prints shapes of parameters, which are the model's own",
            **dict.fromkeys((16, 22, 23, 24, 25), "tests parts of GPT-2's size"),
            **dict.fromkeys(
                range(32, 40),
                "trains for thousands of steps, on more rows than the texts here make",
            ),
            **dict.fromkeys((40, 41, 45, 47, 51, 52, 53), TRAINED),
        },
    ),
    f"{ARENA}/part2_intro_to_mech_interp/solutions.py": (
        12,
        {
            10: "downloads weights before there is a model",
            11: "uses them",
        },
    ),
    f"{ARENA}/part41_indirect_object_identification/solutions.py": (
        12,
        {
            **dict.fromkeys((17, 20, 22, 24), "compares all layers, of which two are patched"),
            45: (
                "`stack_head_results` leaves heads in their cache; means of singular vectors have"
                " no sign"
            ),
        },
    ),
    f"{ARENA}/part51_balanced_bracket_classifier/solutions.py": (2, {}),
    f"{ARENA}/part52_grokking_and_modular_arithmetic/solutions.py": (
        2,
        {
            2: "clones a repository",
            **dict.fromkeys((3, 4, 30, *range(44, 57)), "reads how a model was trained"),
        },
    ),
    f"{ARENA}/part53_othellogpt/solutions.py": (2, dict.fromkeys((2, 35, 37), TRAINED)),
}
#: Random games, with the class of theirs that knows the rules, in the place of a file of games.
GAMES = """import part53_othellogpt.utils as utils
def _games(count):
    found, generator = [], np.random.default_rng(0)
    while len(found) < count:
        board, moves = utils.OthelloBoardState(), []
        while valid := board.get_valid_moves():
            moves.append(int(generator.choice(valid)))
            board.umpire(moves[-1])
        found += [moves] if len(moves) == 60 else []
    return np.array(found)
"""
#: What is written in the place of what: smaller models, fewer examples.
EDITS = {
    f"{ARENA}/part1_transformer_from_scratch/solutions.py": {
        "d_model: int = 768": "d_model: int = 48",
        "d_mlp: int = 3072": "d_mlp: int = 192",
        "d_head: int = 64": "d_head: int = 4",
        "n_ctx: int = 1024": "n_ctx: int = 256",
        'datasets.load_dataset("roneneldan/TinyStories", split="train")': (
            'datasets.Dataset.from_dict({"text": ["Once upon a time there was a cat." * 40] * 200})'
        ),
    },
    f"{ARENA}/part2_intro_to_mech_interp/solutions.py": {
        "d_model=768": "d_model=96",
        "d_head=64": "d_head=8",
        "n_ctx=2048": "n_ctx=256",
        "seq_len = 50": "seq_len = 10",
        "seq_len=50": "seq_len=10",
        "batch_size=10": "batch_size=2",
        "batch_size = 10": "batch_size = 2",
        "n_samples = 300": "n_samples = 10",
    },
    f"{ARENA}/part41_indirect_object_identification/solutions.py": {
        "N = 25": "N = 3",
        "tqdm(range(model.cfg.n_layers))": "tqdm(range(2))",
        "product(range(model.cfg.n_layers), range(model.cfg.n_heads))": (
            "product(range(2), range(3))"
        ),
        "product(range(max(receiver_layers)), range(model.cfg.n_heads))": (
            "product(range(2), range(3))"
        ),
    },
    f"{ARENA}/part51_balanced_bracket_classifier/solutions.py": {
        "N_SAMPLES = 5000": "N_SAMPLES = 200"
    },
    f"{ARENA}/part53_othellogpt/solutions.py": {
        "import part53_othellogpt.utils as utils": GAMES,
        'np.load(section_dir / "board_seqs_square_small.npy")': "_games(60)",
        'np.load(section_dir / "board_seqs_id_small.npy")': (
            "np.array([utils.to_id(x.tolist()) for x in _games(60)])"
        ),
        "num_games: int = 10_000": "num_games: int = 32",
        "epochs: int = 3": "epochs: int = 1",
        "epochs=5": "epochs=1",
    },
}
#: Singular vectors have no sign: with `refactor_factored_attn_matrices`, queries, keys and values
#: have none.
WITHOUT_SIGN = re.compile(r"hook_[qkvz]\]")


def both(name, place, tmp_path, options="{}", **environment):
    """What a program computes with theirs and with ours."""
    assert pathlib.Path(f"{FOLDER}/{place}").exists(), (
        f"{place} is not among the checkouts in {FOLDER}"
    )
    for whose, python in (("theirs", str(THEIRS)), ("ours", sys.executable)):
        file = tmp_path / f"{whose}.pt"
        path = os.pathsep.join(filter(None, (str(ROOT), SITE)))
        done = subprocess.run(
            [
                python,
                "-m",
                "tests.clients.programs",
                name,
                f"{FOLDER}/{place}",
                str(file),
                whose,
                options,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "UNCHECKED": "1", **environment},
            capture_output=True,
            text=True,
        )
        assert not done.returncode, done.stderr[-3000:]
        yield torch.load(file)


def agree(theirs, ours, tolerance):
    """The same numbers, of the same shapes; and prints the largest difference, of the largest."""
    assert list(ours) == list(theirs)
    assert len(theirs) > 2
    largest = 0.0
    for key, right in theirs.items():
        ours_, right_ = (x.abs() if WITHOUT_SIGN.search(key) else x for x in (ours[key], right))
        assert ours_.shape == right_.shape, key
        finite = right_.isfinite()
        assert torch.equal(ours_.nan_to_num()[~finite], right_.nan_to_num()[~finite]), key
        if not finite.any():
            continue
        difference = float(
            (ours_ - right_)[finite].abs().max() / max(1.0, float(right_[finite].abs().max()))
        )
        assert difference < tolerance, (key, difference)
        largest = max(largest, difference)
    print(f"{len(theirs)} numbers, {largest:.1e}")


pytestmark = pytest.mark.skipif(
    not (FOLDER and THEIRS), reason="PROGRAMS and PROGRAMS_REFERENCE say where they are"
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_the_import_is_changed(name, tmp_path):
    place, tolerance = PROGRAMS[name]
    agree(*both(name, place, tmp_path), tolerance)


@pytest.fixture(scope="session")
def hub_of(tmp_path_factory):
    made = {}

    def of(layers):
        if layers not in made:
            made[layers] = tmp_path_factory.mktemp("hub")
            hub.write(made[layers], pathlib.Path(VOCABULARY), layers, 12 if layers == 12 else 3)
        return str(made[layers])

    return of


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.skipif(not VOCABULARY, reason="PROGRAMS_VOCABULARY says where GPT-2's vocabulary is")
def test_cells(name, tmp_path, hub_of):
    layers, skip = NOTEBOOKS[name]
    place, _, file = name.rpartition("/")
    options = json.dumps({"file": file, "skip": list(skip), "edits": EDITS.get(name, {})})
    agree(*both("cells", place, tmp_path, options, **hub.at(hub_of(layers))), 1e-4)
