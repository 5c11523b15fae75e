"""Other people's repositories, with nothing changed but the import, give HookedTransformer's numbers: `make programs`.

Each runs twice, in processes of their own: with TransformerLens 2.18 and with `bridge.legacy` under its name.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent.parent
#: Where checkouts are, and the Python that has TransformerLens 2.18.
FOLDER, THEIRS = os.environ.get("PROGRAMS"), os.environ.get("PROGRAMS_REFERENCE")
#: Each program, the folder in its repository that is imported from, and how far numbers may be from each other, of the
#: largest. (An effect of ACDC is the difference of two divergences in float32.)
PROGRAMS = {
    "acdc": ("Automatic-Circuit-Discovery", 1e-4),
    "activation_additions": ("activation_additions", 1e-5),
    "eap_ig": ("EAP-IG/src", 1e-5),
    "iit": ("iit", 1e-5),
    "path_patching": ("path_patching", 1e-5),
    "transcoder_circuits": ("transcoder_circuits", 1e-5),
    "universal_neurons": ("universal-neurons", 1e-5),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.skipif(not (FOLDER and THEIRS), reason="PROGRAMS and PROGRAMS_REFERENCE say where they are")
def test_only_the_import_is_changed(name, tmp_path):
    place, tolerance = PROGRAMS[name]
    found = {}
    for whose, python in (("theirs", str(THEIRS)), ("ours", sys.executable)):
        file = tmp_path / f"{whose}.pt"
        done = subprocess.run(
            [python, "-m", "tests.clients.programs", name, f"{FOLDER}/{place}", str(file), whose],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "UNCHECKED": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert not done.returncode, done.stderr[-3000:]
        found[whose] = torch.load(file)
    ours, theirs = found["ours"], found["theirs"]
    assert list(ours) == list(theirs)
    assert len(theirs) > 2
    for key, right in theirs.items():
        assert ours[key].shape == right.shape, key
        assert torch.allclose(ours[key], right, rtol=0, atol=tolerance * max(1.0, float(right.abs().max()))), key
